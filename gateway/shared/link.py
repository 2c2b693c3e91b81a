"""The connection of one process to the store, a Redis or Valkey server.

All calls that are made in one turn of the event loop leave in one write, in the order in which they were made, and the
server runs them in that order. A call is answered within `timeouts.store` or fails with `StoreFault`; then the
connection is dropped and another one opened, so nothing ever waits behind a call that is lost. Whether a call that
failed was run is not known. It may even run later: `generation` tells connections apart.

A server that answers PING may still refuse all scripts, or let them wait: for want of memory or replicas, as another's
replica, by its rules of access. So a connection counts only when a *trial* was run by it, a script that does what
others do and leaves nothing behind; and when a call is refused the trial says whether the server refuses them all.
Rules of access may refuse some keys alone: each *family* of keys that is needed has a trial of its own, made when a
connection is there, when a call was refused, and now and then.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import hiredis
import structlog

from gateway.core.errors import StoreFault
from gateway.shared.address import Address

log = structlog.get_logger("detgate.store")

Words = Sequence[str | bytes | int]
Hear = Callable[[bytes], None]

AGAIN, AGAIN_AT_MOST = 0.05, 1.0
"""Seconds until a connection is tried again: the first time, and at most."""


class Script:
    """A Lua script that the server runs as one step."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


TRIAL = Script(
    """
    redis.call('ZADD', KEYS[1], 'XX', 0, '')
    redis.call('PUBLISH', KEYS[1], '')
    return {
        string.match(redis.call('INFO', 'memory'), 'maxmemory_policy:(%S+)') or '',
        tonumber(string.match(redis.call('INFO', 'stats'), 'evicted_keys:(%d+)')) or 0,
    }
    """
)
"""A member that a key has is given a score, and the key is never there. Gives by what policy the server throws keys
away, and how many it has thrown away since it was started."""

TRIAL_KEYS = (b"detgate:trial",)

FAMILY_TRIAL = Script("return redis.call('PUBLISH', ARGV[1], '')")
"""A server looks whether all keys that a script is called with may be read and written, whatever the script does."""

FAMILIES_SECONDS = 5.0
"""After which the families are tried again; `AGAIN_AT_MOST` while one is refused."""

KEEPS_ALL = "noeviction"
"""The policy of a server that throws no key away."""


class Refused(StoreFault):
    """The store refused one call, and not all."""


class Family(NamedTuple):
    """Keys that one thing needs."""

    what: str
    of: str
    """The run or the pool."""


