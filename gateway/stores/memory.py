"""One process: the counters in memory. Every call runs without a pause in between, which makes it atomic."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gateway.core.indexing import Ask, Claim, Scope, Session, Wait
from gateway.stores import ScopeKey


class MemoryStore:
    """The counters of this process's runs."""

    def __init__(self) -> None:
        self.epoch = 0
        self._scopes: dict[ScopeKey, Scope] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._waiters: dict[ScopeKey, dict[asyncio.Future[None], None]] = {}
        """In order of arrival, so that who waits longest asks first."""

    async def claim(self, key: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        scope = self._scopes.get(key) or self._open(key)
        outcome = scope.claim(ask)
        if not isinstance(outcome, Wait):
            return outcome
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settle_seconds
        waited: set[str] = set()
        while isinstance(outcome, Wait):
            waited.add(outcome.why)
            final = not await self._changed(key, deadline - loop.time())
            outcome = scope.claim(ask, final=final)
        if "racing" in waited and not outcome.reused and "racing" not in outcome.flags:
            return replace(outcome, flags=(*outcome.flags, "racing"))
        return outcome

    async def complete(self, key: ScopeKey, index: int) -> bool:
        return self.complete_now(key, index)

    def complete_now(self, key: ScopeKey, index: int) -> bool:
        raced = self._scopes[key].complete(index)
        self._wake(key)
        return raced

    async def settle(self, key: ScopeKey, index: int, *, used: bool) -> bool:
        released = self._scopes[key].settle(index, used=used)
        self._wake(key)
        return released

    def _open(self, key: ScopeKey) -> Scope:
        session = self._sessions.setdefault((key.run, key.session), Session())
        scope = self._scopes[key] = Scope(key.identity, session)
        return scope

    async def _changed(self, key: ScopeKey, seconds: float) -> bool:
        """Wait until something of the scope completes or settles; False when time is up."""
        if seconds <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(key, {})
        waiters[waiter] = None
        try:
            async with asyncio.timeout(seconds):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            waiters.pop(waiter, None)
            if not waiters:
                self._waiters.pop(key, None)

    def _wake(self, key: ScopeKey) -> None:
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)
