"""The requests of a run as its ledger tells of them: each once, in an order that does not depend on when it ended.

A request has an *opened* record for each time that its index was claimed, and a *closed* one for each claim that is
over. They become one object: the last claim, and how it ended; of several ends the delivered one; and the last reward
that it was given, with that of its session. While the ledger is read only where each record stands is kept, some 600
bytes a request. Where several processes wrote it, their records are read in the order of their times.
"""

from __future__ import annotations

import heapq
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from gateway.core.ordering import Rank, canonical, submitted
from gateway.ledger.shapes import odd_to_show, unsound, wrong

if TYPE_CHECKING:  # Loading it takes longer than a page of a run takes to be read.
    from gateway.ledger.writer import Mark

Where = TypeVar("Where")

BLOCK = 65536
"""Bytes that are handed over at once."""


class Key(NamedTuple):
    """What tells the requests of one run apart."""

    session: str
    identity: str
    index: int  # type: ignore[assignment]  # tuple has a method of this name


class Span(NamedTuple):
    """Where a record stands: which segment, where in it, how long."""

    segment: int
    offset: int
    length: int


@dataclass(slots=True)
class Entry:
    """One request."""

    ordinal: int
    opened: Span
    closed: Span | None = None
    delivered: bool = False
    claims: int = 1
    open: int = 1
    """Claims that are not over."""
    reward: float | None = None


