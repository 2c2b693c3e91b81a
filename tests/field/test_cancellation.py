"""Clients that leave: the work at the replica ends, and the count of what is in flight is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gateway.carriers.asgi import Application, Receive, Send
from gateway.ledger.writer import Ledger
from gateway.stores.memory import MemoryStore
from gateway.upstream import Exchange
from tests.field.routes import CHAT, EVERY, GENERATE, SAMPLING, Route, both_carriers, over
from tests.harness import CarrierName, FakeWorker, Gate, Reply, Seen, Wire, gateway, polite

SOON = 1.0
"""Seconds within which a replica must see that the client has left."""


class Held:
    """A worker that says when a request has come and when its connection was closed."""

    def __init__(self, begin: Callable[[Reply], None]) -> None:
        self.begin = begin
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        self.begin(reply)
        await reply.writer.drain()
        self.arrived.set()
        await reply.gone()
        self.gone.set()


def silent(reply: Reply) -> None:
    """Nothing at all."""


@asynccontextmanager
async def held(
    route: Route, carrier: CarrierName, begin: Callable[[Reply], None], **more: Any
) -> AsyncIterator[tuple[Held, Gate]]:
    script = Held(begin)
    async with (
        asyncio.timeout(20),
        FakeWorker(script) as worker,
        gateway(route.pool(worker.url), carrier=carrier, timeouts={"settle": 0.2}, **more) as gate,
    ):
        yield script, gate


async def gone_and_back(script: Held, gate: Gate, route: Route) -> None:
    """The replica has seen the connection close, and nothing counts as in flight any more."""
    async with asyncio.timeout(SOON):
        await script.gone.wait()
    await gate.until(lambda: gate.in_flight(f"{route.role}-0") == 0)
    assert await gate.gauge("detgate_in_flight", pool=route.role, replica=f"{route.role}-0") == 0


@both_carriers
@over(EVERY)
async def test_a_client_that_leaves_ends_the_work(route: Route, carrier: CarrierName) -> None:
    """The replica sees the connection close within a second of the client's leaving (litellm#37140)."""
    async with held(route, carrier, silent) as (script, gate):
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body())
            await script.arrived.wait()
            assert gate.in_flight(f"{route.role}-0") == 1
        await gone_and_back(script, gate, route)


@both_carriers
@over(SAMPLING)
async def test_a_client_that_leaves_before_the_first_byte_of_a_stream(route: Route, carrier: CarrierName) -> None:
    """The replica has sent its head and no byte; it sees the close all the same (litellm#31499)."""
    async with held(route, carrier, Reply.sse) as (script, gate):
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            await script.arrived.wait()
        await gone_and_back(script, gate, route)


@both_carriers
@over(SAMPLING)
async def test_a_client_that_leaves_in_mid_stream(route: Route, carrier: CarrierName) -> None:
    """The client reads two chunks of a hundred and closes; the replica sees it (litellm#30245)."""
    first = route.events[0]

    def begin(reply: Reply) -> None:
        reply.sse()
        for _ in range(2):
            reply.chunk(first)

    async with held(route, carrier, begin) as (script, gate):
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            assert await wire.received(2 * len(first)) == 2 * first
        await gone_and_back(script, gate, route)


class PassThrough(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Callable[[Request], Any]) -> Response:
        answer: Response = await call_next(request)
        return answer


def plain(app: Application) -> Application:
    async def middleware(scope: Any, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)

    return middleware


def starlette(app: Application) -> Application:
    return PassThrough(app)


@pytest.mark.parametrize("middleware", [plain, starlette])
@over((CHAT, GENERATE))
async def test_middleware_does_not_hide_a_client_that_leaves(
    route: Route, middleware: Callable[[Application], Application]
) -> None:
    """With any middleware around the gateway the replica sees the close as soon (claude-code-proxy#114)."""
    async with held(route, "asgi", silent, middleware=middleware) as (script, gate):
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body())
            await script.arrived.wait()
        await gone_and_back(script, gate, route)


@both_carriers
async def test_clients_that_leave_make_no_replica_unhealthy(carrier: CarrierName) -> None:
    """After ten disconnects the next call is answered by the same, healthy replica (kitty-bridge#38)."""
    async with held(CHAT, carrier, silent) as (script, gate):
        for _ in range(10):
            async with Wire(gate.port) as wire:
                wire.post(CHAT.path, CHAT.body())
                await script.arrived.wait()
            await gone_and_back(script, gate, CHAT)
            script.arrived.clear()
            script.gone.clear()
        script.begin = lambda reply: CHAT.reply(reply)
        answer = await gate.http.post(CHAT.path, json=CHAT.body())
        assert answer.status_code == 200
        assert answer.content == CHAT.answer
        assert [replica.state for replica in gate.gateway.fleet.replicas] == ["up"]


