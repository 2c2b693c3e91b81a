"""The pages as an application: which there are, who may see them, and errors as pages too."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import parse_qs

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.core import identity
from gateway.core.errors import CallerFault, Fault, NotFound, TooLarge, Unauthorized, WrongMethod
from gateway.fleet import Fleet
from gateway.runs import Runs
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.ui import fleet as fleet_parts
from gateway.ui import runs as run_parts
from gateway.ui.clerk import Clerk
from gateway.ui.door import Door
from gateway.ui.frame import BOUND, Frame, note, page, sign
from gateway.ui.html import Markup, link, name, tag

log = structlog.get_logger("detgate.ui")

LARGEST = 8192
"""Bytes of the longest form."""

_TO = re.compile(r"(?:\.|lanes|sessions|requests|runs|diff)(?:\?[^\s\\]*)?", re.ASCII)
"""Where a visitor may be sent after logging in."""

Shown = Callable[[Request, Frame], Awaitable[Response]]


def build(settings: Settings, runs: Runs, sessions: Sessions, fleet: Fleet, clerk: Clerk) -> Starlette:
    """The application, to be mounted somewhere: all links in it are relative."""
    desk = Desk(settings, runs, sessions, fleet, clerk)
    style = (files("gateway.ui") / "style.css").read_bytes()

    async def stylesheet(request: Request) -> Response:
        return Response(style, 200, dict(BOUND), "text/css; charset=utf-8")

    return Starlette(
        routes=[
            Route("/", desk.shown(desk.replicas)),
            Route("/lanes", desk.shown(desk.lanes)),
            Route("/sessions", desk.shown(desk.sessions)),
            Route("/requests", desk.shown(desk.requests)),
            Route("/runs", desk.shown(desk.runs)),
            Route("/diff", desk.shown(desk.difference)),
            Route("/login", desk.login, methods=["GET", "POST"]),
            Route("/logout", desk.logout, methods=["POST"]),
            Route("/style.css", stylesheet),
        ],
        exception_handlers={Fault: desk.failed, HTTPException: desk.failed, Exception: desk.failed},
    )


class Desk:
    """Answers with pages."""

    def __init__(self, settings: Settings, runs: Runs, sessions: Sessions, fleet: Fleet, clerk: Clerk) -> None:
        self._ledger = settings.ledger.path
        self._profile = settings.profile
        self._shared = settings.state != "memory"
        self._workers = settings.workers
        self._runs, self._sessions, self._fleet, self._clerk = runs, sessions, fleet, clerk
        self._door = Door(settings)

    def shown(self, show: Shown) -> Callable[[Request], Awaitable[Response]]:
        """A page for those alone who may see it."""

        async def answer(request: Request) -> Response:
            self._door.check(request)
            return await show(request, self._frame(request))

        return answer

    def _frame(self, request: Request) -> Frame:
        return Frame(self._runs.own.name, self._profile, self._door.logged_in(request))

    # --- pages
    async def replicas(self, request: Request, frame: Frame) -> Response:
        """Pools and replicas, as this process sees them now."""
        return page(frame, "Replicas", self._now(), *fleet_parts.replicas(self._fleet, self._profile), here=".")

    async def lanes(self, request: Request, frame: Frame) -> Response:
        """Lanes, as this process sees them now."""
        return page(frame, "Lanes", self._now(), *fleet_parts.lanes(self._fleet), here="lanes")

    async def sessions(self, request: Request, frame: Frame) -> Response:
        """The sessions of a run, and where requests raced."""
        run, racing = self._run(request), "racing" in request.query_params
        folder, _ = self._runs.reading(run)
        gateways = await self._sessions.gateways(run)
        told = await self._clerk.ask("sessions", folder=str(folder), racing=racing, after=_after(request))
        parts = run_parts.sessions(told, run, racing, gateways)
        about = tag(
            "p", "Run ", name(run), ". ", link("requests", "Its requests", run=run), " · ", link("runs", "Other runs")
        )
        return page(frame, "Sessions", about, *parts, here="sessions")

    async def requests(self, request: Request, frame: Frame) -> Response:
        """The requests of a run, or of one session, in canonical order."""
        run, session = self._run(request), request.query_params.get("session")
        folder, live = self._runs.reading(run)
        gateways = await self._sessions.gateways(run)
        told = await self._clerk.ask("requests", folder=str(folder), session=session, after=_after(request))
        parts = run_parts.requests(told, run, session, live, gateways)
        about = tag("p", "Run ", name(run), ", in canonical order. ", link("sessions", "Its sessions", run=run))
        return page(frame, "Requests", about, *parts, here="runs")

    async def runs(self, request: Request, frame: Frame) -> Response:
        """The runs that are kept here, and the choice of two."""
        found, total = await asyncio.to_thread(run_parts.listed, self._ledger)
        choose = note("Choose two runs to see where they part.")
        return page(frame, "Runs", choose, *run_parts.runs(found, total, self._runs.own.name), here="runs")

    async def difference(self, request: Request, frame: Frame) -> Response:
        """Two runs compared."""
        a, b = (identity.run_name(request.query_params.get(side, "").encode(), side) for side in "ab")
        start = request.query_params.get("start", "0")
        if not start.isascii() or not start.isdecimal() or len(start) > 6:
            raise CallerFault("start must be a number.", code="invalid_cursor", param="start")
        answers = "answers" in request.query_params
        folders = [str(self._runs.reading(run)[0]) for run in (a, b)]
        told = await self._clerk.ask("difference", a=folders[0], b=folders[1], answers_only=answers, start=int(start))
        found, _ = await asyncio.to_thread(run_parts.listed, self._ledger)
        parts = run_parts.difference(told, a, b, answers, int(start))
        again = run_parts.choice(found, (a, b), answers)
        return page(frame, "Where two runs part", *parts, tag("h2", "Compare others"), again, here="runs")

    def _now(self) -> Markup:
        many = ""
        if self._workers > 1:
            many = f" These are the numbers of one of {self._workers} workers."
        elif self._shared:
            many = " These are the numbers of this gateway; others of the run have their own."
        return note("Run ", name(self._runs.own.name), ". As of ", run_parts.moment(time.time()), f".{many}")

    def _run(self, request: Request) -> str:
        named = request.query_params.get("run")
        return self._runs.own.name if named is None else identity.run_name(named.encode(errors="replace"), "run")

    # --- the door
    async def login(self, request: Request) -> Response:
        """The form, and what it sends."""
        if request.method != "POST":
            return _form(".", None, 200)
        given = await _sent(request)
        to = given.get("to", ".")
        to = to if _TO.fullmatch(to) else "."
        answer = RedirectResponse(to, 303, dict(BOUND))
        try:
            self._door.enter(request, given.get("key", ""), answer)
        except Unauthorized as fault:
            return _form(to, fault.message, fault.status)
        return answer

    async def logout(self, request: Request) -> Response:
        """Forget the visitor."""
        answer = RedirectResponse("login", 303, dict(BOUND))
        self._door.leave(request, answer)
        return answer

    # --- errors
    async def failed(self, request: Request, error: Exception) -> Response:
        """An error as a page. Who lacks the key is asked for it."""
        fault = _fault(request, error)
        if isinstance(fault, Unauthorized):
            path = request.url.path.rpartition("/")[2] or "."
            query = f"?{request.url.query}" if request.url.query else ""
            told = fault.message if "authorization" in request.headers or "x-api-key" in request.headers else None
            return _form(f"{path}{query}", told, fault.status)
        answer = page(
            None,
            "This page cannot be shown",
            tag("p", sign("bad", str(fault.status)), " ", fault.message),
            note("Code ", tag("code", fault.code)),
            tag("p", link(".", "To the first page")),
            status=fault.status,
        )
        if fault.retry_after is not None:
            answer.headers["retry-after"] = str(fault.retry_after)
        return answer


def _fault(request: Request, error: Exception) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return WrongMethod(f"This page does not take {request.method}.", (error.headers or {}).get("Allow", ""))
        return NotFound("There is no such page.", code="route_not_found")
    log.error("a page failed", path=request.url.path, exc_info=error)
    return Fault("The gateway failed; its log says why.")


def _form(to: str, wrong: str | None, status: int) -> Response:
    told = tag("p", sign("bad", wrong), role="alert", id="wrong") if wrong is not None else None
    form = tag(
        "form",
        told,
        tag("input", type="hidden", name="to", value=to),
        tag("label", "Admin key", for_="key"),
        tag(
            "input",
            type="password",
            name="key",
            id="key",
            autocomplete="current-password",
            required=True,
            aria_describedby="wrong" if wrong is not None else None,
            aria_invalid="true" if wrong is not None else None,
        ),
        tag("button", "Log in"),
        method="post",
        action="login",
        class_="field login",
    )
    answer = page(None, "Log in to detgate", form, status=status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


async def _sent(request: Request) -> dict[str, str]:
    """The fields of a form. Raises `TooLarge`."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise TooLarge(f"The form is larger than {LARGEST} bytes.")
    fields = parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=10)
    return {key: values[0] for key, values in fields.items()}


def _after(request: Request) -> str | None:
    return request.query_params.get("after")
