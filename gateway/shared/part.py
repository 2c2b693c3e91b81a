"""The part that this gateway takes in one run: it registers, lives, notices who is gone, and tells what it did.

A store's memory has an *epoch*. When the server may have forgotten, the next one begins, and every gateway first tells
what it did (`gateway/shared/lua/take_part.lua`); until then nobody gets an index. Each call of a run carries the
`connection` under which its gateway takes part, so that a call of an earlier one, or of a gateway that was taken for
dead, is never run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import orjson
import structlog

from gateway.core.errors import Busy, Fault, Gone, StoreFault
from gateway.ledger.shapes import Unreadable
from gateway.settings.deciding import differing
from gateway.shared import scripts
from gateway.shared.link import Link, Refused, Words

log = structlog.get_logger("detgate.store")

Deed = tuple[bytes | str | int, ...]
"""What became of one index, as `report.lua` takes it."""


class Telling(NamedTuple):
    """What a gateway has to tell."""

    deeds: Iterable[Deed] = ()
    others: Iterable[str] = ()
    """Gateways that can tell no more, and whose deeds are among these."""


TOGETHER = 100
"""Deeds told in one call."""

BEATS = 10
"""How often a gateway shows that it lives, within the time after which it counts as gone."""

MOST_PEERS = 10_000
"""Gateways of a run that are kept in mind, the latest."""


class Terms(NamedTuple):
    """On what terms gateways meet in a run."""

    gateway: str
    """This one's name, which no other has or had."""
    deciding: bytes
    """The settings that decide, as JSON."""
    lease: float
    """Seconds of silence after which a gateway counts as gone."""
    grace: float
    """Seconds in which a gateway speaks up for a run that the store knows nothing of."""
    retention: float
    """Seconds for which a run is kept after its last request."""


class Memory(NamedTuple):
    """What a gateway knows of the store's memory: which it was, and the epoch that it had."""

    epoch: int = -1
    """-1: it never took part."""
    name: str = ""


class LostEnd(NamedTuple):
    """The end of a claim whose gateway is gone."""

    claim: str
    """Its name, which no other has."""
    gateway: str
    about: bytes
    """Session and identity, as JSON."""
    place: int
    """Its index."""
    used: bool
    twice: bool = False
    """No claim has ended: the index was found to be another's too, and its session is fenced."""


class Deeds(Protocol):
    """What a gateway did in a run."""

    async def since(self, number: int, *, lapsed: bool) -> Telling:
        """All that it did after its call of this number; -1: ever.

        `lapsed`: it was silent for so long that its live claims may have been ended, and are not to be told as live.
        """

    def resume(self, tokens: Sequence[bytes]) -> None:
        """It takes part from now on. `tokens`: the live claims that the store holds for its own."""

    def lost(self, ends: Sequence[LostEnd]) -> bool:
        """Others are gone, and their claims were ended. Whether that is written down: else it is told again."""

    def met(self, gateways: Sequence[str]) -> None:
        """These take part, or did. Whoever tells of this gateway's deeds once it is gone must know."""


class Follower(Protocol):
    """Follows the changes of a run (`gateway.shared.series`)."""

    def tell(self) -> None:
        """It is about to take part: the store is told what stands, since it may lack it. Raises `StoreFault`."""

    def newest(self, number: int) -> None:
        """The number of the last change, as it is now."""


