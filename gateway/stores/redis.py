"""Any number of processes: the counters in a Redis or Valkey server, each claim and each end one atomic script.

The scripts of `gateway/shared/lua` are the rule of `gateway/core/indexing.py`. What this process has claimed it holds
until the store knows how it ended: an end that could not be told is owed, and told when the store answers again. A
claim whose answer was lost is owed an end too, by its token, so no index is lost. Whoever must wait asks again when the
scope changed, here or elsewhere, in order of arrival; a message that is lost costs time alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import structlog

from gateway.core.errors import Conflict, Fault, StoreFault
from gateway.core.indexing import Ask, Claim, refused
from gateway.ledger.writer import Ledger
from gateway.settings import InvalidSettings, Settings
from gateway.shared import deeds, scripts
from gateway.shared.address import parse
from gateway.shared.deeds import KINDS, Fate, scope_name, session_name
from gateway.shared.link import KEEPS_ALL, Link
from gateway.shared.part import BEATS, Deed, LostEnd, Memory, Part, Telling, Terms
from gateway.stores import ScopeKey, given_back, waited
from gateway.tasks import start, stop

log = structlog.get_logger("detgate.store")

POLL = 0.25
"""Seconds after which whoever waits asks again, whether it heard of a change or not."""

RECENT = 8192
"""Calls that are kept in mind, to tell them again to a server that has lost the last of them."""

ASK_PAUSE = 0.02
"""Seconds until a store that refused a claim, or did not say whether an answer may be delivered, is asked again: the
first time, for a claim."""

CLAIMED, COMPLETE, SETTLED = 0, 1, 2


@dataclass(slots=True, eq=False)
class Held:
    """A claim of this process that the store does not know to be over."""

    key: ScopeKey
    ask: Ask
    scope: bytes
    session: bytes
    token: int = 0
    index: int = -1
    """-1: not known; the claim's answer was lost."""
    raced: bool = False
    """Known when it was claimed, or when its answer ended."""
    state: int = CLAIMED
    known: int = CLAIMED
    """The state that the store has."""
    used: bool = False
    noted: bool = False
    """The store has noted that its answer is delivered: whatever happens, its index is used."""
    lost: bool = False
    """The store does not have it any more, or may not: another may have its index."""
    asked: tuple[int, int] | None = None
    """What its bytes stood for when it had to wait for a rival, as the store said, and which retry it is."""

    @property
    def live(self) -> bool:
        """Its index is known and not given back, as far as anybody knows."""
        return self.index >= 0 and self.state < SETTLED and not self.lost

    @property
    def about(self) -> bytes:
        return orjson.dumps((self.key.session, self.key.identity))


@dataclass(slots=True, eq=False)
class Issued:
    """An index that this process has claims on."""

    holders: list[Held]
    open: int = 0
    """Claims whose answer has not ended."""
    raced: bool = False


@dataclass(slots=True, eq=False)
class Waiter:
    """A claim that waits."""

    held: Held
    outcome: asyncio.Future[Claim]
    raced: bool
    """It has waited for a rival."""
    asking: bool = False
    again: bool = False
    """It is to ask once more when the answer is there."""
    final: bool = False
    poll: asyncio.TimerHandle | None = None


def build(settings: Settings, failed: Callable[[], None]) -> RedisStore:
    """The store that the settings name. `failed` is called for each call to it that fails.

    Raises `InvalidSettings` where the URL cannot be used.
    """
    try:
        address = parse(settings.state)
    except ValueError as error:
        raise InvalidSettings([f"state: {error}"]) from None
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    terms = Terms(
        f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        orjson.dumps(settings.deciding(), option=orjson.OPT_SORT_KEYS),
        settings.timeouts.gateway,
        settings.timeouts.gateway * 3 / BEATS,
        settings.timeouts.run,
    )
    link = Link(address, settings.timeouts.store, failed)
    return RedisStore(link, terms, strict=settings.profile == "strict", remembered=settings.limits.scopes)


