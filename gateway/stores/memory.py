"""One process: the counters in memory. Every call runs without a pause in between, which makes it atomic.

Whoever must wait is served by the very change that it waits for, in order of arrival: so none who comes later
gets in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim, Scope, Session, Wait
from gateway.stores import ScopeKey


@dataclass(slots=True, eq=False)
class Waiter:
    """A claim that waits, and where its outcome goes."""

    ask: Ask
    outcome: asyncio.Future[Claim]
    raced: bool
    """It has waited for a rival."""


class MemoryStore:
    """The counters of this process's runs."""

    def __init__(self) -> None:
        self.epoch = 0
        self._scopes: dict[ScopeKey, Scope] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._waiters: dict[ScopeKey, list[Waiter]] = {}
        """In order of arrival."""

    async def claim(self, key: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        scope = self._scopes.get(key) or self._open(key)
        outcome = scope.claim(ask)
        if isinstance(outcome, Wait):
            return await self._wait(key, ask, outcome, settle_seconds)
        return outcome

    async def complete(self, key: ScopeKey, index: int) -> bool:
        raced = self._scopes[key].complete(index)
        self._wake(key)
        return raced

    async def settle(self, key: ScopeKey, index: int, *, used: bool) -> bool:
        released = self._scopes[key].settle(index, used=used)
        self._wake(key)
        return released

    def restore(self, run: str, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Bring a run's counters to where its ledger left them. Gives an end for each request that has none.

        What was in flight when the process died was not delivered as far as anyone knows: its index is released.
        """
        live: dict[tuple[ScopeKey, int], list[dict[str, Any]]] = {}
        for record in records:
            if record.get("event") not in ("opened", "closed"):
                continue
            key = ScopeKey(run, record["session"], record["identity"])
            claims = live.setdefault((key, record["index"]), [])
            scope = self._scopes.get(key) or self._open(key)
            if record["event"] == "opened":
                claims.append(record)
                scope.restore(_ask(record), record["index"], raced="racing" in record["flags"])
            elif claims:
                claims.pop()
                self._end(scope, record["index"], used=record["used"])
        lost = []
        for (key, index), claims in live.items():
            for record in claims:
                self._end(self._scopes[key], index, used=False)
                names = {name: record[name] for name in ("run", "session", "identity", "index")}
                lost.append({"event": "closed", **names, "outcome": "failed", "error": "gateway-lost", "used": False})
        return lost

    def _end(self, scope: Scope, index: int, *, used: bool) -> None:
        scope.complete(index)
        scope.settle(index, used=used)

    def raced(self, key: ScopeKey, index: int) -> bool:
        return index in self._scopes[key].raced

    def knows(self, run: str, session: str) -> bool:
        return (run, session) in self._sessions

    def next_index(self, key: ScopeKey) -> int | None:
        scope = self._scopes.get(key)
        if scope is None:
            return 0
        return None if scope.kind == "client" else scope.next

    def _open(self, key: ScopeKey) -> Scope:
        session = self._sessions.setdefault((key.run, key.session), Session())
        scope = self._scopes[key] = Scope(key.identity, session)
        return scope

    async def _wait(self, key: ScopeKey, ask: Ask, wait: Wait, seconds: float) -> Claim:
        loop = asyncio.get_running_loop()
        waiter = Waiter(ask, loop.create_future(), wait.why == "racing")
        self._waiters.setdefault(key, []).append(waiter)
        timer = loop.call_later(seconds, self._serve, key, waiter, True)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            self._leave(key, waiter)
            raise
        finally:
            timer.cancel()

    def _wake(self, key: ScopeKey) -> None:
        for waiter in tuple(self._waiters.get(key, ())):
            self._serve(key, waiter)

    def _serve(self, key: ScopeKey, waiter: Waiter, final: bool = False) -> None:
        """Ask again for one who waits. `final`: its time is up."""
        if waiter.outcome.done():
            return
        try:
            claim = self._scopes[key].claim(waiter.ask, raced=waiter.raced, final=final)
        except Conflict as conflict:
            waiter.outcome.set_exception(conflict)
        else:
            if isinstance(claim, Wait):
                waiter.raced |= claim.why == "racing"
                return
            waiter.outcome.set_result(claim)
        self._forget(key, waiter)

    def _leave(self, key: ScopeKey, waiter: Waiter) -> None:
        """Who waited has gone; what it was given in the same moment is given back."""
        outcome = waiter.outcome
        if outcome.cancelled():
            self._forget(key, waiter)
        elif outcome.exception() is None:
            scope, index = self._scopes[key], outcome.result().index
            scope.complete(index)
            scope.settle(index, used=False)
            self._wake(key)

    def _forget(self, key: ScopeKey, waiter: Waiter) -> None:
        waiters = self._waiters[key]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[key]


def _ask(record: dict[str, Any]) -> Ask:
    """The ask that led to a record."""
    order = record["order"]
    return Ask(
        order,
        bytes.fromhex(record["digest"]),
        record["content"],
        record["index"] if order == "client" else None,
        record["key"],
        record["repeat"],
    )
