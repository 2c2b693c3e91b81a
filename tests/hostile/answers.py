"""Reads everything that comes back on a connection, strictly: what is no whole answer fails the test."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """One answer."""

    status: int
    headers: list[tuple[str, str]]
    """Names in lower case."""
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


def parse(data: bytes, methods: list[str] | None = None) -> list[Answer]:
    """The answers that the bytes are, to the last; interim ones left out. `methods`: what was asked, if not GET."""
    found: list[Answer] = []
    while data:
        method = methods[len(found)] if methods else "GET"
        answer, data = _first(data, method)
        if answer.status >= 200:
            found.append(answer)
    return found


def _first(data: bytes, method: str) -> tuple[Answer, bytes]:
    head, mark, rest = data.partition(b"\r\n\r\n")
    assert mark, f"no head: {data[:200]!r}"
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, _ = first.split(" ", 2)
    assert version == "HTTP/1.1", first
    pairs = [line.partition(": ") for line in lines]
    assert all(colon and name and " " not in name for name, colon, _ in pairs), lines
    headers = [(name.lower(), value) for name, _, value in pairs]
    answer = Answer(int(status), headers, b"")
    length, coding = answer.header("content-length"), answer.header("transfer-encoding")
    assert length is None or coding is None
    if answer.status < 200 or answer.status in (204, 304):
        assert length is None
        assert coding is None
        return answer, rest
    if method == "HEAD":
        return answer, rest
    if coding is not None:
        assert coding == "chunked"
        body, rest = _chunked(rest)
    else:
        assert length is not None, lines
        body, rest = rest[: int(length)], rest[int(length) :]
        assert len(body) == int(length), f"cut short: {data[:300]!r}"
    return answer._replace(body=body), rest


def _chunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, mark, data = data.partition(b"\r\n")
        assert mark, "no chunk"
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        body, data = body + data[:length], data[length + 2 :]
        if not length:
            return body, data
