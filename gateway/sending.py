"""One attempt of one call to a replica, and what all attempts of a request have in common.

A `Sending` holds what a call occupies: the replica's load, a place in its lane, and the id the engine knows it by. It
gives all of it back exactly once, when the replica's answer has ended or the call was given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.core.types import Handling
from gateway.fleet import Pool, Replica
from gateway.gates import Passage
from gateway.lanes import NO_PLACE, Lane
from gateway.tasks import start
from gateway.tracing import Trace
from gateway.upstream import Broken, Exchange

LAST_SECONDS = 1.0
"""How long a replica that has said all may take to end its body."""

Outcome = Literal["answered", "connect", "broken", "unavailable", "aborted"]


@dataclass(slots=True)
class Job:
    """What all calls and attempts of one logical request have in common."""

    pool: Pool
    handling: Handling
    route: str
    method: bytes
    target: bytes
    """Route and query, as they go upstream."""
    headers: bytes
    """The client's headers, as far as they go upstream."""
    request_id: str
    key: str
    """What routing hashes."""
    session: str = ""
    """Run and session: what a lane of that scope is found by."""
    group: str = ""
    """Run and group; of a session without a group that session."""
    place: tuple[int, str] = (0, "")
    """Index and identity: the canonical order among those who wait in a lane."""
    priority: int = 0
    """Stands before them in that order; lower goes first."""
    rank: int | None = None
    """Where it stands among those who wait in the engine, if that is told so; lower goes first."""
    salt: tuple[bytes, ...] = ()
    """What the salt of the engine's prefix cache is made of; nothing: it gets none."""
    client_ids: Sequence[str] = ()
    """The ids that the client gave in its body: one for the request, or one for each prompt. An abort may name them."""
    flags: list[str] = field(default_factory=list)
    """Reasons for X-Detgate-Guarantee that came up on the way."""
    follows: bool = False
    """Goes where its session was first sent to, while that replica is there."""
    sticky: bool = False
    """Went where its session was first sent to: the rule was not asked."""
    loads: Mapping[str, int] | None = None
    """What the last choice was made among, where it depends on loads."""
    attempts: int = 0
    apart: int = 0
    """Bytes of its calls together, where it was taken apart."""
    candidates: list[str] = field(default_factory=list)
    """What the last choice was made among, the best first."""
    replicas: list[str] = field(default_factory=list)
    """Replica of each attempt, in order."""
    ended: list[tuple[str, Outcome]] = field(default_factory=list)
    """Replica of each sending that got an answer or was given up, and how it went."""
    lane_wait: float = 0.0
    sent_at: float = 0.0
    passage: Passage = field(default_factory=Passage)
    """How it stands at its pool's gate."""
    entered: Callable[[Job], None] = lambda job: None
    """Called when it has passed that; may raise a `Fault`."""
    trace: Trace | None = None
    """Its spans, where requests are traced."""


class Home(Protocol):
    """Where the live sendings are known."""

    live: dict[str, Sending]

    def forget(self, sending: Sending) -> None:
        """A sending occupies its replica no more."""

    def vacate(self, sending: Sending, lane: Lane) -> Coroutine[Any, Any, None]:
        """Give a place back that was given up in mid-answer."""


class Sending:
    """One attempt of one call, from routing to the upstream's last byte."""

    __slots__ = (
        "_home", "_outlives", "client_ids", "computes", "engine_id", "job", "lane", "place", "replica", "sent",
        "unwanted",
    )  # fmt: skip

    def __init__(self, home: Home, job: Job, replica: Replica, engine_id: str, client_ids: Sequence[str]) -> None:
        self._home: Home | None = home
        self._outlives = False
        self.job = job
        self.client_ids = client_ids
        self.computes = job.handling.computes
        self.replica = replica
        self.engine_id = engine_id
        self.sent: Exchange | None = None
        self.lane: Lane | None = None
        self.place = NO_PLACE
        self.unwanted = False
        replica.load += 1
        home.live[engine_id] = self

    @property
    def exchange(self) -> Exchange:
        """The exchange with the replica, once the call was sent."""
        assert self.sent is not None
        return self.sent

    def admitted(self) -> bool:
        """Its place in a lane, if it needs one, is its own at this moment."""
        return self.lane is None or self.lane.holds(self.place)

    @property
    def under_way(self) -> bool:
        """The replica has the request and has not ended its answer."""
        return self.sent is not None and not self.sent.complete

    async def pipe(self, sink: Callable[[bytes], bool]) -> None:
        """As `Exchange.pipe`; how it goes speaks for or against the replica."""
        try:
            await self.exchange.pipe(sink)
        except Broken as error:
            self.replica.failed(error.blame, error.reason)
            raise
        if self.exchange.complete:
            self.replica.served()

    def give_up(self) -> None:
        """Its client wants no answer any more."""
        self.unwanted = True
        if self.sent is not None:
            give_up = self.sent.leave if self.job.pool.lanes.apart else self.sent.abort
            give_up("aborted by its client")
        else:
            self.place.wake()

    def outlive(self) -> None:
        """Its request is over: hold what it occupies until the replica, which has said all, ends its body too."""
        start(self._last(), "end of an answer")
        self._outlives = True

    async def _last(self) -> None:
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self.pipe(lambda data: False)
        except (Broken, TimeoutError):
            pass
        finally:
            self._outlives = False
            self.end()

    def end(self) -> None:
        """Give everything back; what is still under way at the replica is aborted. Harmless when repeated.

        A place in a lane that keeps requests apart is given back when the engine has left what was there.
        """
        if self._outlives:
            return
        home, self._home = self._home, None
        if home is None:
            return
        lane = self.lane
        if lane is not None and self.under_way and self.job.pool.lanes.apart:
            start(home.vacate(self, lane), "lane")
            return
        try:
            if self.sent is not None and not self.sent.complete:
                self.sent.abort()
        finally:
            home.forget(self)
            if lane is not None:
                self.job.pool.lanes.leave(lane, self.place)