class Requests:
    """The requests of one run, or of some sessions of it. Made by reading its records once, which may take a while.

    `session`: its name, or several. `since`: the records before it do not matter. `among`: these requests alone, so
    that memory is bounded by them. Raises `Unreadable` where a record of them, or of the life of a session that is
    asked for, cannot be made out.
    """

    def __init__(
        self,
        folder: Path,
        session: str | Collection[str] | None = None,
        since: Mark | None = None,
        among: Collection[Key] | None = None,
    ) -> None:
        self._among = None if among is None else frozenset(among)
        self._kin: frozenset[str] | None = None
        """The sessions that matter, where not all that are read do."""
        if among is not None:
            self._kin = frozenset(key.session for key in among)
        elif session is not None and not isinstance(session, str):
            self._kin = frozenset(session)
        self._files = [file for file in sorted(folder.glob("*.jsonl")) if since is None or file.name >= since.segment]
        self._entries: dict[Key, Entry] = {}
        self._seen: dict[str, int] = {}
        """Session → how many were seen before it."""
        self._order: dict[str, int | None] = {}
        """Session → the place that it was given in the order of submission."""
        self._rewards: dict[str, float | None] = {}
        """Session → the sum of its rewards."""
        self._names: dict[str, str] = {}
        self._lost: set[str] = set()
        """Claims of gateways that are gone, whose ends were found: another may have written one down too."""
        self.gateways: set[str] = set()
        """Those that wrote what was found."""
        self.life: list[dict[str, Any]] = []
        """Of the sessions that are asked for, the records of creation, of the weights they are held to, and of ends."""
        self._lives = session is not None
        wanted = b'"session":' + orjson.dumps(session) + b"," if isinstance(session, str) else None
        segments = []
        for number, file in enumerate(self._files):
            offset = since.offset if since is not None and file.name == since.segment else 0
            segments.append(_records(file, number, offset, wanted))
        if any(map(_is_shared, self._files)):
            found: Iterable[tuple[float, dict[str, Any], Span]] = heapq.merge(*map(timed, segments), key=itemgetter(0))
        else:
            found = timed(chain.from_iterable(segments))
        for _, record, span in found:
            if self._kin is None or self._concerns(record, self._kin):
                self._note(record, span)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def open(self) -> int:
        """Claims that are not over."""
        return sum(entry.open for entry in self._entries.values())

    def open_of(self) -> Counter[str]:
        """The same by session."""
        claims: Counter[str] = Counter()
        for key, entry in self._entries.items():
            claims[key.session] += entry.open
        return claims

    def canonical(self) -> list[Key]:
        """All of them, in canonical order."""
        return _sorted(self._entries, self._canonical)

    def submitted(self) -> list[Key]:
        """Those of all sessions that were submitted before the first that has an open request, in that order."""
        frontier = min(
            (self._submitted(key.session) for key, entry in self._entries.items() if entry.open), default=None
        )
        found = [key for key in self._entries if frontier is None or self._submitted(key.session) < frontier]
        return _sorted(found, self._by_submission)

    def find(self, name: str) -> dict[str, Any] | None:
        """The merged object of a delivered request, by its own id or its answer's; None: there is none."""
        for lines in self.lines(self._entries):
            for line in lines.splitlines():
                merged: dict[str, Any] = orjson.loads(line)
                if merged["outcome"] == "delivered" and name in (merged["request_id"], merged["answer_id"]):
                    return merged
        return None

    def after(self, keys: Sequence[Key], last: Key, *, live: bool) -> Sequence[Key]:
        """What follows `last` in `keys`, whose order is that of `submitted` if `live`, else `canonical`.

        Raises `KeyError` where the run has no such request.
        """
        self._entries[last]
        rank = self._by_submission if live else self._canonical
        return keys[bisect_right(keys, rank(last), key=rank) :]

    def lines(self, keys: Iterable[Key]) -> Iterator[bytes]:
        """The merged objects as JSON lines, many at once."""
        with ExitStack() as stack:
            segments = [stack.enter_context(file.open("rb")).fileno() for file in self._files]
            held = bytearray()
            for key in keys:
                held += orjson.dumps(self._merged(segments, key), option=orjson.OPT_APPEND_NEWLINE)
                if len(held) >= BLOCK:
                    yield bytes(held)
                    held.clear()
            yield bytes(held)

    def _canonical(self, key: Key) -> Rank:
        return canonical(key.identity, self._entries[key].ordinal, key.session, key.index)

    def _submitted(self, session: str) -> Rank:
        return submitted(self._order.get(session), self._seen[session])

    def _by_submission(self, key: Key) -> Rank:
        return (*self._submitted(key.session), *self._canonical(key))

    def _concerns(self, record: dict[str, Any], kin: Collection[str]) -> bool:
        """Whether a record tells of a request that is wanted, of its session, or of who wrote."""
        if record.get("event") == "gateway":
            return True
        session = record.get("session")
        if session not in kin:
            return False
        if self._among is None or record.get("event") != "opened":
            return True
        return (session, record["identity"], record["index"]) in self._among

    def _note(self, record: dict[str, Any], span: Span) -> None:
        if self._among is not None and (why := odd_to_show(record)) is not None:
            raise unsound(f"{self._files[span.segment]}, byte {span.offset}", why)
        if self._lives and record.get("event") in ("session", "session_weights", "session_ended"):
            if (why := wrong(record)) is not None:
                raise unsound(f"{self._files[span.segment]}, byte {span.offset}", why)
            self.life.append(record)
        match record:
            case {"event": "session", "session": str(session), "submission": order}:
                self._order[session] = order
                self._see(session)
            case {"event": "opened", "session": str(session), "identity": str(identity), "index": int(index)}:
                self._see(session)
                self._opened(self._key(session, identity, index), record, span)
            case {"event": "closed", "session": str(session), "identity": str(identity), "index": int(index)}:
                self._closed(self._key(session, identity, index), record, span)
            case {"event": "gateway", "gateway": str(gateway)}:
                self.gateways.add(gateway)
            case {
                "event": "reward",
                "session": str(session),
                "identity": str(identity),
                "index": int(index),
                "reward": reward,
                "session_reward": total,
            }:
                self._rewarded(self._key(session, identity, index), reward, total)
            case {"event": "session_ended", "session": str(session), "session_reward": reward}:
                self._rewards[session] = reward

    def _key(self, session: str, identity: str, index: int) -> Key:
        return Key(self._names.setdefault(session, session), self._names.setdefault(identity, identity), index)

    def _see(self, session: str) -> None:
        self._seen.setdefault(session, len(self._seen))

    def _opened(self, key: Key, record: dict[str, Any], span: Span) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = Entry(record.get("ordinal", 0), span)
            return
        entry.opened = span
        entry.claims += 1
        entry.open += 1

    def _closed(self, key: Key, record: dict[str, Any], span: Span) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        if (claim := record.get("claim")) is not None:
            if claim in self._lost or not entry.open:
                return
            self._lost.add(claim)
        entry.open = max(0, entry.open - 1)
        delivered = record.get("outcome") == "delivered"
        if delivered or not entry.delivered:
            entry.closed, entry.delivered = span, delivered

    def _rewarded(self, key: Key, reward: float | None, total: float | None) -> None:
        self._rewards[key.session] = total
        if key in self._entries:
            self._entries[key].reward = reward

    def _merged(self, segments: list[int], key: Key) -> dict[str, Any]:
        entry = self._entries[key]
        opened = _at(segments, entry.opened)
        over = entry.closed is not None and (entry.delivered or not entry.open)
        closed = _at(segments, entry.closed) if entry.closed is not None and over else _UNKNOWN
        flags = list(dict.fromkeys(opened.get("flags", []) + closed.get("flags", [])))
        merged = {**opened, **closed, "flags": flags, "claims": entry.claims}
        merged |= {"reward": entry.reward, "session_reward": self._rewards.get(key.session)}
        del merged["event"]
        return merged


