"""A recorded run sent again to a gateway, as a new run: same sessions, identities and indices, then compared.

Within a session a request is sent when all those have been answered that had ended before it began; sessions go beside
each other, as many as the recorded run had in flight. What the new run has delivered already is not sent again, so a
replay that was stopped goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from gateway.core.resume import origin
from gateway.evidence.bodies import Records
from gateway.evidence.diff import Diff, compare
from gateway.evidence.ledgers import Source, Unsound, about
from gateway.evidence.recorded import Message, Recorded, Script, Sent, message
from gateway.ledger.about import Broken, read

TRIES = 20
"""How often a request is sent while the gateway asks for patience."""

LONGEST_PAUSE = 5.0
"""Seconds waited before the next try, whatever Retry-After says."""

PAGE = 5000
"""Requests of the new run that are asked for at once."""

Watch = Callable[[int], None]
"""Is told how many requests are done."""

Key = tuple[str, int, int]
"""Effective identity, ordinal and index: what a request has in both runs."""


@dataclass(slots=True)
class Target:
    """The gateway that a run is sent to."""

    url: str
    run: str
    api_key: str | None = None
    admin_key: str | None = None
    kept: Path | None = None
    """Where it keeps the run, if that is here: what is kept with it tells why seeds differ."""
    at_once: int | None = None
    """The most requests in flight; None: as many as were recorded."""


@dataclass(slots=True)
class Notes:
    """What must be known to go on after a stop: that it was begun, and the keys of created sessions.

    Readable by its owner alone.
    """

    file: Path
    run: str
    of: str
    """The run that is sent again."""
    begun: bool = False
    """Whether what the new run has already is of this replay."""
    before: int = 0
    """Requests that it had sent before it was stopped, and that were delivered."""
    keys: dict[str, str] = field(default_factory=dict)
    """Session, as it was recorded → its key in the new run."""

    @classmethod
    def kept(cls, file: Path, run: str, of: str) -> Notes:
        """Those of a replay that was stopped, or new ones. Raises `Unusable` where they cannot be made out."""
        notes = cls(file, run, of)
        try:
            match read(file):
                case None:
                    pass
                case {"run": str(to), "of": str(recorded), "keys": dict(keys)} if _texts(keys):
                    if (to, recorded) == (run, of):
                        notes.begun, notes.keys = True, keys
                case _:
                    raise Broken(file, "it holds no notes of a replay")
        except Broken as broken:
            raise Unsound(f"{broken}. Take it away, and begin another replay, under a name of its own.") from None
        return notes

    def add(self, keys: dict[str, str]) -> None:
        """Keep keys, at once."""
        self.keys |= keys
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(descriptor, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"run": self.run, "of": self.of, "keys": self.keys}, file)
        self.begun = True

    def forget(self) -> None:
        """They are needed no more."""
        self.file.unlink(missing_ok=True)


def _texts(keys: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in keys.values())


class Failed(Exception):
    """The replay cannot go on; the text says why. What was sent stays sent."""


class Refused(Exception):
    """The new run is none that this replay may send to; the text says why. Nothing was sent."""


def look_back(lines: Iterable[bytes], script: Script, run: str, notes: Notes) -> set[Key]:
    """What the new run has delivered already, by its requests as JSON lines.

    Raises `Refused` where it is not of this replay, or complete.
    """
    there: set[Key] = set()
    delivered: set[Key] = set()
    for line in lines:
        request = orjson.loads(line)
        key = (request["identity"], request.get("ordinal") or 0, request["index"])
        there.add(key)
        if request.get("outcome") == "delivered":
            delivered.add(key)
    own = {(sent.identity, sent.ordinal, sent.index) for each in script.sessions for sent in each.requests}
    of, file = script.run, notes.file
    if not there or (notes.begun and there <= own):
        return delivered
    if there == own == delivered:
        why = f"run {run} is complete: all {len(own)} requests of run {of} were sent and answered before"
    elif not there <= own:
        why = f"run {run} is none of this replay: {len(there - own)} of its {len(there)} requests are not of run {of}"
    else:
        why = (
            f"run {run} has {len(there)} of {len(own)} requests already, and {file}, which a replay of run {of} "
            "that was stopped leaves in its working folder, is not here: it is done, or did not begin here"
        )
    raise Refused(
        f"{why}. Nothing was sent. To send run {of} again, name a new run by --run; detgate diff compares two runs "
        "that are there"
    )


async def send(script: Script, target: Target, notes: Notes, watch: Watch) -> Diff:
    """Send all that the new run has not delivered yet, then compare. Raises `Failed`, `Refused`, `Unusable`."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=target.url, timeout=None, limits=limits) as http:
        replay = _Replay(script, target, notes, http, watch)
        with closing(replay.records):
            await replay.run()
        with tempfile.TemporaryDirectory(prefix="detgate-") as folder:
            file = Path(folder) / "replayed.jsonl"
            await replay.export(file)
            replayed = Source(target.run, (file,), {} if target.kept is None else about(target.kept))
            found = await asyncio.to_thread(compare, script.source, replayed, replayed=True)
    notes.forget()
    return found


