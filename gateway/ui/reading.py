"""Reads runs for the pages, in a process of its own: `python -m gateway.ui.reading`, a question in, an answer out.

A long ledger takes seconds to read; here that is at no request's cost, and the memory is given back at the end. It is
bounded all the same: a page is found by one walk that keeps its requests alone and a second one that reads them.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

from gateway.core.digits import natural
from gateway.core.ordering import canonical
from gateway.ledger.requests import Key, Requests
from gateway.ledger.shapes import Unreadable, odd_to_show, unsound

ROWS = 50
"""Requests, sessions or differences on one page."""

TEXT = 2000
"""Characters of one value that are shown."""

RACES = 20
"""Racing indices of one session that are shown."""

RACES_COUNTED = 10_000
"""Racing indices of one session that are told apart; beyond that it is said that there are more."""

GENTLE = 10
"""How far the process stands back for the gateway."""

Item = TypeVar("Item")
_OPENED, _CLOSED, _COMPLETE, _SESSION = (
    b'{"event":"opened"',
    b'{"event":"closed"',
    b'{"event":"complete"',
    b'{"event":"session"',
)
"""What the lines of records begin with."""

_rank = lru_cache(maxsize=4096)(natural)


class WrongCursor(Exception):
    """Where a page begins was not told by another page."""


def requests(folder: str, session: str | None, after: str | None) -> dict[str, Any]:
    """The next requests of a run, or of one session of it, in canonical order."""
    start = None if after is None else canonical(*_place(after, (str, int, str, int)))
    least = Least[tuple[Key, int]](ROWS + 1)
    wanted = None if session is None else b'"session":' + orjson.dumps(session) + b","
    for record in _records(Path(folder), lambda line: line.startswith(_OPENED) and (not wanted or wanted in line)):
        key, ordinal = Key(record["session"], record["identity"], record["index"]), record.get("ordinal") or 0
        rank = (_rank(key.identity), ordinal, _rank(key.session), key.index)
        if start is None or rank > start:
            least.add(rank, (key, ordinal))
    found = least.items()
    shown = [key for key, _ in found[:ROWS]]
    read = Requests(Path(folder), session, among=shown)
    lines = b"".join(read.lines(shown)).splitlines()
    following = None
    if len(found) > ROWS:
        key, ordinal = found[ROWS - 1]
        following = _cursor(key.identity, ordinal, key.session, key.index)
    return {
        "requests": [_cut(orjson.loads(line)) for line in lines],
        "next": following,
        "gateways": sorted(read.gateways),
    }


def sessions(folder: str, racing: bool, after: str | None) -> dict[str, Any]:
    """The next sessions of a run by their id, or of those alone in which requests raced."""
    start = None if after is None else natural(*_place(after, (str,)))
    least = Least[str](ROWS + 1)
    for record in _records(Path(folder), _raced if racing else lambda line: line.startswith((_OPENED, _SESSION))):
        rank = _rank(record["session"])
        if (start is None or rank > start) and (not racing or _races(record)):
            least.add(rank, record["session"])
    found = least.items()
    tallies = {session: Tally(session) for session in found[:ROWS]}
    gateways = set()
    for record in _records(Path(folder), lambda line: not line.startswith(_COMPLETE)):
        if record.get("event") == "gateway":
            gateways.add(record["gateway"])
        elif (tally := tallies.get(record.get("session", ""))) is not None:
            tally.note(record)
    return {
        "sessions": [tally.told() for tally in tallies.values()],
        "next": _cursor(found[ROWS - 1]) if len(found) > ROWS else None,
        "gateways": sorted(gateways),
    }


def difference(a: str, b: str, answers_only: bool, start: int) -> dict[str, Any]:
    """Two runs compared, and the differences that are kept from `start` on."""
    # Only this page needs them, and loading them takes longer than most pages.
    from gateway.evidence import ledgers
    from gateway.evidence.diff import compare
    from gateway.evidence.diff_text import as_json, side_of, where

    try:
        one, other = (replace(ledgers.find(each, Path()), name=Path(each).name) for each in (a, b))
        diff = compare(one, other, answers_only=answers_only)
    except ledgers.Unsound as fault:
        return {"unreadable": str(fault)}
    except ledgers.Unusable as unusable:
        return {"unusable": str(unusable)}
    shown = diff.kept[start : start + ROWS]
    return {
        "summary": _cut(as_json(diff)),
        "kept": len(diff.kept),
        "differences": [
            {
                "where": where(each.one),
                "cause": each.cause,
                "root": each.root,
                "detail": each.detail[:TEXT],
                "a": None if each.a is None else _cut(side_of(each.a)),
                "b": None if each.b is None else _cut(side_of(each.b)),
            }
            for each in shown
        ],
    }


@dataclass(slots=True)
class Tally:
    """One session, counted."""

    session: str
    identity: str | None = None
    group: str | None = None
    created: bool = False
    ended: bool = False
    why: str | None = None
    """Why it failed."""
    claims: int = 0
    closed: int = 0
    delivered: int = 0
    racing: set[tuple[str, int]] = field(default_factory=set)

    def note(self, record: dict[str, Any]) -> None:
        """A record of this session."""
        match record.get("event"):
            case "opened":
                self.claims += 1
                self.identity = self.identity or record["identity"]
                self.group = self.group or record.get("group")
            case "closed":
                self.closed += 1
                self.delivered += record.get("outcome") == "delivered"
            case "session":
                self.created, self.identity, self.group = True, record["identity"], record.get("group")
            case "session_ended":
                self.ended, self.why = True, record.get("why")
        if _races(record) and len(self.racing) < RACES_COUNTED:
            self.racing.add((record["identity"], record["index"]))

    def told(self) -> dict[str, Any]:
        """As JSON."""
        first = sorted(self.racing, key=lambda one: (natural(one[0]), one[1]))[:RACES]
        return {
            "session": self.session,
            "identity": self.identity,
            "group": self.group,
            "state": ("failed" if self.why else "ended") if self.ended else ("open" if self.created else None),
            "why": self.why,
            "claims": self.claims,
            "delivered": self.delivered,
            "open": self.claims - self.closed,
            "racing": len(self.racing),
            "first_racing": [index for _, index in first],
        }


class Least(Generic[Item]):
    """The items of the least ranks among all that are added, each rank once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[tuple[Any, Item]] = []
        self._ranks: set[Any] = set()

    def add(self, rank: Any, item: Item) -> None:
        """Keep an item if it is among them."""
        if rank in self._ranks or (len(self._held) == self._size and rank > self._held[-1][0]):
            return
        insort(self._held, (rank, item), key=lambda held: held[0])
        self._ranks.add(rank)
        if len(self._held) > self._size:
            self._ranks.discard(self._held.pop()[0])

    def items(self) -> list[Item]:
        """The least first."""
        return [item for _, item in self._held]


