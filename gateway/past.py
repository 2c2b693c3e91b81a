"""Sessions and groups of a run that has ended, as its ledger tells of them: who reads them need not open it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gateway.ledger.requests import Key, Requests, members
from gateway.session import Group, Session, Wanted
from gateway.session_records import recalled
from gateway.sessions import numbered


class Past(NamedTuple):
    """A session as its ledger tells."""

    session: Session
    requests: Requests
    next: int | None
    """The next number of its own counter; None: the client numbers."""


def read_session(folder: Path, run: str, name: str) -> Past:
    """One session, which may be one that nobody created or used. Reads the ledger; raises `Unreadable`."""
    found = Requests(folder, name)
    (past,) = _told(run, [name], found)
    if past.session.group is not None and past.session.holds:
        past.session.group.held |= _held(folder, past.session.group, past.session.known.ordinal)
    return past


def read_group(folder: Path, run: str, name: str) -> tuple[Group, list[Past]] | None:
    """A group and its members; None: there is no such group. Reads the ledger; raises `Unreadable`."""
    names = members(folder, name)
    if not names:
        return None
    told = _told(run, names, Requests(folder, names))
    group = told[0].session.group
    # Those of a group were written in one piece: one that was not written whole never was.
    if group is None or len(told) < group.size:
        return None
    for past in told:
        group.held |= past.session.held
        past.session.group = group
        group.members.append(past.session)
    return group, told


def _told(run: str, names: Iterable[str], found: Requests) -> list[Past]:
    lives: dict[str, list[dict[str, Any]]] = {}
    for record in found.life:
        lives.setdefault(record["session"], []).append(record)
    keys: dict[str, list[Key]] = {}
    for key in found.canonical():
        keys.setdefault(key.session, []).append(key)
    claims = found.open_of()
    told = []
    for name in names:
        session = recalled(run, name, lives.get(name, ()))
        session.open = claims[name]
        told.append(Past(session, found, _next(session, found, keys.get(name, []))))
    return told


def _next(session: Session, found: Requests, keys: list[Key]) -> int | None:
    """The next number of its own counter. The last of its requests tells its reward too."""
    if not keys:
        return 0
    last = next((key for key in reversed(keys) if key.identity == session.known.identity), None)
    told = orjson.loads(b"".join(found.lines([last or keys[-1]])))
    if session.reward is None and told["session_reward"] is not None:
        session.add(None, told["session_reward"])
    return 0 if last is None else None if told.get("order") == "client" else last.index + 1


def _held(folder: Path, group: Group, ordinal: int) -> dict[str, str]:
    """The weights that a group is held to: any of its members may have met them first."""
    members = {numbered(identity, ordinal) for identity in Wanted(group.identity, group.size).identities}
    held = {}
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as segment:
            for line in segment:
                if (
                    line.startswith(b'{"event":"session_weights"')
                    and (told := orjson.loads(line))["session"] in members
                ):
                    held[told["pool"]] = told["version"]
    return held