class Part:
    """Whether and how this gateway takes part."""

    def __init__(
        self, link: Link, run: str, terms: Terms, deeds: Deeds, memory: Memory | None = None, peers: Iterable[str] = ()
    ) -> None:
        """`memory` and `peers`: what those knew for whom it tells."""
        self.run = run
        self.memory = memory or Memory()
        self.connection: bytes | None = None
        """What calls carry; None: it does not take part."""
        self.peers = dict.fromkeys(peers)
        """All that were seen to take part, this one too."""
        self.follower: Follower | None = None
        self._refused: Sequence[bytes] = ()
        """The store's answer, where that keeps it from taking part, or the like where its own deeds do."""
        self.keys = scripts.keys(run, terms.gateway)
        self._link = link
        self._terms = terms
        self._deeds = deeds
        self._reported = ""
        self._leased_until = -math.inf
        """Until when nobody takes this gateway for gone, at the least."""
        self._written: tuple[str, ...] = ()
        """Claims of others whose ends were written down, which the store does not know yet."""
        self._in = asyncio.Event()
        self._out = asyncio.Event()
        self._out.set()
        link.connected.append(self.leave)

    @property
    def why_not(self) -> Fault | None:
        """What keeps it from taking part, where it is not the store's silence."""
        return self._refusal(self._refused) if self._refused else None

    @property
    def lapsed(self) -> bool:
        """It may be taken for gone."""
        return asyncio.get_running_loop().time() > self._leased_until

    async def join(self) -> bytes:
        """Wait until it takes part, `timeouts.store` at most; what calls carry.

        Raises `StoreFault`, `Busy` where the run began with other settings, `Unreadable` where what was done in it
        cannot be told, and `Gone` where it was over long ago.
        """
        try:
            async with asyncio.timeout(self._link.seconds):
                return await self.taken()
        except TimeoutError:
            raise self._link.fault() from None

    async def taken(self) -> bytes:
        """As `join`, however long it takes."""
        while True:
            if (why_not := self.why_not) is not None:
                raise why_not
            if self.connection is not None:
                return self.connection
            await self._in.wait()

    def leave(self, connection: bytes | None = None) -> None:
        """It takes no part any more, at least not under this connection: begin anew."""
        if connection is None or connection == self.connection:
            self.connection = None
            self._in.clear()
            self._out.set()

    async def live(self) -> None:
        """Take part, for ever."""
        pause = self._terms.lease / BEATS
        while True:
            self._out.clear()
            try:
                if self.connection is None:
                    await self._take()
                else:
                    await self._beat(self.connection)
            except Refused as fault:
                self.leave()
                self._out.clear()
                self._refused = (b"refused", fault.message.encode())
                self._in.set()
            except StoreFault:
                pass
            except Unreadable as fault:
                if not self._refused:
                    log.error("a run cannot be served", run=self.run, why=fault.message)
                self._refused = (b"unreadable", fault.message.encode())
                self._in.set()
            except Exception:
                log.exception("could not take part in a run; tries again", run=self.run)
            try:
                async with asyncio.timeout(pause):
                    await self._out.wait()
            except TimeoutError:
                pass

    async def end(self) -> None:
        """Take no part any more. Without the store's answer the others find out by themselves."""
        self._link.connected.remove(self.leave)
        if self.connection is not None:
            try:
                await self._link.call(scripts.LEAVE, self.keys, (self._terms.gateway, self.connection))
            except StoreFault:
                log.warning("left a run without a word: the store does not answer", run=self.run)

    def depart(self) -> None:
        """As `end`, and without a wait: whatever is sent from now on is run after it."""
        self._link.connected.remove(self.leave)
        if self.connection is not None:
            with suppress(StoreFault):
                self._link.send(scripts.LEAVE, self.keys, (self._terms.gateway, self.connection))

    async def _beat(self, connection: bytes) -> None:
        terms, sent = self._terms, asyncio.get_running_loop().time()
        words: Words = (terms.gateway, connection, _ms(terms.lease), *self._written)
        answer = await self._link.call(scripts.BEAT, self.keys, words)
        if answer[0] != b"here":
            self.leave(connection)
            return
        self._leased_until = sent + terms.lease
        self._see(answer[1])
        if self.follower is not None:
            self.follower.newest(int(answer[4]))
        self._link.count_evicted(int(answer[5]))
        for gateway, claims in zip(answer[2][::2], answer[2][1::2], strict=True):
            log.warning("a gateway is gone", run=self.run, gateway=gateway.decode(), claims=int(claims))
        self._written = ()
        ends = [_lost_end(name, end) for name, end in zip(answer[3][::2], answer[3][1::2], strict=True)]
        if ends and self._deeds.lost(ends):
            self._written = tuple(end.claim for end in ends)
            self._out.set()

    async def _take(self) -> None:
        """One try. It leaves `connection` set, or `why_not`, or is to be tried again."""
        terms, link, loop = self._terms, self._link, asyncio.get_running_loop()
        settled = int(await link.call(scripts.SETTLED, scripts.MEETING, ()))
        told = 0
        while True:
            generation, sent = link.generation, loop.time()
            if self.follower is not None and generation != told:
                self.follower.tell()
                told = generation
            answer = await link.call(
                scripts.TAKE_PART,
                self.keys,
                (
                    terms.gateway,
                    generation,
                    terms.deciding,
                    *self.memory,
                    self._reported,
                    _ms(terms.lease),
                    _ms(terms.grace),
                    _ms(terms.retention),
                    int(settled >= terms.grace * 1000),
                ),
            )
            if generation != link.generation:
                return
            match answer[0]:
                case b"open":
                    self._leased_until = sent + terms.lease
                    self._enter(generation, Memory(int(answer[1]), answer[2].decode()), answer[3])
                    self._see(answer[5])
                    if self.follower is not None:
                        self.follower.newest(int(answer[4]))
                    return
                case b"report":
                    await self._report(answer[2].decode(), int(answer[3]))
                case b"wait":
                    self._refused = ()
                    self._in.clear()
                    await asyncio.sleep(min(int(answer[3]) / 1000, terms.lease / BEATS / 20))
                case _:
                    self._refused = answer
                    self._in.set()
                    return

    def _enter(self, generation: int, memory: Memory, tokens: Sequence[bytes]) -> None:
        if self.memory.name and self.memory != memory:
            log.warning("the store may have forgotten: a new epoch", run=self.run, epoch=memory.epoch)
        self.memory, self._reported = memory, ""
        self._refused = ()
        self.connection = b"%d:%d" % (generation, memory.epoch)
        self._deeds.resume(tokens)
        self._in.set()

    async def _report(self, memory: str, number: int) -> None:
        await self._tell(memory, "", ",".join(self.peers), ())
        telling = await self._deeds.since(number, lapsed=self.lapsed)
        words: list[bytes | str | int] = []
        for count, deed in enumerate(telling.deeds, 1):
            words += deed
            if count % TOGETHER == 0:
                await self._tell(memory, "", "", words)
                words.clear()
        others = ",".join(telling.others)
        if words or others:
            await self._tell(memory, others, "", words)
        self._reported = memory

    async def _tell(self, memory: str, others: str, peers: str, deeds: Sequence[bytes | str | int]) -> None:
        await self._link.call(scripts.REPORT, self.keys, (self._terms.gateway, memory, others, peers, *deeds))

    def _refusal(self, answer: Sequence[bytes]) -> Fault:
        match answer[0]:
            case b"differs":
                theirs, ours = orjson.loads(answer[1]), orjson.loads(self._terms.deciding)
                return differs(self.run, differing(ours, theirs))
            case b"over":
                return gone(self.run)
            case b"refused":
                return Refused(answer[1].decode())
            case b"unreadable":
                return Unreadable(answer[1].decode())
        return self._link.fault()

    def _see(self, gateways: Sequence[bytes]) -> None:
        new = [name for name in map(bytes.decode, gateways) if name not in self.peers]
        if not new:
            return
        self.peers.update(dict.fromkeys(new))
        self._deeds.met(new)
        while len(self.peers) > MOST_PEERS:
            del self.peers[next(iter(self.peers))]


def differs(run: str, keys: Sequence[str]) -> Busy:
    """The refusal of a run that began with other settings."""
    return Busy(
        f"Run {run} began with other settings: {', '.join(keys)}. "
        "Put them back, or begin another run: give it another name.",
        code="run_differs",
        retry_after=60,
    )


def gone(run: str) -> Gone:
    """The refusal of a run that was idle for as long as runs are kept."""
    return Gone(
        f"Run {run} had no request for so long that its indices were given up. Begin another run.",
        code="run_gone",
        param="run",
    )


def _lost_end(claim: bytes, end: bytes) -> LostEnd:
    """As `beat.lua` tells of it."""
    name = claim.decode()
    index, _, about = end[1:].partition(b"|")
    return LostEnd(name, name.partition(" ")[0], about, int(index), end[:1] != b"0", end[:1] == b"2")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
