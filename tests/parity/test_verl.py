"""What verl's full determinism does (its pull requests 6572, 6857, 7027 and 7613), done by the gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from statistics import correlation
from typing import Any

import httpx

from tests.harness import FakeWorker, Gate, Reply, Seen, chat, gateway, pool
from tests.sim.serving import serving

CHAT = "/v1/chat/completions"
ROWS = 24


async def ask(gate: Gate, row: int, **fields: Any) -> httpx.Response:
    """One row of a batch, as verl names it: `det-{row}`, which is its priority too."""
    headers = {"x-session-id": f"det-{row}", "x-detgate-priority": str(row)}
    answer = await gate.http.post(CHAT, json=chat(f"row {row}", **fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def decided(answer: httpx.Response, *names: str) -> tuple[str, ...]:
    return tuple(answer.headers[f"x-detgate-{name}"] for name in names)


async def by_priority(seen: Seen, reply: Reply) -> None:
    """Probes of a vLLM that schedules by priority."""
    if seen.target == "/v1/models":
        reply.json({"object": "list", "data": [{"id": "test-model", "object": "model"}]})
    elif seen.target.startswith("/server_info"):
        reply.json({"vllm_config": {"scheduler_config": {"policy": "priority"}}})
    else:
        reply.json({})


async def test_a_row_has_the_same_seed_and_id_in_every_run_and_its_own_priority() -> None:
    runs = []
    for order in (list(range(ROWS)), list(reversed(range(ROWS)))):
        async with (
            FakeWorker(probes=by_priority) as worker,
            gateway(pool("policy", worker.url, priority="header")) as gate,
        ):
            answers = dict(zip(order, await asyncio.gather(*(ask(gate, row) for row in order)), strict=True))
            told = {seen.json["messages"][0]["content"]: seen.json["priority"] for seen in worker.seen}
            runs.append(
                [(*decided(answers[row], "seed", "request-id", "index"), told[f"row {row}"]) for row in range(ROWS)]
            )
    assert runs[0] == runs[1]
    assert len({seed for seed, *_ in runs[0]}) == ROWS
    priorities = [priority for *_, priority in runs[0]]
    assert priorities == sorted(set(priorities))


async def test_by_the_full_pool_a_row_has_a_replica_that_no_load_changes() -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker()) for _ in range(4)]
        runs = []
        for at_once in (True, False):
            async with gateway(
                pool("policy", *(worker.url for worker in workers), deterministic="declared"),
                profile="strict",
                guards={"clones": "warn"},
            ) as gate:
                if at_once:
                    answers = await asyncio.gather(*(ask(gate, row) for row in range(ROWS)))
                else:
                    answers = [await ask(gate, row) for row in range(ROWS)]
                runs.append([answer.headers["x-detgate-replica"] for answer in answers])
        assert runs[0] == runs[1]
        assert len(set(runs[0])) == 4


async def test_among_the_least_loaded_ties_go_by_the_row_and_not_to_the_first_replica() -> None:
    """Idle replicas are all tied: taking the first of them would send 200 sessions to one."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker()) for _ in range(4)]
        runs = []
        for rows in (200, 50):
            async with gateway(pool("policy", *(worker.url for worker in workers))) as gate:
                runs.append([(await ask(gate, row)).headers["x-detgate-replica"] for row in range(rows)])
        assert runs[0][:50] == runs[1]
        shares = Counter(runs[0])
        assert len(shares) == 4
        assert min(shares.values()) > 25


async def test_rewards_go_one_at_a_time_and_rollouts_do_not() -> None:
    async with (
        serving("vllm", role="reward", score_seconds=0.002) as (rm, _),
        serving("vllm", token_seconds=0.005) as (llm, _),
        gateway(
            pool("policy", llm.url, models=["sim-model"]), pool("reward", rm.url, role="reward", models=["sim-rm"])
        ) as gate,
    ):
        rollouts = [chat(f"row {row}", model="sim-model", max_tokens=8) for row in range(8)]
        scores: list[Any] = [{"model": "sim-rm", "input": f"answer {row}"} for row in range(8)]
        answers = await asyncio.gather(
            *(gate.http.post(CHAT, json=body) for body in rollouts),
            *(gate.http.post("/classify", json=body | {"model": "sim-rm"}) for body in scores),
        )
        assert {answer.status_code for answer in answers[:8]} == {200}
        assert rm.engine.counters.peak_running <= 1
        assert llm.engine.counters.peak_running > 1


async def test_its_pass_criteria_hold_between_engines_that_were_started_anew() -> None:
    """Tokens equal, logprobs equal to the bit, their correlation 1 within 1e-12."""
    runs = []
    for _ in range(2):
        async with serving("vllm") as (first, _), serving("vllm") as (second, _):
            async with gateway(
                pool("policy", first.url, second.url, models=["sim-model"], deterministic="declared"),
                profile="strict",
            ) as gate:
                fields: Any = {"model": "sim-model", "max_tokens": 16, "logprobs": True, "temperature": 1}
                answers = await asyncio.gather(*(ask(gate, row, **fields) for row in range(ROWS)))
                runs.append([answer.json()["choices"][0]["logprobs"]["content"] for answer in answers])
    tokens = [[[each["token"] for each in row] for row in run] for run in runs]
    logprobs = [[each["logprob"] for row in run for each in row] for run in runs]
    assert tokens[0] == tokens[1]
    assert logprobs[0] == logprobs[1]
    assert abs(correlation(*logprobs) - 1) < 1e-12
    assert len(logprobs[0]) > ROWS


async def test_seeds_of_a_group_do_not_depend_on_how_a_batch_is_parted() -> None:
    """A step's 4 prompts × 4 rollouts, in parts of several sizes, each part through a gateway of its own."""
    rows = [(prompt, rollout) for prompt in range(4) for rollout in range(4)]
    found = []
    for size in (3, 7, 16):
        seeds = {}
        for start in range(0, len(rows), size):
            async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
                for prompt, rollout in rows[start : start + size]:
                    headers = {"x-session-id": f"7:{prompt}:{rollout}"}
                    answer = await gate.http.post(CHAT, json=chat(f"prompt {prompt}"), headers=headers)
                    seeds[prompt, rollout] = answer.headers["x-detgate-seed"]
        assert len(set(seeds.values())) == len(rows)
        found.append(seeds)
    assert found[0] == found[1] == found[2]


async def test_equal_bodies_to_a_reward_pool_are_one_request_to_the_router() -> None:
    """verl hashes the body; content order does the same, whatever the order of its keys."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving("vllm", role="reward")) for _ in range(3)]
        urls = [server.url for server, _ in workers]
        runs = []
        for flipped in (False, True):
            async with gateway(
                pool("reward", *urls, role="reward", models=["sim-model"]), routing={"slack": "inf"}
            ) as gate:
                bodies = [{"model": "sim-model", "input": f"answer {number}"} for number in range(12)]
                bodies = [dict(reversed(body.items())) for body in bodies] if flipped else bodies
                answers = [await gate.http.post("/classify", json=body) for body in bodies]
                runs.append([decided(answer, "request-id", "replica") for answer in answers])
        assert runs[0] == runs[1]
        assert len({replica for _, replica in runs[0]}) == 3
