"""One request on a connection of the fast carrier: its body as it comes, and the answer's bytes on their way back."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core import fields
from gateway.core.errors import Fault
from gateway.core.types import Request

SMALL = 4096
"""Bytes of a body's piece below which it is joined to the one before, so that crumbs cost no more than a loaf."""

LINGERS, RESETS = struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)
"""SO_LINGER: a closed socket sends what it holds and its end; it drops that and resets."""


class Connection(Protocol):
    """What a request needs of the connection that it came by."""

    transport: Any
    version: str
    cut: bool

    @property
    def paused(self) -> bool: ...
    def own_lines(self) -> bytes: ...
    def on_response_complete(self) -> None: ...
    def on_close(self, linger: bytes) -> None: ...
    def linger(self, client: Client) -> None: ...
    async def written(self) -> None: ...


class _Nothing:
    """Stands where uvicorn sets an event: the data plane waits for no body event."""

    def set(self) -> None: ...


_NOTHING = _Nothing()


class Client:
    """One request's way back to its client. uvicorn knows it as the connection's `cycle`."""

    __slots__ = (
        "_bare", "_chunked", "_head", "_protocol", "body", "disconnected", "expect", "held", "keep_alive", "length",
        "message_event", "more_body", "on_pause", "on_resume", "refusal", "request",
        "response_complete", "started", "task",
    )  # fmt: skip

    def __init__(self, protocol: Connection, request: Request, keep_alive: bool, expect: bool) -> None:
        self._protocol = protocol
        self._head: bytes | None = None
        self._chunked = False
        self._bare = False
        """The body ends with the connection: HTTP/1.0."""
        self.request = request
        self.keep_alive = keep_alive
        self.expect = expect
        self.body: list[bytes | bytearray] = []
        self.length = 0
        self.held = 0
        """Bytes of it that count as held here."""
        self.more_body = True
        self.refusal: Fault | None = None
        self.task: asyncio.Task[None] | None = None
        self.started = False
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NOTHING
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def version(self) -> str:
        return self._protocol.version

    def take(self, piece: bytes) -> None:
        """The next piece of the request's body."""
        body = self.body
        if body and len(piece) < SMALL:
            last = body[-1]
            if type(last) is bytearray:
                last += piece
                return
            body.append(bytearray(piece))
        else:
            body.append(piece)

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole answer at once."""
        self._head = None
        if self.disconnected:
            return
        protocol = self._protocol
        framing = b"" if status in fields.BODILESS else b"content-length: %d\r\n" % len(body)
        if self.request.method == "HEAD" or status in fields.BODILESS:
            body = b""
        data = b"%b%b%b%b%b\r\n%b" % (
            STATUS_LINE[status], protocol.own_lines(), headers, self._connection(), framing, body,
        )  # fmt: skip
        self.started = True
        protocol.transport.write(data)
        self._finish()

    def start(self, status: int, headers: bytes, length: int | None = None) -> None:
        """Status and headers of a streamed answer; they leave with its first bytes. `length`: of the body, if known."""
        protocol = self._protocol
        if status in fields.BODILESS:
            framing = b""
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif protocol.version == "1.1":
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False
            self._bare = True
            framing = b""
        own = protocol.own_lines()
        self._head = b"%b%b%b%b%b\r\n" % (STATUS_LINE[status], own, headers, self._connection(), framing)

    def write(self, data: bytes) -> None:
        """Some bytes of the body, at once."""
        if self.disconnected or not data:  # a chunk of nothing is the end
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head is not None:
            data, self._head = self._head + data, None
            self.started = True
            if self._bare:
                self._protocol.on_close(RESETS)
        self._protocol.transport.write(data)

    def end(self) -> None:
        """The body is whole."""
        if self.disconnected:
            return
        last = b"0\r\n\r\n" if self._chunked else b""
        if self._head is not None:
            last, self._head = self._head + last, None
            self.started = True
        if self._bare:
            self._protocol.on_close(LINGERS)
        if last:
            self._protocol.transport.write(last)
        self._finish()

    def break_off(self) -> None:
        """End without a clean end: the client sees a broken transfer."""
        self.keep_alive = False
        self.response_complete = True
        if not self.disconnected:
            self._protocol.transport.close()

    async def flushed(self) -> bool:
        """Wait until the client has taken what was written. False if it left instead."""
        if self._protocol.paused or not self.keep_alive:
            await self._protocol.written()
        return not (self.disconnected or self._protocol.cut)

    def _connection(self) -> bytes:
        if not self.keep_alive:
            return b"connection: close\r\n"
        return b"" if self._protocol.version == "1.1" else b"connection: keep-alive\r\n"

    def _finish(self) -> None:
        self.response_complete = True
        if self.more_body or not self.keep_alive:
            self._protocol.linger(self)
        else:
            self._protocol.on_response_complete()
