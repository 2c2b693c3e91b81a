"""Sessions and groups over HTTP: created, looked at, ended.

Who holds the key of a session may look at it and end it, and so may who holds the admin key. Who may use the data plane
may create one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from gateway import exports
from gateway.core import identity
from gateway.core.errors import CallerFault, NotFound, TooLarge, Unauthorized
from gateway.core.identity import Known, Location, Named
from gateway.keys import AdminKey, digest, given
from gateway.past import Past, read_group, read_session
from gateway.runs import Run, Runs
from gateway.session import Group, Session, Visitor, Wanted
from gateway.sessions import PREFIX, Sessions
from gateway.settings import Settings
from gateway.stores import ScopeKey, Store


def _readable(text: str) -> str:
    try:
        return identity.text(text.encode(), "an identity")
    except CallerFault as fault:
        raise ValueError(fault.message) from None


Identity = Annotated[str, AfterValidator(_readable)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
Shape = TypeVar("Shape", bound=BaseModel)


class Creation(BaseModel):
    """What a session, or a group of them, shall be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    identity: Identity = Field(
        description="The logical name, which seeds follow from: 1 to 256 bytes of UTF-8 without control characters."
    )
    group_size: int | None = Field(None, ge=1, description="Create so many sessions, the members of one group.")
    index_order: Literal["arrival", "content"] | None = Field(None, description="Default: the setting.")
    run: str | None = Field(None, description="Default: the header X-Detgate-Run, else the gateway's own run.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="A master seed of its own.")
    order: int | None = Field(None, ge=-(2**63), lt=2**63, description="Its place in the order of submission.")
    failed_reward: Reward | None = Field(None, description="Its reward if it fails without one. Default: the setting.")
    weights: Literal["any", "hold"] | None = Field(
        None, description="Hold it, and its group, to the weights that it meets first. Default: the setting."
    )


LARGEST = 65536
"""Bytes of the longest body."""

_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": Creation.model_json_schema()}}}}


class Asked(NamedTuple):
    """A request for a session that there may be."""

    run: str
    name: str
    session: Session | None


def build(settings: Settings, runs: Runs, sessions: Sessions, store: Store) -> APIRouter:
    """The routes. Those that name a session or group may have `/runs/{run}` before them."""
    router = APIRouter()
    desk = Desk(settings, runs, sessions, store)
    router.post("/sessions", status_code=201, summary="Create a session, or a group of sessions", openapi_extra=_BODY)(
        desk.create
    )
    for prefix in ("", "/runs/{run}"):
        shown = not prefix
        one, group = f"{prefix}/sessions/{{session_id}}", f"{prefix}/groups/{{group_id}}"
        router.get(one, include_in_schema=shown, summary="A session's state")(desk.state)
        router.delete(one, include_in_schema=shown, summary="End a session")(desk.end)
        router.get(f"{one}/requests", include_in_schema=shown, summary="A session's requests, a JSON object a line")(
            desk.requests
        )
        router.get(group, include_in_schema=shown, summary="The members of a group and their states")(desk.group)
        router.delete(group, include_in_schema=shown, summary="End every member of a group")(desk.end_group)
    return router


class Desk:
    """Answers what is asked of sessions and groups."""

    def __init__(self, settings: Settings, runs: Runs, sessions: Sessions, store: Store) -> None:
        self._default_order = settings.index_order
        self._ports = (settings.admin_port, settings.port) if settings.admin_port and settings.port else None
        """The port for administration, and that where sessions ask; None: they are one, or the latter is any."""
        self._runs = runs
        self._sessions = sessions
        self._store = store
        self._admin = AdminKey(settings)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create what is wanted, in the run that it names."""
        key = given(dict(request.headers.raw))
        if not self._admin.holds(key):
            await self._sessions.prepared(self._runs.own.name, key)
            self._sessions.may_create(key)
        wanted = await read(request, Creation)
        run = self.run(named(request).run if wanted.run is None else identity.run_name(wanted.run.encode(), "run"))
        made, keys = await self._sessions.create(
            run.name,
            Wanted(
                wanted.identity,
                wanted.group_size,
                wanted.index_order,
                wanted.seed,
                wanted.order,
                wanted.failed_reward,
                wanted.weights,
            ),
        )
        told = [
            {
                "session_id": session.known.session,
                "identity": session.known.identity,
                "api_key": secret,
                "base_url": self._base_url(request, session.known),
            }
            for session, secret in zip(made, keys, strict=True)
        ]
        group = made[0].group
        if group is None:
            return told[0]
        members = [{**each, "member": session.known.member} for each, session in zip(told, made, strict=True)]
        return {"group_id": group.id, "sessions": members}

    async def state(self, request: Request) -> dict[str, Any]:
        """How a session stands."""
        past = await self._past(request)
        if past is not None:
            return self._shown_past(past)
        asked = await self.session(request)
        if asked.session is None:
            return await self._uncreated(asked)
        told = self._shown(asked.session)
        if self._sessions.shared:
            folder, _ = self._runs.reading(asked.run)
            told["open_requests"] = (await exports.of_session(folder, asked.name, None)).open
        return told

    async def requests(self, request: Request) -> Response:
        """What a session asked for, and what came of it."""
        past = await self._past(request)
        if past is not None:
            return await exports.whole(past.requests)
        asked = await self.session(request)
        folder, _ = self._runs.reading(asked.run)
        since = None if asked.session is None else asked.session.since
        gateways = await self._sessions.gateways(asked.run)
        return await exports.whole(await exports.of_session(folder, asked.name, since), gateways)

    async def end(self, request: Request, failed: str | None = None) -> dict[str, Any]:
        """Let a session take no more requests; `failed` says why its work is worth nothing."""
        asked = await self.session(request)
        if asked.session is None and self._sessions.has_ended(asked.run, asked.name):
            return await self._uncreated(asked)
        if asked.session is None:
            return self._shown(await self._sessions.end_unknown(asked.run, asked.name, failed or None))
        await self._sessions.end(asked.session, failed or None)
        return self._shown(asked.session)

    async def group(self, request: Request) -> dict[str, Any]:
        """How a group and its members stand."""
        past = await self._past_group(request)
        if past is not None:
            group, members = past
            return self._together(group, map(self._shown_past, members))
        group = await self._group(request)
        for session in group.members:
            await self._sessions.refresh(session)
            await self._store.learn(ScopeKey(*session.place, session.known.identity))
        return self._together(group, map(self._shown, group.members))

    async def end_group(self, request: Request, failed: str | None = None) -> dict[str, Any]:
        """End all members of a group that have not ended."""
        group = await self._group(request)
        for session in group.members:
            await self._sessions.end(session, failed or None)
        return self._together(group, map(self._shown, group.members))

    # --- who asks for what
    async def session(self, request: Request) -> Asked:
        """The session that is asked for, if the key opens it.

        Raises `NotFound`, `Unauthorized`, `Forbidden`. Whether there is a session is told to those alone who may know.
        """
        visitor, names = await self.visitor(request)
        if visitor.holder is None:
            self._admin.check(given(dict(request.headers.raw)))
            self._admin.check_host(request.url.hostname or "")
        session = self._sessions.read(visitor, names, self._runs.own.name)
        name = names.session or ""
        run = self.run(session.known.run if session is not None else names.run, known=True)
        if session is None:
            session = self._sessions.read(visitor, names, run.name)
        known = Known(run.name, name, name) if session is None else session.known
        await self._store.learn(ScopeKey(known.run, known.session, known.identity))
        if session is None and not self._store.knows(run.name, name):
            raise NotFound(f"Run {run.name} has no session {name}.", code="session_not_found")
        if session is not None:
            await self._sessions.refresh(session)
        return Asked(run.name, name if session is None else session.known.session, session)

    async def _past(self, request: Request) -> Past | None:
        """The session that is asked for, of a run that has ended: to be read it need not be opened.

        None: it is no such run. Raises as `session`.
        """
        names, key = named(request), given(dict(request.headers.raw))
        folder = self._runs.past(names.run)
        if folder is None or names.run is None or names.session is None:
            return None
        with_own = key.startswith(PREFIX) and not self._admin.holds(key)
        if not with_own:
            self._admin.check(key)
            self._admin.check_host(request.url.hostname or "")
        past = await asyncio.to_thread(read_session, folder, names.run, names.session)
        if with_own and past.session.key != digest(key):
            raise Unauthorized("This key opens no such session.")
        if not (past.requests.life or len(past.requests)):
            raise NotFound(f"Run {names.run} has no session {names.session}.", code="session_not_found")
        return past

    async def _group(self, request: Request) -> Group:
        visitor, names = await self.visitor(request)
        if visitor.holder is not None:
            raise _no_group_key()
        self._admin.check(given(dict(request.headers.raw)))
        self._admin.check_host(request.url.hostname or "")
        run = self.run(names.run, known=True)
        name = _group_id(request)
        group = self._sessions.group(run.name, name)
        if group is None:
            raise NotFound(f"Run {run.name} has no group {name}.", code="group_not_found")
        return group

    async def _past_group(self, request: Request) -> tuple[Group, list[Past]] | None:
        """The group that is asked for, and its members, of a run that has ended: to be read it need not be opened.

        None: it is no such run. Raises as `_group`.
        """
        names, key = named(request), given(dict(request.headers.raw))
        folder = self._runs.past(names.run)
        if folder is None or names.run is None:
            return None
        if key.startswith(PREFIX) and not self._admin.holds(key):
            raise _no_group_key()
        self._admin.check(key)
        self._admin.check_host(request.url.hostname or "")
        name = _group_id(request)
        past = await asyncio.to_thread(read_group, folder, names.run, name)
        if past is None:
            raise NotFound(f"Run {names.run} has no group {name}.", code="group_not_found")
        return past

    async def visitor(self, request: Request) -> tuple[Visitor, Named]:
        names = named(request)
        key = given(dict(request.headers.raw))
        if names.run is not None and key.startswith(PREFIX):
            self._runs.revive(names.run)
        await self._sessions.prepared(names.run or self._runs.own.name, key)
        return Visitor() if self._admin.holds(key) else self._sessions.visitor(key), names

    def run(self, name: str | None, *, known: bool = False) -> Run:
        """The run of this name, or the gateway's own. `known`: one that is there already."""
        if name is None:
            name = self._runs.own.name
        elif known:
            self._runs.reading(name)
        return self._runs.find(name)

    def _base_url(self, request: Request, known: Known) -> str:
        run, url = "" if known.run == self._runs.own.name else f"/runs/{known.run}", request.url
        if self._ports is not None and url.port == self._ports[0]:
            url = url.replace(port=self._ports[1])
        return f"{url.scheme}://{url.netloc}{run}/sessions/{quote(known.session, safe=':@')}/v1"

    # --- what is told
    def _shown(self, session: Session) -> dict[str, Any]:
        known = session.known
        return {
            "session_id": known.session,
            "identity": known.identity,
            "run": known.run,
            "group_id": known.group,
            "member": known.member,
            "state": session.state,
            "why": session.why,
            "open_requests": session.open,
            "next_index": self._next(known.run, known.session, known.identity, known.order),
            "index_order": known.order or self._default_order,
            "seed": known.seed,
            "order": session.order,
            "reward": session.reward,
            "weights": session.held if session.holds else None,
        }

    def _shown_past(self, past: Past) -> dict[str, Any]:
        shown = self._shown(past.session)
        return shown if shown["next_index"] is None else shown | {"next_index": past.next}

    async def _uncreated(self, asked: Asked) -> dict[str, Any]:
        """A session that nobody created, or that is remembered no more: what the ledger tells of it."""
        folder, _ = self._runs.reading(asked.run)
        session = (await asyncio.to_thread(read_session, folder, asked.run, asked.name)).session
        if session.state == "open" and self._sessions.has_ended(asked.run, asked.name):
            session.state = "ended"
        return self._shown(session)

    def _next(self, run: str, session: str, name: str, order: str | None) -> int | None:
        """The next number of a session that counts as requests arrive; None where there is no such number."""
        if (order or self._default_order) == "content":
            return None
        return self._store.next_index(ScopeKey(run, session, name))

    def _together(self, group: Group, members: Iterable[dict[str, Any]]) -> dict[str, Any]:
        failed = group.failed
        return {
            "group_id": group.id,
            "identity": group.identity,
            "run": group.run,
            "size": group.size,
            "rejected": failed is not None,
            "why": None if failed is None else f"member {failed.known.member} failed: {failed.why}",
            "sessions": list(members),
        }


def _no_group_key() -> NotFound:
    return NotFound("This key opens a session, and no group.", code="group_not_found")


def _group_id(request: Request) -> str:
    return identity.text(identity.unescaped(request.path_params["group_id"], "group id"), "group id")


async def read(request: Request, shape: type[Shape]) -> Shape:
    """The body, whatever its content type. Raises `TooLarge`, and `RequestValidationError` for what is wrong in it."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise TooLarge(f"The body is larger than {LARGEST} bytes.")
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in found]) from None


def named(request: Request) -> Named:
    """Run and session as the data plane would read them: from the path, the run from X-Detgate-Run too."""
    params = request.path_params
    location = Location(request.url.path, params.get("run"), params.get("session_id"))
    return identity.named(location, dict(request.headers.raw))
