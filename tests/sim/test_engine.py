import asyncio
from typing import Any

import httpx
import pytest

from gateway.sim import SimServer
from tests.sim.serving import serving


async def complete(client: httpx.AsyncClient, prompt: str = "a", **members: Any) -> Any:
    answer = await client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True, **members})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def classify(client: httpx.AsyncClient, text: str) -> float:
    answer = await client.post("/classify", json={"input": text, "use_activation": False})
    logit = answer.json()["data"][0]["probs"][0]
    assert isinstance(logit, float)
    return logit


async def held(server: SimServer, count: int, *calls: Any) -> list[asyncio.Task[Any]]:
    """Starts calls while the engine stands still, until that many jobs are there."""
    server.engine.pause()
    tasks = [asyncio.ensure_future(call) for call in calls]
    await server.engine.reached(count)
    return tasks


def test_requests_share_the_batch_up_to_its_size_and_wait_beyond() -> None:
    async def main() -> None:
        async with serving("vllm", max_num_seqs=3) as (server, client):
            tasks = await held(server, 5, *(complete(client) for _ in range(5)))
            metrics = (await client.get("/metrics")).text
            assert 'vllm:num_requests_waiting{engine="0",model_name="sim-model"} 5.0' in metrics
            server.engine.resume()
            await asyncio.gather(*tasks)
            assert server.engine.counters.peak_running == 3
            await server.engine.idle()

    asyncio.run(main())


@pytest.mark.parametrize(("engine", "order"), [("vllm", [1, 2, 3]), ("sglang", [3, 2, 1])])
@pytest.mark.parametrize("honoured", [True, False])
def test_priority_is_honoured_only_where_it_was_switched_on(engine: str, order: list[int], honoured: bool) -> None:
    async def main() -> None:
        async with serving(engine, max_num_seqs=1, priority_scheduling=honoured) as (server, client):
            ended: list[int] = []

            async def call(priority: int) -> None:
                await complete(client, priority=priority)
                ended.append(priority)

            tasks = []
            for count, priority in enumerate((2, 3, 1), start=1):
                tasks += await held(server, count, call(priority))
            server.engine.resume()
            await asyncio.gather(*tasks)
            assert ended == (order if honoured else [2, 3, 1])

    asyncio.run(main())


@pytest.mark.parametrize("dependent", [True, False])
def test_company_changes_logprobs_only_in_a_batch_dependent_engine(dependent: bool) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"batch_dependent": dependent, "prefix_cache": False}
        async with serving("vllm", **settings) as (server, client):
            call: dict[str, Any] = {"seed": 5, "logprobs": 0, "max_tokens": 8}
            alone = (await complete(client, **call))["choices"][0]["logprobs"]["token_logprobs"]
            tasks = await held(server, 3, *(complete(client, **call) for _ in range(3)))
            server.engine.resume()
            crowded = (await asyncio.gather(*tasks))[0]["choices"][0]["logprobs"]["token_logprobs"]
            assert (alone == crowded) is not dependent

    asyncio.run(main())


@pytest.mark.parametrize(("prefix_cache", "values"), [(True, 2), (False, 1)])
def test_a_warm_prefix_cache_gives_another_score_even_one_at_a_time(prefix_cache: bool, values: int) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"batch_dependent": True, "prefix_cache": prefix_cache}
        async with serving("vllm", role="reward", **settings) as (_, client):
            text = "a text that is longer than one block of the prefix cache"
            assert len({await classify(client, text) for _ in range(3)}) == values

    asyncio.run(main())


def test_scores_do_not_change_in_an_invariant_engine() -> None:
    async def main() -> None:
        async with serving("vllm", role="reward") as (server, client):
            alone = await classify(client, "text")
            tasks = await held(server, 4, *(classify(client, "text") for _ in range(4)))
            server.engine.resume()
            assert {alone, *await asyncio.gather(*tasks)} == {alone}

    asyncio.run(main())


def test_a_salt_keeps_prefix_caches_apart() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):

            async def cached(**members: Any) -> int:
                body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 1}, **members}
                return int((await client.post("/generate", json=body)).json()["meta_info"]["cached_tokens"])

            assert await cached() == 0
            assert await cached() == 5
            assert await cached(extra_key="b") == 0
            server.engine.cache.clear()
            assert await cached() == 0

    asyncio.run(main())


def test_abort_matches_ids_by_prefix() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):

            async def call(rid: str, n: int = 1) -> Any:
                parameters = {"max_new_tokens": 6, "n": n, "ignore_eos": True}
                body = {"text": "a", "rid": rid, "sampling_params": parameters}
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200
                return answer.json()

            tasks = await held(server, 5, call("s1"), call("s12"), call("t1"), call("s13", n=2))
            assert (await client.post("/abort_request", json={"rid": "s1"})).status_code == 200
            server.engine.resume()
            first, second, other, clones = await asyncio.gather(*tasks)
            reasons = [one["meta_info"]["finish_reason"]["type"] for one in (first, second, other, *clones)]
            assert reasons == ["abort", "abort", "length", "length", "length"]
            assert first["text"] == ""
            assert server.engine.counters.aborted == 2

    asyncio.run(main())


def test_abort_all_ends_everything() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):
            tasks = await held(server, 2, complete(client), complete(client))
            await client.post("/abort_request", json={"rid": "", "abort_all": True})
            server.engine.resume()
            found = await asyncio.gather(*tasks)
            assert [one["choices"][0]["finish_reason"] for one in found] == ["abort", "abort"]

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_place() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            [task] = await held(server, 3, complete(client, n=3))
            task.cancel()
            await server.engine.idle()
            assert (server.engine.counters.aborted, server.engine.counters.disconnects) == (3, 1)

    asyncio.run(main())


def test_a_stream_that_is_left_frees_its_place() -> None:
    async def main() -> None:
        async with serving("vllm", token_seconds=0.001) as (server, client):
            body = {"prompt": "a", "stream": True, "max_tokens": 30000, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                await anext(stream.aiter_lines())
                assert len(server.engine.running) == 1
            await server.engine.idle()
            assert server.engine.counters.aborted == 1

    asyncio.run(main())
