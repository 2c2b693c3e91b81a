"""Who asks: run, session, identity and index order, read from the path and the headers and nowhere else."""

from __future__ import annotations

import re
from typing import NamedTuple, cast
from urllib.parse import unquote_to_bytes

from gateway.core.errors import CallerFault, Conflict
from gateway.core.ids import LARGEST_INDEX, random_like
from gateway.core.indexing import Kind

ANONYMOUS = "anonymous"
"""The session of requests that name none."""

SESSION_BYTES = 256
KEY_BYTES = 256

_PREFIX = re.compile(r"(?:/+runs/(?P<run>[^/]*))?(?:/+sessions/(?P<session>[^/]*))?(?P<route>/.*)")
_SLASHES = re.compile("/{2,}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DIGITS = re.compile(r"[0-9]{1,10}")


_SHORT = {"/chat/completions": "/v1/chat/completions", "/responses": "/v1/responses"}
"""Routes as clients write them whose base URL ends before `/v1`."""


class Location(NamedTuple):
    """A request path taken apart: the carriers in front, as they stand there, and the route behind them."""

    route: str
    run: str | None = None
    session: str | None = None


class Named(NamedTuple):
    """The run and the session that a request names, read and found good. None: it names none."""

    run: str | None = None
    session: str | None = None


class Known(NamedTuple):
    """A session that was created before it was used, as its creator described it."""

    run: str
    session: str
    identity: str
    ordinal: int = 0
    """0 for the first session of its identity in the run, k for the one after k others."""
    order: str | None = None
    """Its index order, where it has one of its own."""
    seed: int | None = None
    """Its own master seed."""
    group: str | None = None
    member: int | None = None
    """Its place in the group, from 0."""


class Caller(NamedTuple):
    """Who asks, as the request says it. Frozen: it goes into the ledger."""

    run: str | None
    session: str
    identity: str
    named: bool
    """False: the request names no session."""
    order: Kind
    number: int | None = None
    key: str | None = None
    repeat: int = 0
    """Which retry this is; 0: the first sending."""
    member: int | None = None
    random_session: bool = False
    """What stands for the identity holds a random id: seeds will differ in every run."""
    ordinal: int = 0
    seed: int | None = None
    """The session's own master seed."""
    group: str | None = None


def locate(path: str) -> Location:
    """Split the carriers of run and session from the route; repeated slashes are one, and short routes are whole.

    Behind `/runs/` and `/sessions/` stands a name: a slash there says that it is empty.
    """
    doubled = "//" in path
    if doubled:
        path = "/" + path.lstrip("/")
    if not path.startswith(("/runs/", "/sessions/")):
        return Location(_route(path, doubled))
    match = _PREFIX.fullmatch(path)
    if match is None:
        return Location(path)
    return Location(_route(match["route"], doubled), match["run"], match["session"])


def _route(path: str, doubled: bool) -> str:
    if doubled:
        path = _SLASHES.sub("/", path)
    return _SHORT.get(path, path)


def named(location: Location, headers: dict[bytes, bytes]) -> Named:
    """The run and the session that path and headers name. `headers` has names in lower case. Raises `CallerFault`."""
    run = None if location.run is None else run_name(unescaped(location.run, "run"), "run")
    if (value := headers.get(b"x-detgate-run")) is not None:
        run = run_name(value)
    elif run is None and location.session is None and b"x-session-id" not in headers:
        return _NAMELESS
    session = None if location.session is None else text(unescaped(location.session, "session id"), "session id")
    if session is None and (value := headers.get(b"x-session-id")) is not None:
        session = text(value, "X-Session-ID")
    return Named(run, session)


_NAMELESS = Named()
_TELLING = (b"x-detgate-identity", b"x-request-index", b"x-member-index", b"idempotency-key", b"x-index-order")


def identify(names: Named, headers: dict[bytes, bytes], default_order: Kind, known: Known | None = None) -> Caller:
    """Read who asks. `known`: the session, if it was created. Raises `CallerFault` for what cannot be read.

    What a session was created with stands: a header that says otherwise is a `Conflict`.
    """
    if known is None and _says_no_more(headers):
        run, session = names
        if session is None:
            return Caller(run, ANONYMOUS, ANONYMOUS, False, "content")
        return Caller(run, session, session, True, default_order, None, None, 0, None, random_like(session))
    get = headers.get
    run, session = (known.run, known.session) if known is not None else names
    identity = None
    if (value := get(b"x-detgate-identity")) is not None:
        identity = text(value, "X-Detgate-Identity")
    number = None
    if (value := get(b"x-request-index")) is not None:
        number = integer(value, "X-Request-Index")
        if session is None:
            raise CallerFault(
                "X-Request-Index needs a session: send X-Session-ID, or use the path /sessions/{id}/….",
                code="session_required",
                param="X-Request-Index",
            )
    member = None
    if (value := get(b"x-member-index")) is not None:
        member = integer(value, "X-Member-Index")
    key = None
    if (value := get(b"idempotency-key")) is not None:
        key = text(value, "Idempotency-Key", KEY_BYTES)
    caller = Caller(
        run=run,
        session=session if session is not None else ANONYMOUS,
        identity=identity or session or ANONYMOUS,
        named=session is not None,
        order=_order(get(b"x-index-order"), number, session is not None, _default(known) or default_order),
        number=number,
        key=key,
        repeat=_retry(get(b"x-stainless-retry-count")),
        member=member,
        random_session=random_like(identity or session or ANONYMOUS),
    )
    return caller if known is None else _as_created(caller, known, identity)


def _says_no_more(headers: dict[bytes, bytes]) -> bool:
    """Whether headers tell nothing of the caller but run and session, as most do."""
    for name in _TELLING:
        if name in headers:
            return False
    return headers.get(b"x-stainless-retry-count", b"0") == b"0"


def _default(known: Known | None) -> Kind | None:
    return None if known is None else cast(Kind | None, known.order)


def _as_created(caller: Caller, known: Known, identity: str | None) -> Caller:
    """What the session's creator said of it, which no header may contradict."""
    for told, created, name in (
        (identity, known.identity, "X-Detgate-Identity"),
        (caller.member, known.member, "X-Member-Index"),
    ):
        if told is not None and created is not None and told != created:
            raise Conflict(
                f"Session {known.session} was created with {created}, and {name} says {told}. Leave the header out.",
                code="session_conflict",
                param=name,
            )
    return caller._replace(
        identity=known.identity,
        member=known.member if known.member is not None else caller.member,
        random_session=random_like(known.identity),
        ordinal=known.ordinal,
        seed=known.seed,
        group=known.group,
    )


def _order(header: bytes | None, number: int | None, named: bool, default: Kind) -> Kind:
    if number is not None:
        return "client"
    if header is None:
        return default if named else "content"
    order = header.decode("latin-1").strip().lower()
    if order == "content":
        return "content"
    if order != "arrival":
        raise _refuse("X-Index-Order", "arrival or content")
    return "arrival" if named else "content"


def unescaped(part: str, name: str) -> bytes:
    """A part of a path without its percent escapes. Raises `CallerFault` that names `name` where one is none."""
    if _NO_ESCAPE.search(part) is not None:
        raise _refuse(name, "percent-encoded: two hex digits behind each %")
    return unquote_to_bytes(part)


def text(value: bytes, name: str, limit: int = SESSION_BYTES) -> str:
    """An id: 1 to `limit` bytes of UTF-8 without control characters. Raises `CallerFault` that names `name`."""
    try:
        decoded = value.decode()
    except UnicodeDecodeError:
        raise _refuse(name, "UTF-8") from None
    if not decoded or len(value) > limit or _CONTROL.search(decoded):
        raise _refuse(name, f"1 to {limit} bytes of UTF-8 without control characters")
    return decoded


def run_name(value: bytes, name: str = "X-Detgate-Run") -> str:
    """A run's name, which is a folder's too. Raises `CallerFault` that names `name`."""
    run = text(value, name)
    if _RUN.fullmatch(run) is None:
        raise _refuse(name, "1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return run


def integer(value: bytes, name: str, largest: int = LARGEST_INDEX) -> int:
    """A number from 0 in a header. Raises `CallerFault` that names it."""
    digits = value.decode("latin-1").strip()
    if _DIGITS.fullmatch(digits) is None or int(digits) > largest:
        raise _refuse(name, f"an integer from 0 to {largest}")
    return int(digits)


def _retry(value: bytes | None) -> int:
    """The retry's number. What is no number says that it is a retry all the same."""
    digits = (value or b"0").decode("latin-1").strip()
    return int(digits) if _DIGITS.fullmatch(digits) else 1


def _refuse(name: str, wanted: str) -> CallerFault:
    return CallerFault(f"{name} must be {wanted}.", code="invalid_header", param=name)
