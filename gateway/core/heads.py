"""What a request's head must be before anything is done with it.

Refused is what two HTTP readers in a row could read in two ways: the front of a gateway and the gateway, or the gateway
and a replica. What the parser itself refuses (two lengths, a length beside a transfer coding, folded lines, control
characters, bare line ends) is not looked for again.
"""

from __future__ import annotations

import re
from functools import lru_cache

from gateway.core.errors import CallerFault, WrongMethod
from gateway.core.types import Headers

_ONCE = frozenset(
    {
        b"authorization",
        b"content-type",
        b"idempotency-key",
        b"x-api-key",
        b"x-index-order",
        b"x-member-index",
        b"x-request-index",
        b"x-session-id",
        b"x-stainless-retry-count",
    }
)
"""Fields that decide who asks, for what; and so does every `x-detgate-…`."""

_NO_TRAILERS = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""What would come too late: where a message ends, and what becomes of the connection. The parser heeds some of it."""

_ABSOLUTE = re.compile(rb"https?://(?:[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]+)(/[^?#]*)?(\?[^#]*)?(?:#.*)?", re.IGNORECASE)
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")


class _TransferCodingUnsupported(CallerFault):
    status = 501
    code = "transfer_coding_unsupported"


class _VersionUnsupported(CallerFault):
    status = 505
    code = "http_version_unsupported"


def check(method: bytes, version: str, headers: Headers, by_name: dict[bytes, bytes]) -> None:
    """Raise `CallerFault` for a head that is not clear. `by_name`: the same fields, of a repeated one the last."""
    if version == "1.1":
        host = by_name.get(b"host")
        if host is None:
            raise _invalid("it has no Host")
        if not _names_host(host):
            raise _invalid("its Host is none")
    elif version != "1.0":
        raise _VersionUnsupported(f"HTTP/{version} is not spoken here. Use HTTP/1.1.")
    if method == b"CONNECT":
        raise WrongMethod("This is no proxy: it opens no tunnels.", "GET, POST, DELETE")
    if (coding := by_name.get(b"transfer-encoding")) is not None:
        _check_coding(version, coding, headers)
    if len(by_name) != len(headers):
        check_once(headers)


def check_once(headers: Headers) -> None:
    """Raise `CallerFault` where a field that decides stands twice: which of them counts, others may see otherwise."""
    seen = set()
    for name, _ in headers:
        if name == b"host" or name in _ONCE or name.startswith(b"x-detgate-"):
            if name in seen:
                shown = name.decode()
                if name == b"host":
                    raise _invalid("it has more than one Host")
                raise CallerFault(f"{shown} stands more than once; send it once.", code="invalid_header", param=shown)
            seen.add(name)


def check_trailer(name: bytes) -> None:
    """Raise `CallerFault` for a field that belongs in front of the body."""
    if name.lower() in _NO_TRAILERS:
        raise _invalid(f"{name.decode()} stands behind its body")


def origin_form(method: bytes, target: bytes) -> bytes:
    """A request's target as path and query. What names a server is cut off, since this is the one; so is a fragment.

    Raises `CallerFault` for a target of no form that the method takes.
    """
    if target.startswith(b"/"):
        return target.partition(b"#")[0]
    if target == b"*" and method == b"OPTIONS":
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise _invalid("its target is neither a path nor an http URL")
    return (match[1] or b"/") + (match[2] or b"")


def _check_coding(version: str, coding: bytes, headers: Headers) -> None:
    if version == "1.0":
        raise _invalid("HTTP/1.0 knows no Transfer-Encoding")
    if coding.strip(b" \t").lower() != b"chunked" or sum(name == b"transfer-encoding" for name, _ in headers) > 1:
        raise _TransferCodingUnsupported(
            "The only transfer coding that is read is chunked. Send the body so, or whole."
        )


@lru_cache(maxsize=64)
def _names_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def _invalid(why: str) -> CallerFault:
    return CallerFault(f"The request is not valid HTTP/1.1: {why}.", code="invalid_http")
