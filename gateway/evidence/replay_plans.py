"""Every recorded decision made again, by today's code and without any engine.

From what a ledger tells of a request follow its effective identity, index, request id, seed and replica. Each is
computed anew and must be what was recorded; what the ledger does not tell enough of is counted as undetermined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, cast

import orjson

from gateway import engines, schemes
from gateway.core import canonical, ids, plan, resume, routing, seeds
from gateway.core.document import Document, Malformed
from gateway.core.errors import CallerFault, Conflict
from gateway.core.identity import ANONYMOUS
from gateway.core.indexing import Ask, Claim, Kind, Scope, Session
from gateway.core.resume import Origin
from gateway.core.types import Handling
from gateway.evidence.bodies import asked
from gateway.evidence.ledgers import Lines, Place, Source, is_merged, without_requests, writer_of
from gateway.evidence.requests import TOLD_EVERY, base_of, resumed, sortable
from gateway.evidence.sorting import Sorter
from gateway.ledger.shapes import odd_claim

KEPT = 100
"""Differences that are told one by one; all are counted."""

GAPS = "the ledger has gaps"
SEVERAL = "several gateways recorded at once, so the order of claims is not known"
TWICE = "the store forgot, and an index of its session was given twice"
LOST = "an earlier one of its counter is another now"
WAITED = "a repeat whose turn depends on when it waited"
NO_SEED = "no run.json beside the records, so the master seed is not known"
CLIENTS = "a client's seed, and no body was kept"
MIXED = "a client's seed may be mixed in, and no body was kept"
AWAY = "its home was down"
NO_NAMES = "no run.json beside the records, so the pool's replicas are not known"
UNSENT = "never sent"
KEPT_ELSEWHERE = "the session's first replica was kept"


@dataclass(frozen=True, slots=True)
class Deviation:
    """A decision that today's code makes otherwise."""

    request_id: str
    what: str
    recorded: Any
    now: Any


@dataclass(slots=True)
class Replayed:
    """What came of it."""

    name: str
    requests: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    """Decisions that came out the same or not, by what was decided."""
    undetermined: dict[str, Counter[str]] = field(default_factory=dict)
    """Those that could not be made again, by what and why."""
    deviations: list[Deviation] = field(default_factory=list)
    different: int = 0

    def check(self, request_id: str, what: str, recorded: Any, now: Any) -> None:
        """Note a decision that was made again."""
        self.checked[what] += 1
        if recorded != now:
            self.different += 1
            if len(self.deviations) < KEPT:
                self.deviations.append(Deviation(request_id, what, recorded, now))

    def pass_over(self, what: str, why: str) -> None:
        """Note a decision that cannot be made again."""
        self.undetermined.setdefault(what, Counter())[why] += 1


def replay(source: Source, watch: Callable[[int], None] = lambda done: None) -> Replayed:
    """Make every decision of a run again. Raises `Unusable` where nothing is recorded."""
    run = _Run(source)
    lines = Lines(source, odd_claim)
    exported = False
    for number, (segment, offset, record) in enumerate(lines):
        run.note(Place(segment, offset), record)
        exported |= is_merged(record)
        if not number % TOLD_EVERY:
            watch(lines.read)
    watch(lines.read)
    run.gaps |= bool(lines.torn)
    if not run.found.requests:
        raise without_requests(source, exported=exported)
    run.indices()
    return run.found