@both_carriers
async def test_aborted_calls_leave_no_trace_in_the_choice_of_replicas(carrier: CarrierName) -> None:
    """After 100 aborted calls nothing is in flight and equal ids go where they went (vllm-router#215)."""
    aborting = False
    arrived = asyncio.Semaphore(0)

    async def script(seen: Seen, reply: Reply) -> None:
        if not aborting:
            await polite(seen, reply)
            return
        arrived.release()
        await reply.gone()

    async with (
        FakeWorker(script) as one,
        FakeWorker(script) as two,
        gateway(CHAT.pool(one.url, two.url), carrier=carrier) as gate,
    ):

        async def picks(run: str) -> list[str]:
            answers = [
                await gate.http.post(f"/runs/{run}/sessions/s{n}{CHAT.path}", json=CHAT.body()) for n in range(20)
            ]
            return [answer.headers["x-detgate-replica"] for answer in answers]

        before = await picks("before")
        assert {"generate-0", "generate-1"} == set(before)
        aborting = True
        wires = [Wire(gate.port) for _ in range(100)]
        for wire in wires:
            await wire.__aenter__()
            wire.post(CHAT.path, CHAT.body())
        for _ in wires:
            await arrived.acquire()
        assert gate.in_flight("generate-0") == gate.in_flight("generate-1") == 50
        for wire in wires:
            wire.leave()
        await gate.until(lambda: gate.in_flight("generate-0") == gate.in_flight("generate-1") == 0)
        aborting = False
        assert await picks("after") == before


@both_carriers
@over(SAMPLING)
async def test_a_stream_counts_until_its_last_byte(route: Route, carrier: CarrierName) -> None:
    """The gauge stays at one while a long stream runs, and falls when it has ended (vllm-router#200)."""
    go = asyncio.Semaphore(0)

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in route.events:
            reply.chunk(event)
            await go.acquire()
        await go.acquire()
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        labels = {"pool": "generate", "replica": "generate-0"}
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            for event in route.events:
                assert await wire.received(len(event)) == event
                assert gate.in_flight("generate-0") == 1
                go.release()
            assert await gate.gauge("detgate_in_flight", **labels) == 1
            go.release()
            assert await wire.chunk() == b""
            assert await gate.gauge("detgate_in_flight", **labels) == 0


def abort_raises(patch: pytest.MonkeyPatch) -> None:
    def abort(exchange: Exchange, reason: str = "", *, timeout: bool = False) -> None:
        raise RuntimeError("cannot abort")

    patch.setattr(Exchange, "abort", abort)


def settle_raises(patch: pytest.MonkeyPatch) -> None:
    async def settle(*_: object, **__: object) -> bool:
        raise RuntimeError("cannot settle")

    patch.setattr(MemoryStore, "settle", settle)


def ledger_raises(patch: pytest.MonkeyPatch) -> None:
    def closed(ledger: Ledger, record: dict[str, Any]) -> None:
        raise OSError("disk gone")

    patch.setattr(Ledger, "closed", closed)


@both_carriers
@pytest.mark.parametrize("fault", [abort_raises, settle_raises, ledger_raises])
async def test_a_clean_up_that_fails_gives_everything_back(
    carrier: CarrierName, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica resets in mid-stream, then cleaning up raises; the gauge is back at 0 (sglang-omni#931)."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(CHAT.events[0])
        await reply.writer.drain()
        reply.reset()

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        fault(monkeypatch)
        for _ in range(3):
            async with Wire(gate.port) as wire:
                wire.post(CHAT.path, CHAT.body(stream=True))
                assert await wire.head() == 200
                assert (await wire.broken_body()).startswith(CHAT.events[0])
        await gate.until(lambda: gate.in_flight("generate-0") == 0)
        monkeypatch.undo()
        worker.script = CHAT.polite
        assert (await gate.http.post(CHAT.path, json=CHAT.body())).status_code == 200


@both_carriers
@over((CHAT, GENERATE))
async def test_a_client_that_leaves_while_the_gateway_connects(route: Route, carrier: CarrierName) -> None:
    """Leaving before there is a connection to the replica: the gauge is back at 0 (vllm-ascend#10812)."""
    async with (
        FakeWorker(backlog=1) as worker,
        gateway(route.pool(worker.url), carrier=carrier, health={"interval": 60}) as gate,
    ):
        worker.deafen()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.open_connection("127.0.0.1", worker.port)
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body())
            await gate.until(lambda: gate.in_flight("generate-0") == 1)
        await gate.until(lambda: gate.in_flight("generate-0") == 0, SOON)
        assert worker.seen == []


@both_carriers
async def test_leaving_and_completing_at_the_same_moment(carrier: CarrierName) -> None:
    """1,000 clients leave as their answer ends: the gauge is never below 0 and ends at 0 (vllm#44725)."""
    lowest = highest = 0

    async with FakeWorker() as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:

        async def watch() -> None:
            nonlocal lowest, highest
            while True:
                load = gate.in_flight("generate-0")
                lowest, highest = min(lowest, load), max(highest, load)
                await asyncio.sleep(0)

        async def one(number: int) -> None:
            go = asyncio.Event()
            waiting[f"s{number}:0.0!"] = go, arrived = asyncio.Event(), asyncio.Event()
            async with Wire(gate.port) as wire:
                wire.post(f"/sessions/s{number}{CHAT.path}", CHAT.body(stream=number % 2 == 1))
                await arrived.wait()
                go.set()
                for _ in range(number % 9):
                    await asyncio.sleep(0)

        waiting: dict[str, tuple[asyncio.Event, asyncio.Event]] = {}

        async def script(seen: Seen, reply: Reply) -> None:
            go, arrived = waiting.pop(seen.header("x-request-id") or "")
            arrived.set()
            await go.wait()
            await CHAT.polite(seen, reply)

        worker.script = script
        watching = asyncio.create_task(watch())
        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
        await gate.until(lambda: gate.in_flight("generate-0") == 0)
        watching.cancel()
        assert lowest == 0
        assert highest > 0
        assert not gate.gateway.pipeline.dispatcher.live
