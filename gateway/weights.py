"""Versions of weights: changed between requests, and what is promised to sessions that shall see one version only.

A change shuts the gate of its pools, waits until nothing is in their engines, and opens it when the new version has its
name. What an engine itself tells with an answer counts more than that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from gateway.changes import Change
from gateway.core.errors import Busy
from gateway.fleet import Fleet, Pool
from gateway.settings import Settings
from gateway.siblings import Siblings

log = structlog.get_logger("detgate.weights")

LOOK_SECONDS = 0.05
"""How often it is looked whether that has ended."""


class Weights:
    """Changes the weights of pools, or rather lets whoever does it do so."""

    def __init__(self, settings: Settings, fleet: Fleet, siblings: Siblings) -> None:
        self._fleet = fleet
        self._siblings = siblings
        self._seconds = settings.timeouts.weights
        self._changing = asyncio.Lock()

    def shown(self) -> dict[str, Any]:
        """How each pool stands."""
        return {
            pool.name: {
                "version": pool.gate.weights,
                "named": pool.gate.named,
                "told": pool.gate.told,
                "paused": pool.gate.shut,
                "since": pool.gate.since,
                "in_flight": pool.inside,
                "waiting": pool.gate.waiting,
            }
            for pool in self._fleet
        }

    async def pause(self, pools: Sequence[Pool]) -> None:
        """Send nothing more to these pools, and wait until what is there has ended.

        Raises `Busy` where that takes longer than `timeouts.weights`; then they go on as they did.
        """
        async with self._changing:
            await self._pause(pools)

    async def resume(self, pools: Iterable[Pool]) -> None:
        """Let requests go on, whoever has paused."""
        await self._siblings.change(*(Change("resume", pool.name, "") for pool in pools))

    async def change(self, version: str, pools: Sequence[Pool]) -> None:
        """Pause, give the weights their version, and go on. Raises `Busy` as `pause`: then nothing was changed."""
        async with self._changing:
            numbers = await self._pause(pools)
            named = [Change("weights", pool.name, version, after=numbers[pool.name]) for pool in pools]
            await self._siblings.change(*named, *(Change("resume", pool.name, "") for pool in pools))

    async def _pause(self, pools: Sequence[Pool]) -> dict[str, int]:
        """Gives the numbers of the changes by which the pools' gates are shut."""
        before = {pool.name: pool.gate.number for pool in pools}
        shut = [pool for pool in pools if not pool.gate.shut]
        try:
            numbers = await self._siblings.change(*(Change("pause", pool.name, "") for pool in pools))
            async with asyncio.timeout(self._seconds):
                await self._emptied(pools)
        except BaseException as error:
            await self._undo(shut, before)
            if isinstance(error, TimeoutError):
                raise Busy(
                    f"What was in flight had not ended after {self._seconds:g} s; the pools go on as before. "
                    "Ask again later, or raise timeouts.weights.",
                    code="weights_in_flight",
                ) from None
            raise
        return dict(zip((pool.name for pool in pools), numbers, strict=True))

    async def _undo(self, pools: Iterable[Pool], before: dict[str, int]) -> None:
        """Open what was open before, unless somebody else has shut it meanwhile."""
        for pool in pools:
            number = pool.gate.number
            after = number if number != before[pool.name] else None
            try:
                await self._siblings.change(Change("resume", pool.name, "", after=after))
            except Busy as error:
                log.error("a pause could not be undone", pool=pool.name, why=error.message)

    async def _emptied(self, pools: Sequence[Pool]) -> None:
        names = {pool.name for pool in pools}
        while True:
            if not any(pool.inside for pool in pools) and not await self._siblings.inside(names):
                return
            await asyncio.sleep(LOOK_SECONDS)


def restore(fleet: Fleet, changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bring the gates to what the ledger of a run tells of them: a change may have been under way.

    `changes`: its records of changes. Gives those of weights, the last one last.
    """
    found = [each for each in changes if each["event"] == "weights" and each["pool"] in fleet.pools]
    found.sort(key=lambda record: (record.get("number", 0), float(record["time"])))
    for record in found:
        gate = fleet.pools[record["pool"]].gate
        gate.named = record["version"]
        if record["paused"]:
            gate.close(record["time"])
        else:
            gate.open()
    return found
