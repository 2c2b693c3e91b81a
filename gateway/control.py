"""The control plane: probes, metrics and the API's own description, as a FastAPI application."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import __version__, admin, findings, rl_api, sessions_api
from gateway.core.errors import CallerFault, Fault, NotFound, WrongMethod
from gateway.doors import OwnSite, Subject, Unencoded, refusal
from gateway.fleet import Fleet, Pool
from gateway.routes import API_OF
from gateway.runs import Runs
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.siblings import Host, Siblings
from gateway.stores import Store
from gateway.telemetry import Telemetry
from gateway.ui import site
from gateway.ui.clerk import Clerk

EXPOSITION = "text/plain; version=1.0.0; charset=utf-8"


def build(
    settings: Settings,
    runs: Runs,
    sessions: Sessions,
    store: Store,
    fleet: Fleet,
    telemetry: Telemetry,
    host: Host,
    siblings: Siblings,
    clerk: Clerk,
    draining: Callable[[], bool],
) -> FastAPI:
    """The application. What it shows is read when it is asked for."""
    run = runs.own
    app = FastAPI(title="detgate", version=__version__, docs_url=None, redoc_url=None)
    _errors(app, settings)
    app.add_middleware(Whole, routes=app.routes)
    app.add_middleware(Verbatim)
    app.add_middleware(Unencoded)
    app.add_middleware(OwnSite)
    app.add_middleware(Subject)
    # Taken over as they are: a router that is included has each of its routes taken apart a second time.
    app.router.routes += admin.build(settings, runs, sessions, fleet, siblings).routes
    app.router.routes += sessions_api.build(settings, runs, sessions, store).routes
    app.router.routes += rl_api.build(settings, runs, sessions, store).routes
    app.mount("/ui", site.build(settings, runs, sessions, fleet, clerk))

    @app.get("/livez", summary="The process runs")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Requests can be served")
    async def readyz(pool: str | None = None) -> Response:
        if pool is not None and pool not in fleet.pools:
            raise NotFound(f"There is no pool {pool!r}. Pools: {', '.join(fleet.pools)}.", param="pool")
        asked = [fleet.pools[pool]] if pool is not None else list(fleet)
        why_not = [why for each in asked if (why := _unready(each, settings)) is not None]
        probed = all(replica.state != "unknown" for each in asked for replica in each.replicas.values())
        if not probed:
            why_not.insert(0, "not every replica was probed yet")
        ready = probed and len(why_not) < len(asked) and not draining()
        if draining():
            why_not.insert(0, "shutting down")
        if not sessions.ready:
            ready = False
            why_not.insert(0, f"the sessions of run {run.name} are not known yet")
        if not siblings.ready:
            ready = False
            why_not.insert(0, f"what was changed in run {run.name} is not known yet")
        if (down := store.why_down(run.name)) is not None:
            ready = False
            why_not.insert(0, down)
        if (unwritable := run.ledger.unwritable()) is not None:
            ready = False
            why_not.insert(0, unwritable)
        if run.differs:
            ready = False
            why_not.insert(0, f"run {run.name} began with other settings: {', '.join(run.differs)}")
        told = {
            "status": "ready" if ready else "not ready",
            "why": why_not,
            "warnings": store.warnings,
            "run": run.name,
            "pools": {each.name: _state(each) for each in fleet},
        }
        return _json(200 if ready else 503, told)

    @app.get("/metrics", summary="Prometheus exposition")
    async def metrics() -> Response:
        return Response(telemetry.exposition(await host.numbers()), media_type=EXPOSITION)

    @app.get("/determinism", summary="What is known of the engines' determinism")
    async def determinism() -> dict[str, Any]:
        pools = {pool.name: _determinism(pool) for pool in fleet}
        strict = findings.strict_serves(
            fatal=any(pool.contradicts for pool in fleet), states=(replica.state for replica in fleet.replicas)
        )
        return {"profile": settings.profile, "run": run.name, "strict": strict, "pools": pools}

    describe = app.openapi

    def openapi() -> dict[str, Any]:
        described = describe()
        for path, operations in described["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        for route in API_OF:
            described["paths"].setdefault(route, _DATA_PLANE)
        return described

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add to an operation's description what its function does not show: ids in the path, errors, other types."""
    told = operation.setdefault("parameters", [])
    named = {each["name"] for each in told if each["in"] == "path"}
    text = {"type": "string", "minLength": 1}
    for name in re.findall(r"{(\w+)}", path):
        if name not in named:
            told.append({"name": name, "in": "path", "required": True, "schema": text})
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {"description": "An error object", "content": {"application/json": {}}}
    media = _MEDIA.get(path) or _MEDIA.get(path.rpartition("/")[2])
    if media is not None:
        responses["200"]["content"] = {media: {}}


