"""One process: the counters in memory. Every call runs without a pause in between, which makes it atomic.

Whoever must wait is served by the very change that it waits for, in order of arrival: so none who comes later
gets in between. Scopes in which nothing happens leave memory for the run's shelf, those that were used longest ago
first, and come back when they are asked for.
"""

from __future__ import annotations

import asyncio
import marshal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Asked, Bound, Claim, Indices, Keyed, Kind, Scope, Session, Wait
from gateway.ledger.writer import Ledger
from gateway.settings import Settings
from gateway.shelf import Entries, Row, Shelf
from gateway.stores import ScopeKey, given_back, waited

SCOPES = 20_000

WEIGHT = 8
"""What a scope weighs by itself; each request that it remembers adds one. Of memory, some 1,500 bytes against 170."""

ENTRIES = 128
"""Of one scope, the bytes and named indices that are in memory, and of a session the keys."""

BATCH = 64
"""Scopes that leave at once, at most."""

UNTOLD = 4096
"""Claims of one scope, at most, whose records may stand after that of a later one."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A claim that waits, and where its outcome goes."""

    ask: Ask
    outcome: asyncio.Future[Claim]
    raced: bool
    """It has waited for a rival."""


@dataclass(slots=True)
class Shared(Session):
    """What a session's scopes share."""

    scopes: int = 0
    """Those that are in memory."""
    shelved: bool = False
    """The shelf knows that there is one."""


def build(settings: Settings, failed: Callable[[], None]) -> MemoryStore:
    """The store that the settings name. It never fails."""
    return MemoryStore(settings.limits.scopes)


