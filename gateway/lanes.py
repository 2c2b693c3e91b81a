"""Lanes bound what is in flight, and decide in which order those who wait go.

Waiters are served in rounds: when a round is empty, all who wait form the next one, in canonical order. So the order
does not depend on arrival within a round, and nobody waits for more than one full round.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.core.errors import Busy
from gateway.core.strangers import Tally

Rank = tuple[int, int, tuple[object, ...], int]
"""Priority, index, identity, sample: what a round is sorted by."""


@dataclass(slots=True, eq=False)
class Place:
    """A place in a lane's queue that becomes one in the lane. Whoever has one leaves it, whatever happens."""

    rank: Rank
    taken: bool = False
    """It is one in the lane."""
    turn: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """End the wait for it, whether or not its turn has come."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)


Heir = Callable[["Lane", Place, str], None]
"""Gives a place of a gateway that has gone back, when the replica has let go of what was sent there."""

NO_PLACE = Place((0, 0, (), 0))
"""Of who is in no lane."""


class Lane:
    """One bound of `limit` requests in flight and `queue` waiting."""

    def __init__(self, name: str, limit: int, queue: int) -> None:
        self.name = name
        self.limit = limit
        self.queue = queue
        self.running = 0
        self.doubt = ""
        """The replica where what left last may still be worked on."""
        self._round: OrderedDict[Place, None] = OrderedDict()
        self._next: dict[Place, None] = {}

    @property
    def waiting(self) -> int:
        return len(self._round) + len(self._next)

    @property
    def used(self) -> bool:
        """Whether anything depends on this lane's memory."""
        return self.running > 0 or self.waiting > 0 or self.doubt != ""

    def join(self, rank: Rank, *, further: bool = False) -> Place:
        """Take a place, in the queue where all are taken. Raises `Busy` where too many wait already.

        `further`: another call of its request has a place here. However many they are, a request is taken whole.
        """
        place = Place(rank)
        if self.running < self.limit:
            self._take(place)
        elif further or self.waiting < self.queue:
            self._next[place] = None
        else:
            raise Busy(
                f"{self.waiting} requests wait in lane {self.name} already. Ask again later, or raise limits.queue.",
                code="queue_full",
            )
        return place

    def holds(self, place: Place) -> bool:
        """Whether a place is one in the lane at this moment, and nobody else's."""
        return place.taken

    async def turn(self, place: Place) -> None:
        """Wait until a place in the queue has become one in the lane, or is woken."""
        if place.taken:
            return
        place.turn = asyncio.get_running_loop().create_future()
        try:
            await place.turn
        finally:
            place.turn = None

    def leave(self, place: Place) -> None:
        """Give a place up, in the lane or in its queue; the next in order goes on. Harmless when repeated."""
        if place.taken:
            place.taken = False
            self.running -= 1
            self._advance()
        else:
            self._round.pop(place, None)
            self._next.pop(place, None)

    def _advance(self) -> None:
        while self.running < self.limit and self.waiting:
            if not self._round:
                ranked = sorted(self._next, key=lambda place: place.rank)
                self._round, self._next = OrderedDict.fromkeys(ranked), {}
            place, _ = self._round.popitem(last=False)
            self._take(place)
            place.wake()

    def _take(self, place: Place) -> None:
        place.taken = True
        self.running += 1


class Lanes:
    """The lanes of one pool, by its scope. A lane exists while it is used."""

    shared = False
    """Other gateways send to the pool too."""

    def __init__(self, pool: str, scope: str, limit: int | None, queue: int, *, episodes: bool = False) -> None:
        self.scope = scope if limit is not None else "none"
        self.episodes = episodes
        """The members of a group go one after the other, each when those before it have ended."""
        self.heir: Heir | None = None
        self.held = 0
        """Requests that wait for that, in no lane yet."""
        self.pool = pool
        self.limit = limit
        self.queue = queue
        self._lanes: dict[str, Lane] = {}

    @property
    def why_down(self) -> str | None:
        """Why no place can be had; None: it can."""
        return None

    @property
    def apart(self) -> bool:
        """Lanes of this scope keep requests out of each other's batch, so a place is held until the engine is left."""
        return self.scope in ("replica", "pool")

    @property
    def exclusive(self) -> bool:
        """One request in an engine at a time."""
        return self.apart and self.limit == 1

    @property
    def waiting(self) -> int:
        return self.held + sum(lane.waiting for lane in self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        """The lanes that are used and known to this process."""
        return iter(self._lanes.values())

    async def reserve(self, places: Iterable[Place]) -> None:
        """Take the places of several calls of one request, all or none. Raises `Busy`.

        Where all lanes are in this process that was done when they were joined.
        """

    def leaving(self, lane: Lane, place: Place) -> None:
        """A place is kept although its request was given up, until the engine has let go of it."""

    async def inside(self, lane: Lane, place: Place, own: int) -> int:
        """How many other requests the engine may have; `own`: how many of this gateway are in it."""
        return own

    async def tally(self, replica: str) -> Tally | None:
        """What all gateways have done with a replica; None where no lane tells. Raises `StoreFault`."""
        return None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Around a wait for the members before one. Raises `Busy` where too many wait for that already."""
        if self.held >= self.queue:
            raise Busy(
                f"{self.held} requests wait for other members of their groups already. "
                "Ask again later, or raise limits.queue.",
                code="queue_full",
            )
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def find(self, replica: str, session: str, group: str = "") -> Lane | None:
        """The lane of a request to `replica` from a session in a group; None where nothing is bounded."""
        if self.scope == "none":
            return None
        name = self.name(replica, session, group)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, self.limit or 0, self.queue)
        return lane

    def name(self, replica: str, session: str, group: str = "") -> str:
        """What a lane is called."""
        return {"pool": self.pool, "replica": replica, "session": session, "group": group}[self.scope]

    def leave(self, lane: Lane, place: Place) -> None:
        """Give a place up, and forget a lane that nobody uses."""
        lane.leave(place)
        if not lane.used:
            self._lanes.pop(lane.name, None)