def _allowed(app: FastAPI, path: str) -> str:
    """The methods that a path takes."""
    routes = (route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path))
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


_MEDIA = {"/metrics": "text/plain", "requests": "application/x-ndjson"}
"""Types of answers other than JSON, by path or its last part."""


_BY_ID = (b"/sessions/", b"/groups/", b"/runs/")


class Verbatim:
    """Where ids stand in the path it is left as it was sent: decoded first, an encoded slash would part an id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (raw := scope.get("raw_path", b"")).startswith(_BY_ID):
            scope = {**scope, "path": raw.partition(b"?")[0].decode("latin-1")}
        await self._app(scope, receive, send)


class Whole:
    """A path in which an id or a name is empty is refused with what is missing. It stands behind `Verbatim`."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and ("//" in scope["path"] or scope["path"].endswith("/")):
            filled = {**scope, "path": _EMPTY.sub(_MISSING, scope["path"])}
            for route in self._routes:
                if not isinstance(route, Route):
                    continue
                match, found = route.matches(filled)
                if match is Match.FULL:
                    empty = [name for name, value in found["path_params"].items() if value == _MISSING]
                    app = refusal(
                        CallerFault(
                            f"{' and '.join(empty)} must not be empty in {scope['path']}: ask for {route.path}.",
                            code="invalid_header",
                            param=empty[0],
                        )
                    )
                    break
        await app(scope, receive, send)


_EMPTY = re.compile(r"(?<=/)(?=/|$)")
_MISSING = "\0"
"""Stands for an empty part of a path while a route is looked for."""


_DATA_PLANE = {
    "post": {
        "summary": "Passed to a replica, with index, seed and request id decided",
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
        "responses": {
            "200": {"description": "The engine's own answer"},
            "default": {"description": "An error object"},
        },
    }
}


def _unready(pool: Pool, settings: Settings) -> str | None:
    """Why a pool cannot serve; None if it can."""
    if settings.profile == "strict" and (against := pool.contradicts) is not None:
        return f"{pool.name}: {against}"
    if not any(replica.usable for replica in pool.replicas.values()):
        return f"{pool.name}: no replica is up. {pool.why_down()}"
    if (refused := pool.lanes.why_down) is not None:
        return f"{pool.name}: the store refuses the keys of its lanes ({refused})"
    return None


def _state(pool: Pool) -> dict[str, Any]:
    return {
        "role": pool.role,
        "paused_since": pool.gate.since,
        "models": sorted(pool.models or ()),
        "replicas": {
            replica.name: {
                "state": replica.state,
                "breaker": "open" if replica.vitals.tripped else "closed",
                "foreign_traffic": replica.foreign,
                "draining": replica.draining,
                "in_flight": replica.load,
                "reason": replica.reason,
            }
            for replica in pool.replicas.values()
        },
    }


def _determinism(pool: Pool) -> dict[str, Any]:
    told = findings.report(pool.settings, pool.told, pool.findings)
    for name, replica in pool.replicas.items():
        told["replicas"][name] |= {"state": replica.state, "reason": replica.reason}
    return told


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _errors(app: FastAPI, settings: Settings) -> None:
    """Every error in the one shape that the data plane's errors have."""
    on = "" if settings.admin_port is None else " on the port for administration"

    @app.exception_handler(Fault)
    async def fault(request: Request, error: Fault) -> Response:
        return refusal(error)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refusal(Fault("The gateway failed; its log says why."))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return refusal(CallerFault("The client left before its request was whole."))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        if error.status_code == 405:
            allowed = _allowed(app, path)
            return refusal(WrongMethod(f"{path} takes {allowed}, not {request.method}.", allowed))
        if error.status_code == 404:
            told = f"There is no route {path} here. GET /openapi.json{on} lists those there are."
            return refusal(NotFound(told, code="route_not_found"))
        return refusal(CallerFault(str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if isinstance(error.body, bytes):
            return refusal(CallerFault("The body must be JSON, sent with Content-Type: application/json."))
        return refusal(CallerFault(f"{where}: {first['msg']}", param=where))
