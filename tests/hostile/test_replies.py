"""Replicas that answer in what is no HTTP: the client is told in its API's shape, and nobody gets another's bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core import shapes
from gateway.statement import Statement
from tests.field.routes import CHAT, MESSAGES, RESPONSES, SGLANG_CHAT, Route, both_carriers, over
from tests.harness import CarrierName, FakeWorker, Reply, Seen, Wire, gateway

streamed = pytest.mark.parametrize("stream", [False, True])


def answer(route: Route, stream: bool) -> tuple[str, bytes]:
    """The type and the bytes of a good answer."""
    return ("text/event-stream", b"".join(route.events)) if stream else ("application/json", route.answer)


def odd_status(reply: Reply, kind: str, body: bytes) -> None:
    reply.head(600, ("content-type", kind), length=len(body))
    reply.writer.write(body)


def highest_status(reply: Reply, kind: str, body: bytes) -> None:
    reply.head(999, ("content-type", kind))
    reply.chunk(body)
    reply.end()


def other_coding(reply: Reply, kind: str, body: bytes) -> None:
    reply.writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: gzip, chunked\r\n\r\n".encode())
    reply.chunk(gzip.compress(body))
    reply.end()


def no_member(reply: Reply, kind: str, body: bytes) -> None:
    packed = gzip.compress(body) + b"more"
    reply.head(200, ("content-type", kind), ("content-encoding", "gzip"), length=len(packed))
    reply.writer.write(packed)


def assert_refused(route: Route, status: int, body: Any) -> None:
    assert status == 502
    if route is MESSAGES:
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    else:
        assert body["error"]["code"] == "upstream_unavailable"


@streamed
@both_carriers
@pytest.mark.parametrize("how", [odd_status, highest_status, other_coding, no_member])
@over((CHAT, MESSAGES, RESPONSES))
async def test_what_is_no_http_is_a_broken_answer(
    route: Route, how: Callable[[Reply, str, bytes], None], stream: bool, carrier: CarrierName
) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        how(reply, *answer(route, stream))

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        got = await gate.http.post(route.path, json=route.body(stream=stream))
        assert_refused(route, got.status_code, got.json())
        assert gate.records()[-1]["outcome"] == "failed"


@streamed
@both_carriers
async def test_one_of_several_samples_in_what_is_no_http(stream: bool, carrier: CarrierName) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        odd_status(reply, *answer(SGLANG_CHAT, stream))

    async with FakeWorker(script) as worker, gateway(SGLANG_CHAT.pool(worker.url), carrier=carrier) as gate:
        got = await gate.http.post(SGLANG_CHAT.path, json=SGLANG_CHAT.body(stream=stream, n=2, temperature=1))
        assert_refused(SGLANG_CHAT, got.status_code, got.json())
        assert len(worker.seen) == 2


@streamed
@both_carriers
async def test_an_answer_of_several_members_arrives_whole(stream: bool, carrier: CarrierName) -> None:
    kind, body = answer(CHAT, stream)
    half = len(body) // 2
    packed = gzip.compress(body[:half]) + gzip.compress(body[half:])

    async def script(seen: Seen, reply: Reply) -> None:
        reply.head(200, ("content-type", kind), ("content-encoding", "gzip"), length=len(packed))
        reply.writer.write(packed)

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        got = await gate.http.post(CHAT.path, json=CHAT.body(stream=stream))
        assert (got.status_code, got.content) == (200, body)
        assert gate.records()[-1]["outcome"] == "delivered"


@both_carriers
@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_needs_no_unpacking(status: int, carrier: CarrierName) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.writer.write(f"HTTP/1.1 {status} X\r\ncontent-encoding: gzip\r\n\r\n".encode())

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier, profile="off") as gate:
        got = await gate.http.post(CHAT.path, json=CHAT.body())
        assert (got.status_code, got.content) == (status, b"")
        assert not {"content-encoding", "content-length", "transfer-encoding"} & set(got.headers)
        assert len(worker.seen) == 1


@streamed
@both_carriers
async def test_trailers_of_one_answer_are_not_in_anothers_head(stream: bool, carrier: CarrierName) -> None:
    kind, body = answer(CHAT, stream)

    async def script(seen: Seen, reply: Reply) -> None:
        reply.head(200, ("content-type", kind))
        reply.chunk(body)
        trailers = b"set-cookie: a=victim\r\ncontent-encoding: gzip\r\n" if len(worker.seen) == 1 else b""
        reply.writer.write(b"0\r\n%b\r\n" % trailers)

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        for _ in range(2):
            got = await gate.http.post(CHAT.path, json=CHAT.body(stream=stream))
            assert (got.status_code, got.content) == (200, body)
            assert not {"set-cookie", "content-encoding"} & set(got.headers)
        assert worker.seen[0].connection == worker.seen[1].connection


@both_carriers
async def test_a_model_that_no_json_can_name_holds_up_nobody(carrier: CarrierName) -> None:
    """It stands in the text of a refusal."""

    async def probes(seen: Seen, reply: Reply) -> None:
        body = b'{"data": [{"id": "\\ud800"}]}' if seen.target == "/v1/models" else b"{}"
        reply.head(200, ("content-type", "application/json"), length=len(body))
        reply.writer.write(body)

    async with FakeWorker(probes=probes) as worker, gateway(CHAT.pool(worker.url, models=()), carrier=carrier) as gate:
        got = await gate.http.post(CHAT.path, json=CHAT.body(), timeout=5)
        assert "error" in got.json()


@asynccontextmanager
async def refused(carrier: CarrierName, *, stream: bool) -> AsyncIterator[Wire]:
    """A request that is refused, in the middle of its stream or before anything of it has left."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        if stream:
            reply.chunk(CHAT.events[0])
            await reply.writer.drain()
        reply.close()

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        async with Wire(gate.port) as wire:
            wire.post(CHAT.path, CHAT.body(stream=True))
            yield wire
        await gate.until(gate.idle)
        assert gate.records()[-1]["event"] == "closed"


