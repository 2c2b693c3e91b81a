"""What happened to the sessions of one run, in one order for all gateways.

Every call brings what happened since the last one, so whoever has asked is up to date; between calls messages bring it,
and a look now and then, since a message may be lost. Where the store has forgotten, every gateway tells it again what
it knows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import orjson
import structlog

from gateway.core.errors import Gone, StoreFault
from gateway.shared import scripts
from gateway.shared.link import Link
from gateway.shared.part import gone
from gateway.tasks import start, stop

log = structlog.get_logger("detgate.sessions")

LOOK_SECONDS = 1.0
"""How often is asked what happened, whether a message came or not."""

AGAIN_SECONDS = 0.1
"""How soon after it could not be."""

TOGETHER = 100
"""Calls at once when the store is told again."""

Words = Sequence[str | bytes | int]


class Kept(NamedTuple):
    """A session, as the store keeps it."""

    ordinal: int
    key: str
    about: dict[str, Any]
    ended: bool
    why: str | None
    held: dict[str, str]


class Witness(Protocol):
    """Who is told what happened."""

    def happened(self, event: dict[str, Any]) -> None:
        """One event, in order. Told again it changes nothing."""

    def found(self, sessions: Iterable[Kept]) -> None:
        """All sessions that there are."""

    def known(self) -> Iterable[tuple[str, Words]]:
        """All that it knows, as operations of the script."""


class Events:
    """Follows what happens in one run."""

    def __init__(self, link: Link, run: str, limit: int, retention: float, witness: Witness) -> None:
        self._link = link
        self._witness = witness
        self._limit, self._kept = limit, round(retention * 1000)
        self._run = run
        self._keys = scripts.keys(run, "")
        self._channel = scripts.prefix_of(run) + b"sessions"
        self._over = False
        """The run was given up, as far as is known."""
        self._memory = ""
        """Names the store's memory."""
        self._number = 0
        """Of the last event that is known."""
        self._left = False
        self._ready = asyncio.Event()
        self._look = asyncio.Event()
        link.connected.append(self.soon)
        link.subscribe(self._channel, self._hear)
        self._following = start(self._follow(), f"sessions of {run}")

    @property
    def ready(self) -> bool:
        """All that had happened before is known."""
        return self._ready.is_set()

    async def close(self) -> None:
        self.leave()
        await stop(self._following)

    def leave(self) -> None:
        """Follow nothing any more."""
        if self._left:
            return
        self._left = True
        self._link.connected.remove(self.soon)
        self._link.unsubscribe(self._channel, self._hear)
        self._following.cancel()

    async def call(self, operation: str, *words: str | bytes | int) -> Any:
        """What an operation of the script gives; what happened until then is known.

        Raises `StoreFault`, and `Gone` where the run was idle for as long as runs are kept.
        """
        if not self.ready:
            await self._known()
        sent = self._number
        reply = await self._ask(operation, *words, number=sent)
        if not self._heard(sent, reply):
            self.soon()
            await self._known()
        elif self._number < reply[1]:
            await self.call("since")
        return reply[3]

    def tell(self, operation: str, *words: str | bytes | int) -> None:
        """As `call`, for what nobody waits for. Nothing where the store is away."""
        with suppress(StoreFault):
            self._link.send(scripts.SESSIONS, self._keys, self._args(operation, words, -1))

    async def catch_up(self) -> None:
        """Learn what has happened. Raises as `call`."""
        await self.call("since")

    def soon(self) -> None:
        """Look at once."""
        self._look.set()

    async def _known(self) -> None:
        """Wait until all is known. Raises `StoreFault` where that takes too long, and `Gone`."""
        if self._over:
            raise gone(self._run)
        try:
            async with asyncio.timeout(self._link.seconds):
                await self._ready.wait()
        except TimeoutError:
            raise self._link.fault() from None

    # --- what happens
    def _heard(self, sent: int, reply: Sequence[Any]) -> bool:
        """Take in what a reply brings beside its result. `sent`: the number that was known when it was asked for.

        False: all must be learnt anew.
        """
        memory, number, events, _ = reply
        if not self.ready:
            return False
        if memory.decode() != self._memory or number < sent:
            log.warning("the store may have forgotten sessions: it is told again", run=self._run)
            self._ready.clear()
        elif events is None:
            self._ready.clear()
        else:
            for each, text in events:
                self._take(each, text)
        return self.ready

    def _hear(self, message: bytes) -> None:
        number, _, text = message.partition(b" ")
        if self.ready and not self._take(int(number), text):
            self.soon()

    def _take(self, number: int, text: bytes) -> bool:
        """Take in one event. False: there were others before it."""
        if number == self._number + 1:
            self._number = number
            try:
                self._witness.happened(orjson.loads(text))
            except Exception:
                log.exception("what happened to a session could not be taken in", run=self._run, number=number)
        return number <= self._number

    async def _begin(self) -> None:
        """Tell what is known, and learn all that there is. Raises `StoreFault` and `Gone`."""
        told: list[Awaitable[Any]] = []
        for operation, words in self._witness.known():
            told.append(self._ask(operation, *words))
            if len(told) == TOGETHER:
                await asyncio.gather(*told)
                told.clear()
        await asyncio.gather(*told)
        memory, number, *_ = await self._ask("since")
        kept, cursor = [], b"0"
        while True:
            *_, (cursor, *some) = await self._ask("all", cursor)
            kept += some
            if cursor == b"0":
                break
        self._witness.found(_kept(each) for each in kept)
        self._memory, self._number = memory.decode(), number
        self._ready.set()
        self.soon()

    async def _ask(self, operation: str, *words: str | bytes | int, number: int = -1) -> Any:
        """A call, which brings the events after this number; -1: none. Raises `StoreFault` and `Gone`."""
        reply = await self._link.call(scripts.SESSIONS, self._keys, self._args(operation, words, number))
        self._over = reply[0] == b"over"
        if self._over:
            raise gone(self._run)
        return reply

    def _args(self, operation: str, words: Words, number: int) -> Words:
        return (operation, secrets.token_hex(8), number, self._kept, self._limit, *words)

    async def _follow(self) -> None:
        while True:
            self._look.clear()
            pause = LOOK_SECONDS
            try:
                if not self.ready:
                    await self._begin()
                else:
                    sent = self._number
                    reply = await self._ask("since", number=sent)
                    if not self._heard(sent, reply) or self._number < reply[1]:
                        continue
            except Gone:
                pass
            except StoreFault:
                pause = LOOK_SECONDS if self.ready else AGAIN_SECONDS
            except Exception:
                log.exception("what happened to sessions could not be learnt; tries again", run=self._run)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._look.wait()


def _kept(words: Sequence[Any]) -> Kept:
    ordinal, key, about, why, held = words
    return Kept(
        ordinal,
        key.decode(),
        orjson.loads(about),
        why != b"",
        orjson.loads(why) if why else None,
        {pool.decode(): version.decode() for pool, version in zip(held[::2], held[1::2], strict=True)},
    )
