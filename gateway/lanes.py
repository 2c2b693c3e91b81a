"""Lanes bound what is in flight, and decide in which order those who wait go.

Waiters are served in rounds: when a round is empty, all who wait form the next one, in canonical order. So the order
does not depend on arrival within a round, and nobody waits for more than one full round.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.core.errors import Busy

Rank = tuple[int, int, tuple[object, ...]]
"""Priority, index, identity: what a round is sorted by."""


@dataclass(slots=True, eq=False)
class Waiter:
    rank: Rank
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lane:
    """One bound of `limit` requests in flight and `queue` waiting. Whoever enters must leave exactly once."""

    def __init__(self, name: str, limit: int, queue: int) -> None:
        self.name = name
        self.limit = limit
        self.queue = queue
        self.running = 0
        self._doubts = 0
        self._round: list[Waiter] = []
        self._next: list[Waiter] = []

    @property
    def waiting(self) -> int:
        return len(self._round) + len(self._next)

    @property
    def room(self) -> int:
        """How many more requests may enter or wait."""
        return max(0, self.limit - self.running) + self.queue - self.waiting

    def enter_now(self) -> bool:
        """Take a place if one is free and nobody waits."""
        if self.running < self.limit and not self.waiting:
            self.running += 1
            return True
        return False

    async def enter(self, rank: Rank) -> None:
        """Take a place, waiting for it if need be. Raises `Busy` where too many wait already."""
        if self.enter_now():
            return
        if self.waiting >= self.queue:
            raise Busy(
                f"{self.waiting} requests wait in lane {self.name} already. Ask again later, or raise limits.queue.",
                code="queue_full",
            )
        waiter = Waiter(rank)
        self._next.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.leave()
            else:
                self._drop(waiter)
            raise

    def leave(self, *, sure: bool = True) -> None:
        """Give the place back; the next in order takes it. Not `sure`: the engine may still work on what was there."""
        self.running -= 1
        self._doubts += not sure
        while self.running < self.limit and self.waiting:
            if not self._round:
                self._round, self._next = sorted(self._next, key=lambda waiter: waiter.rank, reverse=True), []
            waiter = self._round.pop()
            if not waiter.turn.done():
                self.running += 1
                waiter.turn.set_result(None)

    def doubted(self) -> bool:
        """Whether the place just taken may be shared with what the engine was not seen to drop. Asked once a doubt."""
        if self._doubts:
            self._doubts -= 1
            return True
        return False

    def _drop(self, waiter: Waiter) -> None:
        for waiters in (self._round, self._next):
            if waiter in waiters:
                waiters.remove(waiter)


class Lanes:
    """The lanes of one pool, by its scope. A session's lane exists while it is used."""

    def __init__(self, pool: str, scope: str, limit: int | None, queue: int) -> None:
        self.scope = scope if limit is not None else "none"
        self._pool = pool
        self._limit = limit or 0
        self._queue = queue
        self._lanes: dict[str, Lane] = {}

    @property
    def exclusive(self) -> bool:
        """One request in an engine at a time."""
        return self.scope in ("replica", "pool") and self._limit == 1

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self._lanes.values())

    def find(self, replica: str, session: str) -> Lane | None:
        """The lane of a request to `replica` from `session`; None where nothing is bounded."""
        if self.scope == "none":
            return None
        name = {"pool": self._pool, "replica": replica}.get(self.scope, session)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, self._limit, self._queue)
        return lane

    def release(self, lane: Lane, *, sure: bool = True) -> None:
        """Give a place in a lane back."""
        lane.leave(sure=sure)
        self.tidy(lane)

    def tidy(self, lane: Lane) -> None:
        """Forget a session's lane that nobody uses."""
        if self.scope == "session" and not lane.running and not lane.waiting:
            self._lanes.pop(lane.name, None)
