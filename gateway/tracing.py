"""Where requests are traced: what the request path needs of a trace, and how one is had.

Spans are made by OpenTelemetry's SDK, in `gateway.spans`, which is loaded where the configuration says where they go.
Where it does not, nothing of it is there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

from gateway.core.types import Request
from gateway.settings import InvalidSettings, Settings


class Trace(Protocol):
    """The spans of one request."""

    id: str
    """The trace that they are of, as 32 hex digits."""

    def sent(self, engine_id: str, replica: Any) -> bytes:
        """A call goes to a replica: begin its span. The header lines that name that to the replica."""

    def left(self, engine_id: str, status: int, *, complete: bool) -> None:
        """A call is over. `status`: of the replica's answer, 0 where none came."""

    def end(self, work: Any, outcome: str, error: str | None) -> None:
        """The request is over."""


class Tracing(Protocol):
    """Begins traces, and has them exported."""

    def begin(self, request: Request) -> Trace:
        """A request has come."""

    async def close(self) -> None:
        """Export what was not, for a bounded time."""


def build(settings: Settings) -> Tracing | None:
    """What the configuration wants; None: requests are not traced. Raises `InvalidSettings` without the packages."""
    if settings.tracing.endpoint is None:
        return None
    try:
        module = import_module("gateway.spans")
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            [
                f"tracing.endpoint: needs the package {(error.name or '').split('.')[0]}, which is not installed: "
                "pip install 'detgate[otel]'"
            ]
        ) from None
    return cast(Tracing, module.build(settings.tracing))
