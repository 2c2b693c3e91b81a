"""A recorded run as something to be sent again: its sessions, and in which order their requests came and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gateway.core import resume
from gateway.core.identity import ANONYMOUS
from gateway.evidence.bodies import Records, asked
from gateway.evidence.ledgers import Lines, Place, Source, Unusable, is_merged, without_requests
from gateway.evidence.requests import base_of, resumed
from gateway.ledger.shapes import odd_to_send


class Sent(NamedTuple):
    """One request, sent once, however often it was claimed."""

    identity: str
    ordinal: int
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    place: Place
    """Where its record stands, which holds its body."""


class Step(NamedTuple):
    """What happened in a session: a request began, or its answer had ended."""

    what: Literal["begin", "end"]
    number: int
    """Which of the session's requests."""


@dataclass(slots=True)
class Recorded:
    """One session."""

    name: str
    created: dict[str, Any] | None = None
    """The record of its creation; None: it was used without."""
    requests: list[Sent] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: bool = False
    why: str | None = None
    """Why it failed, if it was ended so."""


@dataclass(slots=True)
class Script:
    """The sessions of a run, in the order in which they first appeared."""

    source: Source
    run: str
    sessions: list[Recorded]
    requests: int
    at_once: int
    """The most requests that were in flight at once."""


def script(source: Source) -> Script:
    """Read what is to be sent. Raises `Unusable` where there is nothing, or bodies were not kept."""
    reading = _Reading()
    exported = False
    for segment, offset, record in Lines(source, odd_to_send):
        exported |= is_merged(record)
        reading.note(Place(segment, offset), record)
    total = sum(len(session.requests) for session in reading.sessions.values())
    if not total:
        raise without_requests(source, exported=exported)
    if reading.without:
        raise Unusable(
            f"{source.name}: {reading.without} of {total} requests were recorded without their body, or with a part of "
            "it. Record with ledger.bodies: true and a ledger.body_bytes that is large enough."
        )
    run = reading.run or source.files[0].resolve().parent.name
    return Script(source, run, list(reading.sessions.values()), total, reading.at_once)


@dataclass(slots=True)
class _Reading:
    sessions: dict[str, Recorded] = field(default_factory=dict)
    run: str = ""
    without: int = 0
    at_once: int = 1
    _numbers: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _live: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def note(self, place: Place, record: dict[str, Any]) -> None:
        match record:
            case {"event": "session", "session": str(name)}:
                self._session(name).created = record
            case {"event": "session_ended", "session": str(name)}:
                self._session(name).ended = True
                self._session(name).why = record.get("why")
            case {"event": "opened", "session": str(name), "identity": str(identity), "index": int(index)}:
                self.run = self.run or str(record.get("run") or "")
                self._opened(name, Sent(identity, record.get("ordinal") or 0, index, place), record)
            case {"event": "complete" | "closed", "session": str(name), "identity": str(identity), "index": int(index)}:
                self._ended((name, identity, index))

    def _session(self, name: str) -> Recorded:
        return self.sessions.setdefault(name, Recorded(name))

    def _opened(self, name: str, sent: Sent, record: dict[str, Any]) -> None:
        key = (name, sent.identity, sent.index)
        if key in self._numbers:
            return
        session = self._session(name)
        number = self._numbers[key] = len(session.requests)
        session.requests.append(sent)
        session.steps.append(Step("begin", number))
        self._live[key] = number
        self.at_once = max(self.at_once, len(self._live))
        self.without += asked(record) is None

    def _ended(self, key: tuple[str, str, int]) -> None:
        number = self._live.pop(key, None)
        if number is not None:
            self.sessions[key[0]].steps.append(Step("end", number))


class Message(NamedTuple):
    """A request as it is sent again."""

    route: str
    headers: dict[str, str]
    body: bytes


def message(records: Records, sent: Sent, session: Recorded) -> Message:
    """Headers that name the session, identity and index that a request had, and the body that its client sent."""
    record = records.at(sent.place)
    body = asked(record)
    assert body is not None
    headers = {"content-type": "application/json"}
    origin = None if record.get("resumes") is None else resume.origin(sent.identity)
    base = base_of(sent.identity, record["order"]) if origin is None else resumed(origin)
    if origin is not None:
        headers["X-Detgate-Resume"] = record["resumes"]
    if session.created is None and not (session.name == base == ANONYMOUS):
        headers["X-Session-ID"] = session.name
        if base != session.name:
            headers["X-Detgate-Identity"] = base
        if record.get("member") is not None:
            headers["X-Member-Index"] = str(record["member"])
    if record.get("kind") != "score" and not (origin is not None and session.name == base == ANONYMOUS):
        if record["order"] == "content":
            headers["X-Index-Order"] = "content"
        else:
            headers["X-Request-Index"] = str(sent.index)
    if record.get("key") is not None:
        headers["Idempotency-Key"] = record["key"]
    if record.get("model") is None:
        headers["X-Detgate-Pool"] = record["pool"]
    return Message(record["route"], headers, body)
