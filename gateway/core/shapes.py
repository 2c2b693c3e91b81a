"""Faults as bytes, in the shape of each API: OpenAI's error object, Anthropic's on /v1/messages.

The one place where an error becomes JSON, for the gateway's own faults and for those of engines that answer a
/v1 route in a shape that no SDK reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson

from gateway.core.errors import Fault, WrongMethod
from gateway.core.types import Api, Headers

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""https://docs.anthropic.com/en/api/errors and the SDK's ErrorType; other statuses are by their hundred."""

_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_LONGEST = 4096
"""Characters kept of a body that is no JSON, such as a proxy's page."""

_DEEPEST = 100
"""Levels kept of what an engine says."""

_UNSAFE = re.compile("[^ -~]")
"""What a header's value must not hold."""


def error_body(fault: Fault, api: Api) -> bytes:
    """The body of an answer that is a fault."""
    if api == "anthropic":
        return _dumps(_anthropic(fault.status, fault.message))
    return _dumps({"error": _openai(fault)})


def error_headers(fault: Fault) -> Headers:
    """The headers that go with it. `x-should-retry: false` keeps the SDKs from asking again in vain."""
    headers = [(b"content-type", b"application/json")]
    if fault.retry_after is not None:
        headers.append((b"retry-after", b"%d" % fault.retry_after))
    if isinstance(fault, WrongMethod):
        headers.append((b"allow", _UNSAFE.sub("?", fault.allow).encode()))
    if fault.retry is False:
        headers.append((b"x-should-retry", b"false"))
    return headers


def stream_error(fault: Fault, api: Api, sequence: int = 0) -> bytes:
    """The event that ends a stream as broken. No `[DONE]` follows: a client would take the answer for whole.

    `sequence`: what comes after the last `sequence_number` of a Responses stream.
    """
    if api == "anthropic":
        return b"event: error\ndata: %b\n\n" % error_body(fault, api)
    if api == "responses":
        event = {
            "type": "error",
            "sequence_number": sequence,
            "code": fault.code,
            "message": fault.message,
            "param": fault.param,
        }
        return b"event: error\ndata: %b\n\n" % _dumps(event)
    return b"data: %b\n\n" % error_body(fault, api)


def normalised(status: int, body: bytes, api: Api) -> bytes | None:
    """An engine's error on a /v1 route in the shape of that route's API, its message kept.

    None where the bytes are to pass as they are: no error, a native route, or the right shape already.
    """
    if status < 400 or api == "native":
        return None
    found = _read(body)
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        if api != "anthropic" or (found.get("type") == "error" and isinstance(error.get("type"), str)):
            return None
        return _dumps(_anthropic(status, error["message"]))
    message = _message(found) or f"The replica answered {_phrase(status)} and gave no reason."
    if api == "anthropic":
        return _dumps(_anthropic(status, message))
    flat = found if isinstance(found, dict) else {}
    kind = flat.get("type")
    return _dumps(
        {
            "error": {
                "message": message,
                "type": kind if isinstance(kind, str) else _openai_type(status),
                "param": flat.get("param"),
                "code": flat.get("code", status),
            }
        }
    )


def _dumps(found: object) -> bytes:
    """As JSON, though what a replica or a client said may not fit into it."""
    try:
        return orjson.dumps(found)
    except orjson.JSONEncodeError:
        return orjson.dumps(_sound(found, _DEEPEST))


def _sound(found: Any, levels: int) -> Any:
    """The same without lone surrogates, and no deeper than that."""
    if isinstance(found, str):
        return found.encode(errors="replace").decode()
    if isinstance(found, dict | list) and not levels:
        return "..."
    if isinstance(found, dict):
        return {name: _sound(value, levels - 1) for name, value in found.items()}
    return [_sound(each, levels - 1) for each in found] if isinstance(found, list) else found


def _openai(fault: Fault) -> dict[str, Any]:
    return {"message": fault.message, "type": fault.type, "param": fault.param, "code": fault.code}


def _anthropic(status: int, message: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _phrase(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _read(body: bytes) -> Any:
    """The body as JSON, else as text."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:_LONGEST]


def _message(found: Any) -> str:
    """The words of an error body: `message`, `error`, `detail` or the whole, whichever is there first."""
    if isinstance(found, str):
        return found
    if not isinstance(found, dict):
        return _text(found)
    for name in ("message", "error", "detail"):
        if found.get(name):
            return _text(found[name])
    return _text(found) if found else ""


def _text(found: Any) -> str:
    if isinstance(found, str):
        return found
    return "" if found is None else _dumps(found).decode()
