"""Which routes belong to the data plane: all that any engine has."""

from __future__ import annotations

from gateway import engines
from gateway.core import identity
from gateway.core.types import Api

API_OF: dict[str, Api] = {
    route: handling.api for name in engines.names() for route, handling in engines.load(name).ROUTES.items()
}
"""Whose shape errors have, by route."""

READ_FIELDS: tuple[str | tuple[str, str], ...] = (
    "model",
    "seed",
    "sampling_seed",
    "n",
    "stream",
    "priority",
    "rid",
    "request_id",
    "sampling_params",
    ("sampling_params", "seed"),
    ("sampling_params", "sampling_seed"),
    ("sampling_params", "n"),
    "min_p",
    ("sampling_params", "min_p"),
    "prompt",
    "input",
    "text",
    "input_ids",
    "messages",
)
"""Body fields that the gateway reads, which must therefore stand once."""


def api_of(path: str) -> Api:
    """Whose shape errors have on a request path."""
    return API_OF.get(identity.locate(path).route, "openai")


def is_data_plane(route: str) -> bool:
    """Whether a route, without the carriers of run and session, is one that the data plane answers."""
    return route in API_OF or route.startswith("/v1/models/")
