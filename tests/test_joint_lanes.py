"""Lanes of several whole gateways on one store: one bound over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway import departures
from gateway.shared import lanes
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, Wire, chat, gateway, pool
from tests.redis_server import RedisServer
from tests.shared.test_gateways import ready

CHAT = "/v1/chat/completions"
ONE = {"scope": "replica", "limit": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LOOK_SECONDS", 0.05)


@asynccontextmanager
async def gateways(number: int, url: str, *pools: dict[str, Any], **settings: Any) -> AsyncIterator[list[Gate]]:
    timeouts = {"gateway": 1.0, "store": 5.0} | settings.pop("timeouts", {})
    given: dict[str, Any] = {"run": "r", "state": url, "timeouts": timeouts} | settings
    async with AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(gateway(*pools, **given)) for _ in range(number)]
        for gate in gates:
            await ready(gate)
        yield gates


async def first(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them has ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Alone:
    """A worker's script that notices when two are in it at once."""

    def __init__(self) -> None:
        self.inside = self.most = self.answered = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(0.001)
            await first(self.go.wait(), reply.gone())
            if not self.go.is_set():
                return
            if seen.target == "/classify":
                reply.json({"data": [{"index": 0, "probs": [1.0]}], "model": MODEL})
            else:
                reply.json({"id": "x", "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]})
            self.answered += 1
        finally:
            self.inside -= 1


async def score(gate: Gate, text: str) -> httpx.Response:
    return await gate.http.post("/classify", json={"model": MODEL, "input": text})


async def test_a_reward_replica_has_one_request_of_all_gateways_and_theirs_are_no_strangers() -> None:
    alone = Alone()

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/metrics":
            done = f'http_requests_total{{handler="/classify",method="POST",status="2xx"}} {alone.answered}'
            reply.text(f"vllm:num_requests_running {alone.inside}\n{done}\n")
        elif seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            reply.json({})

    async with RedisServer() as server, FakeWorker(alone, probes=probes) as worker:
        rewards = pool("rm", worker.url, role="reward")
        async with gateways(3, server.url, rewards) as gates:
            answers = await asyncio.gather(*(score(gates[n % 3], f"text {n}") for n in range(150)))
            assert {answer.status_code for answer in answers} == {200}
            assert alone.most == 1
            assert not any("foreign" in answer.headers["x-detgate-guarantee"] for answer in answers)
            # A stranger's are found all the same, by whichever gateway looks.
            alone.answered += 5
            told: set[int] = set()

            def all_told() -> bool:
                told.update(n for n, gate in enumerate(gates) if next(gate.gateway.fleet.replicas).foreign)
                return len(told) == 3

            await gates[0].until(all_told)


async def test_who_waits_goes_in_rounds_whichever_gateway_it_waits_in() -> None:
    alone = Alone()
    async with RedisServer() as server, FakeWorker(alone) as worker:
        async with gateways(2, server.url, pool("policy", worker.url, lane=ONE)) as gates:
            alone.go.clear()
            asked = [asyncio.create_task(gates[0].http.post("/sessions/first/v1/chat/completions", json=chat()))]
            await gates[0].until(lambda: alone.inside == 1)
            for number, gate in zip((10, 2, 30, 1), gates * 2, strict=True):
                path = f"/sessions/17:{number}/v1/chat/completions"
                asked.append(asyncio.create_task(gate.http.post(path, json=chat(str(number)))))
            waiting = [next(iter(gate.gateway.fleet)).lanes for gate in gates]
            await gates[0].until(lambda: sum(lanes.waiting for lanes in waiting) == 4)
            alone.go.set()
            await asyncio.gather(*asked)
            sent = [seen.json["messages"][0]["content"] for seen in worker.seen]
            assert sent == ["hello", "1", "2", "10", "30"]


@pytest.mark.parametrize("change", ["drain", "remove"])
async def test_who_waits_in_a_lane_goes_elsewhere_when_its_replica_is_drained_at_any_gateway(change: str) -> None:
    one, two = Alone(), Alone()
    one.go.clear()
    async with RedisServer() as server, FakeWorker(one) as first, FakeWorker(two) as second:
        async with gateways(2, server.url, pool("rm", first.url, second.url, role="reward")) as gates:
            two.go.clear()
            asked = [asyncio.create_task(score(gates[number % 2], f"{number}")) for number in range(8)]
            lanes = [next(iter(gate.gateway.fleet)).lanes for gate in gates]
            await gates[0].until(lambda: one.inside == two.inside == 1 and sum(each.waiting for each in lanes) == 6)
            if change == "drain":
                await gates[0].http.post("/admin/pools/rm/replicas/rm-0/drain")
            else:
                await gates[0].http.delete("/admin/pools/rm/replicas/rm-0")
            two.go.set()
            await gates[0].until(lambda: sum(each.done() for each in asked) == 7)
            one.go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 8
            assert (one.answered, two.answered, two.most) == (1, 7, 1)


async def test_samples_of_one_call_are_queued_all_or_none() -> None:
    alone = Alone()
    async with RedisServer() as server, FakeWorker(alone) as worker:
        limits = {"queue": 1}
        async with gateways(
            2, server.url, pool("policy", worker.url, engine="sglang", lane=ONE), limits=limits
        ) as gates:
            alone.go.clear()
            asked = [asyncio.create_task(gates[0].http.post(CHAT, json=chat("a", n=2)))]
            await gates[0].until(lambda: alone.inside == 1)
            refused = await gates[1].http.post(CHAT, json=chat("b", n=3))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            # Not even for a moment had it two of the three: one waits, and none came after it.
            assert await server.ask("GET", "detgate:{lanes:policy}:arrivals") == b"1"
            alone.go.set()
            await asyncio.gather(*asked)
            asked.append(asyncio.create_task(gates[1].http.post(CHAT, json=chat("c", n=4))))
            answers = await asyncio.gather(*asked)
            assert [len(answer.json()["choices"]) for answer in answers] == [2, 4]
            assert alone.most == 1


async def test_a_place_is_kept_until_the_engine_has_let_go_for_whoever_waits_elsewhere() -> None:
    """The client of one gateway leaves; the next, at another, comes when the engine is empty."""
    alone = Alone()
    stuck = 1

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/metrics":
            reply.text(f"vllm:num_requests_running {stuck + alone.inside}\n")
        else:
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async with RedisServer() as server, FakeWorker(alone, probes=probes) as worker:
        async with gateways(2, server.url, pool("policy", worker.url, lane=ONE)) as (one, two):
            alone.go.clear()
            async with Wire(one.port) as wire:
                wire.post(CHAT, chat())
                await one.until(lambda: alone.inside == 1)
            await one.until(lambda: alone.inside == 0)
            alone.go.set()
            asked = asyncio.create_task(two.http.post(CHAT, json=chat()))
            await asyncio.sleep(0.5)
            assert not asked.done()
            tally = await next(iter(two.gateway.fleet)).lanes.tally("policy-0")
            assert tally is not None
            assert (tally.open, tally.leaving) == (0, 1)
            stuck = 0
            answer = await asyncio.wait_for(asked, 5)
            assert "lane-uncertain" not in answer.headers["x-detgate-guarantee"]


async def test_a_doubt_at_one_gateway_is_told_of_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "LEAVE_SECONDS", 0.3)
    alone = Alone()

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/metrics":
            reply.text(f"vllm:num_requests_running {1 + alone.inside}\n")
        else:
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async with RedisServer() as server, FakeWorker(alone, probes=probes) as worker:
        async with gateways(2, server.url, pool("policy", worker.url, lane=ONE)) as (one, two):
            alone.go.clear()
            async with Wire(one.port) as wire:
                wire.post(CHAT, chat())
                await one.until(lambda: alone.inside == 1)
            await one.until(lambda: alone.inside == 0)
            alone.go.set()
            answer = await asyncio.wait_for(two.http.post(CHAT, json=chat()), 5)
            assert "lane-uncertain" in answer.headers["x-detgate-guarantee"]


@pytest.mark.parametrize("scope", ["pool", "session", "group"])
async def test_other_scopes_hold_over_all_gateways_too(scope: str) -> None:
    alone = Alone()
    async with RedisServer() as server, FakeWorker(alone) as worker, FakeWorker(alone) as other:
        lane = {"scope": scope, "limit": 1}
        policy = pool("policy", worker.url, other.url, lane=lane)
        async with gateways(2, server.url, policy, sessions={"required": True}, index_order="content") as gates:
            asked = [gates[n % 2].http.post("/sessions/s/v1/chat/completions", json=chat(str(n))) for n in range(20)]
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
            assert alone.most == 1


async def test_members_of_a_group_go_one_after_the_other_wherever_they_ask() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        policy = pool("policy", worker.url, lane={"scope": "group", "members": "episode"})
        async with gateways(2, server.url, policy, sessions={"required": True}) as (one, two):
            made = (await one.http.post("/sessions", json={"identity": "9", "group_size": 2})).json()["sessions"]
            first, second = ({"authorization": f"Bearer {each['api_key']}"} for each in made)
            later = asyncio.create_task(two.http.post(CHAT, json=chat(), headers=second))
            lanes = next(iter(two.gateway.fleet)).lanes
            await two.until(lambda: lanes.held == 1)
            assert (await one.http.post(CHAT, json=chat(), headers=first)).status_code == 200
            assert not later.done()
            ended = await one.http.delete(f"/sessions/{made[0]['session_id']}", headers=first)
            assert ended.json()["state"] == "ended"
            answer = await asyncio.wait_for(later, 5)
            assert answer.status_code == 200
            assert "group-order" not in answer.headers["x-detgate-guarantee"]
