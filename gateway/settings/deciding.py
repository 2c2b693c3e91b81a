"""The settings that decide what a request gets: kept with a run, and the same wherever it is served.

Beside those that stand under their own names, each pool has a key for what differs from the defaults of its profile
and role, so that a setting which is added leaves the digests of runs that do without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway.settings.defaults import STRICT, filled_pool
from gateway.settings.schema import Pool, Routing

if TYPE_CHECKING:
    from gateway.settings import Settings

ROUTING = {"key", "slack", "on_home_down"}

OF_POOL: dict[str, Any] = {
    "engine": True,
    "role": True,
    "models": True,
    "routing": ROUTING,
    "lane": True,
}
"""What of a pool decides, beside names: which pool a request belongs to and how its seed is written, which replica it
goes to, and with what it shares a batch there, in which order."""

_KEY = re.compile(r"pools\[(.*)\]\.(\w+).*")


def deciding(settings: Settings) -> dict[str, Any]:
    """Those of `settings`, as plain JSON values. What is not told is as the profile and the role have it."""
    told: dict[str, Any] = {
        "seed": settings.seed,
        "scheme": settings.scheme,
        "index_order": settings.index_order,
        "client_seed": settings.client_seed,
        "profile": settings.profile,
        "pools": {pool.name: sorted(replica.name for replica in pool.replicas) for pool in settings.pools},
    }
    for pool in settings.pools:
        usual = _flat(_usual(settings, pool))
        told |= {f"pools[{pool.name}].{key}": value for key, value in _flat(pool).items() if usual[key] != value}
    return told


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The keys of the settings that differ. Where defaults hang on one of them, that alone is named.

    What differs in all of several pools is named as it stands at the top.
    """
    keys = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    pools = ours.get("pools") or {}
    for key in list(keys):
        if (match := _KEY.fullmatch(key)) is not None:
            pool, section = match[1], match[2]
            other = pool not in pools or pool not in (theirs.get("pools") or {})
            by_profile = section == "routing" and "profile" in keys
            by_role = section == "lane" and f"pools[{pool}].role" in keys
            if other or by_profile or by_role:
                keys.discard(key)
    for name in ROUTING if len(pools) > 1 else ():
        own = {f"pools[{pool}].routing.{name}" for pool in pools}
        if own <= keys:
            keys = keys - own | {f"routing.{name}"}
    return sorted(keys)


def routing(told: Mapping[str, Any], pool: str) -> dict[str, Any]:
    """The rule by which a pool chooses replicas, of the settings that are `told`: what is not told is as usual."""
    usual = Routing(**_usual_routing(told.get("profile"))).model_dump(mode="json", include=ROUTING)
    return {name: told.get(f"pools[{pool}].routing.{name}", value) for name, value in usual.items()}


def _usual_routing(profile: str | None) -> dict[str, Any]:
    return STRICT["routing"] if profile == "strict" else {}


def _usual(settings: Settings, pool: Pool) -> Pool:
    """A pool of which no more is said than must be."""
    routing = _usual_routing(settings.profile)
    bare = {"name": pool.name, "engine": "vllm", "role": pool.role, "replicas": pool.replicas}
    return Pool(**filled_pool(bare, routing)).model_copy(update={"role": "generate"})


def _flat(pool: Pool) -> dict[str, Any]:
    told = pool.model_dump(mode="json", include=OF_POOL)
    flat: dict[str, Any] = {}
    for key, value in told.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat | {"models": sorted(told["models"])}
