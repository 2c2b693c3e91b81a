"""The changes of one run, made at any of its gateways, in one order for all.

A gateway hears of a change by message, and looks where a beat tells of one that it has not heard of. It makes them in
their order, and says up to which it has: whoever asked for a change waits until every gateway that lives has said so.
Beside each kind of change that stands its number is kept, here too, so that a store that has forgotten is told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import orjson
import structlog

from gateway.core.errors import Busy, Conflict, StoreFault
from gateway.shared import scripts
from gateway.shared.link import Link
from gateway.shared.part import Part
from gateway.tasks import start, stop

log = structlog.get_logger("detgate.fleet")

AGAIN_SECONDS = 0.1
"""How soon after it could not be the store is asked again."""

COUNT_SECONDS = 0.05
"""How often it is told at most what is left in pools that are shut."""

WAIT_SECONDS = 0.01
"""How often is looked whether all have heard of a change."""

HEAR_SECONDS = 2.0
"""How long that may take beyond a lease, after which who was silent counts as gone."""

REMOVED = 1000
"""Replicas that were taken out and are remembered, as in `lua/changes.lua`."""


class Made(NamedTuple):
    """A change, and its place among all."""

    number: int
    at: float
    """Seconds since the epoch, by the store's clock; of a pause that was asked for again, of the first."""
    what: str
    pool: str
    name: str
    line: bytes
    """As the store keeps it."""

    @property
    def words(self) -> dict[str, Any]:
        """All that it says."""
        told: dict[str, Any] = orjson.loads(self.line.split(b" ", 3)[3])
        return told

    @property
    def stands_as(self) -> str:
        """What it settles until the next one of this."""
        match self.what:
            case "pause" | "resume":
                return f"gate:{self.pool}"
            case "weights":
                return f"weights:{self.pool}"
            case "add" | "remove":
                return f"replica:{self.name}"
        return f"{self.what}:{self.name}"


class Wanted(NamedTuple):
    """A change that is asked for."""

    what: str
    pool: str
    name: str
    after: int | None
    """The number of the change that the pool's gate must stand by."""
    words: dict[str, Any]


class Said(NamedTuple):
    """What a gateway said last."""

    number: int
    """Up to which change it had made them."""
    inside: Mapping[str, int]
    """What it had in the engines of pools that were shut."""


class Witness(Protocol):
    """Makes the changes."""

    def make(self, made: Made) -> None:
        """Make one, after all before it, or after some of what stands."""

    def inside(self) -> dict[str, int]:
        """What is in the engines of pools that are shut."""


