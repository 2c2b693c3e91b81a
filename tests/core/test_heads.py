"""Heads that could be read in two ways are refused, and only those."""

from __future__ import annotations

import pytest

from gateway.core.errors import CallerFault
from gateway.core.heads import check, check_once, origin_form
from gateway.core.types import Headers

HOST = (b"host", b"gateway")


def checked(headers: Headers, method: bytes = b"POST", version: str = "1.1") -> int | None:
    """The status of the refusal; None: the head is good."""
    try:
        check(method, version, headers, dict(headers))
    except CallerFault as fault:
        return fault.status
    return None


@pytest.mark.parametrize(
    "value", [b"", b"a", b"a.b:80", b"[::1]", b"[::1]:8000", b"127.0.0.1:1", b"a_b", b"%41", b"a:"]
)
def test_a_host_is_a_name_or_an_address_and_a_port(value: bytes) -> None:
    assert checked([(b"host", value)]) is None


@pytest.mark.parametrize(
    "value", [b"a b", b"a/b", b"a@b", b"a?b", b"a#b", b"[::1", b"a:b", b"a:123456", b"a\xff", b"::1", b"a,b:80:90"]
)
def test_what_is_no_host_is_refused(value: bytes) -> None:
    assert checked([(b"host", value)]) == 400


@pytest.mark.parametrize(
    ("headers", "version", "status"),
    [
        ([HOST], "1.1", None),
        ([], "1.1", 400),
        ([], "1.0", None),
        ([HOST, HOST], "1.1", 400),
        ([HOST, HOST], "1.0", 400),
        ([HOST], "0.9", 505),
        ([HOST], "2.0", 505),
        ([HOST, (b"transfer-encoding", b"chunked")], "1.1", None),
        ([HOST, (b"transfer-encoding", b" Chunked\t")], "1.1", None),
        ([HOST, (b"transfer-encoding", b"chunked")], "1.0", 400),
        ([HOST, (b"transfer-encoding", b"gzip")], "1.1", 501),
        ([HOST, (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")], "1.1", 501),
        ([HOST, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], "1.1", 501),
        ([HOST, (b"x-a", b"1"), (b"x-a", b"2"), (b"accept", b"*"), (b"accept", b"*")], "1.1", None),
    ],
)
def test_heads(headers: Headers, version: str, status: int | None) -> None:
    assert checked(headers, version=version) == status


def test_tunnels_are_not_opened() -> None:
    assert checked([HOST], b"CONNECT") == 405


@pytest.mark.parametrize("name", [b"x-session-id", b"authorization", b"x-detgate-run", b"x-detgate-anything"])
def test_what_decides_stands_once(name: bytes) -> None:
    with pytest.raises(CallerFault) as caught:
        check_once([(name, b"1"), HOST, (name, b"1")])
    assert (caught.value.code, caught.value.param) == ("invalid_header", name.decode())


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"/a?b", b"/a?b"),
        (b"/a?b#c?d", b"/a?b"),
        (b"//a/b", b"//a/b"),
        (b"http://a/b?c", b"/b?c"),
        (b"HTTPS://[::1]:80/b#c", b"/b"),
        (b"http://a?b", b"/?b"),
        (b"http://a", b"/"),
        (b"http://a//b", b"//b"),
    ],
)
def test_targets_are_brought_to_one_form(target: bytes, origin: bytes) -> None:
    assert origin_form(b"GET", target) == origin


@pytest.mark.parametrize(
    "target", [b"*", b"a", b"a:80", b"ftp://a/b", b"http:///b", b"http://u:p@a/b", b"http:/a", b""]
)
def test_other_targets_are_refused(target: bytes) -> None:
    with pytest.raises(CallerFault):
        origin_form(b"GET", target)


def test_an_asterisk_is_for_options() -> None:
    assert origin_form(b"OPTIONS", b"*") == b"*"