class _Run:
    """A run while it is read."""

    def __init__(self, source: Source) -> None:
        self.found = Replayed(source.name)
        self.gaps = False
        self._twice: set[str] = set()
        """Sessions of which an index was found to be given twice."""
        self._deciding = source.deciding
        self._seeds: dict[str, int] = {}
        self._writers = [writer_of(file) for file in source.files]
        self._names: dict[tuple[str, str], list[list[str]]] = {}
        """Process and pool → its replicas that are not drained, after each change: a process makes a change itself."""
        self._engines: dict[str, str] = {}
        """Pool → the kind of its engine."""
        self._keys: dict[str, set[str]] = {}
        """Pool → what its routing may have hashed, as far as all its choices fit."""
        self._events = Sorter()
        self._claims: dict[tuple[str, str, int], list[_Claimed]] = {}
        self._spans: dict[int, tuple[float, float]] = {}

    def note(self, place: Place, record: dict[str, Any]) -> None:
        """Take in a record; decisions that it tells of whole are made again at once."""
        match record.get("event"):
            case "opened":
                self._opened(place, record)
            case "closed":
                self._closed(place, record)
            case "given_back":
                self._given_back(place, record)
            case "session" if record.get("seed") is not None and record.get("session") is not None:
                self._seeds[record["session"]] = record["seed"]
            case "gap":
                self.gaps = True
            case "fenced":
                self._twice.add(record["session"])
            case "fleet":
                self._fleet(place, record)

    def _fleet(self, place: Place, record: dict[str, Any]) -> None:
        """A change of a pool, or what one of its replicas says of itself."""
        engine = (record.get("facts") or {}).get("engine")
        if isinstance(engine, str) and isinstance(record.get("pool"), str):
            self._engines[record["pool"]] = engine
        if isinstance(names := record.get("replicas"), list) and isinstance(record.get("pool"), str):
            self._known(place, record["pool"]).append(names)

    def _known(self, place: Place, pool: str) -> list[list[str]]:
        """The names that a pool has had, as the process knew them that wrote there."""
        began = (self._deciding.get("pools") or {}).get(pool)
        return self._names.setdefault((self._writers[place.segment], pool), [] if began is None else [list(began)])

    def _opened(self, place: Place, record: dict[str, Any]) -> None:
        if any(record.get(name) is None for name in _NEEDED):
            self.found.pass_over("request", "its record lacks what decisions follow from")
            return
        self.found.requests += 1
        self._clock(place.segment, record.get("time"))
        names = self._known(place, record["pool"])
        self._claims.setdefault(_key(record), []).append(_Claimed(record, names, max(0, len(names) - 1)))
        told = [record.get(name) for name in ("digest", "content", "key", "repeat", "request_id")]
        self._event(place, record, ("opened", record["index"], record["order"], *told))
        self._digests(record)
        request_id = ids.request_id(record["identity"], record["index"], record.get("ordinal") or 0)
        self.found.check(request_id, "request id", record["request_id"], request_id)
        self._seed(record)

    def _closed(self, place: Place, record: dict[str, Any]) -> None:
        self._clock(place.segment, record.get("time"))
        claims = self._claims.get(_key(record))
        if claims is None:
            return
        self._event(place, record, ("closed", record["index"], bool(record.get("used"))))
        self._replica(claims.pop(0), record)
        if not claims:
            del self._claims[_key(record)]

    def _given_back(self, place: Place, record: dict[str, Any]) -> None:
        """An index that nobody has seen: it was issued all the same, and released."""
        if all(record.get(name) is not None for name in ("digest", "order", "repeat")):
            told = [record.get(name) for name in ("digest", "content", "key", "repeat")]
            self._event(place, record, ("given_back", record["index"], record["order"], *told))

    # --- what is asked
    def _digests(self, record: dict[str, Any]) -> None:
        check, request_id, route = self.found.check, record["request_id"], record["route"]
        content = record.get("content")
        body = asked(record)
        if body is not None:
            check(request_id, "digest", record["digest"], canonical.raw(route, body).hex())
            if content is not None:
                check(request_id, "content digest", content, canonical.content(Document(body), route))
        if record["order"] == "content":
            if content is None:
                self.found.pass_over("identity", "no content digest was recorded")
            else:
                base = base_of(record["identity"], "content")
                check(request_id, "identity", record["identity"], f"{base}/{content[:16]}")

    # --- seed
    def _seed(self, record: dict[str, Any]) -> None:
        source = record["seed_source"]
        if record.get("seed") is None and source == "none":
            return
        if "seed" not in self._deciding:
            self.found.pass_over("seed", NO_SEED)
            return
        decided = self._planned(record)
        if decided is not None:
            now = (decided.seed, decided.seed_source)
            self.found.check(record["request_id"], "seed", (record.get("seed"), source), now)
        elif source == "client":
            self.found.pass_over("seed", CLIENTS)
        elif self._deciding.get("client_seed") == "mix":
            self.found.pass_over("seed", MIXED)
        else:
            self.found.check(record["request_id"], "seed", record.get("seed"), self._derived(record))

    def _derived(self, record: dict[str, Any]) -> int | None:
        scheme, origin = record.get("scheme"), _origin(record)
        if scheme not in schemes.names():
            return None
        identity, index = (record["identity"], record["index"]) if origin is None else (origin.identity, origin.index)
        seed = schemes.load(scheme).seed(self._master(record), identity, index, record.get("member"))
        if origin is None:
            return seed
        engine = self._engines.get(record["pool"])
        positional = engine in engines.names() and engines.load(engine).POSITIONAL
        return seeds.segment(seed, origin.sample, record["index"] + 1, positional=positional)

    def _planned(self, record: dict[str, Any]) -> plan.Plan | None:
        """The whole plan, from the body; None where that or the engine is not known."""
        body, handling = asked(record), self._handling(record)
        if body is None or handling is None or record.get("scheme") not in schemes.names():
            return None
        try:
            wish = plan.read_wish(handling, Document(body))
        except (Malformed, CallerFault):
            return None
        return plan.make(
            handling,
            wish,
            scheme=schemes.load(record["scheme"]),
            master=self._master(record),
            mix=self._deciding.get("client_seed") == "mix",
            identity=record["identity"],
            index=record["index"],
            ordinal=record.get("ordinal") or 0,
            member=record.get("member"),
            origin=_origin(record),
            positional=engines.load(self._engines[record["pool"]]).POSITIONAL,
        )

    def _handling(self, record: dict[str, Any]) -> Handling | None:
        engine = self._engines.get(record["pool"])
        return engines.load(engine).ROUTES.get(record["route"]) if engine in engines.names() else None

    def _master(self, record: dict[str, Any]) -> int:
        return int(self._seeds.get(record["session"], self._deciding["seed"]))

    # --- replica
    def _replica(self, claimed: _Claimed, closed: dict[str, Any]) -> None:
        opened = claimed.record
        candidates = closed.get("candidates") or []
        if not candidates or not closed.get("replicas"):
            self.found.pass_over("replica", UNSENT)
        elif closed.get("sticky"):
            self.found.pass_over("replica", KEPT_ELSEWHERE)
        elif closed.get("loads") is None:
            self._at_home(claimed, closed, candidates)
        else:
            self._choice(opened, closed["loads"], candidates)

    def _at_home(self, claimed: _Claimed, closed: dict[str, Any], candidates: list[str]) -> None:
        """With `slack: inf` a key has a home, whatever the loads; unless that was down, it was sent there.

        Its home is among the names that the pool had at some time while the request was in flight.
        """
        opened = claimed.record
        held = [names for names in claimed.names[claimed.known :] if names]

        def home(key: str) -> list[str]:
            homes = [[routing.best(key, names)] for names in held]
            return candidates if candidates in homes else homes[-1]

        if "home-down" in (closed.get("flags") or []):
            self.found.pass_over("replica", AWAY)
        elif not held:
            self.found.pass_over("replica", NO_NAMES)
        elif len(candidates) > 1:
            self._choice(opened, dict.fromkeys(candidates, 0), candidates)
        else:
            self._fits(opened, candidates, home)

    def _choice(self, opened: dict[str, Any], loads: dict[str, int], candidates: list[str]) -> None:
        """A choice follows from the key, the loads and the slack, of which the least that fits is taken."""
        slack = max(loads.get(name, 0) for name in candidates) - min(loads.values())
        self._fits(opened, candidates, lambda key: routing.ranked(key, loads, slack))

    def _fits(self, opened: dict[str, Any], recorded: list[str], ranked: Callable[[str], list[str]]) -> None:
        """The key is the request id, or in a named session its identity: one of them, for all choices of a pool."""
        identity = base_of(opened["identity"], opened["order"])
        keys = {"request": opened["request_id"], "session": identity}
        if (origin := _origin(opened)) is not None:
            identity = keys["session"] = resumed(origin)
            keys["request"] = ids.request_id(origin.identity, origin.index, opened.get("ordinal") or 0)
        if identity == ANONYMOUS:
            self.found.check(opened["request_id"], "replica", recorded, ranked(keys["request"]))
            return
        possible = self._keys.setdefault(opened["pool"], set(keys))
        fit = {name for name in possible if ranked(keys[name]) == recorded}
        self.found.check(opened["request_id"], "replica", recorded, recorded if fit else ranked(keys[min(possible)]))
        if fit:
            possible &= fit

    # --- index
    def indices(self) -> None:
        """Issue every index again, counter by counter, in the order in which they were claimed."""
        why = GAPS if self.gaps else SEVERAL if self._overlap() else None
        if why is not None:
            for _ in range(self.found.requests):
                self.found.pass_over("index", why)
            return
        sessions = groupby(map(_unpacked, self._events), key=lambda event: event[0])
        for name, events in sessions:
            if name in self._twice:
                for *_, (what, *_) in events:
                    if what == "opened":
                        self.found.pass_over("index", TWICE)
                continue
            session = Session()
            for identity, own in groupby(events, key=lambda event: event[1]):
                self._counter(Scope(identity, session), (event for *_, event in own))

    def _counter(self, scope: Scope, events: Iterator[list[Any]]) -> None:
        lost = False
        for what, index, *told in events:
            if what == "closed":
                if not lost:
                    scope.complete(index)
                    scope.settle(index, used=told[0])
            elif what == "given_back":
                if not lost:
                    scope.restore(_ask(index, *told), index, raced=False)
                    scope.complete(index)
                    scope.settle(index, used=False)
            elif lost:
                self.found.pass_over("index", LOST)
            else:
                lost = not self._claim(scope, index, *told)

    def _claim(self, scope: Scope, index: int, order: str, digest: str, content: str | None, key: str | None,
               repeat: int, request_id: str) -> bool:  # fmt: skip
        """Claim an index anew. False: the counter gives another now."""
        ask = _ask(index, order, digest, content, key, repeat)
        if repeat:
            self.found.pass_over("index", WAITED)
            scope.restore(ask, index, raced=False)
            return True
        try:
            claim = scope.claim(ask, final=True)
        except Conflict as conflict:
            self.found.check(request_id, "index", index, conflict.code)
            return False
        now = claim.index if isinstance(claim, Claim) else None
        self.found.check(request_id, "index", index, now)
        return now == index

    def _event(self, place: Place, record: dict[str, Any], told: tuple[Any, ...]) -> None:
        session, identity = record["session"], record["identity"]
        key = sortable(session) + sortable(identity) + b"%08d%020d" % (place.segment, place.offset)
        event = orjson.dumps((session, identity, told))
        self._events.add(b"%b%b%b" % (key, event, len(event).to_bytes(4)))

    def _clock(self, segment: int, time: float | None) -> None:
        if time is not None:
            first, last = self._spans.get(segment, (time, time))
            self._spans[segment] = (min(first, time), max(last, time))

    def _overlap(self) -> bool:
        """Whether two gateways wrote at the same time."""
        spans = sorted(self._spans.values())
        return any(before[1] > after[0] for before, after in pairwise(spans))


@dataclass(slots=True)
class _Claimed:
    """A claim that is not over."""

    record: dict[str, Any]
    names: list[list[str]]
    """All that its pool has had, in its process."""
    known: int
    """How many of these were over when it was claimed."""


_NEEDED = ("session", "identity", "index", "order", "digest", "request_id", "route", "pool", "seed_source")


def _ask(index: int, order: str, digest: str, content: str | None, key: str | None, repeat: int) -> Ask:
    """What an index was asked for with."""
    bound, number = order == "client" or key is not None, index if order == "client" else None
    return Ask(cast(Kind, order), bytes.fromhex(digest), content if bound else None, number, key, repeat or 0)


def _origin(record: dict[str, Any]) -> Origin | None:
    """The sample that a request went on with."""
    return None if record.get("resumes") is None else resume.origin(record["identity"])


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["session"], record["identity"], record["index"]


def _unpacked(item: bytes) -> tuple[str, str, list[Any]]:
    length = int.from_bytes(item[-4:])
    session, identity, told = orjson.loads(item[-4 - length : -4])
    return session, identity, told
