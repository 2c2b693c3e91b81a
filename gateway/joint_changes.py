"""What is changed at one gateway of a run is changed at all: the fleet and weights, by the store, in one order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, get_args

import orjson

from gateway.changes import Change, Changes, What
from gateway.changes import Made as Place
from gateway.fleet import Fleet, Pool, Replica
from gateway.passes import Verdict
from gateway.settings import Replica as ReplicaSettings
from gateway.settings import Settings
from gateway.shared.series import Made, Series, Wanted
from gateway.stores.redis import RedisStore

LEAVE_SECONDS = 5.0
"""How long a gateway that has gone may have left something in the engines, where these do not say that it has ended."""

PICTURED = ("add", "drain", "remove")
"""Changes that a picture of the fleet has."""

Running = Callable[[Pool, Replica], Awaitable[float | None]]


class JointSiblings:
    """All gateways of a run.

    `running` tells how many requests an engine says are in it. `pictured`: the number of the last change that the fleet
    has already, or will be given. `recorded`: what the ledger tells of changes of weights.
    """

    def __init__(
        self,
        settings: Settings,
        store: RedisStore,
        run: str,
        fleet: Fleet,
        changes: Changes,
        running: Running,
        *,
        pictured: int,
        recorded: Iterable[dict[str, Any]],
    ) -> None:
        self._gateway = store.gateway
        self._fleet = fleet
        self._running = running
        witness = _Witness(fleet, changes, pictured)
        series = self._series = Series(
            store.link, store.part(run), store.terms.gateway, settings.timeouts.gateway, LEAVE_SECONDS, witness
        )
        for record in recorded:
            series.remember(_recorded(record))
        for pool in fleet:
            pool.gate.unsure = lambda: series.unsure

    @property
    def ready(self) -> bool:
        return self._series.ready

    @property
    def number(self) -> int:
        return self._series.number

    async def change(self, *changes: Change) -> list[int]:
        return await self._series.make(
            [Wanted(each.what, each.pool, each.name, each.after, _words(each)) for each in changes]
        )

    async def inside(self, pools: Collection[str]) -> int:
        live, gone = await self._series.said()
        number = max((self._fleet.pools[name].gate.number for name in pools), default=0)
        found = 0
        for gateway, said in live.items():
            if gateway != self._gateway:
                found += sum(said.inside.get(name, 0) for name in pools) if said.number >= number else 1
        for said in gone.values():
            left = [name for name in pools if said.number < number or said.inside.get(name, 0)]
            found += sum(await asyncio.gather(*(self._left(self._fleet.pools[name]) for name in left)))
        return found

    async def _left(self, pool: Pool) -> int:
        """1 unless all engines of a pool say that nothing is in them."""
        told = await asyncio.gather(*(self._running(pool, replica) for replica in pool.replicas.values()))
        return int(any(running is None or running > 0 for running in told))

    async def close(self) -> None:
        """Nothing is in any engine any more."""
        await self._series.close()


class _Witness:
    """Makes the changes here."""

    def __init__(self, fleet: Fleet, changes: Changes, pictured: int) -> None:
        self._fleet = fleet
        self._changes = changes
        self._pictured = pictured

    def make(self, made: Made) -> None:
        if made.what not in PICTURED or made.number > self._pictured:
            self._changes.apply(_change(made), Place(made.number, made.at))

    def inside(self) -> dict[str, int]:
        return {pool.name: pool.inside for pool in self._fleet if pool.gate.shut}


def _words(change: Change) -> dict[str, Any]:
    told: dict[str, Any] = {"pool": change.pool, "name": change.name}
    if change.settings is not None:
        told["settings"] = change.settings.model_dump(mode="json")
    if change.engine:
        told["engine"] = change.engine
    if change.verdict is not None:
        told["verdict"] = change.verdict._asdict()
    return told


def _change(made: Made) -> Change:
    told = made.words
    assert made.what in get_args(What)
    settings, verdict = told.get("settings"), told.get("verdict")
    return Change(
        made.what,  # type: ignore[arg-type]
        made.pool,
        made.name,
        settings=None if settings is None else ReplicaSettings.model_validate(settings),
        engine=told.get("engine", ""),
        verdict=None if verdict is None else Verdict(**verdict),
    )


def _recorded(record: dict[str, Any]) -> Made:
    """What a record of the ledger tells of a change of weights."""
    what, pool, at = record["change"], record["pool"], float(record["time"])
    name = record["version"] if what == "weights" else ""
    number = record.get("number", 0)
    line = b"%d %d %b %b" % (number, round(1000 * at), what.encode(), orjson.dumps({"pool": pool, "name": name}))
    return Made(number, at, what, pool, name, line)
