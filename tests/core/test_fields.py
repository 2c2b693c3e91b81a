from __future__ import annotations

import pytest

from gateway.core import fields
from gateway.core.types import Headers


def up(*headers: tuple[bytes, bytes]) -> bytes:
    return fields.upstream(list(headers))


@pytest.mark.parametrize(
    "name",
    [
        b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-authorization",
        b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"api-key", b"cookie",
        b"x-request-id", b"x-session-id", b"x-request-index", b"idempotency-key", b"x-detgate-pool",
        b"x-data-parallel-rank", b"origin", b"traceparent", b"tracestate",
    ],
)  # fmt: skip
def test_what_is_between_neighbours_secret_or_meant_for_the_gateway_does_not_go_upstream(name: bytes) -> None:
    assert up((name, b"v"), (b"x-kept", b"1")) == up((b"x-kept", b"1"))


def test_fields_named_by_any_connection_field_are_dropped() -> None:
    lines = up((b"connection", b"x-drop, close"), (b"x-drop", b"1"), (b"connection", b"X-Other"), (b"x-other", b"2"))
    assert b"drop" not in lines
    assert b"other" not in lines


def test_everything_else_goes_upstream_in_order_and_repeated() -> None:
    lines = up((b"user-agent", b"me"), (b"accept", b"a"), (b"accept", b"b"))
    assert lines.endswith(b"user-agent: me\r\naccept: a\r\naccept: b\r\n")


def test_a_replicas_server_date_framing_and_promises_stay_behind_and_its_cookies_pass() -> None:
    headers: Headers = [
        (b"server", b"uvicorn"), (b"date", b"x"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"),
        (b"content-length", b"3"), (b"transfer-encoding", b"chunked"), (b"connection", b"x-hop"), (b"x-hop", b"1"),
        (b"content-type", b"text/plain"), (b"access-control-allow-origin", b"*"), (b"access-control-max-age", b"9"),
        (b"x-detgate-guarantee", b"strict"), (b"x-detgate-seed", b"1"),
    ]  # fmt: skip
    kept: Headers = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-type", b"text/plain")]
    assert fields.downstream(headers) == fields.lines(kept) == b"".join([b"%b: %b\r\n" % field for field in kept])


@pytest.mark.parametrize("value", [b"", b"a", b"a: b", b" a ", b"\xe9,:"])
def test_lines_are_read_as_they_were_written(value: bytes) -> None:
    headers: Headers = [(b"x-one", value), (b"x-one", b"1"), (b"x-two", value)]
    assert fields.read(fields.lines(headers)) == headers
    assert fields.read(b"") == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"text/event-stream", True), (b"Text/Event-Stream; charset=utf-8", True), (b"application/json", False)],
)
def test_an_event_stream_is_known_by_its_type(value: bytes, expected: bool) -> None:
    assert fields.is_stream(value) is expected
    assert fields.is_stream(b"") is False