class Link:
    """Owns the connection. `run` keeps it up; `failed` is called once for each call that fails."""

    def __init__(self, address: Address, seconds: float, failed: Callable[[], None] = lambda: None) -> None:
        self.address = address
        self.seconds = seconds
        """How long a call may take."""
        self.generation = 0
        """Which connection this is, from 1. What was sent by an earlier one may still be run, late."""
        self.why_down: str | None = "does not answer: not connected yet"
        """What the store does instead of running scripts; None: it runs them."""
        self.policy = KEEPS_ALL
        """By what policy the server throws keys away when its memory is full."""
        self.evicted = 0
        """Keys that it has thrown away while there was a connection to it."""
        self._evicted_before = 0
        self.refused: dict[Family, str] = {}
        """Families of keys that the server does not let this gateway use, and what it said."""
        self._needed: dict[Family, tuple[Words, bytes]] = {}
        self._next_trial: asyncio.TimerHandle | None = None
        self._tried_at = -math.inf
        self.connected: list[Callable[[], None]] = []
        """Called when a new connection is there, before any call goes out by it."""
        self._failed = failed
        self._wire: _Wire | None = None
        self._up = asyncio.Event()
        self._down_since: float | None = None
        self._refusal = ""
        """What the server said, where it is down for that."""
        self._out = False
        """An outage was logged."""
        self._heard: dict[bytes, list[Hear]] = {}

    # --- calls
    async def call(self, script: Script, keys: Words, args: Words) -> Any:
        """Run a script; its reply.

        Raises `StoreFault`: then it was not run, was run, or runs yet. `Refused`, where the server answered so.
        """
        if self._wire is None:
            await self.ready()
        return await self.send(script, keys, args)

    def send(self, script: Script, keys: Words, args: Words) -> asyncio.Future[Any]:
        """As `call`, but its place among the calls is fixed now. Raises `StoreFault` where there is no connection."""
        if self._wire is None:
            raise self.fault()
        return self._wire.run(script, keys, args)

    def fault(self, refusal: str = "") -> StoreFault:
        """The failure of a call, counted. `refusal`: what the server said to that call, and not to all."""
        self._failed()
        if refusal and asyncio.get_running_loop().time() - self._tried_at >= AGAIN_AT_MOST:
            self._try_families()
        told = refusal or self._refusal
        if told:
            what = f"refuses what it is asked ({told.partition(' ')[0]})"
        else:
            what = "has no answer to this yet" if self.why_down is None else "does not answer"
        kind = Refused if refusal else StoreFault
        return kind(f"The store that keeps indices {what}. Nothing was decided; ask again.")

    async def ready(self) -> None:
        """Wait for a connection, if it is not long that there is none. Raises `StoreFault`."""
        loop = asyncio.get_running_loop()
        since = self._down_since if self._down_since is not None else loop.time()
        try:
            async with asyncio.timeout_at(since + self.seconds):
                await self._up.wait()
        except TimeoutError:
            raise self.fault() from None

    async def up(self) -> None:
        """Wait for a connection, however long there is none."""
        await self._up.wait()

    # --- families
    def need(self, family: Family, keys: Words, channel: bytes) -> None:
        """Try these keys, and messages by such a channel, from now on."""
        self._needed[family] = keys, channel
        if self._wire is not None:
            self._try(self._wire, family)

    def need_no_more(self, family: Family) -> None:
        """Nothing uses them here any more."""
        self._needed.pop(family, None)
        self.refused.pop(family, None)

    def _try_families(self) -> None:
        """Try all of them, now and from now on."""
        self._rest()
        if self._wire is None:
            return
        loop = asyncio.get_running_loop()
        self._tried_at = loop.time()
        for family in self._needed:
            self._try(self._wire, family)
        pause = AGAIN_AT_MOST if self.refused else FAMILIES_SECONDS
        self._next_trial = loop.call_later(pause, self._try_families)

    def _rest(self) -> None:
        if self._next_trial is not None:
            self._next_trial.cancel()
            self._next_trial = None

    def _try(self, wire: _Wire, family: Family) -> None:
        keys, channel = self._needed[family]
        wire.attempt(FAMILY_TRIAL, keys, (channel,)).add_done_callback(lambda tried: self._tried(family, tried))

    def _tried(self, family: Family, tried: asyncio.Future[Any]) -> None:
        error = tried.exception()
        if family not in self._needed or (error is not None and not isinstance(error, _Denied)):
            return
        if error is None:
            if self.refused.pop(family, None) is not None:
                log.warning("the store takes keys again", store=str(self.address), keys=family.what, of=family.of)
            return
        if family not in self.refused:
            why = str(error)
            log.error("the store refuses keys", store=str(self.address), keys=family.what, of=family.of, why=why)
            self.refused[family] = why
            self._try_families()  # the others too, and soon again

    # --- messages
    def subscribe(self, channel: bytes, hear: Hear) -> None:
        """Have `hear` called with each message of a channel. A message may be lost, with the connection."""
        hearers = self._heard.setdefault(channel, [])
        hearers.append(hear)
        if len(hearers) == 1 and self._wire is not None:
            self._wire.tell("SUBSCRIBE", channel)

    def unsubscribe(self, channel: bytes, hear: Hear) -> None:
        """Hear no more of it."""
        hearers = self._heard[channel]
        hearers.remove(hear)
        if not hearers:
            del self._heard[channel]
            if self._wire is not None:
                self._wire.tell("UNSUBSCRIBE", channel)

    def _hear(self, message: list[Any]) -> None:
        if message[0] == b"message":
            for hear in tuple(self._heard.get(message[1], ())):
                try:
                    hear(message[2])
                except Exception:
                    log.exception("a message could not be taken in", channel=message[1].decode(errors="replace"))

    # --- the connection
    async def run(self) -> None:
        """Keep a connection open, for ever."""
        loop = asyncio.get_running_loop()
        self._down_since = loop.time()
        pause = AGAIN
        try:
            while True:
                try:
                    wire = await self._open()
                except (OSError, TimeoutError, hiredis.HiredisError) as error:
                    self._lost(_words(error), refused=isinstance(error, _Denied))
                else:
                    since = loop.time()
                    self._take(wire)
                    await wire.ended
                    if loop.time() - since >= AGAIN_AT_MOST:
                        pause = AGAIN
                        continue
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN_AT_MOST)
        finally:
            self._rest()
            if self._wire is not None:
                self._wire.drop("the gateway stops")
            self._wire, self.why_down = None, "is asked no more: the gateway stops"
            self._up.clear()

    async def _open(self) -> _Wire:
        address = self.address
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.seconds):
            _, wire = await loop.create_connection(
                lambda: _Wire(self.seconds, self._hear, self.fault, self._lost),
                address.host,
                address.port,
                ssl=address.tls,
                server_hostname=address.host if address.tls is not None else None,
            )
            try:
                secret = ("AUTH", address.username or "default", address.password) if address.password else ()
                hello = wire.ask("HELLO", 3, *secret, "SETNAME", "detgate")
                chosen = wire.ask("SELECT", address.db)
                _, _, (policy, evicted) = await asyncio.gather(hello, chosen, wire.run(TRIAL, TRIAL_KEYS, ()))
            except BaseException:
                wire.drop("it did not greet")
                raise
        self._look_at(policy.decode(), evicted)
        return wire

    def _look_at(self, policy: str, evicted: int) -> None:
        before, self.policy = self.policy, policy or KEEPS_ALL
        if self.policy not in (before, KEEPS_ALL):
            log.warning(
                "the store may throw keys of a run away",
                store=str(self.address),
                policy=self.policy,
                mend=f"maxmemory-policy {KEEPS_ALL}",
            )
        self._evicted_before = evicted

    def count_evicted(self, number: int) -> None:
        """How many keys the server has thrown away by now since it was started."""
        if number > self._evicted_before:
            if not self.evicted:
                log.error("the store throws keys away, maybe of a run", store=str(self.address), keys=number)
            self.evicted += number - self._evicted_before
            self._evicted_before = number

    def _take(self, wire: _Wire) -> None:
        if wire.ended.done():
            self._lost(*wire.ended.result())
            return
        self.generation += 1
        self._wire = wire
        wire.greeted = True
        if self._heard:
            wire.tell("SUBSCRIBE", *self._heard)
        for connected in self.connected:
            try:
                connected()
            except Exception:
                log.exception("a new connection could not be taken in")
        self._up.set()
        self.why_down, self._refusal = None, ""
        if self._out:
            self._out = False
            seconds = asyncio.get_running_loop().time() - (self._down_since or 0.0)
            log.warning("the store answers again", store=str(self.address), seconds=round(seconds, 3))
        self._down_since = None
        self._try_families()

    def _lost(self, why: str, refused: bool = False) -> None:
        self._wire = None
        self._up.clear()
        self._refusal = why if refused else ""
        self.why_down = f"refuses what it is asked: {why}" if refused else f"does not answer: {why}"
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
        if not self._out:
            self._out = True
            what = "the store refuses what it is asked" if refused else "the store does not answer"
            log.error(what, store=str(self.address), why=why)


