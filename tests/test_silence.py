"""Replicas that say nothing: ended by the time-outs in force, and by nothing else."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from gateway.dispatcher import Dispatcher
from gateway.sending import Sending
from gateway.settings import Timeouts
from gateway.silence import Silence
from gateway.upstream import Connections
from tests.field.clock import jumping
from tests.field.routes import CHAT, EVERY, SAMPLING, Route, over
from tests.harness import FakeWorker, Gate, Reply, Seen, Wire, gateway

DOWN = {"interval": 0.02, "failures": 1}


class Quiet:
    """A worker that answers nothing, or nothing after its first event, and fails its probes when told to."""

    def __init__(self, route: Route, *, begin: bool = False) -> None:
        self.route = route
        self.begin = begin
        self.sick = False
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()

    async def script(self, seen: Seen, reply: Reply) -> None:
        if self.begin:
            reply.sse()
            reply.chunk(self.route.events[0])
        self.arrived.set()
        await reply.gone()
        self.gone.set()

    async def probes(self, seen: Seen, reply: Reply) -> None:
        reply.json({}, status=500 if self.sick else 200)

    def worker(self) -> FakeWorker:
        return FakeWorker(self.script, probes=self.probes)


def name(route: Route, number: int = 0) -> str:
    return f"{route.role}-{number}"


def down(gate: Gate, route: Route) -> bool:
    return gate.gateway.fleet.pools[route.role].replicas[name(route)].state == "down"


async def error(wire: Wire) -> tuple[int, Any]:
    return await wire.head(), json.loads(await wire.body())


# --- a replica whose probes fail


@over(EVERY)
@jumping
async def test_a_silent_replica_that_is_down_is_broken(route: Route) -> None:
    quiet = Quiet(route)
    async with quiet.worker() as worker:
        async with (
            gateway(route.pool(worker.url), health=DOWN, timeouts={"dead": 0.2}) as gate,
            Wire(gate.port) as wire,
        ):
            wire.post(route.path, route.body())
            await quiet.arrived.wait()
            quiet.sick = True
            status, told = await error(wire)
            assert status == 504
            assert "nothing came for 0.2 s and its probes fail" in json.dumps(told)
            await asyncio.wait_for(quiet.gone.wait(), 1)


@over((CHAT, EVERY[-1]))
@jumping
async def test_before_the_first_byte_another_replica_is_asked(route: Route) -> None:
    quiet = Quiet(route)
    async with quiet.worker() as sick, FakeWorker(route.polite) as well:
        pools = route.pool(sick.url, well.url)
        async with gateway(pools, health=DOWN, timeouts={"dead": 0.2}) as gate:
            await gate.http.post(f"/admin/pools/{route.role}/replicas/{name(route, 1)}/drain")
            asking = asyncio.create_task(gate.http.post(route.path, json=route.body()))
            await quiet.arrived.wait()
            gate.gateway.fleet.pools[route.role].replicas[name(route, 1)].draining = False
            quiet.sick = True
            answer = await asking
            assert answer.status_code == 200
            assert answer.content == route.answer
            assert answer.headers["x-detgate-replica"] == name(route, 1)
            assert answer.headers["x-detgate-attempts"] == "2"


@over(SAMPLING)
@jumping
async def test_in_mid_stream_it_ends_as_an_error(route: Route) -> None:
    quiet = Quiet(route, begin=True)
    async with quiet.worker() as worker:
        async with (
            gateway(route.pool(worker.url), health=DOWN, timeouts={"dead": 0.2}) as gate,
            Wire(gate.port) as wire,
        ):
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            assert await wire.received(len(route.events[0])) == route.events[0]
            quiet.sick = True
            assert b"nothing came for 0.2 s and its probes fail" in await wire.broken_body()


@jumping
async def test_neither_silence_nor_failing_probes_break_a_stream_alone() -> None:
    quiet, go = Quiet(CHAT), asyncio.Semaphore(0)

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in CHAT.events:
            await go.acquire()
            reply.chunk(event)
        reply.end()

    async with FakeWorker(script, probes=quiet.probes) as worker:
        async with gateway(CHAT.pool(worker.url), health=DOWN, timeouts={"dead": 0.3}) as gate, Wire(gate.port) as wire:
            wire.post(CHAT.path, CHAT.body(stream=True))
            await gate.until(lambda: gate.in_flight("generate-0") == 1)
            await asyncio.sleep(0.5)
            for place, event in enumerate(CHAT.events):
                go.release()
                if place == 0:
                    assert await wire.head() == 200
                assert await wire.received(len(event)) == event
                quiet.sick = True
                await gate.until(lambda: down(gate, CHAT))
                await asyncio.sleep(0.1)
            assert await wire.chunk() == b""


# --- time-outs as settings


@over(EVERY)
@jumping
async def test_a_first_byte_is_waited_for_as_long_as_is_set(route: Route) -> None:
    quiet = Quiet(route)
    async with quiet.worker() as worker:
        async with gateway(route.pool(worker.url), timeouts={"first_byte": 0.2}) as gate, Wire(gate.port) as wire:
            wire.post(route.path, route.body())
            status, told = await error(wire)
            assert status == 504
            assert "no first byte came within 0.2 s" in json.dumps(told)


@over(SAMPLING)
@jumping
async def test_the_head_of_a_stream_is_no_first_byte(route: Route) -> None:
    """However late it comes: the time runs from the sending."""

    async def script(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(0.4)
        reply.sse()
        await reply.gone()

    async with FakeWorker(script) as worker:
        async with gateway(route.pool(worker.url), timeouts={"first_byte": 0.6}) as gate, Wire(gate.port) as wire:
            since = asyncio.get_running_loop().time()
            wire.post(route.path, route.body(stream=True))
            assert (await error(wire))[0] == 504
            assert asyncio.get_running_loop().time() - since < 0.95


@over(SAMPLING)
@jumping
async def test_a_stream_may_be_silent_for_as_long_as_is_set(route: Route) -> None:
    quiet = Quiet(route, begin=True)
    async with quiet.worker() as worker:
        async with gateway(route.pool(worker.url), timeouts={"idle": 0.2}) as gate, Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            assert b"nothing came for 0.2 s" in await wire.broken_body()
            await asyncio.wait_for(quiet.gone.wait(), 1)


@over((CHAT, EVERY[-1]))
@jumping
async def test_a_whole_answer_that_stops_half_way_is_timed_out_too(route: Route) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.head(200, ("content-type", "application/json"), length=len(route.answer))
        reply.writer.write(route.answer[:10])
        await reply.gone()

    async with FakeWorker(script) as worker:
        async with gateway(route.pool(worker.url), timeouts={"idle": 0.2}) as gate, Wire(gate.port) as wire:
            wire.post(route.path, route.body())
            status, told = await error(wire)
            assert status == 504
            assert "nothing came for 0.2 s" in json.dumps(told)


@jumping
async def test_a_stream_that_goes_on_is_not_cut_however_long_it_is() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in CHAT.events:
            reply.chunk(event)
            await asyncio.sleep(0.12)
        reply.end()

    async with FakeWorker(script) as worker:
        async with gateway(CHAT.pool(worker.url), timeouts={"idle": 0.6, "first_byte": 0.6}) as gate:
            answer = await gate.http.post(CHAT.path, json=CHAT.body(stream=True))
            assert answer.content == b"".join(CHAT.events)


@jumping
async def test_a_slow_reader_is_not_taken_for_a_silent_replica() -> None:
    """While the client takes nothing, the replica is not read: it has no chance to say anything."""
    chunk = b": " + b"x" * 65536 + b"\n\n"

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for _ in range(200):
            reply.chunk(chunk)
            await reply.writer.drain()
        for event in CHAT.events:
            reply.chunk(event)
        reply.end()

    async with FakeWorker(script) as worker:
        async with gateway(CHAT.pool(worker.url), timeouts={"idle": 0.2, "dead": 0.2}, health=DOWN) as gate:
            async with Wire(gate.port, receive_buffer=4096) as wire:
                wire.post(CHAT.path, CHAT.body(stream=True))
                assert await wire.head() == 200
                [sending] = gate.gateway.pipeline.dispatcher.live.values()
                await gate.until(lambda: sending.exchange.paused)
                await asyncio.sleep(0.6)
                assert await wire.body() == chunk * 200 + b"".join(CHAT.events)


@jumping
async def test_after_a_pause_silence_is_counted_anew() -> None:
    quiet = Quiet(CHAT, begin=True)
    async with quiet.worker() as worker:
        await asyncio.sleep(1)
        connections = Connections(worker.url)
        exchange = await connections.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", b"")
        await exchange.begun()
        sending = cast(Sending, SimpleNamespace(sent=exchange, replica=SimpleNamespace(state="up")))
        silence = Silence(Timeouts(idle=50.0), cast(Dispatcher, None))
        loop = asyncio.get_running_loop()
        exchange.pause()
        await asyncio.sleep(100)
        exchange.resume()
        await asyncio.sleep(40)
        silence.look(sending, loop.time())
        assert exchange.alive
        await asyncio.sleep(20)
        silence.look(sending, loop.time())
        assert not exchange.alive


@jumping
async def test_the_default_settings_cut_nothing() -> None:
    """Long silence from a replica that passes its probes: before the first byte, and between two."""

    async def script(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(1000)
        if seen.json.get("stream"):
            reply.sse()
            for event in CHAT.events:
                reply.chunk(event)
                await asyncio.sleep(500)
            reply.end()
        else:
            CHAT.reply(reply)

    async with FakeWorker(script) as worker:
        async with gateway(CHAT.pool(worker.url), health={"interval": 60.0}) as gate:
            for stream, whole in ((False, CHAT.answer), (True, b"".join(CHAT.events))):
                answer = await gate.http.post(CHAT.path, json=CHAT.body(stream=stream), timeout=None)
                assert answer.content == whole


@jumping
async def test_waiting_for_a_turn_is_no_silence() -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        while not go.is_set():
            reply.chunk(": alive\n\n")
            await asyncio.sleep(0.02)
        for event in CHAT.events:
            reply.chunk(event)
        reply.end()

    async with FakeWorker(script) as worker:
        settings = CHAT.pool(worker.url, lane={"scope": "replica", "limit": 1})
        async with gateway(settings, timeouts={"first_byte": 0.5, "idle": 0.5}) as gate:
            body = CHAT.body(stream=True)
            asking = [asyncio.create_task(gate.http.post(f"/sessions/{n}{CHAT.path}", json=body)) for n in range(2)]
            await gate.until(lambda: gate.gateway.fleet.pools["generate"].lanes.waiting == 1)
            await asyncio.sleep(1.0)
            go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
