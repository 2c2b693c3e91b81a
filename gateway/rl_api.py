"""Sessions and rewards under the routes that AReaL's clients ask: `rl/start_session`, `set_reward`, `end_session`.

They stand at the root and under `/v1`, since clients append them to their base URL, whichever it is. Statuses are
AReaL's, bodies of errors the gateway's own. A session here is one like any other: its identity is the task.

Its trainer also asks `grant_capacity` before it starts a session, and takes what the session did by
`export_trajectories`, which is read from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson
import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from gateway import exports
from gateway.core import trajectory
from gateway.core.errors import Busy, CallerFault, Conflict, Gone, NotFound, TooMany, Unauthorized
from gateway.core.trajectory import Turn, Unkept, Unreadable
from gateway.keys import AdminKey, given
from gateway.ledger.requests import Requests
from gateway.runs import Runs
from gateway.session import Interaction, Session, Wanted
from gateway.sessions import Sessions
from gateway.sessions_api import Desk, Identity, Reward, named, read
from gateway.settings import Settings
from gateway.stores import Store

log = structlog.get_logger("detgate.sessions")


class Start(BaseModel):
    """Which session to begin. AReaL knows two shapes: with `group_size` the answer is a list of sessions."""

    model_config = ConfigDict(strict=True)

    task_id: Identity = Field(description="The identity; with a group_size above 1 that of the group.")
    api_key: str | None = Field(None, description="The key of a session that has ended, to be used again.")
    group_size: int | None = Field(None, description="How many sessions; each below 1 is 1.")


class Rewarding(BaseModel):
    """A reward, and of which answer."""

    model_config = ConfigDict(strict=True)

    reward: Reward
    interaction_id: str | None = Field(
        None, description="The id of an answer, or a request id. Default: the last request that was delivered."
    )


class Export(BaseModel):
    """Which sessions to take. AReaL knows two shapes: one session, which is waited for, or several as they stand."""

    model_config = ConfigDict(strict=True)

    session_id: str | None = Field(None, description="A session; the answer waits until it has ended.")
    session_ids: list[str] | None = Field(None, description="Sessions; those that are not known are passed over.")
    discount: float = Field(1.0, allow_inf_nan=False, description="What a turn's reward is worth to the turn before.")
    style: Literal["individual"] = Field("individual", description="Each turn by itself.")
    remove_session: bool = Field(True, description="With session_ids: end them.")


def _described(body: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}


_START, _EXPORT, _REWARDING = _described(Start), _described(Export), _described(Rewarding)

POLL = 0.1
"""Seconds after which a session that is waited for is looked at again."""


def build(settings: Settings, runs: Runs, sessions: Sessions, store: Store) -> APIRouter:
    """The routes. `/runs/{run}` may stand before them, and a session's own prefix before the last two."""
    router = APIRouter()
    routes = _Routes(settings, runs, sessions, Desk(settings, runs, sessions, store))
    for prefix in ("", "/runs/{run}"):
        for base in ("", "/v1"):
            shown = not prefix + base
            router.post(
                f"{prefix}{base}/rl/start_session",
                include_in_schema=shown,
                summary="Begin a session, as AReaL's clients do",
                openapi_extra=_START,
            )(routes.start)
            router.post(
                f"{prefix}{base}/grant_capacity",
                include_in_schema=shown,
                summary="How many sessions there is room for, as AReaL's trainer asks before it begins one",
            )(routes.grant)
            router.post(
                f"{prefix}{base}/export_trajectories",
                include_in_schema=shown,
                summary="What sessions did, with rewards, as AReaL's trainer takes it",
                openapi_extra=_EXPORT,
            )(routes.export)
            for session in ("", "/sessions/{session_id}"):
                router.post(
                    f"{prefix}{session}{base}/rl/set_reward",
                    include_in_schema=shown and not session,
                    summary="Give a request of a session its reward",
                    openapi_extra=_REWARDING,
                )(routes.reward)
                router.post(
                    f"{prefix}{session}{base}/rl/end_session",
                    include_in_schema=shown and not session,
                    summary="End a session, as AReaL's clients do",
                )(routes.end)
    return router


