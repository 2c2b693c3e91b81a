"""The data plane's fast carrier: HTTP/1.1 straight from uvicorn's socket, with no ASGI in between.

A subclass of uvicorn's own httptools protocol, given to it as `http=`. It serves the data plane's routes itself and
leaves all others to the ASGI application. It adds what uvicorn has not: bounds on head and body, and deadlines.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from contextlib import suppress
from typing import Any, Protocol

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.carriers.client import RESETS, Client
from gateway.core import fields, heads
from gateway.core.errors import Busy, CallerFault, Fault, TooLarge, TooSlow
from gateway.core.shapes import error_body, error_headers
from gateway.core.types import Request
from gateway.intake import Intake, Seat
from gateway.routes import api_of

LINGER_SECONDS = 10.0
"""How long the rest of a refused body is read and dropped, so that the client can read why."""

PIPELINED = 32
"""Requests that one connection may send ahead of their answers."""

BODY_RATE = 16384
"""Bytes a second that a client must send on average, beyond `body_seconds`."""

IDLE, HEAD, BODY, ENDING = range(4)

log = structlog.get_logger("detgate.http")


class _HeadTooLarge(CallerFault):
    status = 431
    code = "head_too_large"


class _TargetTooLong(CallerFault):
    status = 414
    code = "target_too_long"


class _Enough(Exception):
    """Nothing more is read on this connection."""


def _head_too_large() -> Fault:
    return _HeadTooLarge("The request's head is too large. Send fewer or shorter headers.")


class Plane(Protocol):
    """What a carrier needs of the data plane."""

    intake: Intake
    head_bytes: int
    body_bytes: int
    head_seconds: float
    body_seconds: float
    write_seconds: float

    @property
    def draining(self) -> bool: ...
    def owns(self, path: str) -> bool: ...
    def refused(self, code: str) -> None: ...
    async def serve(self, request: Request, client: Any) -> None: ...


_UNKNOWN = Request("", "", "", [], {}, b"")
"""A request that could not be read."""


class Carrier(HttpToolsProtocol):
    """uvicorn's protocol, with the data plane's routes served here.

    `overdue` is asked once a second of every connection instead of a timer a request.
    """

    def __init__(self, plane: Plane, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.plane = plane
        self._seat: Seat = "dropped"
        self._own_headers: list[tuple[bytes, bytes]] = []
        self._own_lines = b""
        self.version = "1.1"
        self.active: Client | None = None
        self._phase = IDLE
        self._since = self.loop.time()
        self._head_bytes = 0
        self._unread = 0
        """Bytes that came since a head or a piece of a body was last whole."""
        self._upgrade = False
        self._deaf = False
        self._paused_since: float | None = None
        self._unsent = 0
        """Bytes that the client had not taken at the last look; 0 where none was yet."""
        self._writers: list[asyncio.Future[None]] = []
        self._held = False
        """What is asked next waits until the client has taken what was written."""
        self._lost = False
        self.cut = False
        """The client has left, or was left, before it had taken all that was written."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        intake = self.plane.intake
        self._seat = intake.enter()
        if self._seat == "refused":
            self._fail(intake.no_seat())
        elif self._seat == "dropped":
            self._deaf = True
            transport.abort()
            self.plane.refused(intake.no_seat().code)

    # --- reading
    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unread += len(data)
        rest = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            rest = data[error.args[0] :]
        except httptools.HttpParserCallbackError as error:
            self._stop(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(CallerFault(f"The request is not valid HTTP/1.1: {error}.", code="invalid_http"))
        else:
            if self._unread > self.plane.head_bytes and self._phase != IDLE:
                self._fail(_head_too_large())
        if rest is not None:  # not where the error is handled: a fault behind it would hide in that one's context
            self._read_on(rest)

    def _read_on(self, rest: bytes) -> None:
        """No change of protocol is made: the request is read anew without the wish for one."""
        if not self._upgrade:
            return
        self._upgrade = False
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = fields.lines([field for field in self.headers if field[0] != b"upgrade"])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"%b%b\r\n%b" % (first, kept, rest))

    def _stop(self, error: BaseException) -> None:
        """A callback has ended the reading."""
        if isinstance(error, _Enough):
            self._deaf, self._phase = True, IDLE
        elif isinstance(error, Fault):
            self._fail(error)
        else:
            log.error("a request could not be read", exc_info=error)
            self._fail(Fault("The gateway failed; its log says why."))

    def on_message_begin(self) -> None:
        if self._deaf:
            raise _Enough
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_bytes = self._unread = 0
        self._phase = HEAD
        self._since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self.plane.head_bytes:
            raise _TargetTooLong("The request's target is too long. Send what belongs there in the body.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self.plane.head_bytes:
            raise _head_too_large()
        if self._phase == BODY:
            heads.check_trailer(name)
            return  # what decides is decided, and nobody asked for more
        name = name.lower()
        if value[-1:] <= b" ":  # what is behind it is no part of it (RFC 9110, 5.5), and the parser leaves it there
            value = value.rstrip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        by_name = dict(self.headers)
        heads.check(method, version, self.headers, by_name)
        if self.parser.should_upgrade():
            self._upgrade = True
            return
        url = self.url
        if not url.startswith(b"/") or b"#" in url:
            url = self.url = heads.origin_form(method, url)
        self._begin_body()
        if version == "1.0":
            self.expect_100_continue = False
        path, _, query = url.decode("latin-1").partition("?")
        if not self.plane.owns(path):
            self._leave_to_asgi()
            return
        self.version = version
        request = Request(method.decode("ascii"), path, query, self.headers, by_name, b"")
        keep_alive = self.parser.should_keep_alive() and not self.plane.draining
        client = Client(self, request, keep_alive, self.expect_100_continue)
        declared = int(by_name.get(b"content-length", b"0") or b"0")
        if declared > self.plane.body_bytes:
            client.refusal = self._too_large()
        first = self._is_next()
        self.cycle = client  # type: ignore[assignment]
        if first:
            self._activate(client)
        else:
            self.pipeline.appendleft((client, None))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        client: Any = self.cycle
        if type(client) is not Client:
            super().on_body(body)
            return
        if client.response_complete or client.refusal is not None:
            return
        plane, length = self.plane, len(body)
        client.take(body)
        client.length += length
        client.held += length
        plane.intake.bytes += length
        if client.length > plane.body_bytes:
            client.refusal = self._too_large()
        elif plane.intake.bytes > plane.intake.most_bytes:
            client.refusal = plane.intake.no_room()
        else:
            return
        client.body = []
        self._let_go(client)
        if client is self.active:
            self._refuse(client)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        self._phase = IDLE
        self._since = self.loop.time()
        client: Any = self.cycle
        if type(client) is not Client:
            super().on_message_complete()
            return
        client.more_body = False
        if client.response_complete:
            self._deaf = True
            self.transport.close()
            return
        body = client.body
        client.request.body = bytes(body[0]) if len(body) == 1 else b"".join(body)
        client.body = []
        if client is self.active:
            self._serve(client)

    def _let_go(self, client: Client) -> None:
        """What came of a body is not held here any more."""
        self.plane.intake.bytes -= client.held
        client.held = 0

    def _begin_body(self) -> None:
        """The head is good. Raises `_Enough` where too many requests wait before this one: the client asks again."""
        if len(self.pipeline) >= PIPELINED:
            self.pipeline[0][0].keep_alive = False
            raise _Enough
        self._phase = BODY
        self._head_bytes = self._unread = 0

    def _is_next(self) -> bool:
        """Whether all that was asked before on this connection is answered, and the client takes the answers."""
        return self.active is None and not self._held and not self._busy_with_asgi()

    def _leave_to_asgi(self) -> None:
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers.extend(headers)
        super().on_headers_complete()
        if expect:  # it may be answered before its body, which then comes or does not
            self.cycle.keep_alive = False

    # --- one request after the other
    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if type(cycle) is Client:
            if cycle.more_body:
                self._since = self.loop.time()
            self._activate(cycle)
            if not cycle.more_body:
                self._serve(cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _activate(self, client: Client) -> None:
        self.active = client
        if client.refusal is not None:
            self._refuse(client)
        elif client.expect and client.more_body and not client.body:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, client: Client) -> None:
        self._let_go(client)
        if not client.response_complete:
            client.task = self.loop.create_task(self.plane.serve(client.request, client))

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self.active = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._held = self.paused
        if self.pipeline:
            if not self._held:
                self._next()
        elif self._phase == IDLE:
            self._since = self.loop.time()

    def _next(self) -> None:
        """Begin with what was asked next."""
        cycle, app = self.pipeline.pop()
        self._start_asgi_task(cycle, app)

    def linger(self, client: Client) -> None:
        """The answer is written and the connection ends; what the client still sends is read and dropped first."""
        self.server_state.total_requests += 1
        if not (client.more_body or self._deaf):
            self._deaf = True
            if self.transport.get_write_buffer_size() and not self.paused:
                self._paused_since, self._unsent = self.loop.time(), 0
            self.transport.close()
            return
        self._deaf, self._phase, self._since = True, ENDING, self.loop.time()
        with suppress(OSError):  # the client has reset it
            if self.transport.can_write_eof():
                self.transport.write_eof()

    # --- refusing
    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"The body is larger than {self.plane.body_bytes} bytes. Send less, or raise limits.body_bytes.",
        )

    def _refuse(self, client: Client) -> None:
        fault = client.refusal
        assert fault is not None
        self.plane.refused(fault.code)
        client.keep_alive = False
        client.reply(fault.status, fields.lines(error_headers(fault)), error_body(fault, api_of(client.request.path)))

    def _fail(self, fault: Fault) -> None:
        """Nothing that follows on this connection can be trusted: what was asked before is answered, then it ends."""
        self._deaf = True
        asked: Any = self.cycle if self._phase == BODY else None
        self._phase = IDLE
        client = asked if type(asked) is Client else Client(self, _UNKNOWN, False, False)
        client.more_body = False
        client.refusal = fault
        if asked is None:
            waits = not self._is_next()
        elif asked.response_complete or (asked is not client and asked.response_started):
            self.transport.close()
            return
        elif waits := bool(self.pipeline) and self.pipeline[0][0] is asked:
            self.pipeline.popleft()
        if asked is not None and asked is not client:
            asked.disconnected = True
            asked.message_event.set()
        self.cycle = client  # type: ignore[assignment]
        if waits:
            self.pipeline.appendleft((client, None))  # type: ignore[arg-type]
        else:
            self._activate(client)

    # --- time
    def overdue(self, now: float) -> None:
        """End the connection if its client is too slow: to send a head or a body, to take an answer, to come back."""
        plane, waited = self.plane, now - self._since
        if self._paused_since is not None:
            unsent = self._not_taken()
            if unsent < self._unsent:
                self._paused_since = now
            elif self._unsent and now - self._paused_since > plane.write_seconds:
                self.cut = True
                self.on_close(RESETS)
                self.transport.abort()
            self._unsent = unsent
        elif self._phase == ENDING:
            if waited > LINGER_SECONDS:
                self.transport.abort()
        elif self.flow.read_paused:
            pass
        elif self._phase == HEAD:
            if waited > plane.head_seconds:
                self._fail(TooSlow("The request's head did not arrive in time.", code="head_timeout"))
        elif self._phase == BODY:
            asked: Any = self.cycle
            length = asked.length if type(asked) is Client else 0
            waits = self.pipeline and self.pipeline[0][0] is asked
            if waited > plane.body_seconds + length / BODY_RATE and not waits:
                self._fail(TooSlow("The request's body did not arrive in time.", code="body_timeout"))
        elif self.active is None and waited > self.timeout_keep_alive and not self._busy_with_asgi():
            self.transport.close()

    def _busy_with_asgi(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    # --- writing
    @property
    def paused(self) -> bool:
        """The client takes less than is written."""
        return self._paused_since is not None

    def own_lines(self) -> bytes:
        """The header lines that the server gives every answer; uvicorn makes them anew when the date has changed."""
        own = self.server_state.default_headers
        if own is not self._own_headers:
            self._own_headers, self._own_lines = own, fields.lines(own)
        return self._own_lines

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_since, self._unsent = self.loop.time(), 0
        if self.active is not None and self.active.on_pause is not None:
            self.active.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_since = None
        if self.active is not None and self.active.on_resume is not None:
            self.active.on_resume()
        self._wake_writers()
        if self._held:
            self._held = False
            if self.pipeline:
                self._next()

    async def written(self) -> None:
        """Wait until the transport's buffer is below its high-water mark, or the connection is lost."""
        if self._lost or not (self.paused or self.transport.is_closing()):
            return
        if self.transport.get_write_buffer_size():
            writer = self.loop.create_future()
            self._writers.append(writer)
            await writer

    def on_close(self, linger: bytes) -> None:
        """Say how the connection ends, whoever closes it: `LINGERS` or `RESETS`."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def _not_taken(self) -> int:
        """Bytes that the client has not taken yet: the kernel holds megabytes before it takes more from here."""
        held = b"\0\0\0\0"
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                held = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, held)
        return self.transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            if not writer.done():
                writer.set_result(None)

    # --- the end
    def give_up(self) -> bool:
        """The drain is over: an answer under way ends as an error. False: none was.

        A request that has not come whole is not waited for either.
        """
        asked = self.active
        if asked is not None and asked.task is not None and not asked.response_complete:
            return asked.task.cancel()
        if self._phase == BODY:
            if asked is not None and not asked.started:
                asked.refusal = Busy("The gateway is shutting down. Ask another.", code="shutting_down")
                self._refuse(asked)
            self.transport.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.plane.intake.leave(self._seat)
        self._seat = "dropped"
        self._lost = True
        self.cut = self.cut or exc is not None
        asked: Any
        for asked in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if type(asked) is Client:
                self._let_go(asked)
        active, self.active = self.active, None
        self.pipeline.clear()
        self._paused_since = None
        if active is not None and not active.response_complete:
            active.disconnected = True
            if active.task is not None:
                active.task.cancel()
        super().connection_lost(exc)
        self._wake_writers()
