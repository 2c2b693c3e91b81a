"""Routes that change the fleet, for whoever holds the admin key."""

from __future__ import annotations

import hmac
from typing import Any

import structlog
from fastapi import APIRouter, Depends, Request

from gateway.changes import Changes
from gateway.core.errors import Conflict, Forbidden, NotFound, Unauthorized
from gateway.fleet import Fleet, Pool, Replica
from gateway.settings import Replica as ReplicaSettings
from gateway.settings import Settings

log = structlog.get_logger("detgate.admin")

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def build(settings: Settings, fleet: Fleet, changes: Changes) -> APIRouter:
    """The routes under /admin. Without an admin key they are open on a loopback bind, and closed on any other."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(_guard(settings))])

    def pool_of(pool: str) -> Pool:
        if pool not in fleet.pools:
            raise NotFound(f"There is no pool {pool!r}. Pools: {', '.join(fleet.pools)}.", param="pool")
        return fleet.pools[pool]

    def named(pool: Pool, name: str) -> None:
        if name not in pool.replicas:
            raise NotFound(
                f"Pool {pool.name} has no replica {name!r}. It has: {', '.join(pool.replicas)}.", param="name"
            )

    @router.get("/replicas", summary="All replicas and their states")
    async def replicas() -> dict[str, Any]:
        return {pool.name: [_shown(replica) for replica in pool.replicas.values()] for pool in fleet}

    @router.post("/pools/{pool}/replicas", status_code=201, summary="Take a replica in")
    async def add(pool: str, replica: ReplicaSettings) -> dict[str, Any]:
        into = pool_of(pool)
        if any(replica.name == other.name for other in fleet.replicas):
            raise Conflict(f"There is a replica {replica.name!r} already.", code="replica_exists", param="name")
        return _shown(changes.add(into, replica))

    @router.post("/pools/{pool}/replicas/{name}/drain", summary="Send it nothing more; what is in flight ends")
    async def drain(pool: str, name: str) -> dict[str, Any]:
        named(pool_of(pool), name)
        return _shown(changes.drain(pool_of(pool), name))

    @router.delete("/pools/{pool}/replicas/{name}", summary="Take it out; what is in flight ends")
    async def remove(pool: str, name: str) -> dict[str, Any]:
        named(pool_of(pool), name)
        return _shown(changes.remove(pool_of(pool), name))

    return router


def _shown(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "pool": replica.pool,
        "url": replica.url,
        "state": replica.state,
        "reason": replica.reason,
        "draining": replica.draining,
        "in_flight": replica.load,
    }


def _guard(settings: Settings) -> Any:
    key = settings.auth.admin_key

    async def guard(request: Request) -> None:
        if key is None:
            if settings.host not in LOOPBACK:
                raise Forbidden(
                    "Admin routes are closed off loopback until auth.admin_key is set.", code="admin_closed"
                )
            return
        given = bearer(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if given is None or not hmac.compare_digest(given.encode(), key.get_secret_value().encode()):
            raise Unauthorized("This needs the admin key, as a Bearer token or in x-api-key.")

    return guard


def bearer(authorization: str | None, api_key: str | None) -> str | None:
    """The key that a request carries, in either of the two headers that SDKs use."""
    if authorization is not None and authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return api_key
