"""A gateway that the others have taken for gone delivers nothing of which the index may be another's by then."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import ports
from tests.harness import FakeWorker, Gate, Reply, Seen, Wire, chat, completion, delta, gateway, pool
from tests.processes import serving
from tests.redis_server import Front, RedisServer
from tests.shared.test_gateways import CHAT, SHORT, ask, gateways, index, ready
from tests.waiting import until


class FirstHeld:
    """A worker's script: the first answer begins, if it is a stream, and waits; others come at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self._first = True

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        waits, self._first = self._first, False
        if not seen.json.get("stream"):
            if waits:
                await self.go.wait()
            reply.json(completion())
            return
        reply.sse()
        reply.chunk(delta("hi"))
        if waits:
            await self.go.wait()
        reply.chunk(delta(finish="stop") + "data: [DONE]\n\n")
        reply.end()


def lost(gate: Gate) -> list[dict[str, Any]]:
    """Ends of claims of a gateway that is gone, in the ledger of one that noticed."""
    return [record for record in gate.records() if record.get("error") == "gateway-lost"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_released_meanwhile_is_not_delivered(stream: bool) -> None:
    held = FirstHeld()
    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        given: dict[str, Any] = {"run": "r", "state": front.url, "timeouts": SHORT}
        async with (
            gateway(pool("policy", worker.url), **given) as cut_off,
            gateways(1, server.url, worker) as (other,),
            Wire(cut_off.port) as wire,
        ):
            await ready(cut_off)
            body = json.dumps(chat("x", stream=stream)).encode()
            wire.post(CHAT, body, ("X-Session-ID", "s"))
            await cut_off.until(lambda: len(worker.seen) == 1)
            front.lead(ports.free())
            await other.until(lambda: len(lost(other)) == 1, 10)
            assert (lost(other)[0]["index"], lost(other)[0]["used"]) == (0, False)
            twin = await other.http.post(CHAT, content=body, headers={"X-Session-ID": "s"})
            assert index(twin) == 0
            front.lead(server.port)
            await ready(cut_off)
            held.go.set()
            if stream:
                assert await wire.head() == 200
                got = await wire.broken_body()
                assert b"hi" in got
                assert b"index_released" in got
                assert b"[DONE]" not in got
            else:
                assert await wire.head() == 503
                assert wire.header("retry-after") == "1"
                assert b"index_released" in await wire.body()
            await cut_off.until(lambda: any(record["event"] == "closed" for record in cut_off.records()))
            end = next(record for record in cut_off.records() if record["event"] == "closed")
            assert (end["outcome"], end["used"]) == ("failed", False)
            assert "released" in end["error"]
            assert index(await ask(cut_off, "y")) == 1


async def test_what_the_store_cannot_be_told_within_the_lease_is_not_delivered() -> None:
    held = FirstHeld()
    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        async with gateways(1, front.url, worker) as (gate,):
            loop = asyncio.get_running_loop()
            asked = asyncio.create_task(ask(gate, "x"))
            await gate.until(lambda: len(worker.seen) == 1)
            front.lead(ports.free())
            held.go.set()
            began = loop.time()
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert SHORT["gateway"] * 0.9 < loop.time() - began < SHORT["gateway"] * 3
            front.lead(server.port)
            await ready(gate)
            assert index(await ask(gate, "x", X_Stainless_Retry_Count="1")) == 0


async def test_an_answer_waits_for_the_store_and_is_delivered_when_that_is_back() -> None:
    held = FirstHeld()
    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        async with gateways(1, front.url, worker) as (gate,):
            asked = asyncio.create_task(ask(gate, "x"))
            await gate.until(lambda: len(worker.seen) == 1)
            front.lead(ports.free())
            held.go.set()
            store: Any = gate.gateway._store
            await gate.until(lambda: store.owed == 1)
            assert not asked.done()
            front.lead(server.port)
            assert index(await asked) == 0


CONFIGURATION = """\
run: r
state: {state}
timeouts: {{gateway: 2, store: 1, settle: 0.5}}
log: {{level: warning}}
pools: [{{name: policy, engine: vllm, models: [test-model], replicas: [{{name: policy-0, url: "{worker}"}}]}}]
"""


async def test_a_process_that_stood_still_for_longer_than_its_lease_delivers_nothing_of_before(tmp_path: Path) -> None:
    held = FirstHeld()
    async with RedisServer() as server, FakeWorker(held) as worker, gateways(1, server.url, worker) as (other,):
        async with serving(tmp_path, CONFIGURATION.format(state=server.url, worker=worker.url)) as stopped:
            asked = asyncio.create_task(stopped.http.post(CHAT, json=chat("x"), headers={"X-Session-ID": "s"}))
            await until(lambda: len(worker.seen) == 1)
            stopped.signal(signal.SIGSTOP)
            held.go.set()  # its answer lies in its socket when it goes on
            await other.until(lambda: len(lost(other)) == 1, 10)
            assert index(await ask(other, "x")) == 0
            stopped.signal(signal.SIGCONT)
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "index_released")
