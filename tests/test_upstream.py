"""One contract for whatever sends to replicas: the gateway's own connections, and a library's client beside it."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from gateway import upstream
from gateway.upstream import Broken, Connection, Connections, Exchange, Late
from tests.harness import FakeWorker, Reply, Seen


@dataclass
class Got:
    """An answer, or how it broke."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    broke: str | None = None


Send = Callable[[str, bytes], Awaitable[Got]]


class Own:
    """The gateway's own client."""

    def __init__(self, url: str) -> None:
        self.connections = Connections(url, connect_seconds=1.0, idle_seconds=0.2)

    async def send(self, path: str, body: bytes) -> Got:
        got = Got()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        try:
            exchange = await self.connections.send(head, body)
            await exchange.head()
            got.status = exchange.status
            got.headers = [(name.decode(), value.decode("latin-1")) for name, value in exchange.headers]

            def take(data: bytes) -> bool:
                got.chunks.append(data)
                return False

            await exchange.pipe(take)
        except Broken as error:
            got.broke = error.phase
        got.body = b"".join(got.chunks)
        return got

    async def close(self) -> None:
        self.connections.close()


class Library:
    """aiohttp, as the reference."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session: aiohttp.ClientSession | None = None

    async def send(self, path: str, body: bytes) -> Got:
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=0.2)
            self.session = aiohttp.ClientSession(connector=connector)
        got = Got()
        try:
            async with self.session.post(self.url + path, data=io.BytesIO(body)) as answer:
                got.status = answer.status
                got.headers = [(name.lower(), value) for name, value in answer.headers.items()]
                async for data in answer.content.iter_any():
                    got.chunks.append(data)
        except aiohttp.ClientConnectorError:
            got.broke = "connect"
        except aiohttp.ClientError:
            got.broke = "body" if got.status else "send"
        got.body = b"".join(got.chunks)
        return got

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


CLIENTS: list[Any] = [Own, Library]
both = pytest.mark.parametrize("client", CLIENTS)


def scripted(answer: Callable[[Reply], None]) -> Callable[[Seen, Reply], Awaitable[None]]:
    async def script(seen: Seen, reply: Reply) -> None:
        answer(reply)

    return script


async def ask(client: Any, script: Callable[[Seen, Reply], Awaitable[None]], body: bytes = b"{}") -> Got:
    async with FakeWorker(script) as worker:
        sender = client(worker.url)
        try:
            got: Got = await sender.send("/x", body)
            return got
        finally:
            await sender.close()


@both
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3_000_000])
async def test_bodies_of_any_length_arrive_and_come_back(client: Any, size: int) -> None:
    async def echo(seen: Seen, reply: Reply) -> None:
        reply.head(200, length=len(seen.body))
        reply.writer.write(seen.body)

    body = bytes(range(256)) * (size // 256 + 1)
    got = await ask(client, echo, body[:size])
    assert (got.status, got.body, got.broke) == (200, body[:size], None)


@both
async def test_chunks_are_joined_and_repeated_headers_are_kept(client: Any) -> None:
    def answer(reply: Reply) -> None:
        reply.head(201, ("set-cookie", "a=1"), ("set-cookie", "b=2"))
        for piece in (b"one", b"two", b"three"):
            reply.chunk(piece)
        reply.end()

    got = await ask(client, scripted(answer))
    assert (got.status, got.body) == (201, b"onetwothree")
    assert [value for name, value in got.headers if name == "set-cookie"] == ["a=1", "b=2"]


@both
async def test_a_body_without_a_length_ends_with_its_connection(client: Any) -> None:
    def answer(reply: Reply) -> None:
        reply.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end")
        reply.close()

    got = await ask(client, scripted(answer))
    assert (got.status, got.body, got.broke) == (200, b"until the end", None)


@both
async def test_an_interim_answer_is_not_the_answer(client: Any) -> None:
    def answer(reply: Reply) -> None:
        reply.writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
        reply.json({"ok": True})

    got = await ask(client, scripted(answer))
    assert (got.status, got.body) == (200, b'{"ok": true}')


@both
async def test_encoded_bodies_come_decoded(client: Any) -> None:
    squeezed = gzip.compress(b"text")

    def answer(reply: Reply) -> None:
        reply.head(200, ("content-encoding", "gzip"), length=len(squeezed))
        reply.writer.write(squeezed)

    assert (await ask(client, scripted(answer))).body == b"text"


@both
@pytest.mark.parametrize(
    ("answer", "phase"),
    [
        (lambda reply: reply.close(), "send"),
        (lambda reply: reply.reset(), "send"),
        (lambda reply: (reply.writer.write(b"nonsense\r\n\r\n"), reply.close()), "send"),
        (lambda reply: (reply.head(200, length=10), reply.writer.write(b"short"), reply.close()), "body"),
        (lambda reply: (reply.head(200), reply.chunk(b"begun"), reply.close()), "body"),
    ],
)
async def test_what_breaks_is_told_with_how_far_it_came(client: Any, answer: Any, phase: str) -> None:
    got = await ask(client, scripted(answer))
    assert got.broke == phase


@both
async def test_no_server_is_told_as_no_connection(client: Any) -> None:
    async with FakeWorker() as worker:
        url = worker.url
    sender = client(url)
    try:
        assert (await sender.send("/x", b"{}")).broke == "connect"
    finally:
        await sender.close()


@both
async def test_a_connection_is_used_again_and_not_after_it_was_idle_for_long(client: Any) -> None:
    async with FakeWorker() as worker:
        sender = client(worker.url)
        try:
            for _ in range(5):
                assert (await sender.send("/x", b"{}")).status == 200
            assert worker.connections == 1
            await asyncio.sleep(0.45)
            assert (await sender.send("/x", b"{}")).status == 200
            assert worker.connections == 2
        finally:
            await sender.close()


@both
async def test_a_connection_that_the_server_closes_is_not_used_again(client: Any) -> None:
    def answer(reply: Reply) -> None:
        reply.json({}, 200, ("connection", "close"))
        reply.keep = False

    async with FakeWorker(scripted(answer)) as worker:
        sender = client(worker.url)
        try:
            for _ in range(3):
                assert (await sender.send("/x", b"{}")).status == 200
            assert worker.connections == 3
        finally:
            await sender.close()


async def test_an_endless_head_is_refused() -> None:
    def answer(reply: Reply) -> None:
        reply.writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-filler: y\r\n" * 20000)

    got = await ask(Own, scripted(answer))
    assert got.broke == "send"


def raw(*lines: str, body: bytes = b"", close: bool = False) -> Callable[[Reply], None]:
    """An answer of these head lines and bytes."""

    def answer(reply: Reply) -> None:
        reply.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        if close:
            reply.close()

    return answer


PLAIN = raw("HTTP/1.1 200 OK", "content-length: 5", body=b"plain")


async def after(*answers: Callable[[Reply], None]) -> tuple[list[Got], int]:
    """What requests one after the other get of such answers, and by how many connections."""
    coming = iter(answers)

    async def script(seen: Seen, reply: Reply) -> None:
        next(coming)(reply)

    async with FakeWorker(script) as worker:
        sender = Own(worker.url)
        try:
            return [await sender.send("/x", b"{}") for _ in answers], worker.connections
        finally:
            await sender.close()


def chunked(*lines: str, trailers: bytes = b"") -> Callable[[Reply], None]:
    return raw("HTTP/1.1 200 OK", "transfer-encoding: chunked", *lines, body=b"3\r\none\r\n0\r\n" + trailers + b"\r\n")


@pytest.mark.parametrize(
    ("trailers", "connections"),
    [
        (b"x-secret: of another client\r\nset-cookie: a=1\r\n", 1),
        (b"content-encoding: gzip\r\n", 1),
        (b"content-type: text/event-stream\r\n", 1),
        (b"connection: close\r\n", 2),
        (b"transfer-encoding: gzip\r\n", 2),
        (b"upgrade: h2c\r\nconnection: upgrade\r\n", 1),
    ],
)
async def test_trailers_reach_nobody(trailers: bytes, connections: int) -> None:
    """Neither the client whose answer they end, nor the next on that connection."""
    (first, second), used = await after(chunked(trailers=trailers), PLAIN)
    assert (first.body, first.broke) == (b"one", None)
    assert first.headers == [("transfer-encoding", "chunked")]
    assert (second.body, second.broke) == (b"plain", None)
    assert second.headers == [("content-length", "5")]
    assert used == connections


async def test_trailers_are_bounded() -> None:
    (got,), _ = await after(chunked(trailers=b"x-filler: y\r\n" * 20000))
    assert got.broke == "body"


async def test_trailers_of_many_answers_do_not_add_up() -> None:
    got, used = await after(*[chunked(trailers=b"x-filler: %b\r\n" % (b"y" * 40000))] * 3, PLAIN)
    assert [each.broke for each in got] == [None] * 4
    assert used == 1


def packed(*lines: str, body: bytes, status: str = "200 OK") -> Callable[[Reply], None]:
    return raw(f"HTTP/1.1 {status}", f"content-length: {len(body)}", *lines, body=body)


@pytest.mark.parametrize(
    "first",
    [
        packed("content-encoding: gzip", body=gzip.compress(b"text")),
        packed("content-encoding: gzip", body=b""),
        raw("HTTP/1.1 103 Early Hints", "content-encoding: gzip", "", "HTTP/1.1 204 No Content"),
        raw("HTTP/1.1 103 Early Hints", "content-length: 9", "", "HTTP/1.1 200 OK", "content-length: 0"),
        raw("HTTP/1.1 304 Not Modified", "content-length: 9"),
    ],
)
async def test_nothing_of_an_answer_is_left_for_the_next(first: Callable[[Reply], None]) -> None:
    (before, got), used = await after(
        first, raw("HTTP/1.1 103 Early Hints", "", "HTTP/1.1 200 OK", "content-length: 5", body=b"plain")
    )
    assert before.broke is None
    assert (got.status, got.headers, got.body, got.broke) == (200, [("content-length", "5")], b"plain", None)
    assert used == 1


@pytest.mark.parametrize("status", ["000", "099", "600", "999"])
async def test_a_status_that_is_none_breaks_the_answer(status: str) -> None:
    (got,), _ = await after(packed(status=f"{status} Odd", body=b"{}"))
    assert (got.status, got.broke) == (0, "send")


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "gzip", "identity", "xchunked"])
async def test_transfer_codings_but_chunked_break_the_answer(coding: str) -> None:
    (got,), _ = await after(
        raw("HTTP/1.1 200 OK", f"transfer-encoding: {coding}", body=b"3\r\none\r\n0\r\n\r\n", close=True)
    )
    assert (got.status, got.broke) == (0, "send")


async def test_a_transfer_coding_in_two_lines_breaks_the_answer() -> None:
    (got,), _ = await after(chunked("transfer-encoding: chunked"))
    assert (got.status, got.broke) == (0, "send")


class _Counted:
    """A member of a gzip body that counts the bytes which zlib was given and those which it copied."""

    given = copied = 0

    def __init__(self, wbits: int) -> None:
        self._member = _decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        text = self._member.decompress(data, most)
        _Counted.given += len(data)
        _Counted.copied += len(self._member.unused_data)
        return text


_decompressobj = zlib.decompressobj


@pytest.mark.parametrize("texts", [[b""] * 4096, [b"x"] * 4096, [bytes(range(256)) * 64, b""] * 64])
def test_a_read_of_many_gzip_members_is_copied_a_few_times_and_no_more(
    texts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"".join(gzip.compress(text, compresslevel=0) for text in texts)
    monkeypatch.setattr(zlib, "decompressobj", _Counted)
    monkeypatch.setattr(_Counted, "given", 0)
    monkeypatch.setattr(_Counted, "copied", 0)
    inflater = upstream._Inflater(several=True)
    assert inflater.decompress(body) == b"".join(texts)
    assert inflater.whole
    assert _Counted.copied < 5 * len(body)
    assert _Counted.given < 6 * len(body)


@pytest.mark.parametrize("coding", ["gzip", "X-GZIP"])
@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
async def test_all_members_of_a_gzip_body_are_unpacked(coding: str, pieces: int) -> None:
    """However they come."""
    body = b"".join(gzip.compress(text) for text in (b"one", b"", b"two" * 1000, b"three"))

    async def script(seen: Seen, reply: Reply) -> None:
        reply.head(200, ("content-encoding", coding))
        step = len(body) // pieces + 1
        for at in range(0, len(body), step):
            reply.chunk(body[at : at + step])
            await reply.writer.drain()
        reply.end()

    got = await ask(Own, script)
    assert (got.body, got.broke) == (b"one" + b"two" * 1000 + b"three", None)
    assert "content-encoding" not in dict(got.headers)


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(b"one") + b"\0\0"),
        ("gzip", gzip.compress(b"one") + b"plain"),
        ("gzip", gzip.compress(b"one") + zlib.compress(b"two")),
        ("gzip", gzip.compress(b"one") + gzip.compress(b"two")[:-3]),
        ("gzip", gzip.compress(b"one")[:-3]),
        ("gzip", gzip.compress(b"one")[:4]),
        ("deflate", zlib.compress(b"one") + zlib.compress(b"two")),
        ("deflate", zlib.compress(b"one")[:-1]),
    ],
    ids=["zeros", "plain", "another coding", "a cut member", "cut", "cut head", "deflated twice", "deflated, cut"],
)
async def test_what_does_not_unpack_whole_is_broken(coding: str, body: bytes, close: bool) -> None:
    """Whether the body has a length or ends with its connection."""
    lines = ("HTTP/1.1 200 OK", f"content-encoding: {coding}")
    answer = raw(*lines, body=body, close=True) if close else packed(lines[1], body=body)
    (got,), _ = await after(answer)
    assert (got.status, got.broke) == (200, "body")


@pytest.mark.parametrize(
    "answer",
    [
        raw("HTTP/1.1 204 No Content", "content-encoding: gzip"),
        raw("HTTP/1.1 304 Not Modified", "content-encoding: gzip"),
        packed("content-encoding: gzip", body=b""),
        packed("content-encoding: deflate", body=b"", status="400 Bad"),
        raw("HTTP/1.1 200 OK", "transfer-encoding: chunked", "content-encoding: gzip", body=b"0\r\n\r\n"),
        raw("HTTP/1.1 200 OK", "content-encoding: gzip", close=True),
    ],
)
async def test_no_body_needs_no_unpacking(answer: Callable[[Reply], None]) -> None:
    (got,), _ = await after(answer)
    assert (got.body, got.broke) == (b"", None)


async def test_a_coding_of_several_passes_as_it_is() -> None:
    twice = gzip.compress(gzip.compress(b"text"))
    (got,), _ = await after(packed("content-encoding: gzip", "content-encoding: gzip", body=twice))
    assert got.body == twice
    assert [value for name, value in got.headers if name == "content-encoding"] == ["gzip", "gzip"]


async def test_pausing_holds_the_replica_back_and_resuming_lets_it_go_on() -> None:
    sent = 0
    drained = asyncio.Event()

    async def flood(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        reply.head(200)
        for _ in range(200):
            reply.chunk(b"z" * 65536)
            await reply.writer.drain()
            sent += 1
        reply.end()
        drained.set()

    async with FakeWorker(flood) as worker:
        connections = Connections(worker.url)
        exchange = await connections.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"")
        await exchange.head()
        exchange.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await drained.wait()
        held = sent
        assert held < 200
        exchange.resume()
        total = 0

        def take(data: bytes) -> bool:
            nonlocal total
            total += len(data)
            return False

        await exchange.pipe(take)
        assert total == 200 * 65536
        connections.close()


class _Line(asyncio.Transport):
    """A connection of which nothing is written anywhere."""

    def write(self, data: Any) -> None: ...
    def abort(self) -> None: ...


async def test_what_breaks_before_anyone_looked_is_broken_though_bytes_came() -> None:
    connections = Connections("http://127.0.0.1:1")
    connection = Connection(connections)
    connection.connection_made(_Line())
    connections.heard = connection.loop.time()
    connections.keep(connection)
    exchange = connections.again(b"", b"")
    assert exchange is not None
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    )
    connection.connection_lost(None)
    with pytest.raises(Broken):
        await exchange.begun()
    connections.close()


class Slow:
    """A server that reads nothing until it is let, and then everything."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.got = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.read.wait()
        self.got = await reader.read()
        writer.close()


