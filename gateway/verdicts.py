"""What `detgate verify` found, handed to a running gateway: kept beside the runs, recorded, and in force at once.

A verdict is taken for the engine that the gateway itself meets at a replica, by its fingerprint, and for no other.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.changes import Change
from gateway.core.errors import Busy
from gateway.fleet import Fleet
from gateway.passes import Passes, Verdict
from gateway.settings import Settings
from gateway.siblings import Siblings


class Canary(BaseModel):
    """What came of one canary."""

    model_config = ConfigDict(strict=True)

    outcome: str = Field(description="passed, failed, broken or skipped.")


class Tried(BaseModel):
    """What came of all on one replica."""

    model_config = ConfigDict(strict=True)

    passed: bool
    fingerprint: str | None = Field(description="Of the engine that was asked.")
    canaries: list[Canary] = []

    @property
    def decided(self) -> bool:
        """Something was seen: it passed, or failed. Else it may just not have been tried."""
        return self.passed or any(canary.outcome == "failed" for canary in self.canaries)


class OfPool(BaseModel):
    """What came of a pool."""

    model_config = ConfigDict(strict=True)

    one_at_a_time: bool = Field(description="Whether company was sent one after the other, as its lane would.")
    replicas: dict[str, Tried]


class Report(BaseModel):
    """The report of `detgate verify --json`; what else stands in it is passed over."""

    model_config = ConfigDict(strict=True)

    pools: dict[str, OfPool]


class Verdicts:
    """Takes reports."""

    def __init__(self, settings: Settings, fleet: Fleet, siblings: Siblings) -> None:
        self._fleet = fleet
        self._siblings = siblings
        self._passes = Passes(settings.ledger.path)

    async def take(self, report: Report) -> dict[str, Any]:
        """Take what concerns the engines as they are now. Gives what was taken, and why the rest was not.

        Raises `Busy` where it cannot be kept.
        """
        taken: dict[str, dict[str, str]] = {}
        refused: dict[str, dict[str, str]] = {}
        for name, of_pool in report.pools.items():
            for replica, tried in of_pool.replicas.items():
                why_not = self._why_not(name, replica, tried)
                if why_not is not None:
                    refused.setdefault(name, {})[replica] = why_not
                    continue
                await self._keep(name, replica, of_pool.one_at_a_time, tried)
                taken.setdefault(name, {})[replica] = "passed" if tried.passed else "failed"
        return {"taken": taken, "refused": refused}

    def _why_not(self, pool: str, name: str, tried: Tried) -> str | None:
        replica = self._fleet.pools[pool].replicas.get(name) if pool in self._fleet.pools else None
        if replica is None:
            return "there is no such replica"
        if not tried.decided:
            return "nothing was seen of it"
        if not replica.fingerprint:
            return "it is not known yet what it is"
        if tried.fingerprint != replica.fingerprint:
            return f"another engine was asked: here it is {replica.fingerprint}"
        return None

    async def _keep(self, pool: str, replica: str, apart: bool, tried: Tried) -> None:
        settings = self._fleet.pools[pool].settings
        verdict = Verdict(tried.fingerprint or "", apart, tried.passed, time.time())
        engine, _, passed, at = verdict
        try:
            self._passes.note(settings, replica, engine, apart=apart, passed=passed, at=at)
        except OSError as error:
            why = f"The verdict cannot be written: {error.strerror}."
            raise Busy(why, code="ledger_unwritable", retry_after=10) from None
        await self._siblings.change(Change("verdict", pool, replica, verdict=verdict))
