"""Priorities told to an engine: only to one that goes by them, no two alike, in its own direction."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from gateway.core import priority
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool
from tests.sim.serving import serving

CHAT = "/v1/chat/completions"
ENGINES = ("vllm", "sglang")


@pytest.mark.parametrize("higher_first", [False, True])
def test_ranks_are_in_order_and_no_two_alike(higher_first: bool) -> None:
    ids = [(rank, f"{session}:{rank}.0!") for rank in range(0, 40) for session in range(250)]
    told = [priority.value(rank, name, higher_first=higher_first) for rank, name in ids]
    assert len(set(told)) == len(told)
    assert all(0 <= value < 2**63 for value in told)
    ordered = [rank for _, (rank, _) in sorted(zip(told, ids, strict=True), reverse=higher_first)]
    assert ordered == sorted(ordered)


def test_what_is_beyond_the_largest_rank_goes_with_it() -> None:
    last = priority.value(priority.LARGEST, "a", higher_first=False)
    assert priority.value(2**31 - 1, "a", higher_first=False) == last < 2**63


def telling(on: bool | None) -> Any:
    """Probes of an engine that goes by priority, does not, or does not tell."""

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": "test-model", "object": "model"}]})
        elif seen.target.startswith("/server_info") and on is not None:
            policy = {"scheduler_config": {"policy": "priority" if on else "fcfs"}}
            reply.json({"vllm_config": policy, "enable_priority_scheduling": on})
        else:
            reply.json({})

    return probes


async def ask(gate: Gate, text: str = "a", session: str = "s", **headers: str) -> None:
    answer = await gate.http.post(
        CHAT, json=chat(text), headers={"x-session-id": session} | {k.replace("_", "-"): v for k, v in headers.items()}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on", [True, False, None])
async def test_only_an_engine_that_goes_by_it_is_told(engine: str, on: bool | None) -> None:
    async with (
        FakeWorker(probes=telling(on)) as worker,
        gateway(pool("policy", worker.url, engine=engine, priority="index")) as gate,
    ):
        for text in ("a", "b", "c"):
            await ask(gate, text)
        told = [seen.json.get("priority") for seen in worker.seen]
        if on:
            assert told == sorted(set(told), reverse=engine == "sglang")
        else:
            assert told == [None] * 3
            findings = gate.gateway.fleet.pools["policy"].findings
            assert "priority-unused" in {finding.id for finding in findings}


async def test_off_tells_nothing() -> None:
    async with FakeWorker(probes=telling(True)) as worker, gateway(pool("policy", worker.url)) as gate:
        await ask(gate, x_detgate_priority="5")
        assert "priority" not in worker.seen[0].json


@pytest.mark.parametrize("told", ["off", "index", "header"])
async def test_what_is_no_number_is_refused_whoever_would_read_it(told: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, priority=told)) as gate:
        refused = await gate.http.post(CHAT, json=chat(), headers={"x-detgate-priority": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_header")
        assert worker.seen == []


async def test_by_header_the_lower_goes_first_and_the_seed_is_the_same() -> None:
    async with (
        FakeWorker(probes=telling(True)) as worker,
        gateway(pool("policy", worker.url, priority="header")) as gate,
    ):
        for number in (7, 3, 7):
            await ask(gate, session=f"s{number}", x_detgate_priority=str(number))
        seven, three, again = (seen.json["priority"] for seen in worker.seen)
        assert three < seven
        assert worker.seen[2].json["seed"] != worker.seen[0].json["seed"]
        await ask(gate, session="plain")
        assert "priority" not in worker.seen[3].json
        refused = await gate.http.post(CHAT, json=chat(), headers={"x-detgate-priority": "-1"})
        assert refused.json()["error"]["code"] == "invalid_header"
        assert again != three


def waiting(gate: Gate, count: int) -> bool:
    return gate.in_flight("policy-0") == count


async def test_by_header_those_who_wait_in_a_lane_go_in_that_order() -> None:
    first = asyncio.Event()
    order: list[str] = []

    async def slow(seen: Seen, reply: Reply) -> None:
        order.append(seen.json["messages"][0]["content"])
        if len(order) == 1:
            await first.wait()
        reply.json(completion())

    async with (
        FakeWorker(slow) as worker,
        gateway(pool("policy", worker.url, priority="header", lane={"scope": "replica", "limit": 1})) as gate,
    ):
        tasks = []
        for place, number in enumerate((9, 3, 2, 1)):
            tasks.append(asyncio.ensure_future(ask(gate, str(number), f"s{number}", x_detgate_priority=str(number))))
            await gate.until(partial(waiting, gate, place + 1))
        first.set()
        await asyncio.gather(*tasks)
        # 9 runs, 3 was alone in the first round; those that came later wait together.
        assert order[0] == "9"
        assert order[1:] in (["1", "2", "3"], ["3", "1", "2"])


async def test_one_call_for_several_samples_is_told_none() -> None:
    async with (
        FakeWorker(probes=telling(True)) as worker,
        gateway(pool("policy", worker.url, priority="index")) as gate,
    ):
        await gate.http.post(CHAT, json=chat(n=2), headers={"x-session-id": "s"})
        assert "priority" not in worker.seen[0].json


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_serves_the_lower_index_first(engine: str) -> None:
    done: list[int] = []

    async def ask_for(gate: Gate, index: int, tokens: int) -> None:
        body = chat("a", model="sim-model", max_tokens=tokens)
        headers = {"x-session-id": "s", "x-request-index": str(index)}
        assert (await gate.http.post(CHAT, json=body, headers=headers)).status_code == 200
        done.append(index)

    async with (
        serving(engine, priority_scheduling=True, dev_mode=True, max_num_seqs=1, token_seconds=0.01) as (server, _),
        gateway(pool("policy", server.url, engine=engine, models=["sim-model"], priority="index")) as gate,
    ):
        tasks = [asyncio.ensure_future(ask_for(gate, 9, 40))]
        await gate.until(lambda: bool(server.engine.running))
        tasks += [asyncio.ensure_future(ask_for(gate, index, 1)) for index in (3, 1, 2)]
        await asyncio.gather(*tasks)
        assert done == [9, 1, 2, 3]
