"""What one gateway has in the lanes of one pool, where the store keeps them for all gateways.

A place belongs to one gateway, by a token, for as long as the gateway keeps its lease. Whoever finds that a lease has
run out takes over what was in a lane by it, and gives it back when the engine has let go. A gateway that comes back
late with such a token finds that it has nothing: what it had it neither uses nor frees.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any, Literal

import structlog

from gateway.core.errors import Busy, StoreFault
from gateway.core.strangers import Tally
from gateway.shared import scripts
from gateway.shared.link import Family, Link, Script

log = structlog.get_logger("detgate.lanes")

SCRIPT = Script(scripts.read("lanes"))

RENEWALS = 4
"""How often a lease is renewed while it lasts."""

LOOK_SECONDS = 0.5
"""How often is looked whether who waits may go on: the message that says so may be lost."""

LOOKED_AT = 500
"""Places in one look."""

ANSWERS = 10
"""How often a call is repeated that finds this gateway unknown."""


@dataclass(slots=True, eq=False)
class Claim:
    """One place: asked for, in a queue, in the lane, or over."""

    lane: str
    replica: str
    rank: bytes = b""
    id: str = ""
    state: Literal["new", "waiting", "in", "over"] = "new"
    leaving: bool = False
    """Its request was given up, but the engine may still work on it."""
    doubt: str = ""
    """The replica where what left the lane before may still be worked on."""
    turn: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let whoever waits look at it."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)


class Places:
    """Owns the lease, and every place that goes with it. `inherit` is given those that were taken over."""

    def __init__(self, link: Link, pool: str, limit: int, queue: int, seconds: float, *, apart: bool) -> None:
        self._link = link
        self._root = f"detgate:{{lanes:{pool}}}:"
        self._pool = pool
        self._family = Family("lanes", pool)
        self._seconds = seconds
        self._limit, self._queue, self._apart = limit, queue, apart
        self.inherit: Callable[[Claim], None] = self.leave
        self._numbers = count()
        self._claims: dict[str, Claim] = {}
        """All that are waiting or in, by their ids."""
        self._until = 0.0
        """When the lease ends at the earliest, by the clock that nobody sets."""
        self._known = False
        """This token was told to the store before."""
        self._untidy = False
        """The store may have places of this gateway that it has not."""
        self._enrolment: asyncio.Future[Any] | None = None
        self._renewed_at = 0.0
        self._token = ""
        self._begin()
        link.connected.append(self._enrol)

    @property
    def why_down(self) -> str | None:
        """Why the store gives no place; None: it may."""
        return self._link.refused.get(self._family)

    @property
    def waiting(self) -> int:
        """Places in queues."""
        return sum(claim.state == "waiting" for claim in self._claims.values())

    # --- places
    async def join(self, claims: Sequence[Claim]) -> None:
        """Take a place for each, in the queue where all are taken; all or none.

        Raises `Busy` where too many wait already, `StoreFault`.
        """
        try:
            for _ in range(ANSWERS):
                for claim in claims:
                    self._claims.pop(claim.id, None)
                    claim.id = f"{self._token}:{next(self._numbers)}"
                    self._claims[claim.id] = claim
                words: list[str | bytes | int] = [self._queue]
                for claim in claims:
                    words += (claim.lane, claim.rank, claim.replica, claim.id)
                outcome, *told = await self._call("join", *words)
                if outcome == b"full":
                    for claim in claims:
                        del self._claims[claim.id]
                    lane, waiting = told
                    raise Busy(
                        f"{waiting} requests wait in lane {lane.decode()} already. "
                        "Ask again later, or raise limits.queue.",
                        code="queue_full",
                    )
                if outcome == b"ok" and all(claim.id in self._claims for claim in claims):
                    for claim, each in zip(claims, told, strict=True):
                        self._see(claim, each)
                    return
                # The store does not know this gateway, or by a token only that it has given up meanwhile.
                await self._enrolled()
            raise self._link.fault()
        except BaseException:
            for claim in claims:
                self.leave(claim)
            raise

    async def turn(self, claim: Claim) -> None:
        """Wait until a place is one in its lane; or it is woken while it still waits. Raises as `join`."""
        while not self.holds(claim):
            if claim.state == "new":
                await self.join((claim,))
            elif claim.state == "in":
                # It was held up for so long that its lease may have run out: what it has others may have by now.
                await self._enrolled()
            elif claim.state == "over":
                return
            else:
                claim.turn = asyncio.get_running_loop().create_future()
                try:
                    await claim.turn
                finally:
                    claim.turn = None
                if claim.state == "waiting":
                    return

    def holds(self, claim: Claim) -> bool:
        """Whether a place is one in its lane, by a lease that has not run out."""
        return claim.state == "in" and time.monotonic() < self._until

    def leave(self, claim: Claim) -> None:
        """Give a place up, in the lane or in its queue. Harmless when repeated."""
        if self._claims.pop(claim.id, None) is not None:
            self._tell("leave", claim.lane, claim.id, int(claim.leaving))
        claim.state = "over"

    def leaving(self, claim: Claim) -> None:
        """A place is kept although its request was given up: the engine may still work on it."""
        claim.leaving = True
        if claim.id in self._claims:
            self._tell("mark", claim.lane, claim.id)

    def doubt(self, lane: str, replica: str) -> None:
        """What left a lane last may still be worked on at a replica; an empty one: it is not."""
        self._tell("doubt", lane, replica)

    async def inside(self, claim: Claim) -> int:
        """How many other requests the replica of a place may have by its lane."""
        _, number = await self._call("inside", claim.lane, claim.id, claim.replica)
        return int(number)

    async def tally(self, lane: str, replica: str) -> Tally:
        """What has become of all places at a replica."""
        _, *numbers = await self._call("tally", lane, replica)
        return Tally(*numbers)

    def _see(self, claim: Claim, told: bytes) -> None:
        """Note how a place stands by what the store says of it."""
        if told[:1] == b"1":
            claim.state, claim.doubt = "in", told[1:].decode()
        else:
            claim.state = "waiting" if told == b"0" else "new"
        if claim.state != "waiting":
            claim.wake()

    def _hear(self, message: bytes) -> None:
        place, _, doubt = message.partition(b" ")
        claim = self._claims.get(place.decode())
        if claim is not None:
            self._see(claim, b"1" + doubt)

    # --- the lease
    async def run(self) -> None:
        """Keep the lease, and look after those who wait, for ever."""
        pause = min(LOOK_SECONDS, self._seconds / RENEWALS)
        names = ("", "gateways", "arrivals", "takes", "drops", "quiet", "lane::", "places:", "gone:")
        self._link.need(self._family, [self._root + name for name in names], b"detgate:lanes:trial")
        while True:
            try:
                if self._untidy:
                    await self._enrolled()
                elif time.monotonic() - self._renewed_at >= self._seconds / RENEWALS:
                    await self._renew()
                await self._look()
            except StoreFault:
                pass
            except Exception:
                log.exception("a lease could not be looked after; tries again", pool=self._pool)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Give up all that is left, and the lease."""
        self._link.connected.remove(self._enrol)
        self._link.need_no_more(self._family)
        self._link.unsubscribe(self._channel, self._hear)
        self._claims.clear()
        with suppress(StoreFault):
            await self._call("retire")

    async def _renew(self) -> None:
        sent, token = time.monotonic(), self._token
        outcome, *over = await self._call("renew")
        if token != self._token:
            return
        if outcome == b"ok":
            self._keep(sent, over)
        else:
            await self._enrolled()

    async def _look(self) -> None:
        """See whether those who wait may go on. Where the store cannot be asked they are refused."""
        waiting = [claim for claim in self._claims.values() if claim.state == "waiting"]
        try:
            for first in range(0, len(waiting), LOOKED_AT):
                some = waiting[first : first + LOOKED_AT]
                asked = [claim.id for claim in some]
                words = chain.from_iterable((claim.lane, claim.id) for claim in some)
                _, *told = await self._call("look", *words)
                for claim, name, each in zip(some, asked, told, strict=True):
                    if claim.state == "waiting" and claim.id == name:
                        self._see(claim, each)
        except StoreFault as fault:
            for claim in waiting:
                if claim.turn is not None and not claim.turn.done():
                    claim.turn.set_exception(fault)
            raise

    def _begin(self) -> None:
        """Be another gateway than before, which has nothing."""
        if self._token:
            self._link.unsubscribe(self._channel, self._hear)
        self._token = secrets.token_hex(8)
        self._link.subscribe(self._channel, self._hear)
        self._known = False
        claims, self._claims = self._claims, {}
        for claim in claims.values():
            claim.state = "new" if claim.state == "waiting" else claim.state
            if claim.state == "in" and not claim.leaving:
                claim.state = "new"
            claim.wake()

    @property
    def _channel(self) -> bytes:
        return f"detgate:lanes:{self._token}".encode()

    async def _enrolled(self) -> None:
        """Have the store know this gateway, and what it has. Raises `StoreFault`."""
        if self._enrolment is None or self._enrolment.done():
            self._enrol()
        if self._enrolment is None:
            raise self._link.fault()
        await asyncio.shield(self._enrolment)

    def _enrol(self) -> None:
        """Tell the store what this gateway has: it may have forgotten, or never have heard."""
        held = [claim for claim in self._claims.values() if claim.state == "in"]
        waiting = [claim for claim in self._claims.values() if claim.state != "in"]
        words: list[str | bytes | int] = [int(self._known), len(held)]
        words += chain.from_iterable((c.lane, c.id, f"!{c.replica}" if c.leaving else c.replica) for c in held)
        words += chain.from_iterable((c.lane, c.id) for c in waiting)
        try:
            self._enrolment = self._link.send(SCRIPT, (self._root,), self._args("enrol", *words))
        except StoreFault:
            self._enrolment, self._untidy = None, True
            return
        self._untidy = False
        self._enrolment.add_done_callback(partial(self._known_as, self._token, time.monotonic()))

    def _known_as(self, token: str, sent: float, reply: asyncio.Future[Any]) -> None:
        """The store has answered to what this gateway has, or had by a token that it has given up meanwhile."""
        if token != self._token:
            return
        if reply.cancelled() or reply.exception() is not None:
            self._untidy = True
            return
        outcome, *over = reply.result()
        if outcome == b"gone":
            log.error("this gateway was silent for too long and has lost its places in lanes", pool=self._pool)
            self._begin()
            self._enrol()
            return
        self._known = True
        self._keep(sent, over)

    def _keep(self, sent: float, over: Sequence[bytes]) -> None:
        """The lease was renewed by a call sent then; these places were taken over with it."""
        self._until, self._renewed_at = sent + self._seconds, sent
        words = [word.decode() for word in over]
        for lane, place, replica in zip(words[::3], words[1::3], words[2::3], strict=True):
            log.warning("a place in a lane was taken over", pool=self._pool, lane=lane, replica=replica)
            claim = self._claims[place] = Claim(lane, replica, id=place, state="in", leaving=True)
            self.inherit(claim)

    # --- the store
    def _args(self, operation: str, *words: str | bytes | int) -> tuple[str | bytes | int, ...]:
        lease = int(self._seconds * 1000)
        return operation, self._token, self._link.generation, lease, self._limit, int(self._apart), *words

    async def _call(self, operation: str, *words: str | bytes | int) -> Any:
        return await self._link.call(SCRIPT, (self._root,), self._args(operation, *words))

    def _tell(self, operation: str, *words: str | bytes | int) -> None:
        """Have something done, in order with all else, without waiting for it."""
        try:
            reply = self._link.send(SCRIPT, (self._root,), self._args(operation, *words))
        except StoreFault:
            self._untidy = True
        else:
            reply.add_done_callback(self._told)

    def _told(self, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            self._untidy = True
