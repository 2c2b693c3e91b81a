"""The requests of one ledger in an order in which two ledgers can be walked side by side, in bounded memory.

Each claim of an index becomes one *item*: bytes that sort by session (identity and ordinal), then effective identity,
index and place in the ledger. What an item tells stands in it twice cut: first what must be equal in two runs, so that
equal requests are told by comparing bytes, then what only explains. Items are sorted outside of memory; a `Request` is
made of those alone that differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import orjson

from gateway.core.identity import ANONYMOUS
from gateway.core.ordering import Rank, canonical
from gateway.core.resume import Origin
from gateway.core.seen import UNNAMED
from gateway.evidence.ledgers import Lines, Place, Source, Unusable
from gateway.evidence.sorting import Sorter

_RUNS = re.compile(r"([0-9]+)|([^0-9]+)")
_TRAILER = Struct(">HHI")
_NUMBER = Struct(">I")
_PLACE = Struct(">HIH")
_CONTENT = re.compile(r"(.*)/[0-9a-f]{16}", re.S)

TOLD_EVERY = 4096
"""Records after which whoever watches is told how far the reading has come."""

Watch = Callable[[int], None]
"""Is told how many bytes have been read so far."""


class Attempt(NamedTuple):
    """One sending."""

    replica: str
    ended: str | None = None
    """How, where the ledger tells."""


@dataclass(slots=True)
class Request:
    """One logical request, as its ledger tells of it. None: it does not tell."""

    base: str
    """The identity without what content order puts behind it."""
    identity: str
    """The effective identity."""
    ordinal: int
    index: int
    session: str
    order: str
    opened: Place
    ended: Place | None
    """When its answer had ended."""
    closed: Place | None
    claims: int
    # What must be equal.
    content: str | None
    digest: str | None
    seed: int | None
    attempts: list[Attempt]
    engine: str | None
    """Fingerprint of the replica's engine."""
    weight_version: str | None
    outcome: str | None
    status: int | None
    finish_reasons: list[str] | None
    answer: str | None
    tokens: int | None
    # What explains.
    seed_source: str | None
    scheme: str | None
    request_id: str | None
    member: int | None
    group: str | None
    route: str | None
    pool: str | None
    racing: bool
    flags: list[str]
    error: str | None
    loads: dict[str, int] | None
    crowd: int
    """The most requests of its pool that were in flight in its gateway when it began and when it ended."""
    epoch: int | None
    sticky: bool
    """It was sent where the first choice of its session had fallen."""

    @property
    def named(self) -> bool:
        """It is of a session that somebody named."""
        return self.base != ANONYMOUS

    @property
    def delivered(self) -> bool:
        return self.outcome == "delivered"

    @property
    def rank(self) -> Rank:
        """Its place in canonical order."""
        return canonical(self.identity, self.ordinal, self.session, self.index)

    @property
    def replica(self) -> str | None:
        return self.attempts[-1].replica if self.attempts else None


@dataclass(slots=True)
class _Open:
    """A claim that is not over."""

    place: Place
    record: dict[str, Any]
    crowd: int
    ended: Place | None = None


