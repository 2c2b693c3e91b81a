"""Requests at the edge of HTTP/1.1 and beyond it, and what must come of each."""

from __future__ import annotations

import json
from typing import NamedTuple

from tests.harness import chat

BODY = json.dumps(chat("edge")).encode()
HOST = b"Host: gateway\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: gateway\r\n\r\n"


class Case(NamedTuple):
    """What is sent, and the statuses of all answers."""

    name: str
    sent: bytes
    answers: list[int]
    ends: bool = False
    """The gateway ends the connection then; else it goes on with the next request."""


def post(*lines: bytes, path: bytes = b"/v1/chat/completions", version: bytes = b"1.1", body: bytes = BODY) -> bytes:
    """A request with these header lines, each with its line end."""
    return b"POST %b HTTP/%b\r\n%b\r\n%b" % (path, version, b"".join(lines), body)


def get(target: bytes, method: bytes = b"GET", version: bytes = b"1.1", lines: bytes = HOST) -> bytes:
    """A request without a body."""
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, lines)


def chunks(body: bytes, size: bytes | None = None, end: bytes = b"\r\n", trailer: bytes = b"") -> bytes:
    """A chunked body of one chunk; `size`: the line that tells its size."""
    line = b"%x" % len(body) if size is None else size
    return b"%b%b%b%b0%b%b%b" % (line, end, body, end, end, trailer, end)


def chunked(size: bytes | None = None, **parts: bytes) -> bytes:
    return post(HOST, CHUNKED, body=chunks(BODY, size, **parts))


SIZE = b"%x" % len(BODY)


def _fine(name: str, sent: bytes, *answers: int) -> Case:
    return Case(name, sent, list(answers or (200,)))


def _refused(name: str, sent: bytes, *answers: int) -> Case:
    return Case(name, sent, list(answers or (400,)), ends=True)


HOSTS = [
    _fine("host", post(HOST, LENGTH)),
    _fine("host with a port", post(b"Host: gateway:8000\r\n", LENGTH)),
    _fine("host of IPv6", post(b"hoSt:\t[::1]:8000\r\n", LENGTH)),
    _fine("empty host", post(b"Host:\r\n", LENGTH)),
    _fine("HTTP/1.0 needs none", get(b"/livez", version=b"1.0", lines=b"Connection: keep-alive\r\n"))._replace(
        ends=True
    ),
    _refused("no host", post(LENGTH)),
    _refused("no host, control plane", get(b"/livez", lines=b"")),
    _refused("two hosts", post(HOST, b"Host: other\r\n", LENGTH)),
    _refused("the same host twice", post(HOST, HOST, LENGTH)),
    _refused("a host with a space", post(b"Host: a b\r\n", LENGTH)),
    _refused("a host with a path", post(b"Host: gateway/v1\r\n", LENGTH)),
    _refused("a host with a user", post(b"Host: user@gateway\r\n", LENGTH)),
]

LENGTHS = [
    _refused("length and chunked", post(HOST, LENGTH, CHUNKED, body=chunks(BODY))),
    _refused("chunked and length", post(HOST, CHUNKED, LENGTH, body=chunks(BODY))),
    _refused("the same length twice", post(HOST, LENGTH, LENGTH)),
    _refused("two lengths", post(HOST, LENGTH, b"Content-Length: 3\r\n")),
    _refused("a list of lengths", post(HOST, b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY)))),
    *(
        _refused(f"length {value!r}", post(HOST, b"Content-Length: %b\r\n" % value))
        for value in (b"+5", b"-1", b"0x10", b"", b"1_0", b"5 5", b"5;", b"9" * 30, b"\xc2\xb2")
    ),
    _refused("a space before the colon", post(HOST, b"Content-Length : %d\r\n" % len(BODY))),
    _refused("more than may be", post(HOST, b"Content-Length: 9223372036854775808\r\n"), 413),
    _refused(
        "more than may be, with leave asked", post(HOST, b"Content-Length: 99999999\r\nExpect: 100-continue\r\n"), 413
    ),
    _fine("none at all", post(HOST, body=b""), 400),
]