class Series:
    """Follows the changes of a run, and adds to them.

    `lease`: seconds of silence after which a gateway has gone. `ending`: how many more what it has left in the engines
    may take to end.
    """

    def __init__(self, link: Link, part: Part, gateway: str, lease: float, ending: float, witness: Witness) -> None:
        self._link, self._part = link, part
        self._gateway = gateway
        self._lease, self._ending = lease, ending
        self._witness = witness
        self._channel = scripts.prefix_of(part.run) + b"changes"
        self.number = 0
        """Of the last change that was made here."""
        self.ready = False
        """It was known once what stands."""
        self._newest = -1
        """The number of the last of all, as far as is known."""
        self._stands: dict[str, Made] = {}
        self._said: tuple[bytes, Said] | None = None
        """What the store was told last, and by which connection."""
        self._look = asyncio.Event()
        part.follower = self
        link.subscribe(self._channel, self._hear)
        self._following = start(self._follow(), f"changes of {part.run}")

    @property
    def unsure(self) -> bool:
        """A change may stand that was not made here. Where the store is away what was known counts."""
        return not self.ready or (self._link.why_down is None and (self._newest > self.number or self._part.lapsed))

    async def close(self) -> None:
        """Nothing is in any engine any more, and nothing will be."""
        self._link.unsubscribe(self._channel, self._hear)
        await stop(self._following)
        if self._said is not None and (connection := self._part.connection) is not None:
            with suppress(StoreFault):
                await self._call(connection, "leave")

    def remember(self, made: Made) -> None:
        """A change that is known to stand from elsewhere than the store."""
        before = self._stands.get(made.stands_as)
        if before is None or before.number <= made.number:
            self._stand(made)

    # --- what the part is told
    def tell(self) -> None:
        words: list[bytes | str | int] = []
        for made in self._stands.values():
            words += (made.number, made.what, made.pool, made.name, made.line)
        if words:
            self._link.send(scripts.CHANGES, self._part.keys, ("tell", self._gateway, "", *words))

    def newest(self, number: int) -> None:
        self._newest = number
        self.ready = self.ready or number == 0
        if number != self.number or (self._said is not None and self._said[0] != self._part.connection):
            self._look.set()

    # --- changes
    async def make(self, wanted: Sequence[Wanted]) -> list[int]:
        """Have changes made by all gateways that live, together and in this order. The number of each.

        Raises `StoreFault`; `Busy` where a gate does not stand as it should, or somebody has not made them in time;
        `Conflict` where a replica is there already.
        """
        words: list[str | bytes | int] = []
        for each in wanted:
            after = "" if each.after is None else each.after
            words += (each.what, each.pool, each.name, after, orjson.dumps(each.words))
        outcome, *told = await self._ask("change", *words)
        if outcome == b"contended":
            raise Busy(
                f"The pause of pool {told[0].decode()} was ended or taken over by somebody else. Ask again.",
                code="weights_contended",
            )
        if outcome == b"exists":
            name = told[0].decode()
            raise Conflict(f"There is a replica {name!r} already.", code="replica_exists", param="name")
        last: int = told[0]
        await self._made(last)
        return list(range(last + 1 - len(wanted), last + 1))

    async def said(self) -> tuple[dict[str, Said], dict[str, Said]]:
        """What each gateway that lives said last, and each of which something may be left. Raises `StoreFault`."""
        _, live, gone = await self._ask("who", round(1000 * self._ending), round(1000 * self._lease))
        return _said(live), _said(gone)

    async def _made(self, number: int) -> None:
        """Wait until all have made a change. Raises `Busy`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._lease + HEAR_SECONDS
        while True:
            try:
                live, _ = await self.said()
                late = [gateway for gateway, said in live.items() if said.number < number]
            except StoreFault:
                if loop.time() >= deadline:
                    raise
            else:
                if not late and self.number >= number:
                    return
                if loop.time() >= deadline:
                    raise Busy(
                        f"These gateways have not made the change yet: {', '.join(late) or self._gateway}. Ask again.",
                        code="gateways_busy",
                    )
            await asyncio.sleep(WAIT_SECONDS)

    # --- what happens
    async def _follow(self) -> None:
        while True:
            self._look.clear()
            pause: float | None = None
            try:
                if (connection := self._part.connection) is not None:
                    await self._step(connection)
            except StoreFault:
                pause = AGAIN_SECONDS
            except Exception:
                pause = AGAIN_SECONDS
                log.exception("changes could not be followed; tries again", run=self._part.run)
            if self._said is not None and any(self._said[1].inside.values()):
                pause = pause or COUNT_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()

    async def _step(self, connection: bytes) -> None:
        """Be up to date, and say so. Raises `StoreFault`."""
        if not self.ready and not await self._learn(connection):
            return
        while True:
            said = Said(self.number, self._witness.inside())
            if self._said == (connection, said) and self._newest <= self.number:
                return
            outcome, *told = await self._call(connection, "look", said.number, orjson.dumps(said.inside))
            if outcome != b"here":
                return
            self._said = connection, said
            last, lines = told
            self._newest = last
            if last < said.number:
                # It has forgotten, and was not told: as it would be before taking part.
                self.tell()
            elif lines is not None:
                for line in lines:
                    self._take(_made(line))
            elif not await self._learn(connection):
                return

    def _hear(self, message: bytes) -> None:
        made = _made(message)
        self._newest = max(self._newest, made.number)
        if self.ready:
            self._take(made)
        self._look.set()

    def _take(self, made: Made) -> None:
        """Make a change, unless there are others before it."""
        if made.number == self.number + 1:
            self.number = made.number
            self._make(made)

    async def _learn(self, connection: bytes) -> bool:
        """Make all that stands, where it does not stand here. False: this gateway must take part anew first."""
        outcome, *told = await self._call(connection, "all")
        if outcome != b"here":
            return False
        last, lines = told
        for made in sorted(map(_made, lines)):
            before = self._stands.get(made.stands_as)
            if before is None or before.number < made.number:
                self._make(made)
        self.number = max(last, self.number)
        self._newest = last
        self.ready = True
        return True

    def _make(self, made: Made) -> None:
        self._stand(made)
        try:
            self._witness.make(made)
        except Exception:
            log.exception("a change could not be made", change=made.what, pool=made.pool, name=made.name)

    def _stand(self, made: Made) -> None:
        """Note that it stands, as `lua/changes.lua` does."""
        stands = self._stands
        stands.pop(made.stands_as, None)
        stands[made.stands_as] = made
        if made.what in ("add", "remove"):
            for of in ("drain", "accept", "verdict"):
                stands.pop(f"{of}:{made.name}", None)
        removed = [place for place, each in stands.items() if each.what == "remove"]
        for place in removed[: max(0, len(removed) - REMOVED)]:
            del stands[place]

    # --- the store
    async def _ask(self, operation: str, *words: str | bytes | int) -> Any:
        """What an operation gives, as soon as this gateway takes part. Raises `StoreFault`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._link.seconds
        while True:
            connection = self._part.connection or await self._part.join()
            answer = await self._call(connection, operation, *words)
            if answer[0] != b"away":
                return answer
            if loop.time() >= until:
                raise self._link.fault()

    async def _call(self, connection: bytes, operation: str, *words: str | bytes | int) -> Any:
        answer = await self._link.call(scripts.CHANGES, self._part.keys, (operation, self._gateway, connection, *words))
        if answer[0] == b"away":
            self._part.leave(connection)
        return answer


def _made(line: bytes) -> Made:
    number, at, what, words = line.split(b" ", 3)
    told = orjson.loads(words)
    return Made(int(number), int(at) / 1000, what.decode(), told["pool"], told["name"], line)


def _said(words: Sequence[bytes]) -> dict[str, Said]:
    told = {}
    for gateway, said in zip(words[::2], words[1::2], strict=True):
        number, _, inside = said.partition(b" ")
        told[gateway.decode()] = Said(int(number), orjson.loads(inside)) if said else Said(-1, {})
    return told