class _Routes:
    """Answers them."""

    def __init__(self, settings: Settings, runs: Runs, sessions: Sessions, desk: Desk) -> None:
        self._admin = AdminKey(settings)
        self._runs = runs
        self._sessions = sessions
        self._desk = desk
        self._most = settings.limits.sessions
        self._seconds = settings.timeouts.group

    async def start(self, request: Request) -> Response:
        """Create what is asked for; 429 where there is no room, 409 where the key's session is open."""
        key = given(dict(request.headers.raw))
        await self._sessions.prepared(self._runs.own.name, key)
        self._may_start(key)
        asked = await read(request, Start)
        size = asked.group_size or 1
        wanted = Wanted(asked.task_id, group_size=size if size > 1 else None)
        try:
            made, keys = await self._sessions.create(self._desk.run(named(request).run).name, wanted, asked.api_key)
        except Busy as fault:
            if fault.code == "too_many_sessions":
                raise TooMany(fault.message, code="too_many_sessions") from None
            raise
        first = made[0].known
        if asked.group_size is None:
            return _json(200, {"session_id": first.session, "api_key": keys[0]})
        sessions = [
            {"session_id": session.known.session, "session_api_key": key}
            for session, key in zip(made, keys, strict=True)
        ]
        return _json(201, {"group_id": first.group or first.session, "sessions": sessions})

    async def reward(self, request: Request) -> Response:
        """Give a request its reward; 400 where there is no such request, 410 where the session has ended."""
        session = await self._session(request)
        asked = await read(request, Rewarding)
        await self._sessions.reward(session, asked.interaction_id, asked.reward, self._look)
        told = {"session_id": session.known.session, "interaction_count": session.interactions}
        return _json(200, {"message": "success", **told})

    async def end(self, request: Request) -> Response:
        """End a session. Asked twice it is the same, as clients repeat; 410 where it had failed before."""
        session = await self._session(request)
        if session.state == "failed":
            raise Gone(f"Session {session.known.session} has failed: {session.why}.", code="session_ended")
        await self._sessions.end(session)
        return _json(200, {"message": "success", "interaction_count": session.interactions})

    async def grant(self, request: Request) -> Response:
        """Say that there is room. How stale a rollout may be is the trainer's to hold to: nothing is counted here."""
        self._may_administer(request)
        return _json(200, {"capacity": self._most - self._sessions.live})

    async def export(self, request: Request) -> Response:
        """The turns of sessions. Raises `NotFound`, `Busy` where one does not end, `Conflict` where not all is here."""
        self._may_administer(request)
        asked = await read(request, Export)
        if asked.session_id is None and not asked.session_ids:
            raise CallerFault("session_id or session_ids is needed.", param="session_ids")
        run = self._desk.run(named(request).run, known=True).name
        await self._sessions.prepared(run, given(dict(request.headers.raw)))
        if asked.session_id is not None:
            found = [await self._ended(run, asked.session_id)]
        else:
            known = (self._sessions.session(run, name) for name in asked.session_ids or ())
            found = [session for session in known if session is not None]
        taken, left_out = [], dict[str, str]()
        for session in found:
            try:
                taken.append(await self._turns(session, asked.discount))
            except Unreadable as unreadable:
                if asked.session_id is not None:
                    why = f"Session {asked.session_id} cannot be exported: {unreadable}."
                    raise Conflict(why, code="turn_unreadable") from None
                left_out[session.known.session] = str(unreadable)
                log.warning(
                    "a session is left out of an export", run=run, session=session.known.session, why=str(unreadable)
                )
        if asked.session_id is None and asked.remove_session:
            for session in found:
                await self._sessions.end(session)
        return StreamingResponse(_interactions(taken, left_out), media_type="application/json")

    async def _ended(self, run: str, name: str) -> Session:
        """A session, when it has ended."""
        session = self._sessions.session(run, name)
        if session is None:
            raise NotFound(f"Run {run} has no session {name} that was created.", code="session_not_found")
        loop = asyncio.get_running_loop()
        until = loop.time() + self._seconds
        await self._sessions.refresh(session)
        while session.state == "open":
            if loop.time() >= until:
                raise Busy(f"Session {name} has not ended. End it first.", code="session_open", retry_after=1)
            await asyncio.sleep(POLL)
            await self._sessions.refresh(session)
        return session

    async def _turns(self, session: Session, discount: float) -> Trajectory:
        folder, _ = self._runs.reading(session.known.run)
        requests = await exports.of_session(folder, session.known.session, session.since)
        missing = set(await self._sessions.gateways(session.known.run)) - requests.gateways
        if missing:
            raise Conflict(
                f"Requests of session {session.known.session} may be in the ledger of {', '.join(sorted(missing))}, "
                "which is not here. Let all gateways have one ledger folder.",
                code="ledger_elsewhere",
            )
        try:
            return await asyncio.to_thread(Trajectory, requests, discount)
        except Unkept as unkept:
            raise Conflict(
                f"The ledger has not the whole bodies of {unkept}. Set ledger.bodies, and a ledger.body_bytes that is "
                "large enough.",
                code="bodies_not_kept",
            ) from None

    def _may_administer(self, request: Request) -> None:
        self._admin.check(given(dict(request.headers.raw)))
        self._admin.check_host(request.url.hostname or "")

    def _may_start(self, key: bytes) -> None:
        """The admin key alone, where there is one; else whoever may use the data plane."""
        if self._admin.needed:
            self._admin.check(key)
        else:
            self._sessions.may_create(key)

    async def _session(self, request: Request) -> Session:
        """The session whose key is given, or that is named by whoever may read it. Raises `Unauthorized`."""
        visitor, names = await self._desk.visitor(request)
        if visitor.holder is None and names.session is None:
            raise Unauthorized("The key of a session is needed, as a Bearer token or in x-api-key.")
        asked = await self._desk.session(request)
        if asked.session is None:
            raise CallerFault(
                f"Session {asked.name} was used without having been created: it has no rewards.",
                code="session_not_created",
            )
        await self._sessions.refresh(asked.session)
        return asked.session

    async def _look(self, session: Session, name: str) -> Interaction:
        """A request that is remembered no more, from the ledger."""
        folder, _ = self._runs.reading(session.known.run)
        requests = await exports.of_session(folder, session.known.session, session.since)
        found = await asyncio.to_thread(requests.find, name)
        if found is None:
            raise CallerFault(
                f"Session {session.known.session} has no answer {name}. An answer's id or a request id is needed.",
                code="interaction_not_found",
                param="interaction_id",
            )
        ids = found["request_id"], found["answer_id"]
        return Interaction(found["identity"], found["index"], *ids, delivered=True, reward=found["reward"])