CODINGS = [
    _fine("chunked", chunked()),
    _fine("CHUNKED", post(HOST, b"Transfer-Encoding: CHUNKED\r\n", body=chunks(BODY))),
    *(
        _refused(f"coding {value!r}", post(HOST, b"Transfer-Encoding: %b\r\n" % value, body=chunks(BODY)), 501)
        for value in (b"identity", b"gzip", b"gzip, chunked", b"xchunked", b"chunkedx", b"x, chunked", b'"chunked"')
    ),
    *(
        _refused(f"coding {value!r}", post(HOST, b"Transfer-Encoding: %b\r\n" % value, body=chunks(BODY)))
        for value in (b"chunked, gzip", b"chunked, chunked", b"\x0bchunked", b"chunked\x00")
    ),
    _refused("chunked twice", post(HOST, CHUNKED, CHUNKED, body=chunks(BODY))),
    _refused("gzip, then chunked", post(HOST, b"Transfer-Encoding: gzip\r\n", CHUNKED, body=chunks(BODY)), 501),
    _refused("chunked in HTTP/1.0", post(HOST, CHUNKED, version=b"1.0", body=chunks(BODY))),
    _refused(
        "chunked in HTTP/1.0, kept alive",
        post(HOST, b"Connection: keep-alive\r\n", CHUNKED, version=b"1.0", body=chunks(BODY)),
    ),
    _refused("length in HTTP/1.0", post(LENGTH, version=b"1.0"), 200),
    _fine("length in HTTP/1.0, kept alive", post(b"Connection: keep-alive\r\n", LENGTH, version=b"1.0")),
]

