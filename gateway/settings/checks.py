"""Settings against each other: contradictions, and what is worth a warning. A line each, its key first."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING

from pydantic import SecretStr

from gateway import engines
from gateway.settings.schema import Lane, Pool, Routing, hashed

if TYPE_CHECKING:
    from gateway.settings import Settings


def contradictions(settings: Settings) -> Iterator[str]:
    """Settings that cannot hold together; the gateway does not start with them."""
    yield from _twice(settings)
    if settings.state != "memory" and settings.run is None:
        yield "run: a name is needed with redis, where gateways meet in a run by its name"
    if settings.workers > 1 and settings.state == "memory":
        yield f"workers: {settings.workers} cannot share state: memory; set state: redis://…, or workers: 1"
    if not (is_loopback(settings.host) or settings.auth.api_keys or settings.insecure):
        yield (
            f"host: {settings.host} can be reached from elsewhere, and auth.api_keys has none; add keys, or"
            " insecure: true"
        )
    yield from _doors(settings)
    for place, pool in _places(settings):
        yield from _unusable(f"{place}.lane", pool.lane)
        if pool.lane.scope in ("session", "group") and not settings.sessions.required:
            yield (
                f"{place}.lane.scope: {pool.lane.scope} needs sessions.required: true, or requests without a session"
                " share one lane"
            )
        if settings.profile == "strict" and pool.engine == "openai":
            yield f"{place}.engine: openai promises nothing that profile strict could hold it to"
        if settings.profile == "strict":
            yield from _shared_batch(place, pool, "profile strict refuses")
        yield from _unread(place, pool)


def _doors(settings: Settings) -> Iterator[str]:
    """What contradicts itself in ports, certificates and keys."""
    if settings.admin_host is not None and settings.admin_port is None:
        yield "admin_host: needs an admin_port"
    if settings.admin_port is not None and settings.admin_port == settings.port:
        yield f"admin_port: {settings.admin_port} is the port of the data plane"
    for place, cert, others in (
        ("tls", settings.tls.cert, {"key": settings.tls.key, "client_ca": settings.tls.client_ca}),
        *((f"{place}.tls", pool.tls.cert, {"key": pool.tls.key}) for place, pool in _places(settings)),
    ):
        yield from (f"{place}.{name}: needs {place}.cert" for name, file in others.items() if cert is None and file)
    names = [found.name for key in settings.auth.api_keys if (found := hashed(key.get_secret_value())) is not None]
    for name in sorted({name for name in names if name is not None and names.count(name) > 1}):
        yield f"auth.api_keys: {name} stands before two keys"


def _unusable(place: str, lane: Lane) -> Iterator[str]:
    if lane.scope == "none" and lane.limit is not None:
        yield f"{place}.limit: bounds nothing while scope is none"
    if lane.scope != "none" and lane.limit is None:
        yield f"{place}.limit: is needed with scope {lane.scope}"
    if lane.scope != "group" and lane.members == "episode":
        yield f"{place}.members: episode needs scope group"


def _unread(place: str, pool: Pool) -> Iterator[str]:
    """What no route of the engine that serves this pool's role would read."""
    routes = [each for each in engines.load(pool.engine).ROUTES.values() if each.computes]
    routes = [each for each in routes if each.role in (pool.role, "any")]
    does = "sample" if pool.role == "generate" else "score"
    if pool.isolate_cache != "off" and not any(each.salt for each in routes):
        yield f"{place}.isolate_cache: {pool.engine} takes no salt for its cache with requests to {does}; set off"
    if pool.priority != "off" and not any(each.priority for each in routes):
        yield f"{place}.priority: {pool.engine} takes no priority with requests to {does}; set off"


def doubts(settings: Settings) -> Iterator[str]:
    """Settings that can be used, but not with what their owner may expect."""
    limits = settings.limits
    if limits.body_bytes > limits.held_bytes:
        yield f"limits.body_bytes: {limits.body_bytes} is never taken, since limits.held_bytes is {limits.held_bytes}"
    auth = settings.auth
    if auth.admin_key is not None and _digest(auth.admin_key) in map(_digest, auth.api_keys):
        yield "auth.admin_key: is one of auth.api_keys too, so who may ask may administer"
    if settings.profile == "off":
        return
    if settings.scheme == "offset":
        yield "scheme: offset gives every prompt the same seeds; it is for comparison with runs that did so"
    yield from _homeless("routing", settings.routing, settings.profile)
    for place, pool in _places(settings):
        if pool.routing != settings.routing:
            yield from _homeless(f"{place}.routing", pool.routing, settings.profile)
        if settings.profile == "balanced":
            yield from _shared_batch(place, pool, "answers are marked reward-batched")
    yield from _one_server(settings)


def _digest(key: SecretStr) -> bytes:
    text = key.get_secret_value()
    known = hashed(text)
    return sha256(text.encode()).digest() if known is None else known.digest


def _homeless(place: str, routing: Routing, profile: str) -> Iterator[str]:
    default = "wait" if profile == "strict" else "next"
    if not math.isinf(routing.slack) and routing.on_home_down != default:
        yield (
            f"{place}.on_home_down: {routing.on_home_down} has no effect while slack is"
            f" {routing.slack:g}: no key has"
            " a home"
        )


def _shared_batch(place: str, pool: Pool, consequence: str) -> Iterator[str]:
    """A reward pool whose lane lets two requests into one batch."""
    if pool.role != "reward" or (pool.lane.scope in ("replica", "pool") and pool.lane.limit == 1):
        return
    key, value = ("limit", pool.lane.limit) if pool.lane.scope in ("replica", "pool") else ("scope", pool.lane.scope)
    yield f"{place}.lane.{key}: {value} lets requests share a batch, which changes scores; {consequence}"


def _twice(settings: Settings) -> Iterator[str]:
    pools: dict[str, str] = {}
    replicas: dict[str, str] = {}
    for place, pool in _places(settings):
        if pool.name in pools:
            yield f"{place}.name: {pool.name} is the name of {pools[pool.name]} already"
        pools.setdefault(pool.name, place)
        for k, replica in enumerate(pool.replicas):
            here = f"{place}.replicas[{k}]"
            if replica.name in replicas:
                yield f"{here}.name: {replica.name} is the name of {replicas[replica.name]} already"
            replicas.setdefault(replica.name, here)


def _one_server(settings: Settings) -> Iterator[str]:
    servers: dict[tuple[str, int | None], str] = {}
    for place, pool in _places(settings):
        for k, replica in enumerate(pool.replicas):
            here = f"{place}.replicas[{k}]"
            other = servers.setdefault((replica.url, replica.dp_rank), here)
            if other != here:
                yield (f"{here}.url: {other} is the same server, so neither's load nor lane tells what runs there")


def _places(settings: Settings) -> Iterator[tuple[str, Pool]]:
    return ((f"pools[{k}]", pool) for k, pool in enumerate(settings.pools))


def is_loopback(host: str) -> bool:
    """Whether a bind to `host` is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
