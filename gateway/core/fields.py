"""Which HTTP header fields go through the gateway, in both directions."""

from __future__ import annotations

from gateway.core.errors import Encoded
from gateway.core.types import Headers

BODILESS = (204, 304)
"""Statuses whose answers have no body, and no word of one."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Fields between two neighbours: RFC 9110, section 7.6.1."""

_NOT_UPSTREAM = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    b"content-encoding",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    b"x-request-id",
    b"x-data-parallel-rank",
    b"x-session-id",
    b"x-request-index",
    b"x-index-order",
    b"x-member-index",
    b"idempotency-key",
    b"origin",
    b"traceparent",
    b"tracestate",
}
_CORS = frozenset(
    b"access-control-" + name
    for name in (
        b"allow-credentials",
        b"allow-headers",
        b"allow-methods",
        b"allow-origin",
        b"allow-private-network",
        b"expose-headers",
        b"max-age",
    )
)
"""What would let other sites' pages read answers: engines send it to everyone."""

_NOT_DOWNSTREAM = HOP_BY_HOP | _CORS | {b"server", b"date", b"content-length", b"x-request-id"}


def upstream(headers: Headers) -> bytes:
    """The client's fields that a replica gets, as lines. Never its keys, its cookies or what was meant for the gateway.

    `accept-encoding` stays here too: the gateway reads the answers. So do `traceparent` and `tracestate`, which are
    passed on where they are good: `gateway.core.traces`. A body that was read has no coding, and no word of one.
    """
    dropped = _with_named(_NOT_UPSTREAM, headers)
    kept = [
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name not in dropped and not name.startswith(b"x-detgate-")
    ]
    if applied := codings(headers):
        kept.append(b"content-encoding: %b\r\n" % b", ".join(applied))
    return b"".join(kept)


def downstream(headers: Headers) -> bytes:
    """The replica's fields that the client gets, as lines. What this gateway alone may say of an answer is never among
    them. Length and framing belong to the carrier.
    """
    dropped = _with_named(_NOT_DOWNSTREAM, headers)
    return b"".join(
        [
            b"%b: %b\r\n" % (name, value)
            for name, value in headers
            if name not in dropped and not name.startswith(b"x-detgate-")
        ]
    )


def codings(headers: Headers) -> list[bytes]:
    """How a body is encoded, the last applied last: RFC 9110, section 8.4. `identity` is no coding."""
    told = [value for name, value in headers if name == b"content-encoding"]
    if not told:
        return []
    names = [each.strip().lower() for each in b",".join(told).split(b",")]
    return [name for name in names if name not in (b"", b"identity")]


def plain(headers: Headers) -> None:
    """Raise `Encoded` where a body is said to be encoded, whatever it looks like."""
    if found := codings(headers):
        coding = b", ".join(found).decode("latin-1")
        raise Encoded(f"The body is encoded (Content-Encoding: {coding:.40}). Send it as it is.")


def lines(headers: Headers) -> bytes:
    """Fields as they stand in a message's head: each a line with its end."""
    return b"".join([b"%b: %b\r\n" % field for field in headers])


def read(lines: bytes) -> Headers:
    """The fields of such lines."""
    return [(name, value) for name, _, value in [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]]


def is_stream(content_type: bytes) -> bool:
    """Whether an answer of this type is a stream of server-sent events."""
    return content_type[:17].lower() == b"text/event-stream"


def find(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a field."""
    return next((value for key, value in headers if key == name), None)


def _with_named(dropped: frozenset[bytes], headers: Headers) -> frozenset[bytes]:
    """`dropped`, and the fields that any line of Connection names."""
    for name, value in headers:
        if name == b"connection" and value != b"keep-alive":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return dropped
