"""Where indices are claimed. One file is one store; each passes tests/stores/test_contract.py."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gateway.core.indexing import Ask, Claim


class ScopeKey(NamedTuple):
    """Names one counter."""

    run: str
    session: str
    identity: str


class Store(Protocol):
    """Owns the counters of runs. Each call is atomic; nothing else may change an index."""

    epoch: int
    """Names the store's memory: it changes when the store may have forgotten."""

    async def claim(self, scope: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        """Take an index; waits at most `settle_seconds` where the rule says wait. Who waits longest is first.

        Raises `Conflict` and `StoreFault`; nothing is taken then, nor when it is cancelled.
        """

    async def complete(self, scope: ScopeKey, index: int) -> bool:
        """The answer of one claim has ended. Says whether the index raced."""

    async def settle(self, scope: ScopeKey, index: int, *, used: bool) -> bool:
        """One claim is over. True if the index is released now."""

    def raced(self, scope: ScopeKey, index: int) -> bool:
        """Whether an index that this process holds has raced so far, as far as this process knows."""

    def knows(self, run: str, session: str) -> bool:
        """Whether a session has asked for an index, as far as this process knows."""

    def next_index(self, scope: ScopeKey) -> int | None:
        """The number that would be drawn next, as far as this process knows; None where the client numbers."""
