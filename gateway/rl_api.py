"""Sessions and rewards under the routes that AReaL's clients ask: `rl/start_session`, `set_reward`, `end_session`.

They stand at the root and under `/v1`, since clients append them to their base URL, whichever it is. Statuses are
AReaL's, bodies of errors the gateway's own. A session here is one like any other: its identity is the task.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway import exports
from gateway.core.errors import Busy, CallerFault, Gone, TooMany, Unauthorized
from gateway.keys import AdminKey, given
from gateway.runs import Runs
from gateway.sessions import Interaction, Session, Sessions, Wanted
from gateway.sessions_api import Desk, Identity, Reward, named, read
from gateway.settings import Settings
from gateway.stores import Store


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
                openapi_extra=_described(Start),
            )(routes.start)
            for session in ("", "/sessions/{session_id}"):
                router.post(
                    f"{prefix}{session}{base}/rl/set_reward",
                    include_in_schema=shown and not session,
                    summary="Give a request of a session its reward",
                    openapi_extra=_described(Rewarding),
                )(routes.reward)
                router.post(
                    f"{prefix}{session}{base}/rl/end_session",
                    include_in_schema=shown and not session,
                    summary="End a session, as AReaL's clients do",
                )(routes.end)
    return router


def _described(body: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}


class _Routes:
    """Answers them."""

    def __init__(self, settings: Settings, runs: Runs, sessions: Sessions, desk: Desk) -> None:
        self._admin = AdminKey(settings)
        self._runs = runs
        self._sessions = sessions
        self._desk = desk

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

    def _may_start(self, key: bytes) -> None:
        """The admin key alone, where there is one; else whoever may use the data plane."""
        if self._admin.needed:
            self._admin.check(key)
        elif self._sessions.visitor(key).holder is not None:
            raise Unauthorized("This key opens a session, and starts none.")

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


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