def fails(*given: Any, **named: Any) -> Any:
    raise RuntimeError("it fails")


@both_carriers
@pytest.mark.parametrize("name", ["error_body", "error_headers"])
async def test_who_cannot_be_refused_does_not_wait(
    name: str, carrier: CarrierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with refused(carrier, stream=False) as wire:
        monkeypatch.setattr(shapes, name, fails)
        async with asyncio.timeout(5):
            assert b"200" not in await wire.reader.read()


@both_carriers
async def test_whose_decision_cannot_be_told_does_not_wait(
    carrier: CarrierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with refused(carrier, stream=False) as wire:
        monkeypatch.setattr(Statement, "of_decision", fails)
        async with asyncio.timeout(5):
            assert b"200" not in await wire.reader.read()


@both_carriers
async def test_whose_stream_cannot_be_ended_by_an_event_does_not_wait(
    carrier: CarrierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "stream_error", fails)
    async with refused(carrier, stream=True) as wire:
        assert await wire.head() == 200
        async with asyncio.timeout(5):
            assert (await wire.broken_body()).startswith(CHAT.events[0])


@both_carriers
async def test_a_failure_that_cannot_be_logged_is_answered(
    carrier: CarrierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.log.exception", fails, raising=False)
    async with FakeWorker() as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        monkeypatch.setattr("gateway.pipeline.identity.named", fails)
        got = await gate.http.post(CHAT.path, json=CHAT.body(), timeout=5)
        assert got.status_code == 500


@pytest.mark.parametrize("whole", [True, False])
async def test_a_stream_that_breaks_does_not_look_whole_to_http_1_0(whole: bool) -> None:
    """Its end is the connection's: a broken one ends by a reset, which a proxy takes for what it is."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(CHAT.events[0])
        if whole:
            for event in CHAT.events[1:]:
                reply.chunk(event)
            reply.end()
        else:
            reply.close()

    loop = asyncio.get_running_loop()
    body = json.dumps(CHAT.body(stream=True)).encode()
    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url)) as gate:
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", gate.port))
            head = b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (CHAT.path.encode(), len(body))
            await loop.sock_sendall(sock, head + body)
            got, ended = b"", "cleanly"
            try:
                while data := await loop.sock_recv(sock, 65536):
                    got += data
            except ConnectionResetError:
                ended = "by a reset"
    assert ended == ("cleanly" if whole else "by a reset")
    sent = got.partition(b"\r\n\r\n")[2].removeprefix(CHAT.events[0])
    if whole:
        assert sent == b"".join(CHAT.events[1:])
    else:
        assert b'"error"' in sent


async def test_a_parted_stream_that_tells_of_an_error_ends_once() -> None:
    """What follows on the connection is the next answer."""

    async def script(seen: Seen, reply: Reply) -> None:
        if not seen.json.get("stream"):
            reply.json(json.loads(SGLANG_CHAT.answer))
            return
        reply.sse()
        reply.chunk(SGLANG_CHAT.events[0])
        reply.chunk(b'data: {"error":{"message":"out of memory","type":"server_error"}}\n\n')
        reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    async with FakeWorker(script) as worker, gateway(SGLANG_CHAT.pool(worker.url)) as gate:
        async with Wire(gate.port) as wire:
            wire.post(SGLANG_CHAT.path, SGLANG_CHAT.body(stream=True, n=2))
            assert await wire.head() == 200
            assert b"out of memory" in await wire.body()
            wire.post(SGLANG_CHAT.path, SGLANG_CHAT.body())
            assert await wire.head() == 200
