"""The control plane: probes, metrics and the API's own description, as a FastAPI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway import __version__
from gateway.core.errors import CallerFault, Fault, NotFound, WrongMethod
from gateway.core.shapes import error_body, error_headers
from gateway.fleet import Fleet, Pool
from gateway.routes import API_OF
from gateway.settings import Settings
from gateway.telemetry import Telemetry

EXPOSITION = "text/plain; version=1.0.0; charset=utf-8"


def build(settings: Settings, run: str, fleet: Fleet, telemetry: Telemetry) -> FastAPI:
    """The application. What it shows is read when it is asked for."""
    app = FastAPI(title="detgate", version=__version__, docs_url=None, redoc_url=None)
    _errors(app)

    @app.get("/livez", summary="The process runs")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Requests can be served")
    async def readyz(pool: str | None = None) -> Response:
        if pool is not None and pool not in fleet.pools:
            raise NotFound(f"There is no pool {pool!r}. Pools: {', '.join(fleet.pools)}.", param="pool")
        told = {"run": run, "pools": {each.name: _state(each) for each in fleet}}
        asked = [fleet.pools[pool]] if pool is not None else list(fleet)
        probed = all(replica.state != "unknown" for each in asked for replica in each.replicas.values())
        healthy = [any(replica.usable for replica in each.replicas.values()) for each in asked]
        ready = probed and (all(healthy) if pool is not None else any(healthy))
        told["status"] = "ready" if ready else "not ready"
        return _json(200 if ready else 503, told)

    @app.get("/metrics", summary="Prometheus exposition")
    async def metrics() -> Response:
        return Response(telemetry.exposition(), media_type=EXPOSITION)

    @app.get("/determinism", summary="What is known of the engines' determinism")
    async def determinism() -> dict[str, Any]:
        return {"profile": settings.profile, "run": run, "pools": {pool.name: _determinism(pool) for pool in fleet}}

    describe = app.openapi

    def openapi() -> dict[str, Any]:
        described = describe()
        for route in API_OF:
            described["paths"].setdefault(route, _DATA_PLANE)
        return described

    app.openapi = openapi  # type: ignore[method-assign]
    return app


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


def _state(pool: Pool) -> dict[str, Any]:
    return {
        "role": pool.role,
        "models": sorted(pool.models or ()),
        "replicas": {
            replica.name: {
                "state": replica.state,
                "draining": replica.draining,
                "in_flight": replica.load,
                "reason": replica.reason,
            }
            for replica in pool.replicas.values()
        },
    }


def _determinism(pool: Pool) -> dict[str, Any]:
    return {
        "engine": pool.settings.engine,
        "role": pool.role,
        "declared": pool.declared,
        "replicas": {
            name: {"state": replica.state, "deterministic": replica.facts.deterministic}
            for name, replica in pool.replicas.items()
        },
    }


def _json(status: int, body: Any) -> Response:
    import orjson

    return Response(orjson.dumps(body), status, media_type="application/json")


def _errors(app: FastAPI) -> None:
    """Every error in the one shape that the data plane's errors have."""

    def answer(fault: Fault) -> Response:
        headers = {name.decode(): value.decode() for name, value in error_headers(fault)}
        return Response(error_body(fault, "openai"), fault.status, headers)

    @app.exception_handler(Fault)
    async def fault(request: Request, error: Fault) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            return answer(WrongMethod(f"{request.url.path} does not take {request.method}."))
        if error.status_code == 404:
            return answer(NotFound(f"There is no route {request.url.path} here.", code="route_not_found"))
        return answer(CallerFault(str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(CallerFault(f"{where}: {first['msg']}", param=where))
