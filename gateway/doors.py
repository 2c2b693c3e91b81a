"""What stands before the control plane: which of it a port shows, and from where browsers may use it."""

from __future__ import annotations

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core import fields
from gateway.core.errors import Encoded, Fault, Forbidden, NotFound
from gateway.core.shapes import error_body, error_headers

_PUBLIC = frozenset({"/livez", "/readyz", "/sessions", "/grant_capacity", "/export_trajectories"})
_PUBLIC_BELOW = ("/sessions/", "/groups/", "/runs/", "/rl/", "/v1/")
"""What clients of the data plane need too."""

_HARMLESS = ("GET", "HEAD", "OPTIONS")


def refusal(fault: Fault) -> Response:
    """A fault as an answer, in the one shape that all errors have."""
    headers = {name.decode(): value.decode() for name, value in error_headers(fault)}
    return Response(error_body(fault, "openai"), fault.status, headers)


class Public:
    """The data plane's port, where administration has a port of its own: of the control plane what clients need."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in _PUBLIC and not path.startswith(_PUBLIC_BELOW):
            app: ASGIApp = refusal(
                NotFound(
                    f"There is no route {path} here. Administration and the list of routes have a port of their own.",
                    code="route_not_found",
                )
            )
        else:
            app = self._app
        await app(scope, receive, send)


class OwnSite:
    """A page of another site may not have a browser change anything here: such requests need no key to reach loopback.

    Browsers say where a request comes from; whatever is no browser says nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] not in _HARMLESS:
            site = next((value for name, value in scope["headers"] if name == b"sec-fetch-site"), b"none")
            if site not in (b"same-origin", b"none"):
                app = refusal(Forbidden("A page of another site may not ask for this.", code="cross_site"))
        await app(scope, receive, send)


class Unencoded:
    """What administration is asked is read as it came: a body that is said to be encoded is refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = scope["headers"]
            length = fields.find(headers, b"content-length") or b"0"
            if length != b"0" or fields.find(headers, b"transfer-encoding"):
                try:
                    fields.plain(headers)
                except Encoded as fault:
                    app = refusal(fault)
        await app(scope, receive, send)


class Subject:
    """Lines that are logged for a request of the control plane carry the id that its client gave it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
            if given is not None:
                structlog.contextvars.bind_contextvars(client_request_id=given.decode("latin-1"))
        await self._app(scope, receive, send)
