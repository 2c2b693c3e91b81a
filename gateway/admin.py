"""Routes that change the fleet and tell of runs, for whoever holds the admin key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway import exports
from gateway.changes import Change
from gateway.core import identity
from gateway.core.errors import Conflict, NotFound
from gateway.fleet import Fleet, Pool, Replica
from gateway.keys import AdminKey, given
from gateway.runs import Runs
from gateway.sessions import Sessions
from gateway.settings import Replica as ReplicaSettings
from gateway.settings import Settings
from gateway.siblings import Siblings
from gateway.verdicts import Report, Verdicts
from gateway.weights import Weights

log = structlog.get_logger("detgate.admin")


class SomePools(BaseModel):
    """Which pools."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pools: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Default: those of role generate."
    )


class NewWeights(SomePools):
    """What weights the engines have now."""

    version: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f,]+$")


def build(settings: Settings, runs: Runs, sessions: Sessions, fleet: Fleet, siblings: Siblings) -> APIRouter:
    """The routes under /admin. Without an admin key they are open on a loopback bind, and closed on any other."""
    weights = Weights(settings, fleet, siblings)
    verdicts = Verdicts(settings, fleet, siblings)
    router = APIRouter(prefix="/admin", dependencies=[Depends(guard(settings))])

    def pool_of(pool: str) -> Pool:
        if pool not in fleet.pools:
            raise NotFound(f"There is no pool {pool!r}. Pools: {', '.join(fleet.pools)}.", param="pool")
        return fleet.pools[pool]

    def named(pool: Pool, name: str) -> None:
        if name not in pool.replicas:
            raise NotFound(
                f"Pool {pool.name} has no replica {name!r}. It has: {', '.join(pool.replicas)}.", param="name"
            )

    async def change(what: Literal["drain", "remove", "accept"], pool: str, name: str) -> dict[str, Any]:
        named(pool_of(pool), name)
        replica = fleet.pools[pool].replicas[name]
        await siblings.change(Change(what, pool, name, engine=replica.fingerprint))
        return _shown(replica)

    @router.get("/replicas", summary="All replicas and their states")
    async def replicas() -> dict[str, Any]:
        return {pool.name: [_shown(replica) for replica in pool.replicas.values()] for pool in fleet}

    @router.post("/pools/{pool}/replicas", status_code=201, summary="Take a replica in, or one back that was drained")
    async def add(pool: str, replica: ReplicaSettings) -> dict[str, Any]:
        into = pool_of(pool)
        taken = next((other for other in fleet.replicas if other.name == replica.name), None)
        if taken is not None and not (taken.draining and taken is into.replicas.get(replica.name)):
            raise Conflict(f"There is a replica {replica.name!r} already.", code="replica_exists", param="name")
        await siblings.change(Change("add", pool, replica.name, replica))
        return _shown(into.replicas[replica.name])

    @router.post("/pools/{pool}/replicas/{name}/drain", summary="Send it nothing more; what is in flight ends")
    async def drain(pool: str, name: str) -> dict[str, Any]:
        return await change("drain", pool, name)

    @router.post("/pools/{pool}/replicas/{name}/accept", summary="It came back as another engine, and that is meant")
    async def accept(pool: str, name: str) -> dict[str, Any]:
        return await change("accept", pool, name)

    @router.delete("/pools/{pool}/replicas/{name}", summary="Take it out; what is in flight ends")
    async def remove(pool: str, name: str) -> dict[str, Any]:
        return await change("remove", pool, name)

    def pools_of(names: list[str] | None) -> list[Pool]:
        return [pool for pool in fleet if pool.role == "generate"] if names is None else [pool_of(n) for n in names]

    @router.get("/weights", summary="Versions of the pools' weights")
    async def versions() -> dict[str, Any]:
        return weights.shown()

    @router.post("/weights", summary="Let what is in flight end, name the new weights, go on")
    async def change_weights(wanted: NewWeights) -> dict[str, Any]:
        await weights.change(wanted.version, pools_of(wanted.pools))
        return weights.shown()

    @router.post("/weights/pause", summary="Let what is in flight end, and hold back what comes")
    async def pause(wanted: SomePools | None = None) -> dict[str, Any]:
        await weights.pause(pools_of(wanted.pools if wanted is not None else None))
        return weights.shown()

    @router.post("/weights/resume", summary="Go on")
    async def resume(wanted: SomePools | None = None) -> dict[str, Any]:
        await weights.resume(pools_of(wanted.pools if wanted is not None else None))
        return weights.shown()

    @router.post("/verdicts", summary="Take the report of `detgate verify --json`")
    async def take(report: Report) -> dict[str, Any]:
        return await verdicts.take(report)

    @router.get("/runs/{run}/requests", summary="The requests of a run, a JSON object a line")
    async def requests(
        run: str, after: str | None = None, limit: Annotated[int | None, Query(ge=1)] = None
    ) -> Response:
        name = identity.run_name(run.encode(), "run")
        folder, live = runs.reading(name)
        return await exports.page(folder, live, after, limit, await sessions.gateways(name))

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


def guard(settings: Settings) -> Any:
    """A dependency of routes that need the admin key."""
    admin = AdminKey(settings)

    async def check(request: Request) -> None:
        admin.check(given(dict(request.headers.raw)))
        admin.check_host(request.url.hostname or "")

    return check
