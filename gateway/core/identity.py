"""Who asks: run, session, identity and index order, read from the path and the headers and nowhere else."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from gateway.core.errors import CallerFault
from gateway.core.ids import random_like

ANONYMOUS = "anonymous"
"""The session of requests that name none."""

LARGEST_INDEX = 2**31 - 1
SESSION_BYTES = 256
KEY_BYTES = 256

_PREFIX = re.compile(r"(?:/runs/(?P<run>[^/]+))?(?:/sessions/(?P<session>[^/]+))?(?P<route>/.*)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGITS = re.compile(r"[0-9]{1,10}")


class Location(NamedTuple):
    """A request path taken apart: the carriers in front, as they stand there, and the route behind them."""

    route: str
    run: str | None = None
    session: str | None = None


class Caller(NamedTuple):
    """Who asks, as the request says it. Frozen: it goes into the ledger."""

    run: str | None
    session: str
    identity: str
    named: bool
    """False: the request names no session."""
    order: str
    number: int | None = None
    key: str | None = None
    repeat: int = 0
    """Which retry this is; 0: the first sending."""
    member: int | None = None
    random_session: bool = False
    """The session id holds a random id and no identity was given: seeds will differ in every run."""


def locate(path: str) -> Location:
    """Split the carriers of run and session from the route; repeated slashes are one."""
    if "//" in path:
        path = re.sub("/{2,}", "/", path)
    if not path.startswith(("/runs/", "/sessions/")):
        return Location(path)
    match = _PREFIX.fullmatch(path)
    if match is None:
        return Location(path)
    return Location(match["route"], match["run"], match["session"])


def identify(location: Location, headers: dict[bytes, bytes], default_order: str) -> Caller:
    """Read who asks. `headers` has names in lower case. Raises `CallerFault` for what cannot be read."""
    get = headers.get
    run = None if location.run is None else _text(unquote_to_bytes(location.run), "run")
    if (value := get(b"x-detgate-run")) is not None:
        run = _text(value, "X-Detgate-Run")
    if run is not None and _RUN.fullmatch(run) is None:
        raise _refuse("X-Detgate-Run", "1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    session = None if location.session is None else _text(unquote_to_bytes(location.session), "session id")
    if session is None and (value := get(b"x-session-id")) is not None:
        session = _text(value, "X-Session-ID")
    identity = None
    if (value := get(b"x-detgate-identity")) is not None:
        identity = _text(value, "X-Detgate-Identity")
    named = session is not None
    number = None
    if (value := get(b"x-request-index")) is not None:
        number = _integer(value, "X-Request-Index")
        if not named:
            raise CallerFault(
                "X-Request-Index needs a session: send X-Session-ID, or use the path /sessions/{id}/….",
                code="session_required",
                param="X-Request-Index",
            )
    member = None
    if (value := get(b"x-member-index")) is not None:
        member = _integer(value, "X-Member-Index")
    key = None
    if (value := get(b"idempotency-key")) is not None:
        key = _text(value, "Idempotency-Key", KEY_BYTES)
    return Caller(
        run=run,
        session=session if session is not None else ANONYMOUS,
        identity=identity or session or ANONYMOUS,
        named=named,
        order=_order(get(b"x-index-order"), number, named, default_order),
        number=number,
        key=key,
        repeat=_retry(get(b"x-stainless-retry-count")),
        member=member,
        random_session=identity is None and session is not None and random_like(session),
    )


def _order(header: bytes | None, number: int | None, named: bool, default: str) -> str:
    if number is not None:
        return "client"
    if header is not None:
        order = header.decode("latin-1").strip().lower()
        if order not in ("arrival", "content"):
            raise _refuse("X-Index-Order", "arrival or content")
        return order if named else "content"
    return default if named else "content"


def _text(value: bytes, name: str, limit: int = SESSION_BYTES) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise _refuse(name, "UTF-8") from None
    if not text or len(value) > limit or _CONTROL.search(text):
        raise _refuse(name, f"1 to {limit} bytes of UTF-8 without control characters")
    return text


def _integer(value: bytes, name: str) -> int:
    text = value.decode("latin-1").strip()
    if _DIGITS.fullmatch(text) is None or int(text) > LARGEST_INDEX:
        raise _refuse(name, f"an integer from 0 to {LARGEST_INDEX}")
    return int(text)


def _retry(value: bytes | None) -> int:
    """The retry's number. What is no number says that it is a retry all the same."""
    text = (value or b"0").decode("latin-1").strip()
    return int(text) if _DIGITS.fullmatch(text) else 1


def _refuse(name: str, wanted: str) -> CallerFault:
    return CallerFault(f"{name} must be {wanted}.", code="invalid_header", param=name)