class _Replay:
    def __init__(self, script: Script, target: Target, notes: Notes, http: httpx.AsyncClient, watch: Watch) -> None:
        self.records = Records(script.source)
        self._script = script
        self._target = target
        self._notes = notes
        self._http = http
        self._watch = watch
        self._places = asyncio.Semaphore(target.at_once or script.at_once)
        self._sessions = asyncio.Semaphore(target.at_once or script.at_once)
        self._delivered: set[Key] = set()
        self._groups: dict[str, list[Recorded]] = {}
        for session in script.sessions:
            if session.created is not None and session.created.get("group") is not None:
                self._groups.setdefault(session.created["group"], []).append(session)
        self._done = 0

    async def run(self) -> None:
        """Send what is left to be sent."""
        await self._look_back()
        try:
            async with asyncio.TaskGroup() as sessions:
                for session in self._script.sessions:
                    await self._create(session)
                    await self._sessions.acquire()
                    sessions.create_task(self._session(session))
        except* Failed as failed:
            raise _first(failed) from None

    # --- what the new run has already
    async def _look_back(self) -> None:
        with tempfile.TemporaryDirectory(prefix="detgate-") as folder:
            file = Path(folder) / "before.jsonl"
            await self.export(file)
            with file.open("rb") as lines:
                self._delivered = look_back(lines, self._script, self._target.run, self._notes)
        self._notes.before = len(self._delivered)
        self._notes.add({})

    async def export(self, file: Path) -> None:
        """The requests of the new run, as its gateway tells of them. Of a run that has not begun there are none."""
        headers = {} if self._target.admin_key is None else {"authorization": f"Bearer {self._target.admin_key}"}
        params = {"limit": str(PAGE)}
        with file.open("wb") as lines:
            while True:
                page = await self._ask(
                    "GET", f"/admin/runs/{self._target.run}/requests", headers=headers, params=params
                )
                if page.status_code == 404:
                    return
                if page.status_code != 200:
                    raise Failed(f"the gateway does not tell of run {self._target.run}: {_said(page)}")
                if not page.content:
                    return
                lines.write(page.content)
                params["after"] = page.headers["x-detgate-next"]

    # --- sessions
    async def _create(self, session: Recorded) -> None:
        """Create a session that was created, with all others of its group."""
        created = session.created
        if created is None or session.name in self._notes.keys:
            return
        kin = [session] if created.get("group") is None else self._groups[created["group"]]
        before = [self._has(sent) for each in kin for sent in each.requests]
        if before and all(before):
            return
        if any(before):
            raise Failed(
                f"run {self._target.run} has requests of session {session.name} already, and {self._notes.file} does "
                "not have its key: name another run by --run"
            )
        wanted = {"identity": created["identity"], "run": self._target.run}
        names = {"index_order": "index_order", "seed": "seed", "submission": "order"}
        wanted |= {theirs: created[ours] for ours, theirs in names.items() if created.get(ours) is not None}
        if created.get("group") is not None:
            wanted |= {"identity": created["group_identity"], "group_size": created["group_size"]}
        answer = await self._ask("POST", "/sessions", json=wanted, headers=self._key(None))
        if answer.status_code != 201:
            raise Failed(f"session {session.name} could not be created: {_said(answer)}")
        made = answer.json()
        members = {each.get("member"): each["api_key"] for each in made.get("sessions", [made])}
        self._notes.add({each.name: members[(each.created or {}).get("member")] for each in kin})

    async def _session(self, session: Recorded) -> None:
        """The requests of a session, each when those are answered that had ended before it began."""
        running: dict[tuple[str, int], asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as requests:
                for step in session.steps:
                    if step.what == "begin":
                        sent = session.requests[step.number]
                        drawn = origin(sent.identity)
                        if drawn is not None and (begun := running.get(drawn[:2])) is not None:
                            await begun  # what goes on has to be known
                        running[sent.identity, sent.index] = requests.create_task(self._request(session, sent))
                    else:
                        ended = session.requests[step.number]
                        await running.pop((ended.identity, ended.index))
            if session.ended and not all(map(self._has, session.requests)):
                await self._end(session)
        finally:
            self._sessions.release()

    async def _end(self, session: Recorded) -> None:
        params = {} if session.why is None else {"failed": session.why}
        headers = self._key(session) | {"X-Detgate-Run": self._target.run}
        with suppress(Failed):
            await self._ask("DELETE", f"/sessions/{quote(session.name, safe='')}", headers=headers, params=params)

    # --- requests
    def _has(self, sent: Sent) -> bool:
        """Whether the new run has delivered it already."""
        return (sent.identity, sent.ordinal, sent.index) in self._delivered

    async def _request(self, session: Recorded, sent: Sent) -> None:
        if not self._has(sent):
            async with self._places:
                await self._send(message(self.records, sent, session), session)
        self._done += 1
        self._watch(self._done)

    async def _send(self, told: Message, session: Recorded) -> None:
        headers = told.headers | self._key(session) | {"X-Detgate-Run": self._target.run}
        for _ in range(TRIES):
            answer = await self._ask("POST", told.route, content=told.body, headers=headers)
            if answer.status_code not in (429, 503) or "retry-after" not in answer.headers:
                break
            await asyncio.sleep(min(LONGEST_PAUSE, float(answer.headers["retry-after"])))
        if answer.status_code in (401, 403, 404, 409, 410):
            raise Failed(f"request of session {session.name} was refused: {_said(answer)}")

    async def _ask(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **what)
        except httpx.RemoteProtocolError as error:  # an answer that broke: the gateway's ledger tells
            return httpx.Response(502, text=str(error))
        except httpx.TransportError as error:
            raise Failed(f"{self._target.url} does not answer: {str(error) or type(error).__name__}") from None

    def _key(self, session: Recorded | None) -> dict[str, str]:
        key = self._target.api_key if session is None else self._notes.keys.get(session.name, self._target.api_key)
        return {} if key is None else {"authorization": f"Bearer {key}"}


def _said(answer: httpx.Response) -> str:
    """What the gateway said, in a line."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    return f"{answer.status_code}: {answer.text[:200]}"


def _first(failed: BaseExceptionGroup[Failed]) -> Failed:
    """Why it cannot go on: the first of what may be many reasons."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Failed)
    return error
