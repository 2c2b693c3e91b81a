"""What clients have open and have sent is bounded over all of them, and what they took is given back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway import intake
from tests.harness import CarrierName, FakeWorker, Reply, Seen, Wire, chat, completion, gateway, pool

CHAT = "/v1/chat/completions"


def code(answer: httpx.Response) -> str:
    found: str = answer.json()["error"]["code"]
    return found


async def test_a_connection_too_many_is_told_so_and_the_next_is_served_when_one_has_gone() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits={"connections": 2}) as gate:
        async with Wire(gate.port) as first, Wire(gate.port) as second:
            for wire in (first, second):
                wire.post(CHAT, chat("a"))
                assert await wire.head() == 200
                await wire.body()
            refused = await httpx.AsyncClient(base_url=gate.url).post(CHAT, json=chat("b"))
            assert (refused.status_code, code(refused)) == (503, "too_many_connections")
            assert refused.headers["retry-after"] == "1"
            assert len(worker.seen) == 2
        await gate.until(lambda: gate.gateway.intake.connections == 0)
        served = await gate.http.post(CHAT, json=chat("b"))
        assert served.status_code == 200
        metrics = (await gate.http.get("/metrics")).text
        assert "detgate_connections 1.0" in metrics
        assert 'detgate_refusals_total{code="too_many_connections"} 1.0' in metrics


async def test_those_that_are_told_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "REFUSED", 1)
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits={"connections": 1}) as gate:
        async with Wire(gate.port) as first, Wire(gate.port) as second, Wire(gate.port) as third:
            first.post(CHAT, chat("a"))
            assert await first.head() == 200
            assert await second.head() == 503
            assert await third.reader.read() == b""
        await gate.until(lambda: gate.gateway.intake.refused == gate.gateway.intake.connections == 0)
        assert 'detgate_refusals_total{code="too_many_connections"} 2.0' in (await gate.http.get("/metrics")).text


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
async def test_bodies_of_all_requests_together_are_bounded(carrier: CarrierName) -> None:
    go = asyncio.Event()

    async def slow(seen: Seen, reply: Reply) -> None:
        await go.wait()
        reply.json(completion())

    limits = {"held_bytes": 20_000}
    async with FakeWorker(slow) as worker, gateway(pool("policy", worker.url), limits=limits, carrier=carrier) as gate:
        held = gate.gateway.intake
        async with asyncio.TaskGroup() as group:
            first = group.create_task(gate.http.post(CHAT, json=chat("a" * 15_000)))
            await gate.until(lambda: len(worker.seen) == 1)
            refused = await gate.http.post(CHAT, json=chat("b" * 15_000))
            assert (refused.status_code, code(refused)) == (503, "too_many_bytes")
            assert 15_000 < held.bytes < 16_000
            small = group.create_task(gate.http.post(CHAT, json=chat("c")))
            await gate.until(lambda: len(worker.seen) == 2)
            assert f"detgate_held_bytes {held.bytes}" in (await gate.http.get("/metrics")).text
            go.set()
        assert [first.result().status_code, small.result().status_code] == [200, 200]
        await gate.until(lambda: held.bytes == 0)
        assert (await gate.http.post(CHAT, json=chat("b" * 15_000))).status_code == 200
        assert [record["event"] for record in gate.records()].count("opened") == 3


async def test_a_body_that_never_becomes_whole_is_given_back() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        held = gate.gateway.intake
        async with Wire(gate.port) as wire:
            wire.writer.write(b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\n" % CHAT.encode() + b"x" * 60)
            await gate.until(lambda: held.bytes == 60)
        await gate.until(lambda: held.bytes == held.connections == 0)


async def test_requests_that_wait_behind_another_are_held_until_they_are_answered_or_their_client_leaves() -> None:
    async def never(seen: Seen, reply: Reply) -> None:
        await asyncio.Event().wait()

    async with FakeWorker(never) as worker, gateway(pool("policy", worker.url)) as gate:
        held = gate.gateway.intake
        async with Wire(gate.port) as wire:
            for _ in range(3):
                wire.post(CHAT, b"[" + b" " * 998 + b"]" if _ else chat("a"))
            await gate.until(lambda: len(worker.seen) == 1 and held.bytes > 2000)
        await gate.until(lambda: held.bytes == held.connections == 0)
