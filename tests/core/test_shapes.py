"""Faults and engines' errors with the bytes that a client gets of them."""

from __future__ import annotations

import json

import pytest

from gateway.core.errors import (
    Busy,
    CallerFault,
    Fault,
    ModelNotFound,
    TooLarge,
    Unauthorized,
    UpstreamTimeout,
    WrongMethod,
)
from gateway.core.observer import Observer
from gateway.core.shapes import error_body, error_headers, normalised, stream_error
from gateway.core.types import Api
from tests import captures

NO_REASON = "The replica answered {} and gave no reason."
FAULT = CallerFault("min_p ends it.", code="min_p_unsupported", param="min_p")


@pytest.mark.parametrize("api", ["openai", "responses", "native"])
def test_openai_object(api: Api) -> None:
    assert json.loads(error_body(FAULT, api)) == {
        "error": {
            "message": "min_p ends it.",
            "type": "invalid_request_error",
            "param": "min_p",
            "code": "min_p_unsupported",
        }
    }


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (FAULT, "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (ModelNotFound("x"), "not_found_error"),
        (TooLarge("x"), "request_too_large"),
        (Busy("x"), "overloaded_error"),
        (UpstreamTimeout("x"), "timeout_error"),
        (Fault("x"), "api_error"),
    ],
)
def test_anthropic_object_has_its_own_types(fault: Fault, kind: str) -> None:
    body = json.loads(error_body(fault, "anthropic"))
    assert body == {"type": "error", "error": {"type": kind, "message": fault.message}}


@pytest.mark.parametrize("api", ["openai", "anthropic", "responses", "native"])
def test_a_fault_may_tell_what_no_json_can_hold(api: Api) -> None:
    fault = CallerFault("Served: \ud800é.", code="\udfff", param="\ud83d")
    error = json.loads(error_body(fault, api))["error"]
    assert error["message"] == "Served: ?é."
    if api != "anthropic":
        assert (error["code"], error["param"]) == ("?", "?")
    assert b'"Served: ?\xc3\xa9."' in stream_error(fault, api)


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("body", [b'{"detail": %b}', b'{"message": "no", "param": %b}', b"%b"])
def test_an_engine_may_say_more_deeply_than_can_be_written(body: bytes, api: Api) -> None:
    said = normalised(400, body % (b"[" * 600 + b"]" * 600), api)
    assert said is not None
    assert json.loads(said)["error"]["message"]


def test_a_header_holds_no_line_end() -> None:
    headers = error_headers(WrongMethod("x", "GET\r\nset-cookie: a\ud800é"))
    assert dict(headers)[b"allow"] == b"GET??set-cookie: a??"


def test_headers() -> None:
    assert error_headers(FAULT) == [
        (b"content-type", b"application/json"),
        (b"x-should-retry", b"false"),
    ]
    assert error_headers(Busy("x", retry_after=7)) == [
        (b"content-type", b"application/json"),
        (b"retry-after", b"7"),
    ]


@pytest.mark.parametrize("api", ["openai", "anthropic", "responses", "native"])
def test_a_stream_that_breaks_says_so_in_its_own_shape(api: Api) -> None:
    event = stream_error(UpstreamTimeout("it broke"), api, 5)
    assert event.endswith(b"\n\n")
    assert b"[DONE]" not in event
    observer = Observer(api, "sample")
    observer.feed(event)
    assert observer.result().error == "it broke"
    assert not observer.result().ended


def test_stream_errors_by_name() -> None:
    assert stream_error(FAULT, "openai") == b"data: " + error_body(FAULT, "openai") + b"\n\n"
    assert stream_error(FAULT, "anthropic") == b"event: error\ndata: " + error_body(FAULT, "anthropic") + b"\n\n"
    head, data = stream_error(FAULT, "responses", 5).strip().split(b"\ndata: ")
    assert head == b"event: error"
    assert json.loads(data) == {
        "type": "error",
        "sequence_number": 5,
        "code": "min_p_unsupported",
        "message": "min_p ends it.",
        "param": "min_p",
    }


ERRORS = [
    (engine, name)
    for engine in ("vllm", "sglang")
    for name in captures.names(engine)
    if captures.load(engine, name).status >= 400 and captures.load(engine, name).path.startswith("/v1/")
]


@pytest.mark.parametrize(("engine", "name"), ERRORS)
def test_real_errors_come_in_the_shape_of_their_route(engine: str, name: str) -> None:
    capture = captures.load(engine, name)
    api: Api = "anthropic" if "/messages" in capture.path else "openai"
    shaped = normalised(capture.status, capture.body, api)
    body = json.loads(shaped if shaped is not None else capture.body)
    error = body["error"]
    assert error["message"]
    sent = json.loads(capture.body)
    assert error["message"] in (sent.get("error") or sent).get("message", sent.get("detail"))
    assert isinstance(error["type"], str)
    if api == "anthropic":
        assert body["type"] == "error"
    assert normalised(capture.status, json.dumps(body).encode(), api) is None


def test_a_right_body_is_not_touched() -> None:
    assert normalised(400, b'{"error":{"message":"x","type":"t","param":null,"code":400}}', "openai") is None
    assert normalised(400, b'{"type":"error","error":{"type":"t","message":"x"}}', "anthropic") is None
    assert normalised(200, b'{"detail":"Not Found"}', "openai") is None
    assert normalised(404, b'{"detail":"Not Found"}', "native") is None


@pytest.mark.parametrize(
    ("status", "body", "message", "kind", "code"),
    [
        (404, '{"detail":"Not Found"}', "Not Found", "not_found_error", 404),
        (401, '{"error":"Unauthorized"}', "Unauthorized", "authentication_error", 401),
        (
            400,
            '{"object":"error","message":"n!","type":"BadRequestError","param":"n","code":40001}',
            "n!",
            "BadRequestError",
            40001,
        ),
        (422, '{"detail":[{"msg":"m"}]}', '[{"msg":"m"}]', "invalid_request_error", 422),
        (502, "<html>Bad Gateway</html>", "<html>Bad Gateway</html>", "server_error", 502),
        (500, "Internal Server Error", "Internal Server Error", "server_error", 500),
        (503, "", NO_REASON.format("503 Service Unavailable"), "overloaded_error", 503),
        (599, "{}", NO_REASON.format(599), "server_error", 599),
        (500, "null", NO_REASON.format("500 Internal Server Error"), "server_error", 500),
        (400, '["a"]', '["a"]', "invalid_request_error", 400),
        (400, '{"error":{"reason":"r"}}', '{"reason":"r"}', "invalid_request_error", 400),
        (400, '{"message":"m","type":7}', "m", "invalid_request_error", 400),
    ],
)  # fmt: skip
def test_other_shapes_keep_their_message(status: int, body: str, message: str, kind: str, code: int) -> None:
    shaped = normalised(status, body.encode(), "openai")
    assert shaped is not None
    error = json.loads(shaped)["error"]
    assert (error["message"], error["type"], error["code"]) == (message, kind, code)
    assert set(error) == {"message", "type", "param", "code"}
    shaped = normalised(status, body.encode(), "anthropic")
    assert shaped is not None
    assert json.loads(shaped)["error"]["message"] == message


def test_an_openai_object_on_an_anthropic_route() -> None:
    shaped = normalised(400, b'{"error":{"message":"x","type":"Bad Request","code":400}}', "anthropic")
    assert shaped is not None
    assert json.loads(shaped) == {"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}


def test_a_page_is_cut() -> None:
    shaped = normalised(502, b"x" * 100_000, "openai")
    assert shaped is not None
    assert len(shaped) < 5000