CHUNKS = [
    _fine("an extension", chunked(SIZE + b";a=b")),
    _fine("a quoted extension", chunked(SIZE + b';a="b;c"')),
    _fine("a size with zeros", chunked(b"000" + SIZE)),
    _fine("a size in capitals", chunked(SIZE.upper())),
    _fine("a trailer", chunked(trailer=b"X-Checksum: 1\r\n")),
    *(
        _refused(f"a size {size!r}", chunked(size))
        for size in (
            b"",
            b"0x" + SIZE,
            b"+" + SIZE,
            b"-1",
            b" " + SIZE,
            SIZE + b" ",
            b"4_2",
            b"g",
            b"f" * 17,
            b"f" * 32,
        )
    ),
    _refused("bare LF behind sizes", chunked(end=b"\n")),
    _refused("bare CR behind sizes", chunked(end=b"\r")),
    _refused("bare LF in an extension", chunked(SIZE + b";a\nb")),
    _refused("data beyond its size", post(HOST, CHUNKED, body=SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n")),
    *(
        _refused(f"a trailer {line!r}", chunked(trailer=line + b"\r\n"))
        for line in (
            b"Content-Length: 3",
            b"transfer-encoding: chunked",
            b"Connection: close",
            b"HOST: a",
            b"Proxy-Connection: close",
        )
    ),
    _refused("a trailer with a NUL", chunked(trailer=b"X-A: \x00\r\n")),
    _refused("a trailer above the bound", chunked(trailer=b"X-A: %b\r\n" % (b"a" * 9000)), 431),
    _refused("trailers above the bound", chunked(trailer=b"X-A: a\r\n" * 4000), 431),
]

LINES = [
    _refused("a folded line", post(HOST, LENGTH, b"X-A: b\r\n c\r\n")),
    _refused("a folded first line", post(b" X-A: b\r\n", HOST, LENGTH)),
    *(
        _refused(f"{byte!r} in a value", post(HOST, LENGTH, b"X-A: b%bc\r\n" % byte))
        for byte in (b"\x00", b"\x01", b"\x07", b"\x08", b"\x0b", b"\x0c", b"\x1b", b"\x7f", b"\r", b"\n")
    ),
    *(
        _refused(f"{byte!r} in a name", post(HOST, LENGTH, b"X%bA: b\r\n" % byte))
        for byte in (b"\x00", b" ", b"\t", b"\x7f", b"\xe9", b"(", b"[", b"@", b'"', b"\r", b"\n")
    ),
    _refused("no name", post(HOST, LENGTH, b": b\r\n")),
    _refused("no colon", post(HOST, LENGTH, b"X-A\r\n")),
    _refused("bare LF everywhere", post(HOST, LENGTH).replace(b"\r\n", b"\n")),
    _refused("bare LF at the end of the head", post(HOST, LENGTH).replace(b"\r\n\r\n", b"\r\n\n", 1)),
    _refused("bare CR at the end of the head", get(b"/livez").replace(b"\r\n\r\n", b"\r\n\rX: y\r\n\r\n", 1)),
    _fine("Latin text", post(HOST, LENGTH, b"X-A: \xe9\xff\r\n")),
    _fine("an empty value", post(HOST, LENGTH, b"X-A:\r\n")),
    _fine("a name with an underscore", post(HOST, LENGTH, b"Content_Length: 3\r\n")),
    _refused("a head above the bound", post(HOST, LENGTH, b"X-A: %b\r\n" % (b"a" * 9000)), 431),
    _refused("too many lines", post(HOST, LENGTH, b"X-A: a\r\n" * 4000), 431),
    _refused("a name above the bound", post(HOST, LENGTH, b"%b: a\r\n" % (b"a" * 9000)), 431),
]

TARGETS = [
    _fine("absolute", post(HOST, LENGTH, path=b"http://gateway/v1/chat/completions")),
    _fine("absolute, another host", post(HOST, LENGTH, path=b"HTTP://other:80/v1/chat/completions?a=b")),
    _fine("absolute, control plane", get(b"https://gateway/livez#x")),
    _fine("absolute, no path", get(b"http://gateway"), 404),
    _fine("a fragment", post(HOST, LENGTH, path=b"/v1/chat/completions?a=b#c")),
    _fine("asterisk", get(b"*", b"OPTIONS"), 404),
    _refused("asterisk for another method", get(b"*")),
    _refused("absolute, a user", get(b"http://user:word@gateway/livez")),
    _refused("absolute, another scheme", get(b"ftp://gateway/livez")),
    _refused("authority", get(b"gateway:80")),
    _refused("relative", get(b"livez")),
    _refused("tunnel", get(b"gateway:443", b"CONNECT"), 405),
    _refused("tunnel to a path", get(b"/livez", b"CONNECT"), 405),
    *(
        _refused(f"{byte!r} in it", get(b"/li%bvez" % byte))
        for byte in (b"\x00", b" ", b"\t", b"\x01", b"\x7f", b"\xff")
    ),
    _refused("raw UTF-8 in it", post(HOST, LENGTH, path="/sessions/é/v1/chat/completions".encode())),
    _refused("above the bound", get(b"/" + b"a" * 9000), 414),
    _refused("a query above the bound", post(HOST, LENGTH, path=b"/v1/chat/completions?" + b"a" * 9000), 414),
    _fine("long", get(b"/" + b"a" * 8000), 404),
    _fine("bad escape in a session", post(HOST, LENGTH, path=b"/sessions/%zz/v1/chat/completions"), 400),
    _fine("cut escape in a session", post(HOST, LENGTH, path=b"/sessions/a%4/v1/chat/completions"), 400),
    _fine("bad escape in a run", post(HOST, LENGTH, path=b"/runs/%zz/v1/chat/completions"), 400),
    *(
        _fine(
            f"{escaped!r} in a session", post(HOST, LENGTH, path=b"/sessions/a%bb/v1/chat/completions" % escaped), 400
        )
        for escaped in (b"%0d%0aX-Evil:%201", b"%00", b"%7f", b"%ff", b"%c2%85", b"%ed%a0%80", b"%c0%af")
    ),
    _fine("slash in a session", post(HOST, LENGTH, path=b"/sessions/a%2F..%2Fb/v1/chat/completions")),
]

STARTS = [
    _refused("HTTP/1.2", get(b"/livez", version=b"1.2")),
    _refused("HTTP/2.0", get(b"/livez", version=b"2.0"), 505),
    _refused("HTTP/0.9", b"GET /livez\r\n\r\n", 505),
    _refused("no version", b"GET /livez \r\n" + HOST + b"\r\n"),
    _refused("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    _refused("http/1.1", b"GET /livez http/1.1\r\n" + HOST + b"\r\n"),
    _refused("a method in small letters", get(b"/livez", b"get")),
    _refused("an unknown method", get(b"/livez", b"BREW")),
    _refused("a space first", b" " + LIVEZ),
    _refused("a tab for a space", LIVEZ.replace(b" ", b"\t", 1)),
    _refused("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    _fine("empty lines first", b"\r\n\r\n" + LIVEZ),
    _fine("a body where none belongs", get(b"/livez", lines=HOST + b"Content-Length: 5\r\n") + b"hello"),
]

WISHES = [
    _fine("websocket", get(b"/livez", lines=HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n")),
    _fine("upgrade with a body", post(HOST, LENGTH, b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n")),
    _fine("upgrade with chunks", post(HOST, CHUNKED, b"Connection: upgrade\r\nUpgrade: x\r\n", body=chunks(BODY))),
    _fine("two upgrades", post(HOST, LENGTH, b"Connection: upgrade\r\nUpgrade: x\r\n") * 2, 200, 200),
    _refused(
        "an upgrade, then no host",
        post(HOST, LENGTH, b"Connection: upgrade\r\nUpgrade: x\r\n") + post(LENGTH),
        200,
        400,
    ),
    _refused(
        "an upgrade with a body that is too large",
        post(HOST, b"Content-Length: 99999999\r\nConnection: upgrade\r\nUpgrade: x\r\n"),
        413,
    ),
    _fine("continue", post(HOST, LENGTH, b"Expect: 100-continue\r\n")),
    _fine("continue in HTTP/1.0", post(b"Connection: keep-alive\r\nExpect: 100-continue\r\n", LENGTH, version=b"1.0")),
    _fine("another expectation", post(HOST, LENGTH, b"Expect: wonders\r\n")),
    _refused("close", post(HOST, LENGTH, b"Connection: close\r\n"), 200),
]

TWICE = [
    *(
        _refused(f"{name.decode()} twice", post(HOST, LENGTH, b"%b: 1\r\n" % name, b"%b: 1\r\n" % name.upper()))
        for name in (b"x-session-id", b"x-detgate-identity", b"x-request-index", b"authorization", b"idempotency-key")
    ),
    _fine("another one twice", post(HOST, LENGTH, b"X-A: 1\r\nX-A: 2\r\n")),
]

AHEAD = [
    _fine("two ahead", post(HOST, LENGTH) * 2, 200, 200),
    _fine("the planes by turns", (post(HOST, LENGTH) + LIVEZ) * 3, *[200] * 6),
    _refused("then garbage", post(HOST, LENGTH) + LIVEZ + b"GARBAGE\r\n\r\n", 200, 200, 400),
    _refused("then a bad body", LIVEZ + chunked(b"g"), 200, 400),
    _refused(
        "then a bad body for the control plane",
        LIVEZ * 2 + chunked(b"g").replace(b"/v1/chat/completions", b"/sessions"),
        200,
        200,
        400,
    ),
    _refused("then too large a body", LIVEZ + post(HOST, b"Content-Length: 99999999\r\n"), 200, 413),
]

CASES = [*HOSTS, *LENGTHS, *CODINGS, *CHUNKS, *LINES, *TARGETS, *STARTS, *WISHES, *TWICE, *AHEAD]