class _Wire(asyncio.Protocol):
    """One connection. It is dropped when its oldest call has waited too long."""

    def __init__(
        self,
        seconds: float,
        hear: Callable[[list[Any]], None],
        fault: Callable[[str], StoreFault],
        lost: Callable[[str, bool], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[tuple[str, bool]] = self._loop.create_future()
        """Set when it is gone: why, and whether that is what the server said."""
        self._seconds = seconds
        self._hear = hear
        self._fault = fault
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any] | None, float]] = deque()
        """Calls without a reply, the oldest first, and since when. None: nobody waits for it."""
        self._watch: asyncio.TimerHandle | None = None
        self._loaded: set[str] = set()
        self._trial: asyncio.Future[Any] | None = None
        self._attempts: set[asyncio.Future[Any]] = set()
        """Trials of families."""
        self._refused: list[tuple[asyncio.Future[Any] | None, str]] = []
        """Calls that were refused, and how. They wait for the trial."""
        self._refusals: set[str] = set()
        """Kinds of errors that were logged."""
        self.greeted = False

    # --- to the server
    def run(self, script: Script, keys: Words, args: Words) -> asyncio.Future[Any]:
        if script.sha not in self._loaded:
            self._loaded.add(script.sha)
            self._write(_packed(("SCRIPT", "LOAD", script.source)))
            self._waiting.append((None, self._loop.time()))
        return self._expect(_packed(("EVALSHA", script.sha, len(keys), *keys, *args)))

    def attempt(self, script: Script, keys: Words, args: Words) -> asyncio.Future[Any]:
        """As `run`, for a script that may be refused without a word: `_Denied`."""
        reply = self.run(script, keys, args)
        self._attempts.add(reply)
        reply.add_done_callback(self._attempts.discard)
        return reply

    def ask(self, *words: str | int) -> asyncio.Future[Any]:
        """A command and its reply."""
        return self._expect(_packed(words))

    def tell(self, what: str, *channels: bytes) -> None:
        """Subscribe to channels, or to them no more."""
        for channel in channels:
            self._write(_packed((what, channel)))
            self._waiting.append((None, self._loop.time()))

    def _expect(self, command: bytes) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._write(command)
        self._waiting.append((reply, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._seconds, self._overdue)
        return reply

    def _write(self, command: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _overdue(self) -> None:
        self._watch = None
        if not self._waiting:
            return
        left = self._waiting[0][1] + self._seconds - self._loop.time()
        if left <= 0:
            self.drop(f"no answer within {self._seconds:g} s")
        else:
            self._watch = self._loop.call_later(left, self._overdue)

    # --- from the server
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own is no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                self._take(reply)
        except hiredis.ProtocolError:
            self.drop("what it says is no Redis protocol")

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.PushNotification):
            self._hear(reply)
            if reply[0] not in (b"subscribe", b"unsubscribe"):
                return
        if not self._waiting:
            return
        waiter, _ = self._waiting.popleft()
        if isinstance(reply, hiredis.ReplyError):
            self._deny(waiter, _told(reply))
        elif waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _deny(self, waiter: asyncio.Future[Any] | None, words: str) -> None:
        """A command was refused. Who asked hears of it when it is known whether others would be too."""
        if waiter in self._attempts and not words.startswith("NOSCRIPT"):
            if not waiter.done():
                _fail(waiter, _Denied(words))
            return
        self._refused.append((waiter, words))
        if not self.greeted or (waiter is not None and waiter is self._trial) or words.startswith("NOSCRIPT"):
            self.drop(words, refused=True)
        elif self._trial is None:
            self._trial = self.run(TRIAL, TRIAL_KEYS, ())
            self._trial.add_done_callback(self._tried)

    def _tried(self, trial: asyncio.Future[Any]) -> None:
        self._trial = None
        if trial.exception() is not None:
            return
        for waiter, words in self._refused:
            if waiter is not None and not waiter.done():
                _fail(waiter, self._fault(words))
            kind = words.partition(" ")[0]
            if kind not in self._refusals:
                self._refusals.add(kind)
                log.error("the store refused a call", error=words)
        self._refused.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(_words(error) if error is not None else "it closed the connection")

    def drop(self, why: str, *, refused: bool = False) -> None:
        """Have no more to do with it. `refused`: that is what the server said."""
        self._end(why, refused)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str, refused: bool = False) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if not self.ended.done():
            self.ended.set_result((why, refused))
            if self.greeted:
                self._lost(why, refused)
        left = [waiter for waiter, _ in (*self._refused, *self._waiting)]
        self._refused.clear()
        self._waiting.clear()
        for waiter in left:
            if waiter in self._attempts and not waiter.done():
                _fail(waiter, ConnectionError(why))
            elif waiter is not None and not waiter.done():
                _fail(waiter, self._fault("") if self.greeted else _Denied(why) if refused else ConnectionError(why))


class _Denied(ConnectionError):
    """The server answered a greeting, or a trial, with an error."""


def _fail(waiter: asyncio.Future[Any], error: Exception) -> None:
    """Without a word of asyncio's where nobody waits for it any more."""
    waiter.set_exception(error)
    waiter.exception()


def _told(error: hiredis.ReplyError) -> str:
    """What the server said, without the words that it was sent, which may be a password, and the script's place."""
    return re.split(r",? with args | script: ", str(error))[0]


_MORE: Any = object()

_packed: Callable[[tuple[str | bytes | int, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
"""A command as the server reads it. The package's stub takes tuples of one alone."""


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
