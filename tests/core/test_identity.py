"""Who asks: what path, headers and the session's creator say of it."""

from __future__ import annotations

import pytest

from gateway.core.errors import CallerFault, Conflict
from gateway.core.identity import Caller, Known, Named, identify, locate, named, run_name, text


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/models", {}, (None, None)),
        ("/sessions/a%2Fb/v1/models", {b"x-session-id": b"other"}, (None, "a/b")),
        ("/runs/r/sessions/s/v1/models", {}, ("r", "s")),
        ("/runs/r/v1/models", {b"x-detgate-run": b"q", b"x-session-id": "ü".encode()}, ("q", "ü")),
        ("//runs/r//sessions/s//v1///models", {}, ("r", "s")),
    ],
)
def test_names_come_from_the_path_before_the_headers_but_for_the_run(
    path: str, headers: dict[bytes, bytes], expected: tuple[str | None, str | None]
) -> None:
    assert named(locate(path), headers) == expected


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({b"x-session-id": b""}, "X-Session-ID"),
        ({b"x-session-id": b"a" * 257}, "X-Session-ID"),
        ({b"x-session-id": b"\xff"}, "X-Session-ID"),
        ({b"x-session-id": b"a\x7f"}, "X-Session-ID"),
        ({b"x-detgate-run": b"../up"}, "X-Detgate-Run"),
        ({b"x-detgate-run": b"a" * 129}, "X-Detgate-Run"),
    ],
)
def test_names_that_cannot_be_are_refused(headers: dict[bytes, bytes], param: str) -> None:
    with pytest.raises(CallerFault) as refused:
        named(locate("/v1/models"), headers)
    assert (refused.value.code, refused.value.param) == ("invalid_header", param)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sessions//v1/models", "session id"),
        ("//sessions///v1/models", "session id"),
        ("/sessions//chat/completions", "session id"),
        ("/sessions//x/v1/models", "session id"),
        ("/runs/r/sessions//v1/models", "session id"),
        ("/runs//sessions/s/v1/models", "run"),
        ("/runs//v1/models", "run"),
    ],
)
def test_a_name_in_the_path_is_not_left_out(path: str, param: str) -> None:
    with pytest.raises(CallerFault) as refused:
        named(locate(path), {b"x-session-id": b"other"})
    assert (refused.value.code, refused.value.param) == ("invalid_header", param)


PREFIXES = ["", "/sessions/s", "//sessions/s", "/runs/r", "/runs/r/sessions/s", "/runs/r//sessions/s"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_repeated_slashes_of_a_route_are_one(prefix: str) -> None:
    for route in ("//v1//chat/completions", "//chat//completions", "/v1/chat//completions"):
        assert locate(prefix + route).route == "/v1/chat/completions"


def test_bounds_of_names_are_inclusive() -> None:
    assert text(b"a" * 256, "x") == "a" * 256
    assert run_name(b"a" * 128) == "a" * 128


CREATED = Known("r", "a-1", "a", ordinal=1, order="content", seed=7, group="g", member=2)


def test_a_created_session_is_what_its_creator_said() -> None:
    caller = identify(Named(), {}, "arrival", CREATED)
    assert caller == Caller("r", "a-1", "a", True, "content", member=2, ordinal=1, seed=7, group="g")


def test_headers_may_say_of_a_created_session_what_its_creator_left_open() -> None:
    bare = Known("r", "a", "a")
    caller = identify(Named(), {b"x-member-index": b"3", b"x-index-order": b"content"}, "arrival", bare)
    assert (caller.member, caller.order) == (3, "content")
    assert identify(Named(), {b"x-request-index": b"5"}, "content", CREATED).order == "client"
    assert identify(Named(), {}, "content", bare).order == "content"


@pytest.mark.parametrize(
    ("name", "value", "same"), [("X-Detgate-Identity", b"b", b"a"), ("X-Member-Index", b"1", b"2")]
)
def test_no_header_contradicts_the_creator(name: str, value: bytes, same: bytes) -> None:
    header = name.lower().encode()
    assert identify(Named(), {header: same}, "arrival", CREATED).identity == "a"
    with pytest.raises(Conflict) as refused:
        identify(Named(), {header: value}, "arrival", CREATED)
    assert refused.value.param == name


def test_of_a_created_session_the_identity_is_what_must_not_be_random() -> None:
    uuid = "2f1b3c4d-5e6f-4a1b-8c2d-9e0f1a2b3c4d"
    assert identify(Named(), {}, "arrival", Known("r", uuid, uuid)).random_session
    assert identify(Named(), {b"x-detgate-identity": uuid.encode()}, "arrival", Known("r", uuid, uuid)).random_session
    assert not identify(Named(session="s"), {}, "arrival").random_session
    assert identify(Named(session=uuid), {}, "arrival").random_session
    for session in ("s", None, uuid):
        given = {b"x-detgate-identity": uuid.encode()}
        assert identify(Named(session=session), given, "arrival").random_session
    assert not identify(Named(session=uuid), {b"x-detgate-identity": b"17:3"}, "arrival").random_session
    assert not identify(Named(session=uuid), {b"x-detgate-identity": b"a"}, "arrival").random_session
