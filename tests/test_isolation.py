"""Prefix caches that are parted by a salt: who may find what, and that nothing else follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import FakeWorker, Gate, Reply, Seen, chat, gateway, pool
from tests.sim.serving import serving

SALT = {"vllm": "cache_salt", "sglang": "extra_key"}


async def asked(gate: Gate, body: Any, path: str = "/v1/chat/completions", **headers: str) -> dict[str, str]:
    answer = await gate.http.post(path, json=body, headers={"x-session-id": "s"} | headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.headers)


def salts(worker: FakeWorker, engine: str) -> list[Any]:
    return [seen.json.get(SALT[engine]) for seen in worker.seen]


@pytest.mark.parametrize("engine", SALT)
async def test_each_request_has_a_salt_and_the_same_seed_as_without(engine: str) -> None:
    told: dict[str, list[tuple[str, str]]] = {}
    for isolate in ("off", "request", "run"):
        async with (
            FakeWorker() as worker,
            gateway(pool("policy", worker.url, engine=engine, isolate_cache=isolate)) as gate,
        ):
            answers = [await asked(gate, chat(text)) for text in ("a", "a", "b")]
            told[isolate] = [(each["x-detgate-seed"], each["x-detgate-request-id"]) for each in answers]
            found = salts(worker, engine)
            assert len(set(found)) == {"off": 1, "request": 3, "run": 1}[isolate]
            assert (found[0] is None) is (isolate == "off")
            # vLLM takes at most 128 characters and none of @ / \.
            assert all(each is None or (each.isalnum() and len(each) == 32) for each in found)
    assert told["off"] == told["request"] == told["run"]


@pytest.mark.parametrize("isolate", ["request", "run"])
async def test_no_run_meets_what_another_left(isolate: str) -> None:
    async with FakeWorker() as worker:
        for run in ("a", "b"):
            async with gateway(pool("policy", worker.url, isolate_cache=isolate), run=run) as gate:
                await asked(gate, chat("a"))
        first, second = salts(worker, "vllm")
        assert first != second


@pytest.mark.parametrize(("isolate", "distinct"), [("request", 4), ("run", 2)])
async def test_a_clients_own_salts_part_what_they_parted(isolate: str, distinct: int) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, isolate_cache=isolate)) as gate:
        for own in ("x", "x", None, "y"):
            await asked(gate, chat("a", cache_salt=own))
        assert len(set(salts(worker, "vllm"))) == distinct + (isolate == "run")


@pytest.mark.parametrize("isolate", ["request", "run"])
async def test_children_of_one_call_keep_the_salts_of_their_prompts(isolate: str) -> None:
    async def generate(seen: Seen, reply: Reply) -> None:
        reply.json({"text": "x", "output_ids": [1], "meta_info": {"id": seen.json["rid"], "finish_reason": None}})

    async with (
        FakeWorker(generate) as worker,
        gateway(pool("policy", worker.url, engine="sglang", isolate_cache=isolate)) as gate,
    ):
        body = {"text": ["a", "b"], "extra_key": ["x", "y"], "sampling_params": {"n": 2}}
        await asked(gate, body, "/generate")
        assert len(worker.seen) == 4
        assert len(set(salts(worker, "sglang"))) == {"request": 4, "run": 2}[isolate]


async def test_what_is_sent_again_meets_nothing_that_its_first_sending_left() -> None:
    async def broken_once(seen: Seen, reply: Reply) -> None:
        if len(worker.seen) == 1:
            reply.json({"error": {"message": "busy"}}, 500)
        else:
            reply.json({"choices": [{"text": "a"}], "usage": {}})

    async with FakeWorker(broken_once) as worker, gateway(pool("policy", worker.url, isolate_cache="request")) as gate:
        first = await gate.http.post("/v1/chat/completions", json=chat("a"), headers={"x-session-id": "s"})
        again = await gate.http.post("/v1/chat/completions", json=chat("a"), headers={"x-session-id": "s"})
        assert first.status_code == 500
        assert first.headers["x-detgate-request-id"] == again.headers["x-detgate-request-id"]
        assert len(set(salts(worker, "vllm"))) == 2


@pytest.mark.parametrize("engine", SALT)
@pytest.mark.parametrize("isolate", ["off", "request", "run"])
async def test_on_an_engine_where_a_warm_prefix_changes_an_answer_only_its_own_request_is_sure(
    engine: str, isolate: str
) -> None:
    async with (
        serving(engine, batch_dependent=True) as (server, _),
        gateway(pool("policy", server.url, engine=engine, models=["sim-model"], isolate_cache=isolate)) as gate,
    ):
        body = chat("word " * 60, model="sim-model", max_tokens=8, seed=7, logprobs=True)
        said = []
        for _ in range(2):
            answer = await gate.http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
            said.append(answer.json()["choices"][0]["logprobs"]["content"])
        assert (said[0] == said[1]) is (isolate == "request")


async def test_a_route_without_a_salt_says_that_its_cache_is_shared() -> None:
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url, engine="sglang", isolate_cache="request")) as gate,
    ):
        body = {"model": "test-model", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        assert "cache-shared" in (await asked(gate, body, "/v1/messages"))["x-detgate-guarantee"]
        assert "cache-shared" not in (await asked(gate, chat("a")))["x-detgate-guarantee"]
        assert "extra_key" not in worker.seen[0].json


@pytest.mark.parametrize(("isolate", "values"), [("off", 2), ("request", 1)])
async def test_a_reward_replica_with_a_prefix_cache_scores_alike_where_each_request_has_a_salt(
    isolate: str, values: int
) -> None:
    async with (
        serving("vllm", role="reward", batch_dependent=True) as (server, _),
        gateway(pool("reward", server.url, role="reward", models=["sim-model"], isolate_cache=isolate)) as gate,
    ):
        body = {"model": "sim-model", "input": "a text that is longer than one block of the prefix cache"}
        answers = [await gate.http.post("/classify", json=body) for _ in range(3)]
        assert len({str(answer.json()["data"]) for answer in answers}) == values
        assert ("reward-batched" in answers[0].headers["x-detgate-guarantee"]) is (isolate == "off")