def _records(folder: Path, wanted: Callable[[bytes], bool]) -> Iterator[dict[str, Any]]:
    """The records of a run whose lines are wanted, as they stand in its segments. Raises `Unreadable`."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb", buffering=1 << 20) as segment:
            for number, line in enumerate(segment, 1):
                if line.endswith(b"\n") and wanted(line):
                    try:
                        record = orjson.loads(line)
                    except orjson.JSONDecodeError:
                        continue
                    if isinstance(record, dict):
                        if (why := odd_to_show(record)) is not None:
                            raise unsound(f"{file}, line {number}", why)
                        yield record


def _raced(line: bytes) -> bool:
    """Whether a line may be the record of a request that raced."""
    return b"racing" in line and line.startswith((_OPENED, _CLOSED))


def _races(record: dict[str, Any]) -> bool:
    return record.get("event") in ("opened", "closed") and (
        record.get("racing") is True or "racing" in (record.get("flags") or ())
    )


def _cut(value: Any) -> Any:
    """A value whose texts are as long as a page can show."""
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[:TEXT]} … and {len(value) - TEXT:,} characters more"
    if isinstance(value, list):
        more = len(value) - TEXT
        return [_cut(each) for each in value[:TEXT]] + ([f"… and {more:,} more"] if more > 0 else [])
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    return value


def _cursor(*place: str | int) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(place)).decode().rstrip("=")


def _place(cursor: str, kinds: tuple[type, ...]) -> Any:
    """What a cursor stands for. Raises `WrongCursor`."""
    try:
        place = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except ValueError:
        raise WrongCursor from None
    if not isinstance(place, list) or [type(each) for each in place] != list(kinds):
        raise WrongCursor
    return place


ASKED: dict[str, Callable[..., dict[str, Any]]] = {
    "requests": requests,
    "sessions": sessions,
    "difference": difference,
}


def main() -> None:
    """Answer the question on standard input: what is asked for, with what, and the seconds that it may take."""
    asked, given, seconds = orjson.loads(sys.stdin.buffer.read())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    os.nice(GENTLE)
    try:
        told = ASKED[asked](**given)
    except WrongCursor:
        told = {"wrong_cursor": True}
    except Unreadable as fault:
        told = {"unreadable": fault.message}
    sys.stdout.buffer.write(orjson.dumps(told))


if __name__ == "__main__":
    main()