@dataclass(slots=True)
class Requests:
    """All requests of one source. Made by reading its records once, in memory bounded by what was in flight."""

    source: Source
    sorter: Sorter = field(default_factory=Sorter)
    runs: set[str] = field(default_factory=set)
    seeds: dict[str, int] = field(default_factory=dict)
    """Session → its own master seed."""
    fenced: set[str] = field(default_factory=set)
    """Sessions of which an index was found to be given twice."""
    waited: set[tuple[str, str]] = field(default_factory=set)
    """Effective identity and digest of requests that waited for a rival in vain, and so got no index."""
    torn: int = 0
    last: Place | None = None
    _open: dict[tuple[str, str, int], list[_Open]] = field(default_factory=dict)
    _orphans: dict[tuple[str, str, int], list[tuple[Place, dict[str, Any]]]] = field(default_factory=dict)
    """Ends that were read before their claims: another gateway wrote them."""
    _crowd: dict[str, int] = field(default_factory=dict)
    """Pool → requests in flight."""

    @classmethod
    def read(cls, source: Source, watch: Watch = lambda _: None, sorter: Sorter | None = None) -> Requests:
        """Read a source. Raises `Unusable` where it holds no request, or those of several runs."""
        found = cls(source, Sorter() if sorter is None else sorter)
        lines = Lines(source)
        for number, (segment, offset, record) in enumerate(lines):
            found._note(Place(segment, offset), record)
            if not number % TOLD_EVERY:
                watch(lines.read)
        watch(lines.read)
        found.torn = lines.torn
        for claims in found._open.values():
            for claim in claims:
                found._add(claim, None, {})
        if len(found.runs) > 1:
            raise Unusable(f"{source.name}: holds records of several runs: {', '.join(sorted(found.runs)[:10])}")
        if not len(found.sorter):
            raise Unusable(f"{source.name}: holds no request")
        return found

    def __len__(self) -> int:
        """Claims, which are at least as many as requests."""
        return len(self.sorter)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.sorter)

    def _note(self, place: Place, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event == "opened":
            self._opened(place, record)
        elif event == "closed":
            self._closed(place, record)
        elif event == "complete":
            for claim in self._open.get((record["session"], record["identity"], record["index"]), ()):
                if claim.ended is None:
                    claim.ended = place
                    break
        elif event == "session" and record.get("seed") is not None and record.get("session") is not None:
            self.seeds[record["session"]] = record["seed"]
        elif event == "fenced":
            self.fenced.add(record["session"])
        elif event == "waited":
            self.waited.add((record["identity"], record["digest"]))
        elif event is None and "identity" in record and "index" in record:
            self._know(record)
            self._add(_Open(place, record, 0), place if record.get("outcome") else None, record)

    def _know(self, record: dict[str, Any]) -> None:
        if len(self.runs) < 10 and (run := record.get("run")) is not None:
            self.runs.add(run)

    def _opened(self, place: Place, record: dict[str, Any]) -> None:
        key = (record["session"], record["identity"], record["index"])
        if self._orphans and (ends := self._orphans.get(key)):
            self._add(_Open(place, record, 0), *ends.pop(0))
            return
        self._know(record)
        pool = record.get("pool") or ""
        crowd = self._crowd[pool] = self._crowd.get(pool, 0) + 1
        claim = _Open(place, record, crowd)
        claims = self._open.get(key)
        if claims is None:
            self._open[key] = [claim]
        else:
            claims.append(claim)

    def _closed(self, place: Place, record: dict[str, Any]) -> None:
        key = (record["session"], record["identity"], record["index"])
        claims = self._open.get(key)
        if claims is None:
            self._orphans.setdefault(key, []).append((place, record))
            return
        claim = claims.pop(0)
        if not claims:
            del self._open[key]
        pool = claim.record.get("pool") or ""
        now = self._crowd[pool]
        self._crowd[pool] = now - 1
        claim.crowd = max(claim.crowd, now)
        self._add(claim, place, record)

    def _add(self, claim: _Open, end: Place | None, closed: dict[str, Any]) -> None:
        self.sorter.add(item(claim.place, claim.record, claim.ended or end, end, closed, claim.crowd))


# --- items


def item(
    place: Place,
    opened: dict[str, Any],
    ended_at: Place | None,
    closed_at: Place | None,
    closed: dict[str, Any],
    crowd: int,
) -> bytes:
    """One claim and how it ended."""
    told, ended = opened.get, closed.get
    identity, order = opened["identity"], told("order") or "arrival"
    base = base_of(identity, order)
    group = sortable(base) + _NUMBER.pack(told("ordinal") or 0)
    key = group + sortable(identity[len(base) :]) + _NUMBER.pack(opened["index"])
    usage = ended("usage")
    equal = orjson.dumps(
        (
            told("content"),
            told("digest"),
            told("seed"),
            _attempts(closed),
            ended("engine"),
            None if ended("weight_version") == UNNAMED else ended("weight_version"),
            ended("outcome"),
            ended("status"),
            ended("finish_reasons"),
            ended("answer"),
            usage.get("completion_tokens") if usage else None,
        )
    )
    flags = told("flags") or []
    more = orjson.dumps(
        (
            identity,
            told("ordinal") or 0,
            opened["index"],
            opened["session"],
            order,
            told("seed_source"),
            told("scheme"),
            told("request_id"),
            told("member"),
            told("group"),
            told("route"),
            told("pool"),
            bool(ended("racing")) or "racing" in flags,
            [*flags, *(ended("flags") or ())],
            ended("error"),
            ended("loads"),
            crowd,
            told("epoch"),
            ended("sticky") is True,
            None if ended_at is None else (ended_at.segment, ended_at.offset),
            None if closed_at is None else (closed_at.segment, closed_at.offset),
            told("claims") or 1,
        )
    )
    return b"".join(
        (
            key,
            _PLACE.pack(place.segment, place.offset >> 16, place.offset & 0xFFFF),
            equal,
            more,
            _TRAILER.pack(len(key), len(group), len(equal)),
        )
    )


def key_of(entry: bytes) -> bytes:
    """What the same request has in two runs."""
    return entry[: _TRAILER.unpack_from(entry, len(entry) - _TRAILER.size)[0]]


def session_of(entry: bytes) -> bytes:
    """The beginning of the keys of all requests of the same session."""
    return entry[: _TRAILER.unpack_from(entry, len(entry) - _TRAILER.size)[1]]


def equal_part(entry: bytes) -> bytes:
    """Key and everything that must be equal, in one piece that only equal requests share."""
    key, _, equal = _TRAILER.unpack_from(entry, len(entry) - _TRAILER.size)
    return entry[:key] + entry[key + _PLACE.size : key + _PLACE.size + equal]


def place_of(entry: bytes) -> Place:
    """Where its claim stands in the ledger."""
    key = _TRAILER.unpack_from(entry, len(entry) - _TRAILER.size)[0]
    segment, high, low = _PLACE.unpack_from(entry, key)
    return Place(segment, high << 16 | low)


def request_of(entry: bytes) -> Request:
    """What an item tells."""
    key, _, equal = _TRAILER.unpack_from(entry, len(entry) - _TRAILER.size)
    start = key + _PLACE.size
    must = orjson.loads(entry[start : start + equal])
    more = orjson.loads(entry[start + equal : -_TRAILER.size])
    content, digest, seed, attempts, *came = must
    identity, ordinal, index, session, order, *explains, ended, closed, claims = more
    return Request(
        base_of(identity, order), identity, ordinal, index, session, order, place_of(entry),
        None if ended is None else Place(*ended), None if closed is None else Place(*closed), claims,
        content, digest, seed, [Attempt(*attempt) for attempt in attempts], *came,
        *explains,
    )  # fmt: skip


def merged(claims: list[Request]) -> Request:
    """The claims of one index as one request: the last, or of those that were delivered the last."""
    delivered = [claim for claim in claims if claim.delivered]
    one = (delivered or claims)[-1]
    one.claims = max(len(claims), one.claims)
    one.racing = any(claim.racing for claim in claims)
    one.opened = claims[0].opened
    return one


def resumed(origin: Origin) -> str:
    """The identity that the effective identity of a sample which went on was made of, whatever its order."""
    return base_of(origin.identity, "content")


def base_of(identity: str, order: str) -> str:
    """The identity that an effective identity was made of."""
    if order == "content" and (match := _CONTENT.fullmatch(identity)) is not None:
        return match[1]
    return identity


@lru_cache(maxsize=4096)
def sortable(text: str) -> bytes:
    """Bytes that sort as `gateway.core.digits.natural` does, none of which is the beginning of another's."""
    parts = []
    for digits, other in _RUNS.findall(text):
        if digits:
            number = digits.lstrip("0").encode()
            parts.append(b"\x01%b%b%b\x00" % (len(number).to_bytes(2), number, digits.encode()))
        else:
            parts.append(b"\x02%b\x00" % other.encode())
    return b"".join(parts) + b"\x00"


def _attempts(closed: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Each sending: its replica, and how it ended where that is told."""
    told = closed.get("attempts")
    if not isinstance(told, list):
        return [(replica, None) for replica in closed.get("replicas") or ()]
    attempts = [(each.get("replica"), each.get("outcome")) for each in told]
    if sum(ended == "answered" for _, ended in attempts) > 1:
        attempts.sort(key=lambda each: (each[0], each[1] or ""))  # calls of one request, which end in any order
    return attempts