class MemoryStore:
    """The counters of this process's runs. `scopes` bounds the memory for them: so many that remember one request each,
    or fewer that remember more."""

    shared = False
    gateway: str | None = None
    owed = 0

    def __init__(self, scopes: int = SCOPES) -> None:
        self._batch = min(BATCH, 1 + scopes // 8)
        self._limit = (scopes + self._batch) * (WEIGHT + 1)
        self._weight = 0
        self._scopes: OrderedDict[ScopeKey, Scope | bytes] = OrderedDict()
        """The one that was used last comes last. Bytes: one of a single request that is over, packed."""
        self._sessions: dict[tuple[str, str], Shared] = {}
        """By run and session: those of the scopes in memory."""
        self._waiters: dict[ScopeKey, list[Waiter]] = {}
        """In order of arrival."""
        self._shelves: dict[str, Shelf] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._fenced: set[str] = set()
        """Runs whose ledger has a gap: an index of theirs may have been issued that nobody knows of."""

    @property
    def scopes(self) -> int:
        """How many are in memory."""
        return len(self._scopes)

    async def claim(self, key: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        scope = self._scope(key)
        if key.run in self._fenced and ask.exclusive:
            raise Conflict(
                f"The ledger of run {key.run} has a gap, so an index of this session may have been given away that "
                "nobody knows of. Begin another run, or use profile balanced.",
                code="session_fenced",
            )
        outcome = scope.claim(ask)
        if isinstance(outcome, Wait):
            outcome = await self._wait(key, ask, outcome, settle_seconds)
        if ask.key is not None and len(scope.session.keys) > ENTRIES:
            _shed(scope.session.keys)
        if key.run in self._fenced:
            return outcome._replace(flags=(*outcome.flags, "epoch"))
        return outcome

    async def complete(self, key: ScopeKey, index: int, *, sure: bool = False) -> bool:
        raced = self._claimed(key).complete(index)
        if key in self._waiters:
            self._wake(key)
        return raced

    async def settle(self, key: ScopeKey, index: int, *, used: bool) -> bool:
        released = self._settle(key, self._claimed(key), index, used=used)
        if key in self._waiters:
            self._wake(key)
        return released

    async def has_issued(self, key: ScopeKey, index: int) -> bool:
        if key.run in self._fenced:
            return True
        scope = self._seen(key)
        return scope is not None and scope.has_issued(index)

    def raced(self, key: ScopeKey, index: int) -> bool:
        return index in self._claimed(key).raced

    async def learn(self, key: ScopeKey) -> None:
        """There is no other process."""

    def knows(self, run: str, session: str) -> bool:
        if (run, session) in self._sessions:
            return True
        shelf = self._shelves.get(run)
        return shelf is not None and any(
            shelf.get(row) is not None for row in (_scope_row(session, session), _session_row(session))
        )

    def next_index(self, key: ScopeKey) -> int | None:
        scope = self._seen(key)
        if scope is None:
            return 0
        return None if scope.kind == "client" else scope.next

    # --- runs
    def restore(self, run: str, folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Bring a run's counters to where its ledger left them. Gives an end for each request that has none.

        What was in flight when the process died was not delivered as far as anyone knows, and its index is released:
        but one whose answer was complete may have been, and stays used.
        """
        self._shelves[run] = Shelf(folder / "state.db")
        live: dict[tuple[ScopeKey, int], list[dict[str, Any]]] = {}
        untold: dict[ScopeKey, set[int]] = {}
        for record in records:
            event = record.get("event")
            if event == "waited":
                key = ScopeKey(run, record["session"], record["identity"])
                self._scope(key).restore_asked(bytes.fromhex(record["digest"]), record["asked"], record["repeat"])
            if event not in ("opened", "complete", "closed", "given_back"):
                continue
            key, index = ScopeKey(run, record["session"], record["identity"]), record["index"]
            if event == "given_back":
                self._again(key, record, untold)
                self._end(key, index, used=False)
                continue
            if event == "opened":
                self._again(key, record, untold)
                live.setdefault((key, index), []).append(record)
                continue
            claims = live.get((key, index))
            if claims is None:
                continue
            if event == "complete":
                claim = next((claim for claim in reversed(claims) if "complete" not in claim), None)
                if claim is not None:
                    claim["complete"] = True
                    self._claimed(key).complete(index)
                continue
            # Of several claims any may be the one that is over: rather one whose answer was complete, if it was used.
            claim = next((claim for claim in reversed(claims) if ("complete" in claim) == record["used"]), claims[-1])
            claims.remove(claim)
            if not claims:
                del live[key, index]
            if record.get("racing"):
                self._claimed(key).restore_raced(index)
            self._end(key, index, used=record["used"], complete="complete" in claim)
        return [self._lost(key, index, record) for (key, index), claims in live.items() for record in claims]

    def fence(self, run: str) -> None:
        """Nobody knows any more all that a run issued."""
        self._fenced.add(run)

    def serve(self, run: str, folder: Path, ledger: Ledger) -> None:
        """What it serves it has restored. The ledger is told of those who waited in vain."""
        self._ledgers[run] = ledger

    def leave(self, run: str) -> None:
        """There is no other."""

    def why_down(self, run: str) -> str | None:
        """It is never down."""
        return None

    @property
    def warnings(self) -> list[str]:
        """It loses nothing."""
        return []

    @property
    def refused(self) -> dict[str, int]:
        """It refuses nothing."""
        return {}

    async def run(self) -> None:
        """It does nothing by itself."""

    async def stop(self) -> None:
        """It has told the ledger everything."""

    @property
    def busy(self) -> set[str]:
        busy = {key.run for key, scope in self._scopes.items() if isinstance(scope, Scope) and scope.live}
        return busy | {key.run for key in self._waiters}

    def take_over(self, other: MemoryStore) -> None:
        """Know what another store of this process was brought to; that one is used no more."""
        self._shelves |= other._shelves
        self._scopes |= other._scopes
        self._sessions |= other._sessions
        self._weight += other._weight
        self._fenced |= other._fenced

    def close(self, run: str) -> None:
        """A run has ended: it is forgotten."""
        self._ledgers.pop(run, None)
        self._fenced.discard(run)
        for key in [key for key in self._scopes if key.run == run]:
            self._weight -= _weight(self._scopes.pop(key))
        for place in [place for place in self._sessions if place[0] == run]:
            del self._sessions[place]
        if (shelf := self._shelves.pop(run, None)) is not None:
            shelf.close()

    def _again(self, key: ScopeKey, record: dict[str, Any], untold: dict[ScopeKey, set[int]]) -> None:
        """Take in a claim. `untold`: indices below one that was taken in, of which no record has told yet.

        Who was given an index while it waited is told of when it wakes, maybe after one that came in that turn.
        """
        scope, ask, index = self._scope(key), _ask(record), record["index"]
        late = index in untold.get(key, ())
        if late:
            untold[key].discard(index)
        elif ask.number is None and index > scope.next:
            untold.setdefault(key, set()).update(range(max(scope.next, index - UNTOLD), index))
        scope.restore(ask, index, raced="racing" in record["flags"], late=late)

    def _lost(self, key: ScopeKey, index: int, record: dict[str, Any]) -> dict[str, Any]:
        used = record.get("complete", False)
        self._end(key, index, used=used, complete=used)
        names = {name: record[name] for name in ("run", "session", "identity", "index")}
        return {
            "event": "closed",
            "time": time.time(),
            **names,
            "outcome": "failed",
            "error": "gateway-lost",
            "used": used,
        }

    def _end(self, key: ScopeKey, index: int, *, used: bool, complete: bool = False) -> None:
        """A claim is over. `complete`: its answer had ended before."""
        scope = self._claimed(key)
        if not complete:
            scope.complete(index)
        self._settle(key, scope, index, used=used)

    def _settle(self, key: ScopeKey, scope: Scope, index: int, *, used: bool) -> bool:
        released = scope.settle(index, used=used)
        asked, bound = len(scope.asked), len(scope.bound)
        if asked > ENTRIES or bound > ENTRIES:
            self._thin(key, scope)
            asked, bound = len(scope.asked), len(scope.bound)
        remembered, before = asked + bound, scope.remembered
        scope.remembered = remembered
        if remembered == 1 and key not in self._waiters and (packed := _single(scope)) is not None:
            self._scopes[key] = packed
        if remembered != before:
            self._weight += remembered - before
            if self._weight > self._limit:
                self._put_away()
        return released

    # --- in memory and out of it
    def _scope(self, key: ScopeKey) -> Scope:
        scope = self._scopes.get(key)
        if scope is not None:
            self._scopes.move_to_end(key)
            if isinstance(scope, bytes):
                scope = self._scopes[key] = _unpacked_single(key, self._sessions[key.run, key.session], scope)
            return scope
        if self._weight >= self._limit:
            self._put_away()
        place = key.run, key.session
        session = self._sessions.get(place) or self._shared(place)
        scope = self._back(key, session)
        if scope is None:
            scope = Scope(key.identity, session)
        else:
            session.shelved = True
        self._scopes[key] = scope
        session.scopes += 1
        scope.remembered = len(scope.asked) + len(scope.bound)
        self._weight += WEIGHT + scope.remembered
        return scope

    def _claimed(self, key: ScopeKey) -> Scope:
        """A scope in which something happens."""
        scope = self._scopes[key]
        assert isinstance(scope, Scope)
        return scope

    def _seen(self, key: ScopeKey) -> Scope | None:
        """A scope to be looked at, wherever it is; None: there was none."""
        scope = self._scopes.get(key)
        if scope is None:
            return self._back(key, Session())
        return _unpacked_single(key, Session(), scope) if isinstance(scope, bytes) else scope

    def _shared(self, place: tuple[str, str]) -> Shared:
        shelf = self._shelves.get(place[0])
        keys: dict[str, Keyed] = {}
        if shelf is not None:
            keys = Entries(shelf, _prefix("key", place[1]), _packed_key, _unpacked_key)
        session = self._sessions[place] = Shared(keys)
        return session

    def _back(self, key: ScopeKey, session: Session) -> Scope | None:
        """A scope that had left memory; None: there was none."""
        shelf = self._shelves.get(key.run)
        row = None if shelf is None or shelf.empty else shelf.get(_scope_row(key.session, key.identity))
        if row is None or shelf is None:
            return None
        return _unpacked(key, session, shelf, row)

    def _put_away(self) -> None:
        """Let the scopes go that were used longest ago, but none in which something happens."""
        gone: dict[str, list[tuple[ScopeKey, Scope | bytes]]] = {}
        for key, scope in list(islice(self._scopes.items(), self._batch)):
            if key.run not in self._shelves or (isinstance(scope, Scope) and (scope.live or key in self._waiters)):
                self._scopes.move_to_end(key)
            else:
                gone.setdefault(key.run, []).append((key, scope))
        for run, scopes in gone.items():
            if self._shelves[run].put(self._rows(run, scopes)):
                self._gone(run, scopes)

    def _rows(self, run: str, scopes: list[tuple[ScopeKey, Scope | bytes]]) -> list[Row]:
        rows = []
        for (_, session, identity), scope in scopes:
            if isinstance(scope, Scope):
                for entries in (scope.asked, scope.bound, scope.released):
                    if isinstance(entries, Entries):
                        rows += entries.rows()
                scope = marshal.dumps(_packed(scope))
            rows.append((_scope_row(session, identity), scope))
            if identity != session and not self._sessions[run, session].shelved:
                rows.append((_session_row(session), b""))
        return rows

    def _gone(self, run: str, scopes: list[tuple[ScopeKey, Scope | bytes]]) -> None:
        for key, scope in scopes:
            del self._scopes[key]
            self._weight -= _weight(scope)
            place = run, key.session
            session = self._sessions[place]
            session.scopes -= 1
            session.shelved = True
            if session.keys and isinstance(session.keys, Entries):
                session.keys.shed(0 if not session.scopes else ENTRIES)
            if not (session.scopes or session.keys):
                del self._sessions[place]

    def _thin(self, key: ScopeKey, scope: Scope) -> None:
        """Keep only a part of a scope in memory that has grown long."""
        shelf = self._shelves.get(key.run)
        if shelf is None:
            return
        for entries in _thinned(key, scope, shelf):
            if len(entries) > ENTRIES:
                entries.shed(ENTRIES // 2)

    async def _wait(self, key: ScopeKey, ask: Ask, wait: Wait, seconds: float) -> Claim:
        loop = asyncio.get_running_loop()
        waiter = Waiter(ask, loop.create_future(), wait.why == "racing")
        self._waiters.setdefault(key, []).append(waiter)
        timer = loop.call_later(seconds, self._serve, key, waiter, True)
        try:
            return await waiter.outcome
        except asyncio.CancelledError:
            self._leave(key, waiter)
            self._note_wait(key, waiter)
            raise
        except Conflict:
            self._note_wait(key, waiter)
            raise
        finally:
            timer.cancel()

    def _wake(self, key: ScopeKey) -> None:
        for waiter in tuple(self._waiters.get(key, ())):
            self._serve(key, waiter)

    def _serve(self, key: ScopeKey, waiter: Waiter, final: bool = False) -> None:
        """Ask again for one who waits. `final`: its time is up."""
        if waiter.outcome.done():
            return
        try:
            claim = self._claimed(key).claim(waiter.ask, raced=waiter.raced, final=final)
        except Conflict as conflict:
            waiter.outcome.set_exception(conflict)
        else:
            if isinstance(claim, Wait):
                waiter.raced |= claim.why == "racing"
                return
            waiter.outcome.set_result(claim)
        self._forget(key, waiter)

    def _leave(self, key: ScopeKey, waiter: Waiter) -> None:
        """Who waited has gone; what it was given in the same moment is given back."""
        outcome = waiter.outcome
        if outcome.cancelled():
            self._forget(key, waiter)
        elif outcome.exception() is None:
            index = outcome.result().index
            if (ledger := self._ledgers.get(key.run)) is not None:
                ledger.closed(given_back(key, waiter.ask, index, raced=index in self._claimed(key).raced))
            self._end(key, index, used=False)
            self._wake(key)

    def _note_wait(self, key: ScopeKey, waiter: Waiter) -> None:
        """Who waited for a rival had no index. After a restart too its retry must not be taken for another's."""
        raw, ledger = waiter.ask.raw, self._ledgers.get(key.run)
        if not waiter.raced or ledger is None or (asked := self._scope(key).asked.get(raw)) is None:
            return
        ledger.closed(waited(key, raw, asked.index, asked.repeat))

    def _forget(self, key: ScopeKey, waiter: Waiter) -> None:
        waiters = self._waiters[key]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[key]


def _ask(record: dict[str, Any]) -> Ask:
    """The ask that led to a record."""
    order = record["order"]
    return Ask(
        order,
        bytes.fromhex(record["digest"]),
        record["content"],
        record["index"] if order == "client" else None,
        record["key"],
        record["repeat"],
    )


# --- as rows of a shelf
def _prefix(kind: str, session: str) -> bytes:
    """What the rows of a session begin with. No id holds a line's end."""
    return f"{kind} {session}\n".encode()


def _scope_row(session: str, identity: str) -> bytes:
    """Where a scope is."""
    return f"scope {session}\n{identity}".encode()


def _session_row(session: str) -> bytes:
    """Where it says that a session has scopes, if none of them has its name."""
    return f"session {session}".encode()


def _packed_key(keyed: Keyed) -> Any:
    return keyed.identity, keyed.index, keyed.content


def _unpacked_key(row: Any) -> Keyed:
    return Keyed(*row)


def _packed_asked(asked: Asked) -> Any:
    return asked.index, asked.repeat, asked.live


def _unpacked_asked(row: Any) -> Asked:
    return Asked(*row)


def _packed_bound(bound: Bound) -> Any:
    return bound.content, bound.keyed, bound.used


def _unpacked_bound(row: Any) -> Bound:
    return Bound(*row)


def _same(value: Any) -> Any:
    return value


def _thinned(key: ScopeKey, scope: Scope, shelf: Shelf) -> tuple[Entries[Any, Any], ...]:
    """Let a scope's dicts lean on the shelf."""
    inside = f"{key.session}\n{key.identity}"
    if not isinstance(scope.asked, Entries):
        scope.asked = Entries(shelf, _prefix("asked", inside), _packed_asked, _unpacked_asked, scope.asked.items())
        scope.bound = Entries(shelf, _prefix("bound", inside), _packed_bound, _unpacked_bound, scope.bound.items())
        scope.released = Entries(shelf, _prefix("released", inside), _same, _same, scope.released.items())
    return cast(tuple[Entries[Any, Any], ...], (scope.asked, scope.bound, scope.released))


_SINGLE: dict[Kind | None, bytes] = {"arrival": b"\0a", "content": b"\0c", "client": b"\0n"}
"""What the row of a scope of a single request begins with; `marshal` writes no such."""

_KINDS = {first[1]: kind for kind, first in _SINGLE.items()}


def _single(scope: Scope) -> bytes | None:
    """The row of a scope of which one request had the only index, and delivered it; None: it is another."""
    if scope.next != 1 or scope.live or scope.bound or scope.released or scope.raced:
        return None
    if isinstance(scope.asked, Entries):
        return None
    [(raw, asked)] = scope.asked.items()
    if asked.index or asked.repeat or asked.live:
        return None
    return _SINGLE[scope.kind] + raw


def _unpacked_single(key: ScopeKey, session: Session, row: bytes) -> Scope:
    return Scope(key.identity, session, 1, _KINDS[row[1]], asked={row[2:]: Asked(0, 0)}, remembered=1)


def _weight(scope: Scope | bytes) -> int:
    return WEIGHT + (1 if isinstance(scope, bytes) else scope.remembered)


def _packed(scope: Scope) -> Any:
    """A scope in which nothing happens, without what is on the shelf already."""
    raced = bytes(scope.raced) if isinstance(scope.raced, Indices) else b""
    if isinstance(scope.asked, Entries):
        return scope.next, scope.kind, raced
    return (
        scope.next,
        scope.kind,
        raced,
        [(raw, _packed_asked(asked)) for raw, asked in scope.asked.items()],
        [(index, _packed_bound(bound)) for index, bound in scope.bound.items()],
        list(scope.released.items()),
    )


def _unpacked(key: ScopeKey, session: Session, shelf: Shelf, row: bytes) -> Scope:
    if row.startswith(b"\0"):
        return _unpacked_single(key, session, row)
    number, kind, raced, *entries = marshal.loads(row)
    scope = Scope(key.identity, session, number, kind)
    if raced:
        scope.raced = Indices(raced)
    if not entries:
        _thinned(key, scope, shelf)
        return scope
    asked, bound, released = entries
    scope.asked = {raw: _unpacked_asked(each) for raw, each in asked}
    if bound:
        scope.bound = {index: _unpacked_bound(each) for index, each in bound}
    if released:
        scope.released = dict(released)
    return scope


def _shed(keys: MutableMapping[str, Keyed]) -> None:
    if isinstance(keys, Entries):
        keys.shed(ENTRIES // 2)
