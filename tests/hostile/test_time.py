"""Clients that take their time: each phase of a connection has its bound, and what takes longer is ended."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.field import clock
from tests.harness import CarrierName, FakeWorker, Gate, Reply, Seen, Wire, gateway, polite, pool
from tests.hostile.answers import parse
from tests.hostile.cases import BODY, CHUNKED, HOST, LENGTH, LIVEZ, post

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"


async def dripped(gate: Gate, first: bytes, drop: bytes, seconds: float) -> tuple[list[int], float]:
    """Send a beginning, then a drop every so many seconds until the connection ends: the statuses, and when it was."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    async with Wire(gate.port) as wire:
        wire.writer.write(first)
        ended = asyncio.create_task(wire.reader.read())
        while not ended.done():
            await asyncio.wait((ended,), timeout=seconds)
            if not ended.done():
                wire.writer.write(drop)
            assert loop.time() - begin < 2000, "it is never ended"
        return [answer.status for answer in parse(ended.result())], loop.time() - begin


@pytest.mark.parametrize(
    ("first", "drop", "status", "bound"),
    [
        (b"", b"", None, 75),
        (b"G", b"", 408, 30),
        (b"\r\n", b"\r\n", None, 75),
        (HEAD, b"X-A: b\r\n", 408, 30),
        (b"GET /livez HTTP/1.1\r\n", b"X-A: b\r\n", 408, 30),
        (b"GET /", b"a", 408, 30),
        (HEAD + LENGTH + b"\r\n", b"", 408, 60),
        (HEAD + b"Content-Length: 9999\r\n\r\n", b" ", 408, 60),
        (HEAD + CHUNKED + b"\r\n", b"1\r\n \r\n", 408, 60),
        (HEAD + CHUNKED + b"\r\n1;", b"a", 408, 60),
        (HEAD + CHUNKED + b"\r\n0\r\n", b"X-A: b\r\n", 408, 60),
        (HEAD.replace(b"/v1/chat/completions", b"/sessions") + b"Content-Length: 9999\r\n\r\n", b" ", 408, 60),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n", b" ", 200, 60),
        (LIVEZ + HEAD, b"X-A: b\r\n", 408, 30),
    ],
    ids=str,
)
def test_what_comes_drop_by_drop_is_ended(first: bytes, drop: bytes, status: int | None, bound: float) -> None:
    """Heads within 30 s, bodies within 60 s and their size, idle connections within 75 s."""

    async def main() -> None:
        async with FakeWorker() as worker, gateway(pool("policy", worker.url), health={"interval": 30}) as gate:
            statuses, seconds = await dripped(gate, first, drop, 0.7)
            assert statuses[-1:] == ([] if status is None else [status])
            assert bound <= seconds <= bound + 15
            await gate.until(gate.idle)
            assert worker.seen == []
            assert gate.records() == []

    clock.run(main())


def test_a_large_body_has_more_time() -> None:
    """A second for each 16 KiB: a slow line is no attack."""

    async def main() -> None:
        body = b'{"model": "test-model", "messages": []%b}' % (b" " * 2_000_000)
        async with FakeWorker() as worker, gateway(pool("policy", worker.url), health={"interval": 30}) as gate:
            async with Wire(gate.port) as wire:
                wire.writer.write(post(HOST, b"Content-Length: %d\r\n" % len(body), body=b""))
                for at in range(0, len(body), 20_000):
                    wire.writer.write(body[at : at + 20_000])
                    await asyncio.sleep(1.0)
                assert await wire.head() == 200

    clock.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_who_takes_nothing_of_its_answer_is_ended(stream: bool) -> None:
    """After 60 s, and the engine is let go. The kernel's last acknowledgements come late by a clock that jumps."""
    size = 20_000_000

    async def script(seen: Seen, reply: Reply) -> None:
        if stream:
            reply.sse()
            for _ in range(size // 10_000):
                reply.chunk(b": " + b"x" * 10_000 + b"\n\n")
                await reply.writer.drain()
            reply.end()
        else:
            reply.json({"choices": [{"text": "a"}], "padding": "x" * size})
            await reply.writer.drain()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), health={"interval": 30}) as gate:
            async with Wire(gate.port, receive_buffer=4096) as wire:
                wire.writer.write(post(HOST, LENGTH))
                await gate.until(lambda: bool(worker.seen))
                begin = loop.time()
                await gate.until(gate.idle, 300)
                assert 55 <= loop.time() - begin <= 200
            await gate.until(lambda: not worker.running)

    clock.run(main())


@pytest.mark.parametrize(("carrier", "little"), [("http1", 8192), ("asgi", 200_000)])
def test_who_takes_a_little_now_and_then_is_not_ended(carrier: CarrierName, little: int) -> None:
    """Though it is so little that the kernel, which holds megabytes for it, takes no more from the gateway.

    Through ASGI the gateway sees no less than what its server takes at once.
    """

    async def script(seen: Seen, reply: Reply) -> None:
        reply.json({"choices": [{"text": "a"}], "padding": "x" * 20_000_000})
        await reply.writer.drain()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        health = {"interval": 30}
        async with (
            FakeWorker(script) as worker,
            gateway(pool("policy", worker.url), carrier=carrier, health=health) as gate,
        ):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", gate.port))
                await loop.sock_sendall(sock, post(HOST, LENGTH))
                begin = loop.time()
                while loop.time() - begin < 400:
                    assert await loop.sock_recv(sock, little)
                    await asyncio.sleep(10)
                    assert not gate.idle()

    clock.run(main())


def test_a_request_ahead_of_its_turn_is_not_hurried() -> None:
    """Its body, of which it has sent a part, is not late while the answer before it goes on."""

    async def slow(seen: Seen, reply: Reply) -> None:
        if len(worker.seen) == 1:
            await asyncio.sleep(300)
        await polite(seen, reply)

    async def main() -> None:
        async with worker, gateway(pool("policy", worker.url), health={"interval": 30}) as gate:
            async with Wire(gate.port) as wire:
                wire.writer.write(post(HOST, LENGTH) + post(HOST, LENGTH, body=BODY[:5]))
                assert await wire.head() == 200
                await wire.body()
                wire.writer.write(BODY[5:])
                assert await wire.head() == 200

    worker = FakeWorker(slow)
    clock.run(main())
