"""Others who use a reward replica too: found by what it has done, since a look at what it does comes too late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.batches import SCORES, EngineName
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, Wire, gateway, pool

both_engines = pytest.mark.parametrize("name", ["vllm", "sglang"])


class Counting(FakeWorker):
    """A reward engine that runs nothing whenever it is asked, and counts what it has scored since its start."""

    def __init__(self, name: EngineName) -> None:
        super().__init__(self.score, probes=self.probe)
        self.name: EngineName = name
        self.scored = 0
        self.looks = 0
        self.go = asyncio.Event()
        self.go.set()

    def pool(self) -> dict[str, Any]:
        return pool("reward", self.url, engine=self.name, role="reward")

    async def score(self, seen: Seen, reply: Reply) -> None:
        if seen.target == "/abort_request":
            reply.json({})
            return
        await self.go.wait()
        self.scored += 1
        reply.json(SCORES[self.name])

    async def probe(self, seen: Seen, reply: Reply) -> None:
        if seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif seen.target == "/metrics":
            self.looks += 1
            reply.text(
                'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
                'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1.0\n'
                f'http_requests_total{{handler="/tokenize",method="POST",status="2xx"}} {self.looks}.0\n'
                f'http_requests_total{{handler="/classify",method="POST",status="2xx"}} {self.scored}.0\n'
            )
        elif seen.target == "/v1/loads":
            self.looks += 1
            rank = {"num_running_reqs": 0, "num_waiting_reqs": 0, "total_prefill_uncached_tokens": 7 * self.scored}
            reply.json({"loads": [rank]})
        else:
            reply.json({})

    async def looked_at(self, gate: Gate, times: int = 2) -> None:
        """Wait for looks that begin after now."""
        wanted = self.looks + times
        await gate.until(lambda: self.looks >= wanted)


def foreign(gate: Gate) -> bool:
    return gate.gateway.fleet.pools["reward"].replicas["reward-0"].foreign


async def classify(gate: Gate, text: str) -> str:
    """What the answer to one request says of itself."""
    answer = await gate.http.post("/classify", json={"model": MODEL, "input": text, "text": text})
    return answer.headers["x-detgate-guarantee"]


@both_engines
async def test_one_request_of_a_stranger_is_found_though_it_is_over(name: EngineName) -> None:
    async with Counting(name) as engine, gateway(engine.pool()) as gate:
        await engine.looked_at(gate)
        assert await classify(gate, "a") == "balanced"
        await engine.looked_at(gate)
        assert not foreign(gate)
        engine.scored += 1
        await gate.until(lambda: foreign(gate))
        assert await classify(gate, "b") == "none; foreign-traffic"
        await gate.until(lambda: not foreign(gate))
        assert await classify(gate, "c") == "balanced"


async def test_a_stranger_among_ours_is_found_where_requests_are_counted() -> None:
    async with Counting("vllm") as engine, gateway(engine.pool(), health={"interval": 0.02}) as gate:
        await engine.looked_at(gate)

        async def ask() -> None:
            for number in range(200):
                await classify(gate, str(number))

        asking = asyncio.create_task(ask())
        await gate.until(lambda: engine.scored > 20)
        assert not foreign(gate)
        before = len(engine.seen)
        while not foreign(gate):
            engine.scored += 1
            await engine.looked_at(gate, 1)
        assert len(engine.seen) > before, "ours went on meanwhile"
        asking.cancel()


@both_engines
async def test_ours_are_none_finished_or_given_up(name: EngineName) -> None:
    flagged = False

    async def watch(gate: Gate) -> None:
        nonlocal flagged
        while True:
            flagged |= foreign(gate)
            await asyncio.sleep(0)

    async with (
        Counting(name) as engine,
        gateway(engine.pool(), health={"interval": 0.02}, timeouts={"settle": 0.05}) as gate,
    ):
        watching = asyncio.create_task(watch(gate))
        await engine.looked_at(gate)
        for round in range(5):
            await asyncio.gather(*(classify(gate, f"{round}:{number}") for number in range(20)))
            engine.go.clear()
            async with Wire(gate.port) as wire:
                wire.post("/classify", {"model": MODEL, "input": f"{round}", "text": f"{round}"})
                await gate.until(lambda: engine.running == 1)
            await gate.until(lambda: gate.in_flight("reward-0") == 0)
            await engine.looked_at(gate)
            # The engine finishes it for nobody.
            engine.go.set()
            await engine.looked_at(gate)
        watching.cancel()
    assert not flagged