class RedisStore:
    """The counters of runs that other processes serve too."""

    shared = True
    gateway: str | None

    def __init__(self, link: Link, terms: Terms, *, strict: bool, remembered: int = 100_000) -> None:
        self.link = link
        self.terms = terms
        self.gateway = terms.gateway
        self.fenced: Callable[[], None] = lambda: None
        """Called for each session that is fenced because an index of it was given twice."""
        self._strict = strict
        self._remembered = remembered
        self._runs: dict[str, SharedRun] = {}
        self._numbers = count(1)

    @property
    def scopes(self) -> int:
        """Counters whose numbers are kept in mind."""
        return sum(run.scopes for run in self._runs.values())

    @property
    def owed(self) -> int:
        """Claims that the store does not know to have ended, or begun."""
        return sum(run.owed for run in self._runs.values())

    def why_down(self, run: str) -> str | None:
        """Why requests of a run cannot be numbered now; None: they can."""
        if self.link.why_down is not None:
            return f"the store {self.link.why_down}"
        part = self._run(run).part
        if part.connection is None:
            why_not = part.why_not
            return why_not.message if why_not is not None else "the store waits for what other gateways know"
        refused = [f"{family.what} ({why})" for family, why in self.link.refused.items() if family.of == run]
        return f"the store refuses the keys of {' and '.join(refused)}" if refused else None

    @property
    def refused(self) -> Counter[str]:
        return Counter(family.what for family in self.link.refused)

    @property
    def warnings(self) -> list[str]:
        link, told = self.link, []
        if link.policy != KEEPS_ALL:
            told.append(
                "the store may throw keys of a run away, and not all of that is noticed: "
                f"maxmemory-policy {link.policy}"
            )
        if link.evicted:
            told.append(f"the store has thrown {link.evicted} keys away, maybe of a run")
        return told

    # --- runs
    def restore(self, run: str, folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a run issued the server knows."""
        return []

    def fence(self, run: str) -> None:
        """What the ledger lacks the server knows."""

    def serve(self, run: str, folder: Path | None = None, ledger: Ledger | None = None) -> None:
        """Take part in a run, whose ledger is told of claims that other gateways left behind."""
        known = self._runs.get(run)
        if known is not None and known.is_in(folder):
            known.show(ledger)
        else:
            self._runs[run] = SharedRun(self, run, folder, ledger)

    def close(self, run: str) -> None:
        """A run's folder is left. `stop` has left the run itself."""
        if (left := self._runs.get(run)) is not None:
            left.hide()

    def leave(self, run: str) -> None:
        left = self._runs.pop(run, None)
        if left is not None:
            left.depart()

    @property
    def busy(self) -> set[str]:
        return {name for name, run in self._runs.items() if run.busy}

    def part(self, run: str) -> Part:
        """The part that this gateway takes in a run."""
        return self._run(run).part

    def _run(self, name: str) -> SharedRun:
        if name not in self._runs:
            self.serve(name)
        return self._runs[name]

    async def run(self) -> None:
        """Keep up the connection, for ever."""
        await self.link.run()

    async def stop(self) -> None:
        """Take part in nothing any more."""
        for run in self._runs.values():
            await run.leave()

    async def claim(self, key: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        run = self._run(key.run)
        with run.asking():
            return await run.claim(key, ask, settle_seconds)

    async def complete(self, key: ScopeKey, index: int, *, sure: bool = False) -> bool:
        return await self._runs[key.run].complete(key, index, sure)

    async def settle(self, key: ScopeKey, index: int, *, used: bool) -> bool:
        return await self._runs[key.run].settle(key, index, used)

    async def has_issued(self, key: ScopeKey, index: int) -> bool:
        run = self._run(key.run)
        with run.asking():
            return await run.has_issued(key, index)

    def raced(self, key: ScopeKey, index: int) -> bool:
        return self._runs[key.run].issued(key, index).raced

    async def learn(self, key: ScopeKey) -> None:
        await self._run(key.run).learn(key)

    def knows(self, run: str, session: str) -> bool:
        return run in self._runs and self._runs[run].knows(session)

    def next_index(self, key: ScopeKey) -> int | None:
        return self._run(key.run).next_index(key)

    def number(self) -> int:
        """Names a call of this process; later ones have higher numbers."""
        return next(self._numbers)

    @property
    def mode(self) -> int:
        """What every claim says of this gateway."""
        return 8 * self._strict

    @property
    def remembered(self) -> int:
        """Scopes and sessions whose numbers are kept in mind."""
        return self._remembered


class SharedRun:
    """What this process does in one run."""

    def __init__(self, store: RedisStore, run: str, folder: Path | None, ledger: Ledger | None) -> None:
        self._store = store
        self._link = store.link
        self._run = run
        self._folder = folder
        self._ledger = ledger
        memory = Memory() if folder is None else deeds.recall(folder)
        peers = () if folder is None else deeds.known(folder)
        terms = store.terms if folder is None else deeds.terms(folder, store.terms)
        self._shown = None if folder is None else deeds.show(folder, store.terms.gateway)
        self.part = Part(store.link, run, terms, self, memory, peers)
        self._keys = self.part.keys
        self._held: dict[int, Held] = {}
        self._issued: dict[tuple[bytes, int], Issued] = {}
        self._drawn: dict[bytes, set[Issued]] = {}
        """Scope → what this process has drawn from its counter and has in flight."""
        self._waiters: dict[bytes, list[Waiter]] = {}
        """In order of arrival."""
        self._recent: deque[tuple[int, Held]] = deque(maxlen=RECENT)
        self._told = store.number()
        """The number of the last call that the store has answered. Those of an earlier part in the run are lower."""
        self._asking = 0
        """Claims, and looks before a claim, that are under way."""
        self._forgot = memory.epoch >= 0
        """There were calls that are not among the recent ones."""
        self._next: OrderedDict[ScopeKey, int | None] = OrderedDict()
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._channel = scripts.prefix_of(run) + b"changed"
        store.link.subscribe(self._channel, self._wake)
        self._families = scripts.families(run, terms.gateway)
        for family, keys in self._families.items():
            store.link.need(family, keys, scripts.prefix_of(run) + b"trial")
        self._life = start(self.part.live(), f"run {run}")

    async def leave(self) -> None:
        """Take no part any more."""
        await stop(self._life)
        self._unneeded()
        await self.part.end()

    def depart(self) -> None:
        """As `leave`, at once. Nothing of it is in flight."""
        self._life.cancel()
        self._unneeded()
        self.part.depart()

    def _unneeded(self) -> None:
        self._link.unsubscribe(self._channel, self._wake)
        for family in self._families:
            self._link.need_no_more(family)

    @property
    def busy(self) -> bool:
        """It has a claim, or asks for one, or cannot leave in an orderly way now."""
        return bool(self._held or self._waiters or self._asking) or self.part.connection is None

    def is_in(self, folder: Path | None) -> bool:
        """Whether that is its folder."""
        return folder is not None and self._folder == folder

    def show(self, ledger: Ledger | None) -> None:
        """Live again, with another ledger, for those who share the folder."""
        assert self._folder is not None
        self._ledger = ledger
        if self._shown is None:
            self._shown = deeds.show(self._folder, self._store.terms.gateway)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Meanwhile it is not left."""
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1

    def hide(self) -> None:
        """Live no more, for those who share the folder."""
        if self._shown is not None and self._folder is not None:
            deeds.hide(self._folder, self._store.terms.gateway, self._shown)
            self._shown = None

    # --- what this process knows
    @property
    def owed(self) -> int:
        return sum(held.known < held.state for held in self._held.values())

    @property
    def scopes(self) -> int:
        return len(self._next)

    @property
    def waiting(self) -> int:
        """Claims that wait."""
        return sum(map(len, self._waiters.values()))

    def issued(self, key: ScopeKey, index: int) -> Issued:
        """What this process knows of an index that it has a claim on."""
        return self._issued[scope_name(key.session, key.identity), index]

    async def learn(self, key: ScopeKey) -> None:
        names = session_name(key.session), scope_name(key.session, key.identity)
        asked, counted = await self._link.call(scripts.LOOK, self._keys, names)
        if asked:
            self._sessions[key.session] = None
            self._bound(self._sessions)
        if counted is not None:
            number, kind, *_ = counted.decode().split(",")
            self._next[key] = None if kind == KINDS["client"] else int(number)
            self._bound(self._next)

    async def has_issued(self, key: ScopeKey, index: int) -> bool:
        names = session_name(key.session), scope_name(key.session, key.identity)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._link.seconds
        while True:
            connection = self.part.connection or await self.part.join()
            words = (self._store.terms.gateway, connection, *names, index)
            answer = await self._link.call(scripts.ISSUED, self._keys, words)
            if answer[0] != b"away":
                return bool(answer[0] == b"yes")
            self.part.leave(connection)
            if loop.time() >= until:
                raise self._link.fault()

    def knows(self, session: str) -> bool:
        return session in self._sessions

    def next_index(self, key: ScopeKey) -> int | None:
        return self._next.get(key, 0)

    # --- claim
    async def claim(self, key: ScopeKey, ask: Ask, seconds: float) -> Claim:
        self._sessions[key.session] = None
        self._bound(self._sessions)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._link.seconds
        pause = ASK_PAUSE
        while True:
            held = Held(key, ask, scope_name(key.session, key.identity), session_name(key.session))
            if self._link.why_down is not None:
                await self._link.ready()
            connection = self.part.connection or await self.part.join()
            try:
                answer = await self._ask(held, connection)
            except StoreFault:
                left = until - loop.time()
                if left <= 0:
                    raise
                # A server that refuses this call alone keeps the connection, and would do so at once.
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, POLL)
                continue
            if answer[0] == b"wait":
                racing = answer[1] == b"racing"
                if racing:
                    self._rival(held, answer)
                return await self._wait(held, racing, seconds)
            if answer[0] != b"away":
                return self._outcome(held, answer)
            self.part.leave(connection)

    async def _ask(self, held: Held, connection: bytes) -> list[Any]:
        """Ask for an index. Who is gone before the answer has taken nothing."""
        asked = self._send(held, connection)
        try:
            answer: list[Any] = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda answer: self._came_late(held, answer))
            self._give_back(held)
            raise
        except StoreFault:
            self._give_back(held)
            raise
        if answer[0] != b"index":
            del self._held[held.token]
        return answer

    def _send(self, held: Held, connection: bytes, *, raced: bool = False, final: bool = False) -> asyncio.Future[Any]:
        ask, store = held.ask, self._store
        held.token = store.number()
        words = (
            store.terms.gateway,
            connection,
            held.token,
            held.scope,
            held.session,
            KINDS[ask.kind],
            ask.raw,
            ask.content or "",
            "" if ask.number is None else ask.number,
            ask.key or "",
            ask.repeat,
            ask.exclusive + 2 * raced + 4 * final + store.mode,
            held.about,
            round(store.terms.retention * 1000),
        )
        sent = self._link.send(scripts.CLAIM, self._keys, words)
        self._held[held.token] = held
        return sent

    def _outcome(self, held: Held, answer: Sequence[Any]) -> Claim:
        """What a claim came to. Raises `Conflict`."""
        if answer[0] == b"fenced":
            raise Conflict(
                "The store may have forgotten requests of this session that another gateway served. Begin a new "
                "session, or the run anew.",
                code="session_fenced",
                param="X-Session-ID",
            )
        if answer[0] == b"refused":
            if answer[1] == b"racing_index":
                self._race(held.scope)
            raise refused(answer[1].decode(), answer[2].decode())
        _, index, reused, raced, rivals, flag, fenced = answer
        held.index, held.raced = int(index), bool(raced)
        self._note(held.token, held)
        place = (held.scope, held.index)
        issued = self._issued.get(place) or self._issued.setdefault(place, Issued([]))
        issued.holders.append(held)
        issued.open += 1
        issued.raced |= held.raced
        if rivals:
            self._race(held.scope)
        if not reused:
            self._drawn.setdefault(held.scope, set()).add(issued)
            numbered = held.ask.kind == "client"
            self._next[held.key] = None if numbered else held.index + 1
            self._bound(self._next)
        flags = ("racing",) * bool(raced) + (flag.decode(),) * bool(flag) + ("epoch",) * bool(fenced)
        return Claim(held.index, flags, bool(reused), self.part.memory.epoch)

    def _race(self, scope: bytes) -> None:
        """All that were drawn here and are in flight have a rival."""
        for other in self._drawn.get(scope, ()):
            other.raced = True

    def _rival(self, held: Held, answer: Sequence[Any]) -> None:
        """A claim has a rival, for which it must wait."""
        self._race(held.scope)
        if len(answer) > 2:
            held.asked = int(answer[2]), held.ask.repeat

    def _came_late(self, held: Held, asked: asyncio.Future[Any]) -> None:
        """What a claim came to whose asker is gone."""
        if asked.cancelled() or asked.exception() is not None:
            return
        answer = asked.result()
        if answer[0] == b"index":
            held.index, held.raced = int(answer[1]), bool(answer[3])
            self._note(held.token, held)
            self._record_return(held)
            return
        self._held.pop(held.token, None)
        if answer[0] == b"wait" and answer[1] == b"racing":
            self._rival(held, answer)
        self._note_wait(held)

    def _record_return(self, held: Held) -> None:
        """Write down that an index was issued which no request has: else a store that forgets would not be told."""
        if self._ledger is not None:
            gateway = self._store.terms.gateway
            self._ledger.closed(given_back(held.key, held.ask, held.index, raced=held.raced, gateway=gateway))

    def _note_wait(self, held: Held) -> None:
        """Who waited for a rival had no index. A store that forgets must know that its retry is not another's."""
        if held.asked is None:
            return
        self._note(self._store.number(), held)
        if self._ledger is not None:
            self._ledger.closed(waited(held.key, held.ask.raw, *held.asked))

    def _give_back(self, held: Held) -> None:
        """Who asked is gone. If the claim was made, or is made yet, it is over."""
        held.state, held.used = SETTLED, False
        self._tell(held)
        self._wake(held.scope)

    def _bound(self, known: OrderedDict[Any, Any]) -> None:
        if len(known) > self._store.remembered:
            known.popitem(last=False)

    # --- the end
    async def complete(self, key: ScopeKey, index: int, sure: bool) -> bool:
        issued = self.issued(key, index)
        held = next((held for held in issued.holders if held.state == CLAIMED), None)
        if held is None:
            return issued.raced
        held.state = COMPLETE
        self._end_flight(held, issued)
        try:
            if sure:
                issued.raced |= await self._noted(held)
            else:
                issued.raced |= await self._told_of(held)
        finally:
            held.raced = issued.raced
        self._wake(held.scope)
        return issued.raced

    async def _told_of(self, held: Held) -> bool:
        """Tell that an answer has ended, if the store can be told soon. Whether its index raced."""
        try:
            told = self._tell(held)
            if told is None:
                await self._link.ready()
                await self.part.join()
                told = self._tell(held)
            answer = [b"away"] if told is None else await told
        except Fault:
            return False  # it is owed
        return answer[0] == b"done" and bool(answer[1])

    async def _noted(self, held: Held) -> bool:
        """Have the store note that an answer will be delivered. Whether its index raced.

        What the store has noted it gives to nobody else, should this gateway be taken for gone from now on. Raises
        `StoreFault` where the claim was ended by then, or the store does not say within the lease.
        """
        until = asyncio.get_running_loop().time() + self._store.terms.lease
        answer = await self._asked_once(held)
        if answer is None:
            try:
                async with asyncio.timeout_at(until):
                    while answer is None:
                        await asyncio.sleep(ASK_PAUSE)
                        await self._link.up()
                        await self.part.taken()
                        answer = await self._asked_once(held)
            except TimeoutError:
                self._link.fault()
                raise StoreFault(
                    "The store that keeps indices did not take note of the answer within "
                    f"{self._store.terms.lease:g} s, so it is not delivered. Ask again."
                ) from None
        if answer[0] == b"gone":
            raise StoreFault(
                "This gateway could not be heard for so long that the index of this request was released, and another "
                "may have it. Ask again.",
                code="index_released",
            )
        return bool(answer[1])

    async def _asked_once(self, held: Held) -> list[Any] | None:
        """What the store says to the end of an answer; None: nothing, or nothing to this connection."""
        told = self._tell(held)
        if told is None:
            return None
        try:
            answer: list[Any] = await told
        except StoreFault:
            return None
        return None if answer[0] == b"away" else answer

    async def settle(self, key: ScopeKey, index: int, used: bool) -> bool:
        held = max(self.issued(key, index).holders, key=lambda held: held.state)
        told = self._finish(held, used)
        if told is None:
            return False
        try:
            answer = await told
        except StoreFault:
            return False
        self._wake(held.scope)
        return answer[0] == b"done" and bool(answer[1])

    def _finish(self, held: Held, used: bool) -> asyncio.Future[Any] | None:
        """A claim is over."""
        issued = self._issued[held.scope, held.index]
        if held.state == CLAIMED:
            self._end_flight(held, issued)
        issued.holders.remove(held)
        if not issued.holders:
            del self._issued[held.scope, held.index]
        held.state, held.used = SETTLED, used
        return self._tell(held)

    def _end_flight(self, held: Held, issued: Issued) -> None:
        issued.open -= 1
        drawn = self._drawn.get(held.scope)
        if drawn is not None and not issued.open:
            drawn.discard(issued)
            if not drawn:
                del self._drawn[held.scope]

    def _tell(self, held: Held) -> asyncio.Future[Any] | None:
        """Tell the store how far a claim is; None: it is owed, since the store cannot be asked now."""
        connection = self.part.connection
        if connection is None or self._link.why_down is not None:
            return None
        number, state = self._store.number(), held.state
        words: tuple[bytes | str | int, ...] = (self._store.terms.gateway, connection, number, held.token)
        if state == COMPLETE:
            told = self._link.send(scripts.COMPLETE, self._keys, words)
        else:
            index = held.index if held.index >= 0 else ""
            told = self._link.send(
                scripts.SETTLE, self._keys, (*words, int(held.used), held.scope, index, held.ask.raw)
            )

        def heard(answer: asyncio.Future[Any]) -> None:
            if answer.cancelled():
                return
            if answer.exception() is not None:
                # A server that refuses this call alone keeps the connection: nobody tells it again.
                asyncio.get_running_loop().call_later(POLL, self._owe, held)
                return
            outcome = answer.result()[0]
            if outcome == b"away":
                self.part.leave(connection)
                return
            held.known = max(held.known, state)
            if outcome == b"done":
                held.noted |= state == COMPLETE
                if held.index < 0 and held.scope:  # the claim was made, and its answer was lost
                    held.index, held.raced = int(answer.result()[2]), bool(answer.result()[3])
                    self._record_return(held)
                self._note(number, held)
            if held.known == SETTLED:
                self._held.pop(held.token, None)

        told.add_done_callback(heard)
        return told

    def _owe(self, held: Held) -> None:
        """Tell how far a claim is if the store does not know yet."""
        if held.known < held.state:
            self._tell(held)

    def _note(self, number: int, held: Held) -> None:
        self._told = max(self._told, number)
        self._forgot |= len(self._recent) == RECENT
        self._recent.append((number, held))

    # --- waiting
    async def _wait(self, held: Held, raced: bool, seconds: float) -> Claim:
        loop = asyncio.get_running_loop()
        waiter = Waiter(held, loop.create_future(), raced)
        self._waiters.setdefault(held.scope, []).append(waiter)
        self._poll(waiter)
        timer = loop.call_later(seconds, self._again, waiter, True)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            if not waiter.outcome.cancelled() and waiter.outcome.exception() is None:
                self._record_return(waiter.held)  # it was given an index in the moment in which it left
                self._finish(waiter.held, used=False)
                self._wake(held.scope)
            elif not waiter.asking:
                self._note_wait(waiter.held)
            raise
        except Fault:
            self._note_wait(waiter.held)
            raise
        finally:
            timer.cancel()
            self._forget(waiter)

    def _poll(self, waiter: Waiter) -> None:
        waiter.poll = asyncio.get_running_loop().call_later(POLL, self._polled, waiter)

    def _polled(self, waiter: Waiter) -> None:
        self._again(waiter)
        self._poll(waiter)

    def _wake(self, scope: bytes) -> None:
        for waiter in tuple(self._waiters.get(scope, ())):
            self._again(waiter)

    def _again(self, waiter: Waiter, final: bool = False) -> None:
        """Ask again for one who waits. `final`: its time is up."""
        waiter.final |= final
        if waiter.outcome.done():
            return
        if waiter.asking:
            waiter.again = True
            return
        connection = self.part.connection
        if connection is None or self._link.why_down is not None:
            if waiter.final:
                waiter.outcome.set_exception(self._link.fault())
            return
        waiter.asking = True
        final = waiter.final
        held = waiter.held
        asked = self._send(held, connection, raced=waiter.raced, final=final)
        asked.add_done_callback(lambda answer: self._answered(waiter, answer, connection, final))

    def _answered(self, waiter: Waiter, asked: asyncio.Future[Any], connection: bytes, final: bool) -> None:
        waiter.asking = False
        held = waiter.held
        if asked.exception() is not None:
            # Who asks again does so as somebody else: what this asking came to is not known.
            if waiter.outcome.done():
                self._note_wait(held)
            else:
                waiter.held = Held(held.key, held.ask, held.scope, held.session, asked=held.asked)
                if waiter.final:
                    waiter.outcome.set_exception(self._link.fault())
            self._give_back(held)
            return
        answer = asked.result()
        if waiter.outcome.done():
            self._came_late(held, asked)
            if answer[0] == b"index":
                self._give_back(held)
            return
        if answer[0] != b"index":
            del self._held[held.token]
        if answer[0] == b"away":
            self.part.leave(connection)
        elif answer[0] == b"wait":
            if answer[1] == b"racing":
                waiter.raced = True
                self._rival(held, answer)
        else:
            try:
                waiter.outcome.set_result(self._outcome(held, answer))
            except Conflict as conflict:
                waiter.outcome.set_exception(conflict)
            return
        if waiter.again or (waiter.final and not final):
            waiter.again = False
            self._again(waiter)

    def _forget(self, waiter: Waiter) -> None:
        if waiter.poll is not None:
            waiter.poll.cancel()
        waiters = self._waiters[waiter.held.scope]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.held.scope]

    # --- taking part (gateway.shared.part.Deeds)
    async def since(self, number: int, *, lapsed: bool) -> Telling:
        for each in self._held.values():
            each.lost |= lapsed
        if number >= self._told and not (number < 0 and self._forgot):
            return Telling()
        if self._ledger is None or self._folder is None or self._remembers(number):
            recent = {each.token: each for told, each in self._recent if told > number}
            claims = [each for each in recent.values() if each.index >= 0]
            waits = [_wait(each) for each in recent.values() if each.index < 0 and each.asked is not None]
            return Telling([*(fate.deed() for fate in _fates(claims)), *waits])
        self._ledger.flush()
        live: deeds.Live = {}
        for each in self._held.values():
            if each.live:
                live.setdefault((each.key.session, each.key.identity, each.index), []).append(_token(each))
        return await asyncio.to_thread(deeds.told, self._folder, self._store.terms.gateway, live)

    def _remembers(self, number: int) -> bool:
        """Whether all calls after this one are among the recent, and there is nobody else's to tell."""
        if number < 0:
            assert self._folder is not None
            return not self._forgot and len(list(self._folder.glob("*.jsonl"))) == 1
        return not self._forgot or (bool(self._recent) and self._recent[0][0] <= number)

    def resume(self, tokens: Sequence[bytes]) -> None:
        if self._folder is not None:
            deeds.remember(self._folder, self._store.terms.gateway, self.part.memory)
        kept = {int(token) for token in tokens}
        stale = kept - self._held.keys()
        for held in list(self._held.values()):
            held.lost = held.token not in kept
            if held.known < held.state:
                self._tell(held)
        for token in stale:
            self._tell(Held(ScopeKey(self._run, "", ""), Ask("arrival", b""), b"", b"", token, state=SETTLED))
        for scope in tuple(self._waiters):
            self._wake(scope)

    def lost(self, ends: Sequence[LostEnd]) -> bool:
        if not self._written(ends):
            return False
        twice = [end for end in ends if end.twice]
        if twice:
            session, identity = orjson.loads(twice[0].about)
            log.error(
                "indices were given twice: their sessions are fenced",
                run=self._run,
                sessions=len(twice),
                first={"session": session, "identity": identity, "index": twice[0].place},
            )
        for _ in twice:
            self._store.fenced()
        return True

    def _written(self, ends: Sequence[LostEnd]) -> bool:
        if self._ledger is None:
            return True
        for end in ends:
            session, identity = orjson.loads(end.about)
            about = {
                "time": time.time(),
                "run": self._run,
                "session": session,
                "identity": identity,
                "index": end.place,
            }
            if end.twice:
                self._ledger.closed({"event": "fenced", **about})
                continue
            how = {"outcome": "failed", "error": "gateway-lost", "used": end.used}
            self._ledger.closed({"event": "closed", **about, **how, "gateway": end.gateway, "claim": end.claim})
        try:
            self._ledger.flush()
        except StoreFault:
            return False
        return True

    def met(self, gateways: Sequence[str]) -> None:
        if self._folder is not None:
            deeds.met(self._folder, gateways)


def _token(held: Held) -> str:
    return ("o" if held.state == CLAIMED else "e") + str(held.token)


def _wait(held: Held) -> Deed:
    """What a claim that waited for a rival in vain has to tell."""
    assert held.asked is not None
    return deeds.wait(held.key.session, held.key.identity, held.ask.raw, *held.asked)


def _fates(claims: Iterable[Held]) -> Iterable[Fate]:
    """What became of the indices of these claims."""
    fates: dict[tuple[bytes, int], Fate] = {}
    for held in claims:
        place, ask = (held.scope, held.index), held.ask
        fate = fates.get(place) or fates.setdefault(place, Fate(held.key.session, held.key.identity, held.index))
        fate.claimed(ask.kind, ask.raw, ask.content if ask.number is not None or ask.key else None, ask.key, ask.repeat)
        fate.raced |= held.raced
        if held.live:
            fate.tokens.append(_token(held))
        elif held.state == SETTLED:
            fate.used |= held.used
        else:
            fate.used |= held.noted
    return fates.values()
