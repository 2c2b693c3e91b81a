"""Clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core import merge
from tests.field.routes import both_carriers
from tests.harness import DONE, CarrierName, FakeWorker, Gate, Reply, Seen, chat, completion, delta, gateway, pool
from tests.waiting import until

BIG = 8_000_000
"""Bytes of an answer, more than kernels hold for a connection."""

RESET = struct.pack("ii", 1, 0)


async def big(seen: Seen, reply: Reply) -> None:
    if seen.json.get("stream"):
        reply.sse()
        reply.chunk(delta("x", "stop"))
        reply.chunk(DONE)
        reply.end()
    else:
        reply.json(completion("x" * BIG))


def request(*headers: str, **fields: Any) -> bytes:
    body = json.dumps(chat("hi", **fields)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: gateway", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@asynccontextmanager
async def asked(gate: Gate, data: bytes) -> AsyncIterator[socket.socket]:
    """A client that has sent this and read the first bytes of what it got."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", gate.port))
        await loop.sock_sendall(sock, data)
        assert await loop.sock_recv(sock, 2000)
        yield sock


def ends(gate: Gate) -> list[str]:
    return [record["outcome"] for record in gate.records() if record["event"] == "closed"]


@both_carriers
@pytest.mark.parametrize("headers", [(), ("connection: close",)])
async def test_an_answer_that_was_not_taken_whole_is_not_delivered(
    headers: tuple[str, ...], carrier: CarrierName
) -> None:
    async with FakeWorker(big) as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        async with asked(gate, request(*headers)) as sock:
            assert ends(gate) == []
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await gate.until(lambda: ends(gate) == ["abandoned"])


@both_carriers
@pytest.mark.parametrize("headers", [(), ("connection: close",)])
async def test_nor_is_one_whose_client_reads_nothing_for_too_long(
    headers: tuple[str, ...], carrier: CarrierName
) -> None:
    timeouts = {"client_write": 0.5}
    async with (
        FakeWorker(big) as worker,
        gateway(pool("policy", worker.url), carrier=carrier, timeouts=timeouts) as gate,
    ):
        async with asked(gate, request(*headers)):
            await gate.until(lambda: ends(gate) == ["abandoned"])


@both_carriers
async def test_a_stream_that_nobody_reads_lets_its_replica_go(carrier: CarrierName) -> None:
    left = asyncio.Event()

    async def endless(seen: Seen, reply: Reply) -> None:
        reply.sse()
        try:
            while True:
                reply.chunk(b": " + b"x" * 65_534 + b"\n\n")
                await reply.writer.drain()
        except ConnectionError:
            left.set()
            raise

    timeouts = {"client_write": 0.5}
    async with (
        FakeWorker(endless) as worker,
        gateway(pool("policy", worker.url), carrier=carrier, timeouts=timeouts) as gate,
    ):
        async with asked(gate, request(stream=True)):
            await gate.until(lambda: ends(gate) == ["abandoned"])
            assert gate.in_flight("policy-0") == 0
            await until(left.is_set)


@pytest.mark.parametrize("headers", [(), ("connection: close",)])
async def test_one_that_is_taken_late_is_delivered(headers: tuple[str, ...]) -> None:
    async with FakeWorker(big) as worker, gateway(pool("policy", worker.url)) as gate:
        async with asked(gate, request(*headers)) as sock:
            assert ends(gate) == []
            taken = 2000
            while taken < BIG:
                taken += len(await asyncio.get_running_loop().sock_recv(sock, 1 << 20))
            await gate.until(lambda: ends(gate) == ["delivered"])


async def test_what_is_asked_behind_an_answer_that_is_not_taken_waits() -> None:
    """Whether it was sent ahead of the answer or after it."""
    async with FakeWorker(big) as worker, gateway(pool("policy", worker.url)) as gate:
        async with asked(gate, request() + request(stream=True)) as sock:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, request(stream=True))
            assert (await gate.http.get("/livez")).status_code == 200
            assert len(worker.seen) == 1
            ends_seen, last = 0, b""
            while ends_seen < 2:
                piece = await loop.sock_recv(sock, 1 << 20)
                assert piece, "closed before all was answered"
                last = last[-len(b"[DONE") :] + piece
                ends_seen += last.count(b"[DONE]")
            assert len(worker.seen) == 3
            await gate.until(lambda: ends(gate) == ["delivered"] * 3)


async def test_what_cannot_be_merged_ends_the_stream_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in one piece with the end of the replica's answer."""
    monkeypatch.setattr(merge, "_EVENT_LIMIT", 10_000)
    begun = asyncio.Event()

    async def endless(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(delta("a"))
        await begun.wait()
        reply.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (20_006, b"data: " + b"x" * 20_000))

    async with FakeWorker(endless) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        asking = asyncio.create_task(gate.http.post("/v1/chat/completions", json=chat("hi", n=2, stream=True)))
        await until(lambda: len(worker.seen) == 2)
        begun.set()
        await asyncio.wait({asking}, timeout=10)
        assert asking.done()
        await asyncio.gather(asking, return_exceptions=True)
        await gate.until(lambda: gate.in_flight("policy-0") == 0)
        assert ends(gate) == ["failed"]
