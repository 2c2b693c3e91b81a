"""Aborts by id: they reach what they name, where it runs, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.harness import DONE, MODEL, FakeWorker, Reply, Seen, chat, completion, delta, gateway, pool
from tests.sim.serving import serving

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_reaches_the_replica_that_runs_the_request_and_no_other(engine: str, stream: bool) -> None:
    """As sglang#31685 asks."""
    told: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    ended: dict[int, int] = {0: 0, 1: 0, 2: 0}

    def script(number: int) -> Any:
        aborted = asyncio.Event()

        async def held(seen: Seen, reply: Reply) -> None:
            if seen.target == "/abort_request":
                told[number].append(seen.json["rid"])
                aborted.set()
                reply.json({})
                return
            if stream:
                reply.sse()
                reply.chunk(delta("a"))
            if engine == "vllm":
                await reply.gone()
            else:
                await aborted.wait()
                if stream:
                    reply.chunk(delta("", "abort") + DONE)
                    reply.end()
                else:
                    reply.json(completion())
            ended[number] += 1

        return held

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(script(number))) for number in range(3)]
        gate = await stack.enter_async_context(gateway(pool("policy", *(each.url for each in workers), engine=engine)))
        tasks = [
            asyncio.ensure_future(gate.http.post(CHAT, json=chat(name, rid=name, stream=stream)))
            for name in ("a", "b", "c")
        ]
        await gate.until(lambda: [len(worker.seen) for worker in workers] == [1, 1, 1])
        [runs] = [n for n, worker in enumerate(workers) if worker.seen[0].json["messages"][0]["content"] == "b"]
        assert (await gate.http.post("/abort_request", json={"rid": "b"})).status_code == 200
        await gate.until(lambda: sum(ended.values()) == 1)
        assert ended[runs] == 1
        others = [names for number, names in told.items() if number != runs]
        assert others == [[], []]
        if engine == "sglang":
            assert told[runs] == [workers[runs].seen[0].json["rid"]]
        await gate.until(lambda: sum(gate.in_flight(f"policy-{number}") for number in range(3)) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_abort_ends_no_request_whose_id_begins_with_the_same() -> None:
    """As sglang#39461 asks: SGLang itself ends every request whose id begins with the one that it is told."""
    async with (
        serving("sglang", token_seconds=0.01) as (server, _),
        gateway(pool("policy", server.url, engine="sglang", models=["sim-model"])) as gate,
    ):
        bodies = [chat(name, model="sim-model", rid=name, max_tokens=40, ignore_eos=True) for name in ("s1", "s12")]
        tasks = [asyncio.ensure_future(gate.http.post(CHAT, json=body)) for body in bodies]
        await gate.until(lambda: len(server.engine.running) == 2)
        await gate.http.post("/abort_request", json={"rid": "s1"})
        first, second = await asyncio.gather(*tasks)
        assert second.status_code == 200
        assert second.json()["choices"][0]["finish_reason"] == "length"
        assert first.status_code != 200 or first.json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
async def test_an_abort_of_one_of_several_ids_ends_the_samples_of_its_prompt(
    route: str, place: int, n: int, stream: bool
) -> None:
    params = {"n": n, "ignore_eos": True}
    body: dict[str, Any]
    if route == "/generate":
        body = {"text": ["a", "b"], "sampling_params": params | {"max_new_tokens": 40}}
    else:
        body = {"model": "sim-model", "prompt": ["a", "b"], "max_tokens": 40} | params
    body |= {"rid": ["one", "two"], "stream": stream}
    async with (
        serving("sglang", token_seconds=0.01) as (server, _),
        gateway(pool("policy", server.url, engine="sglang", models=["sim-model"])) as gate,
    ):
        asking = asyncio.ensure_future(gate.http.post(route, json=body))
        await gate.until(lambda: len(server.engine.running) == 2 * n)
        await gate.http.post("/abort_request", json={"rid": ["one", "two"][place]})
        answer = await asking
        assert answer.status_code == 200
        [closed] = [each for each in gate.records() if each["event"] == "closed"]
        ends = ["abort" if sample // n == place else "length" for sample in range(2 * n)]
        assert (closed["outcome"], closed["finish_reasons"]) == ("delivered", ends)


async def test_an_abort_of_one_of_several_ids_ends_the_whole_request_where_its_engine_takes_none() -> None:
    async def held(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    async with FakeWorker(held) as worker, gateway(pool("policy", worker.url)) as gate:
        body = {"model": MODEL, "prompt": ["a", "b"], "rid": ["one", "two"]}
        asking = asyncio.ensure_future(gate.http.post("/v1/completions", json=body))
        await gate.until(lambda: len(worker.seen) == 2)
        await gate.http.post("/abort_request", json={"rid": "two"})
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")


async def test_an_abort_of_an_unknown_id_is_no_error_and_ends_nothing() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(completion())

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        assert (await gate.http.post("/abort_request", json={"rid": "nobody"})).status_code == 200
        assert (await gate.http.post(CHAT, json=chat())).status_code == 200
        assert [seen.target for seen in worker.seen] == [CHAT]
