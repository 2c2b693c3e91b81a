"""Connections to replicas: the only module that sends a client's request upstream.

A connection carries one exchange at a time. Bytes go from the replica's socket to whoever reads the exchange in the
same turn of the event loop; nothing here knows what they mean. Written on httptools because the common clients cost
more than the rest of the gateway together (docs/decisions/0002-own-upstream-connection.md); tests/test_upstream.py
holds it and a library client to one contract.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

from gateway import tls
from gateway.core import fields
from gateway.core.types import Headers
from gateway.settings import ReplicaTls

HEAD_BYTES = 65536
"""Bound of a replica's response head, in bytes of names and values; and of its trailers."""

PART_SECONDS = 1.0
"""How long a replica may take to close a connection that was closed for it."""

_ANY_HEADER, _GZIP_HEADER = 32, 16
"""Make zlib take its own header or gzip's; only gzip's."""

_SYSTEM = ReplicaTls()

Phase = Literal["connect", "send", "body"]

Blame = Literal["refused", "broke", "none"]
"""refused: proof that no server listens. broke: it speaks against the replica. none: it says nothing of it."""

ANSWER_BYTES = 268_435_456
"""Bytes of an answer that are held where nothing else is said."""

OWN_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""What fails for want of files, memory or ports in this process or on its machine."""


class Broken(Exception):
    """An answer that broke off. `phase` says how far it was: no connection, no head yet, in the body."""

    def __init__(
        self,
        reason: str,
        phase: Phase,
        *,
        blame: Blame = "broke",
        stale: bool = False,
        timeout: bool = False,
        too_large: bool = False,
    ) -> None:
        super().__init__(reason)
        self.too_large = too_large
        """It was longer than may be held, so asked again it would be as well."""
        self.blame = blame
        self.timeout = timeout
        self.reason = reason
        self.phase = phase
        self.stale = stale
        """The connection had been idle and closed without a byte: the replica most likely never saw the request."""


class _TooLarge(Exception):
    """An answer has more bytes than may be held."""


class Late(Exception):
    """What was to be sent must not be sent any more."""


@cache
def trust(settings: ReplicaTls = _SYSTEM) -> ssl.SSLContext:
    """The certificates that replicas are believed by, the system's or a pool's own. One for requests and probes alike.

    Raises `InvalidSettings` where its files cannot be used.
    """
    return tls.of_replicas(settings)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens, taken from its configured URL."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Exchange:
    """One request sent and its answer. Ends exactly once: complete, broken or aborted."""

    __slots__ = (
        "_carrier", "_chunks", "_connection", "_error", "_loop", "_parting", "_sink", "_waiter", "begun_at", "complete",
        "headers", "heard", "paused", "reused", "sent_at", "status", "streams",
    )  # fmt: skip

    def __init__(self, connection: Connection, reused: bool) -> None:
        self._loop = connection.loop
        self._connection: Connection | None = connection
        self._carrier = connection
        self._chunks: list[bytes] = []
        self._sink: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._parting: asyncio.Future[None] | None = None
        self.status = 0
        self.headers: Headers = []
        self.streams = False
        """The answer is a stream of server-sent events, and no refusal, whatever that is called."""
        self.complete = False
        self.reused = reused
        self.sent_at = self.heard = self._loop.time()
        """`heard`: when the last bytes came, or the request was sent, or listening to the replica went on."""
        self.paused = False
        """Nothing can come: the client is slower."""
        self.begun_at = 0.0
        """When the first bytes of the body came."""

    async def head(self) -> None:
        """Wait until status and headers are there. Raises `Broken`."""
        while not self.status:
            await self._more()

    async def begun(self) -> None:
        """Wait until the first body byte is there, or the end of an empty body. Raises `Broken`."""
        while not (self._chunks or self.complete) or self._error is not None:
            await self._more()

    async def finished(self) -> None:
        """Wait until the body is whole. Raises `Broken`."""
        while not self.complete:
            await self._more()

    @property
    def body(self) -> bytes:
        """What of the body is here and was not piped."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def pipe(self, sink: Callable[[bytes], bool]) -> None:
        """Give body bytes to `sink` as they come, from those that are already here on, in the same turn of the loop.

        Returns after the last, or when `sink` answers True: enough for now. Raises `Broken`.
        """
        if self._chunks:
            held, self._chunks = b"".join(self._chunks), []
            if sink(held):
                return
        self._sink = sink
        try:
            while (not self.complete and self._sink is not None) or self._error is not None:
                await self._more()
        finally:
            self._sink = None

    @property
    def alive(self) -> bool:
        """The answer is still coming: neither complete nor broken off."""
        return self._connection is not None and self._error is None

    async def drain(self) -> None:
        """Let the answer come to its end and drop it. Raises `Broken`."""
        await self.pipe(lambda data: False)

    def abort(self, reason: str = "aborted", *, timeout: bool = False) -> None:
        """Close the connection in mid-answer, which both engines take as a cancellation. Harmless after the end."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.complete:
            connection.exchange = None
            connection.close()
            blame: Blame = "broke" if timeout else "none"
            self._fail(Broken(reason, "body" if self.status else "send", blame=blame, timeout=timeout))

    def leave(self, reason: str = "aborted") -> None:
        """As `abort`, but let the replica close too, which it does when it has read what it was sent: see `left`."""
        connection = self._connection
        if connection is None or self.complete:
            return
        self._parting = connection.part()
        self._connection = connection.exchange = None
        self._fail(Broken(reason, "body" if self.status else "send"))

    def distrust(self) -> None:
        """What came was no answer: the replica may be out of step, so its connection carries no other request.

        One that has it already is sent anew.
        """
        self._carrier.close()

    async def left(self) -> None:
        """Wait until the replica has read the end of an exchange that was left, a second at most.

        What is asked of a replica by one connection may overtake what was sent by another.
        """
        if self._parting is not None:
            await asyncio.wait((self._parting,))

    def pause(self) -> None:
        """Stop reading from the replica until `resume`: the client is slower."""
        if self._connection is not None and not self.complete:
            self.paused = True
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading. Harmless where it was not paused."""
        if self.paused and self._connection is not None and not self.complete:
            self.paused = False
            self.heard = self._loop.time()
            self._connection.transport.resume_reading()

    def _more(self) -> asyncio.Future[None]:
        """What is done when more has come, or the end. Raises `Broken` where nothing more will."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _body(self, data: bytes) -> None:
        if not self.begun_at:
            self.begun_at = self.heard
        if self._sink is None:
            self._chunks.append(data)
        elif self._sink(data):
            self._sink = None


class Connection(asyncio.Protocol):
    """One socket to a replica. The parser's callbacks collect; `data_received` hands over once per read."""

    def __init__(self, pool: Connections) -> None:
        self.pool = pool
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport
        self.closed = False
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._inflater: _Inflater | None = None
        self._room = pool.answer_bytes
        """Bytes that may still come of an answer that is no stream."""
        self._ended = False
        self._until_close = False
        self._reusable = False
        self._parted: asyncio.Future[None] | None = None
        """Set once it is given up: done when the replica has closed too."""
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def close(self) -> None:
        self.closed = True
        self.transport.abort()

    def part(self) -> asyncio.Future[None]:
        """Say that nothing more is sent. Done when the replica has closed too, or did not within `PART_SECONDS`."""
        self.closed = True
        parted = self._parted = self.loop.create_future()
        transport = self.transport
        if transport.can_write_eof():
            transport.resume_reading()
            transport.write_eof()
        else:
            transport.close()
        patience = self.loop.call_later(PART_SECONDS, transport.abort)
        parted.add_done_callback(lambda parted: patience.cancel())
        return parted

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            if self._parted is None:
                self.close()
            return
        self.exchange.heard = self.pool.heard = self.loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("the replica answered with a protocol switch")
        except httptools.HttpParserError as error:
            if not self._ended:
                if isinstance(error.__context__, _TooLarge):
                    bound = self.pool.answer_bytes
                    self._break(f"the replica's answer has more than {bound} bytes", blame="none", too_large=True)
                else:
                    self._break(f"the replica's answer is not valid HTTP: {error.__context__ or error}")
                return
            self._reusable = False
        self._hand_over()

    def _hand_over(self) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        data = b""
        if self._body:
            body, self._body = self._body, []
            data = body[0] if len(body) == 1 else b"".join(body)
        if self._ended:
            self._ended = False
            self.exchange = None
            exchange.complete = True
            exchange._connection = None
            if self._reusable:
                self.pool.keep(self)
            else:
                self.close()
        if data:
            try:
                exchange._body(data)
            except Exception as error:
                exchange._fail(error)
        if exchange._waiter is not None and (exchange._sink is None or exchange.complete):
            exchange._wake()

    def _break(self, reason: str, *, blame: Blame = "broke", stale: bool = False, too_large: bool = False) -> None:
        exchange, self.exchange = self.exchange, None
        if not self.closed:
            self.close()
        if exchange is not None:
            if self._body:
                exchange._body(b"".join(self._body))
            exchange._connection = None
            phase: Phase = "body" if exchange.status else "send"
            exchange._fail(Broken(reason, phase, blame=blame, stale=stale, too_large=too_large))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._parted is not None and not self._parted.done():
            self._parted.set_result(None)
        exchange = self.exchange
        if exchange is None:
            return
        whole = self._inflater is None or self._inflater.whole
        if exc is None and exchange.status and self._until_close and whole:
            self._ended = True
            self._hand_over()
            return
        reason = f"connection lost: {exc}" if exc else "the replica closed the connection"
        self._break(reason, stale=exchange.reused and not exchange.status)

    # --- callbacks of the parser: what they keep is of one message
    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("more than one answer")
        self._headers = []
        self._head_bytes = 0
        self._inflater = None
        self._room = self.pool.answer_bytes
        self._until_close = self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("its head or its trailers are too large")
        if self.exchange is not None and not self.exchange.status:  # else a trailer, which nobody asked for
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._head_bytes = self._headers, 0
        if not 100 <= status <= 599:
            raise ValueError(f"{status} is no status")
        if status < 200 or self.exchange is None:
            return
        names = dict(headers)
        if (coded := b"transfer-encoding" in names) and not _only_chunked(headers):
            raise ValueError("it has another transfer coding than chunked")
        self._until_close = not (coded or b"content-length" in names or status in fields.BODILESS)
        if b"content-encoding" in names:
            headers = self._decoding(headers)
        self.exchange.headers = headers
        self.exchange.streams = status < 400 and fields.is_stream(names.get(b"content-type", b""))
        self.exchange.status = status

    def on_body(self, data: bytes) -> None:
        # A stream is handed over as it comes: only what one read of it unpacks to is held.
        streams = self.exchange is not None and self.exchange.streams
        room = ANSWER_BYTES if streams else self._room
        if self._inflater is not None:
            data = self._inflater.decompress(data, room)
        if len(data) > room:
            raise _TooLarge
        if not streams:
            self._room -= len(data)
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._inflater is not None and not self._inflater.whole:
            raise ValueError("the compressed body is cut short")
        if self.exchange is not None and self.exchange.status:
            self._ended = True
            self._reusable = self._parser.should_keep_alive()  # asked here, it heeds what trailers did to the parser

    def _decoding(self, headers: Headers) -> Headers:
        """A compressed answer, although none was asked for, is unpacked here: it is read on its way."""
        codings = [value.lower() for name, value in headers if name == b"content-encoding"]
        if codings not in ([b"gzip"], [b"x-gzip"], [b"deflate"]):
            return headers
        self._inflater = _Inflater(several=codings != [b"deflate"])
        return [field for field in headers if field[0] != b"content-encoding"]