@asynccontextmanager
async def left() -> AsyncIterator[tuple[Slow, Exchange]]:
    """An exchange that was left when the replica had read nothing of it."""
    slow = Slow()
    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        exchange = await connections.send(b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\n", b"body")
        exchange.leave()
        yield slow, exchange
        slow.read.set()


async def test_who_leaves_knows_when_the_replica_has_read_all_that_it_was_sent() -> None:
    async with left() as (slow, exchange):
        with pytest.raises(Broken):
            await exchange.head()
        waiting = asyncio.create_task(exchange.left())
        done, _ = await asyncio.wait((waiting,), timeout=0.05)
        assert not done
        slow.read.set()
        await waiting
        assert slow.got.endswith(b"\r\n\r\nbody")


async def test_a_replica_that_does_not_close_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.PART_SECONDS", 0.05)
    async with left() as (slow, exchange):
        await exchange.left()
        assert slow.got == b""


async def test_what_may_not_be_sent_any_more_when_there_is_a_connection_is_not_sent() -> None:
    async with FakeWorker() as worker:
        connections = Connections(worker.url)
        head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n"
        with pytest.raises(Late):
            await connections.send(head, b"{}", still=lambda: False)
        assert worker.seen == []
        exchange = connections.again(head, b"{}")
        assert exchange is not None, "the connection is kept for the next"
        await exchange.finished()
        assert len(worker.seen) == 1
        connections.close()
