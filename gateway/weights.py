"""Versions of weights: changed between requests, and what is promised to sessions that shall see one version only.

A change shuts the gate of its pools, waits until nothing is in their engines, and opens it when the new version has its
name. What an engine itself tells with an answer counts more than that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
import structlog

from gateway.changes import Change
from gateway.core.errors import Busy
from gateway.fleet import Fleet, Pool
from gateway.settings import Settings
from gateway.siblings import Siblings

log = structlog.get_logger("detgate.weights")

INSIDE = "detgate_inside"
"""The gauge by which workers tell each other what is in the engines of a pool."""

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
                "in_flight": inside(pool),
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
        """Let requests go on."""
        for pool in pools:
            await self._siblings.change(Change("resume", pool.name, ""))

    async def change(self, version: str, pools: Sequence[Pool]) -> None:
        """Pause, give the weights their version, and go on. Raises `Busy` as `pause`: then nothing was changed."""
        async with self._changing:
            await self._pause(pools)
            for pool in pools:
                await self._siblings.change(Change("weights", pool.name, version))
            await self.resume(pools)

    async def _pause(self, pools: Sequence[Pool]) -> None:
        shut = [pool for pool in pools if not pool.gate.shut]
        try:
            for pool in shut:
                await self._siblings.change(Change("pause", pool.name, ""))
            async with asyncio.timeout(self._seconds):
                await self._emptied(pools)
        except BaseException as error:
            await self.resume(shut)
            if isinstance(error, TimeoutError):
                raise Busy(
                    f"What was in flight had not ended after {self._seconds:g} s; the pools go on as before. "
                    "Ask again later, or raise timeouts.weights.",
                    code="weights_in_flight",
                ) from None
            raise

    async def _emptied(self, pools: Sequence[Pool]) -> None:
        while True:
            if not await self._busy(pools):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _busy(self, pools: Iterable[Pool]) -> bool:
        """Whether anything is in the engines of these pools, sent by this worker or another."""
        if any(inside(pool) for pool in pools):
            return True
        names = {pool.name for pool in pools}
        return any(
            sample.value
            for numbers in await self._siblings.numbers()
            for family in numbers
            if family.name == INSIDE
            for sample in family.samples
            if sample.labels["pool"] in names
        )


def inside(pool: Pool) -> int:
    """Requests that are in the engines of a pool, or were given up and may still be."""
    return pool.gate.inside + sum(replica.leaving for replica in pool.replicas.values())


def restore(fleet: Fleet, folder: Path) -> None:
    """Bring the gates to what the ledger of a run tells of them: a change may have been under way."""
    found: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        with file.open("rb") as segment:
            found += (orjson.loads(line) for line in segment if b'"event":"weights"' in line and line.endswith(b"\n"))
    for record in sorted(found, key=lambda record: float(record["time"])):
        pool = fleet.pools.get(record["pool"])
        if pool is not None:
            pool.gate.shut, pool.gate.named = record["paused"], record["version"]
