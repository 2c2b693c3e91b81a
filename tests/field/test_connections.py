"""Connections that go idle, that stay long, and that are many."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.field import clock
from tests.field.routes import CARRIERS, CHAT, GENERATE, MESSAGES, Route, both_carriers, over
from tests.harness import CarrierName, FakeWorker, Reply, Seen, Wire, gateway

SELDOM = {"interval": 10}
"""Minutes of probes would take longer than all else."""


async def ask_and_idle(route: Route, port: int, number: int, turns: int) -> None:
    """Some requests on one connection, 4.9 to 5.1 s between two of them."""
    async with Wire(port) as wire:
        for turn in range(turns):
            wire.post(route.path, route.body())
            assert await wire.head() == 200
            assert await wire.body() == route.answer
            await asyncio.sleep(4.9 + 0.2 * ((number * turns + turn) % 41) / 40)


@over((CHAT, MESSAGES))
def test_idle_connections_that_the_engine_closes(route: Route) -> None:
    """The engine closes after 5 s; 1,000 requests 4.9 to 5.1 s after the last see no error (NeMo Gym#1555).

    The gateway closes first, so that no request meets a closing connection.
    """

    async def main() -> None:
        async with (
            FakeWorker(route.polite, keep_alive=5.0) as worker,
            gateway(route.pool(worker.url), health={"interval": 1}) as gate,
        ):
            await asyncio.gather(*(ask_and_idle(route, gate.port, number, 20) for number in range(50)))
            assert len(worker.seen) == 1000
            assert worker.expired == 0
            closed = [record for record in gate.records() if record["event"] == "closed"]
            assert {(record["outcome"], record["attempt"]) for record in closed} == {("delivered", 1)}

    clock.run(main())


@over((CHAT, MESSAGES))
def test_connections_that_close_as_a_request_comes(route: Route) -> None:
    """An engine that drops idle connections sooner than the gateway thinks is asked again (vllm#41567).

    All connections are of this kind, so the second sending must not take one of them.
    """
    last: dict[int, float] = {}
    dropped = 0

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal dropped
        now = asyncio.get_running_loop().time()
        if now - last.get(seen.connection, now) > 4:
            dropped += 1
            reply.close()
            return
        last[seen.connection] = now
        await asyncio.sleep(0.5)
        await route.polite(seen, reply)

    async def main() -> None:
        async with (
            FakeWorker(script) as worker,
            gateway(route.pool(worker.url), health={"interval": 30}, limits={"attempts": 2}) as gate,
        ):
            for replica in gate.gateway.fleet.replicas:
                replica.connections.idle_seconds = 60
            await asyncio.gather(*(ask_and_idle(route, gate.port, number, 4) for number in range(50)))
            assert dropped > 100
            closed = [record for record in gate.records() if record["event"] == "closed"]
            assert {record["outcome"] for record in closed} == {"delivered"}
            assert all(replica.up for replica in gate.gateway.fleet.replicas)

    clock.run(main())


@both_carriers
async def test_refusals_use_up_no_connections(carrier: CarrierName) -> None:
    """After 200 streamed answers of 429, 300 streams run side by side (litellm#14895)."""
    refusing = True
    running = 0
    all_run = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal running
        if refusing:
            reply.head(429, ("content-type", "text/event-stream"))
            reply.chunk('data: {"error": {"message": "slow down", "type": "rate_limit", "code": 429}}\n\n')
            reply.end()
            return
        running += 1
        reply.sse()
        reply.chunk(CHAT.events[0])
        if running == 300:
            all_run.set()
        await all_run.wait()
        for event in CHAT.events[1:]:
            reply.chunk(event)
        reply.end()

    async def stream(port: int) -> tuple[int, bytes]:
        async with Wire(port) as wire:
            wire.post(CHAT.path, CHAT.body(stream=True))
            return await wire.head(), await wire.body()

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        refused = await asyncio.gather(*(stream(gate.port) for _ in range(200)))
        assert {status for status, _ in refused} == {429}
        assert all(b"slow down" in body for _, body in refused)
        assert {record["status"] for record in gate.records() if record["event"] == "closed"} == {429}
        refusing = False
        answers = await asyncio.gather(*(stream(gate.port) for _ in range(300)))
        assert set(answers) == {(200, b"".join(CHAT.events))}
        assert gate.in_flight("generate-0") == 0


@both_carriers
async def test_liveness_answers_under_load(carrier: CarrierName) -> None:
    """While hundreds of streams run, /livez answers in less than a second (production-stack#448).

    Of the process's own time: all that it waits for runs in it, and other programs may have the cores.
    """
    stop = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        while not stop.is_set():
            reply.chunk(CHAT.events[0])
            await asyncio.sleep(0.3)
        for event in CHAT.events:
            reply.chunk(event)
        reply.end()

    async def stream(port: int) -> bool:
        async with Wire(port) as wire:
            wire.post(CHAT.path, CHAT.body(stream=True))
            assert await wire.head() == 200
            return (await wire.body()).endswith(CHAT.events[-1])

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        streams = [asyncio.create_task(stream(gate.port)) for _ in range(200)]
        await gate.until(lambda: gate.in_flight("generate-0") == 200)
        slowest = 0.0
        for _ in range(10):
            before = time.process_time()
            assert (await gate.http.get("/livez")).status_code == 200
            slowest = max(slowest, time.process_time() - before)
        assert slowest < 1.0
        stop.set()
        assert all(await asyncio.gather(*streams))


@pytest.mark.parametrize("carrier", CARRIERS)
@over((CHAT, GENERATE))
def test_a_slow_stream_is_not_cut(route: Route, carrier: CarrierName) -> None:
    """One chunk a second for 700 s, at the default time-outs (modelplane#174)."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for _ in range(700):
            reply.chunk(route.events[0])
            await asyncio.sleep(1)
        for event in route.events[1:]:
            reply.chunk(event)
        reply.end()

    async def main() -> None:
        async with (
            FakeWorker(script) as worker,
            gateway(route.pool(worker.url), carrier=carrier, health=SELDOM) as gate,
            Wire(gate.port) as wire,
        ):
            before = asyncio.get_running_loop().time()
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            assert await wire.body() == route.events[0] * 700 + b"".join(route.events[1:])
            assert asyncio.get_running_loop().time() - before >= 700

    clock.run(main())


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("stream", [False, True])
@over((CHAT, GENERATE))
def test_a_late_first_byte_is_waited_for(route: Route, stream: bool, carrier: CarrierName) -> None:
    """The head at once and the first byte after 310 s, at the default time-outs (dstack#4239)."""

    async def script(seen: Seen, reply: Reply) -> None:
        kind = "text/event-stream" if stream else "application/json"
        reply.head(200, ("content-type", kind))
        await asyncio.sleep(310)
        reply.chunk(b"".join(route.events) if stream else route.answer)
        reply.end()

    async def main() -> None:
        async with (
            FakeWorker(script) as worker,
            gateway(route.pool(worker.url), carrier=carrier, health=SELDOM) as gate,
            Wire(gate.port) as wire,
        ):
            wire.post(route.path, route.body(stream=stream))
            assert await wire.head() == 200
            assert await wire.body() == (b"".join(route.events) if stream else route.answer)

    clock.run(main())
