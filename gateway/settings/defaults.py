"""Defaults that depend on the profile, the role of a pool, or the settings at the top."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

STRICT: dict[str, dict[str, Any]] = {
    "ledger": {"on_error": "fail"},
    "routing": {"slack": math.inf, "on_home_down": "wait"},
    "guards": {"shared_seed": "refuse", "clones": "refuse"},
}
"""Defaults of `profile: strict` that are not the schema's."""


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, settings as they stand in a file, with these defaults."""
    raw = {key: value for key, value in given.items() if value is not None}
    if raw.get("profile") == "strict":
        raw |= {name: _beneath(weak, raw.get(name)) for name, weak in STRICT.items()}
    if isinstance(raw.get("pools"), list | tuple):
        raw["pools"] = [filled_pool(pool, raw.get("routing")) for pool in raw["pools"]]
    return raw


def _beneath(weak: Mapping[str, Any], strong: Any) -> Any:
    """`strong` over the defaults `weak`; what is no mapping is left for the schema to refuse."""
    if isinstance(strong, BaseModel):
        strong = strong.model_dump(exclude_unset=True)
    if strong is None:
        return dict(weak)
    return {**weak, **strong} if isinstance(strong, Mapping) else strong


def filled_pool(pool: Any, routing: Any) -> Any:
    """A pool with these defaults. `routing`: that at the top."""
    raw = _beneath({}, pool)
    if not isinstance(raw, dict):
        return raw
    above = _beneath({}, routing)
    if isinstance(above, dict):
        raw["routing"] = _beneath(above, raw.get("routing"))
    lane = _beneath({}, raw.get("lane"))
    if isinstance(lane, dict):
        lane = _filled_lane(lane, raw.get("role") == "reward")
    raw["lane"] = lane
    return raw


def _filled_lane(lane: dict[str, Any], reward: bool) -> dict[str, Any]:
    scope = lane.get("scope", "replica" if reward else "none")
    one = scope == "group" or (reward and scope != "none")
    return {"scope": scope, **({"limit": 1} if one else {}), **lane}