def _only_chunked(headers: Headers) -> bool:
    return [value.lower() for name, value in headers if name == b"transfer-encoding"] == [b"chunked"]


_WINDOW = 64
"""Bytes that a further member gets at first, then twice as many each time: zlib copies all that follows its end."""


class _Inflater:
    """Unpacks a compressed body, which may be empty. `several`: it may have members, as gzip's (RFC 1952, 2.2)."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._begun = False
        self._member = zlib.decompressobj(zlib.MAX_WBITS | _ANY_HEADER)

    @property
    def whole(self) -> bool:
        """Nothing is missing of what has begun."""
        return self._member.eof or not self._begun

    def decompress(self, data: bytes, most: int = ANSWER_BYTES) -> bytes:
        """What the next bytes hold, or more than `most` bytes of it where it is more.

        Raises `zlib.error` or `ValueError` for what is not compressed so.
        """
        self._begun = True
        pieces, view, at, window = [], memoryview(data), 0, len(data)
        while at < len(view) and most >= 0:
            if self._member.eof:
                if not self._several:
                    raise ValueError("bytes follow its compressed body")
                self._member = zlib.decompressobj(zlib.MAX_WBITS | _GZIP_HEADER)
                window = _WINDOW
            piece = view[at : at + window]
            pieces.append(self._member.decompress(piece, most + 1))
            most -= len(pieces[-1])
            at += len(piece) - len(self._member.unused_data)
            window *= 2
        return b"".join(pieces)


def absent(error: BaseException) -> bool:
    """Whether it proves that no server is there: the connection was refused, or nobody has the name.

    A name server that does not answer proves nothing.
    """
    return isinstance(error, ConnectionRefusedError) or (
        isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME
    )


_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def _blame(error: OSError) -> Blame:
    if absent(error):
        return "refused"
    return "none" if error.errno in OWN_ERRORS else "broke"


class Connections:
    """The connections to one replica: the last used is used first, idle ones are closed before the replica does.

    `idle_seconds` must be below the replica's own keep-alive time-out (vLLM: 5 s). There is no cap: what is in flight
    is bounded by admission, not by a socket count.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_seconds: float = 5.0,
        idle_seconds: float = 2.0,
        tls: ReplicaTls = _SYSTEM,
        answer_bytes: int = ANSWER_BYTES,
    ) -> None:
        self.address = Address.parse(url)
        self.connect_seconds = connect_seconds
        self.idle_seconds = idle_seconds
        self.answer_bytes = answer_bytes
        self.heard = -math.inf
        """When the replica last sent anything in answer to a request."""
        self._idle: deque[Connection] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls = trust(tls) if self.address.tls else None

    async def send(
        self, head: bytes, body: bytes, *, fresh: bool = False, still: Callable[[], bool] = lambda: True
    ) -> Exchange:
        """Send one request (`head` ends with the empty line) and give its exchange. Raises `Broken("connect")`.

        `still`: whether it may be sent when there is a connection, which takes time. Raises `Late` where it may not.
        """
        exchange = None if fresh else self.again(head, body)
        if exchange is not None:
            return exchange
        connection = await self._connect()
        if not still():
            self._keep(connection, connection.loop.time())
            raise Late
        return self._sent(connection, head, body, reused=False)

    def again(self, head: bytes, body: bytes) -> Exchange | None:
        """The same on a connection that is open already; None: there is none."""
        connection = self._take() if self._idle else None
        return None if connection is None else self._sent(connection, head, body, reused=True)

    def _sent(self, connection: Connection, head: bytes, body: bytes, *, reused: bool) -> Exchange:
        exchange = connection.exchange = Exchange(connection, reused)
        if len(body) < HEAD_BYTES:
            connection.transport.write(head + body)
        else:
            connection.transport.writelines((head, body))
        return exchange

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose exchange is complete."""
        self._keep(connection, self.heard)

    def _keep(self, connection: Connection, since: float) -> None:
        connection.idle_since = since
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self.idle_seconds, self._sweep)

    def close(self) -> None:
        """Close what is idle; exchanges in flight go on."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection | None:
        oldest = self._idle[-1].loop.time() - self.idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            if connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        address = self.address
        try:
            async with asyncio.timeout(self.connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), address.host, address.port, ssl=self._tls
                )
        except TimeoutError:
            raise Broken(f"no connection within {self.connect_seconds:g} s", "connect", timeout=True) from None
        except OSError as error:
            raise Broken(f"cannot connect: {error.strerror or error}", "connect", blame=_blame(error)) from None
        return connection

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self.idle_seconds
        while self._idle and (self._idle[0].closed or self._idle[0].idle_since < oldest):
            connection = self._idle.popleft()
            if not connection.closed:
                connection.close()
        self._sweeper = loop.call_later(self.idle_seconds / 2, self._sweep) if self._idle else None
