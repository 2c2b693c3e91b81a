"""The data plane as a plain ASGI application, for any ASGI server; slower than `http1`, and the same to the client.

What an application sees of a client that takes nothing is a server that takes nothing: then the request ends, and the
replica is let go. The connection is the server's, which may keep it until the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

from gateway.core import fields, heads
from gateway.core.errors import Fault, TooLarge
from gateway.core.shapes import error_body, error_headers
from gateway.core.types import Headers, Request
from gateway.intake import Intake
from gateway.routes import api_of
from gateway.tasks import start, stop

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]


class Plane(Protocol):
    """What this carrier needs of the data plane."""

    intake: Intake
    body_bytes: int
    write_seconds: float

    def refused(self, code: str) -> None: ...
    def owns(self, path: str) -> bool: ...
    async def serve(self, request: Request, client: Any) -> None: ...


class Client:
    """One request's way back. What the pipeline writes at once is queued for the server to send."""

    def __init__(self) -> None:
        self.started = False
        self.response_complete = False
        self.disconnected = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self._head: Message | None = None
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._queued = 0
        self._clean = True
        self._offered_at: float | None = None
        """Since when the server has not taken what it was given."""

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        bodiless = status in fields.BODILESS
        self.start(status, headers, None if bodiless else len(body))
        self.write(b"" if bodiless else body)
        self.end()

    def start(self, status: int, headers: bytes, length: int | None = None) -> None:
        if length is not None:
            headers += b"content-length: %d\r\n" % length
        self._head = {"type": "http.response.start", "status": status, "headers": fields.read(headers)}

    def write(self, data: bytes) -> None:
        self._leave()
        self._put({"type": "http.response.body", "body": data, "more_body": True})

    def end(self) -> None:
        self._leave()
        self._put({"type": "http.response.body", "body": b"", "more_body": False})
        self._queue.put_nowait(None)
        self.response_complete = True

    def break_off(self) -> None:
        self._clean = False
        self._queue.put_nowait(None)
        self.response_complete = True

    async def flushed(self) -> bool:
        await self._queue.join()
        return not self.disconnected

    def abandon(self) -> None:
        """What the client has not taken it never will."""
        self.disconnected = True
        while not self._queue.empty():
            self._queue.get_nowait()
            self._queue.task_done()

    async def pump(self, send: Send) -> bool:
        """Hand over what is written until the end. False: the answer was broken off."""
        loop = asyncio.get_running_loop()
        while (message := await self._queue.get()) is not None:
            try:
                for piece in _pieces(message):
                    self._offered_at = loop.time()
                    await send(piece)
                    self._offered_at = None
            finally:
                self._queue.task_done()
            if self.on_resume is not None and self._queue.empty():
                self.on_resume()
        self._queue.task_done()
        return self._clean

    async def stalled(self, seconds: float) -> None:
        """Wait until the server has taken nothing for so long although it was given something."""
        loop = asyncio.get_running_loop()
        waited = 0.0
        while waited < seconds:
            await asyncio.sleep(seconds - waited)
            waited = 0.0 if self._offered_at is None else loop.time() - self._offered_at

    def _leave(self) -> None:
        if self._head is not None:
            self.started = True
            self._put(self._head)
            self._head = None

    def _put(self, message: Message) -> None:
        self._queue.put_nowait(message)
        if self.on_pause is not None and self._queue.qsize() > PAUSE_AT:
            self.on_pause()


PAUSE_AT = 64
"""Messages that wait for a slow client before the replica is not read any more."""


PIECE = 65536
"""Bytes that a server is given at once: that it takes them shows that the client goes on reading."""


def _pieces(message: Message) -> Iterator[Message]:
    body: bytes = message.get("body", b"")
    if len(body) <= PIECE:
        yield message
        return
    for at in range(0, len(body), PIECE):
        yield {**message, "body": body[at : at + PIECE]}


class Broken(Exception):
    """Tells the server to break the transfer: the answer could not be ended cleanly."""


class DataPlane:
    """An ASGI application in front of another: the data plane's routes are answered here."""

    def __init__(self, plane: Plane, rest: Application) -> None:
        self._plane = plane
        self._rest = rest

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._plane.owns(_path(scope)):
            await self._rest(scope, receive, send)
            return
        try:
            heads.check_once([(name.lower(), value) for name, value in scope["headers"]])
            body = await self._body(receive)
        except Fault as fault:
            self._plane.refused(fault.code)
            client = Client()
            client.reply(fault.status, fields.lines(error_headers(fault)), error_body(fault, api_of(_path(scope))))
            await client.pump(send)
            return
        if body is None:
            return
        await self._serve(_request(scope, body), receive, send)

    async def _body(self, receive: Receive) -> bytes | None:
        chunks: list[bytes] = []
        size = 0
        intake = self._plane.intake
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                intake.bytes += len(chunks[-1])
                if size > self._plane.body_bytes:
                    raise TooLarge(f"The body is larger than {self._plane.body_bytes} bytes. Send less.")
                if intake.bytes > intake.most_bytes:
                    raise intake.no_room()
                if not message.get("more_body", False):
                    return b"".join(chunks)
        finally:
            intake.bytes -= size

    async def _serve(self, request: Request, receive: Receive, send: Send) -> None:
        client = Client()
        serving = start(self._plane.serve(request, client), "request")
        pumping = start(client.pump(send), "answer")
        leaving = start(_leave(receive, client, pumping), "client")
        stalling = start(client.stalled(self._plane.write_seconds), "stalled client")
        try:
            await asyncio.wait((pumping, leaving, stalling), return_when=asyncio.FIRST_COMPLETED)
            if not pumping.done() or pumping.exception() is not None:
                await stop(pumping)
                client.abandon()
            if client.response_complete:
                await serving
            if pumping.cancelled():
                if not leaving.done():
                    raise Broken
            elif not pumping.result():
                raise Broken
        finally:
            await stop(serving, pumping, leaving, stalling)


async def _leave(receive: Receive, client: Client, pumping: asyncio.Task[bool]) -> None:
    """Wait until the client leaves. It is noted at once: a server takes all for one that has left, and drops it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client.disconnected = not pumping.done()


def _request(scope: Any, body: bytes) -> Request:
    headers: Headers = [(name.lower(), value.strip(b" \t")) for name, value in scope["headers"]]
    query = scope.get("query_string", b"").decode("latin-1")
    return Request(scope["method"], _path(scope), query, headers, dict(headers), body)


def _path(scope: Any) -> str:
    """The path as it was sent: decoded, an encoded slash in a session id would part it."""
    raw = scope.get("raw_path")
    path: str = raw.split(b"?")[0].decode("latin-1") if raw else scope["path"]
    return path