class Trajectory:
    """The turns of one session in their order. All are read twice, so that one at a time is in memory.

    Raises `Unkept`, `Unreadable`.
    """

    def __init__(self, requests: Requests, discount: float) -> None:
        self._requests = requests
        rewards: list[float | None] = []
        self.tokens = True
        """Every turn tells its tokens."""
        for turn in self._read():
            rewards.append(turn.reward)
            self.tokens &= turn.tokens is not None
        self._rewards = trajectory.discounted(rewards, discount, tensors=self.tokens)

    def turns(self) -> Iterator[tuple[Turn, float]]:
        """Each turn and its reward."""
        return zip(self._read(), self._rewards, strict=False)

    def _read(self) -> Iterator[Turn]:
        for block in self._requests.lines(self._requests.canonical()):
            for line in block.splitlines():
                turn = trajectory.read(orjson.loads(line))
                if turn is not None:
                    yield turn


def _interactions(taken: Sequence[Trajectory], left_out: Mapping[str, str]) -> Iterator[bytes]:
    """The answer. Its trainer takes tensors from all turns or from none.

    `left_out`: sessions that are not in it, and why.
    """
    shape = trajectory.tensors if all(each.tokens for each in taken) else trajectory.strings
    names: set[str] = set()
    yield b'{"interactions":{'
    for each in taken:
        for turn, reward in each.turns():
            name = turn.answer_id
            if name is None or name in names:  # no engine that is known gives one id twice
                name = turn.request_id
            yield b"," * bool(names) + orjson.dumps(name) + b":" + orjson.dumps(shape(turn, reward, name))
            names.add(name)
    yield b"}"
    if left_out:
        yield b',"left_out":' + orjson.dumps(left_out)
    yield b"}"


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