def members(folder: Path, group: str) -> list[str]:
    """The sessions of a group as they were created; none: there is no such group."""
    wanted = b'"group":' + orjson.dumps(group) + b","
    return [
        record["session"]
        for number, file in enumerate(sorted(folder.glob("*.jsonl")))
        for record, _ in _records(file, number, 0, wanted)
        if record.get("event") == "session" and type(record.get("session")) is str
    ]


_GATEWAY = b'{"event":"gateway"'
"""What the record of who writes begins with."""

_UNKNOWN: dict[str, Any] = {"outcome": None}
"""The end of a request that is not over."""


def _records(file: Path, number: int, offset: int, wanted: bytes | None) -> Iterator[tuple[dict[str, Any], Span]]:
    """The records of a segment, from an offset on, and where each stands. `wanted`: what a line must hold."""
    with file.open("rb") as segment:
        segment.seek(offset)
        for line in segment:
            if line.endswith(b"\n") and (wanted is None or wanted in line or line.startswith(_GATEWAY)):
                with suppress(orjson.JSONDecodeError):
                    record = orjson.loads(line)
                    if isinstance(record, dict):
                        yield record, Span(number, offset, len(line))
            offset += len(line)


def _is_shared(file: Path) -> bool:
    """Whether its writer is one of several."""
    with file.open("rb") as segment:
        return segment.read(len(_GATEWAY)) == _GATEWAY


def timed(records: Iterable[tuple[dict[str, Any], Where]]) -> Iterator[tuple[float, dict[str, Any], Where]]:
    """The records of one process, each with a time that is never before that of the one before it."""
    now = 0.0
    for record, where in records:
        told = record.get("time")
        now = max(now, told) if isinstance(told, float | int) else now
        yield now, record, where


def _sorted(keys: Iterable[Key], rank: Callable[[Key], Rank]) -> list[Key]:
    """The keys in the order of their ranks; one rank is asked for all of a session's that differ in the index alone."""
    kin: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        kin.setdefault((key.session, key.identity), []).append(key)
    parts = sorted(kin.values(), key=lambda part: rank(part[0]))
    return [key for part in parts for key in sorted(part, key=lambda key: key.index)]


def _at(segments: list[int], span: Span) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads(os.pread(segments[span.segment], span.length, span.offset))
    return record
