"""Seeds as the real engines treat them, route by route."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.sim.serving import serving

HI = [{"role": "user", "content": "Say hi"}]
ENGINES = ("vllm", "sglang")
COERCED = [("7", 7), (7.0, 7), (True, 1), (1e3, 1000), (-5, -5), (2**63 - 1, 2**63 - 1)]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx.AsyncClient, **members: Any) -> list[str]:
    found = await post(client, "/v1/chat/completions", {"messages": HI, "max_tokens": 12, **members})
    return [choice["message"]["content"] for choice in found["choices"]]


async def complete(client: httpx.AsyncClient, prompt: Any = "Say hi", **members: Any) -> list[str]:
    found = await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 12, **members})
    return [choice["text"] for choice in found["choices"]]


async def generate(client: httpx.AsyncClient, text: Any = "Say hi", parameters: Any = None) -> list[str]:
    found = await post(client, "/generate", {"text": text, "sampling_params": parameters})
    return [one["text"] for one in (found if isinstance(found, list) else [found])]


async def respond(client: httpx.AsyncClient, **members: Any) -> list[str]:
    found = await post(client, "/v1/responses", {"input": "Say hi", "max_output_tokens": 12, **members})
    return [found["output"][0]["content"][0]["text"]]


async def message(client: httpx.AsyncClient, **members: Any) -> list[str]:
    found = await post(client, "/v1/messages", {"messages": HI, "max_tokens": 12, **members})
    return [found["content"][0]["text"]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("call", [chat, complete])
def test_a_seed_repeats_on_every_server_and_two_seeds_differ(engine: str, call: Any) -> None:
    async def main() -> None:
        async with serving(engine) as (_, one), serving(engine) as (_, other):
            assert await call(one, seed=7) == await call(one, seed=7) == await call(other, seed=7)
            assert len({(await call(one, seed=seed))[0] for seed in range(8)}) == 8

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_temperature_0_takes_no_notice_of_the_seed(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (_, client):
            found = [await chat(client, seed=seed, temperature=0) for seed in (1, 2, None)]
            assert found[0] == found[1] == found[2]

    asyncio.run(main())


def test_vllm_without_a_seed_is_random_and_so_is_minus_one() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            calls: list[Any] = [chat, complete, respond]
            found = [await call(client, seed=seed) for call in calls for seed in (None, -1)]
            found += [await message(client, seed=7) for _ in range(2)]
            assert len({text for [text] in found}) == len(found)
            assert {seen.seeds for seen in server.engine.counters.seen} == {(None,)}

    asyncio.run(main())


def test_sglang_without_a_seed_is_at_42_on_every_route() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):
            assert await chat(client) == await chat(client, seed=42)
            assert await generate(client) == await generate(client, parameters={"sampling_seed": 42})
            assert await respond(client, seed=7) == await respond(client)
            assert await message(client, seed=7) == await message(client)
            assert {seen.seeds for seen in server.engine.counters.seen} == {(42,)}

    asyncio.run(main())


def test_sglang_out_of_deterministic_mode_ignores_seeds() -> None:
    async def main() -> None:
        async with serving("sglang", deterministic=False) as (_, client):
            assert await chat(client, seed=7) != await chat(client, seed=7)

    asyncio.run(main())


def test_an_unseeded_vllm_can_be_made_to_answer_at_42() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(unseeded_42=True)
            assert await chat(client) == await chat(client, seed=42)

    asyncio.run(main())


def test_vllm_choice_i_is_what_seed_plus_i_gives_alone() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            together = await chat(client, seed=7, n=3)
            assert together == [text for seed in (7, 8, 9) for text in await chat(client, seed=seed)]
            assert server.engine.counters.seen[0].seeds == (7, 8, 9)

    asyncio.run(main())


def test_vllm_gives_every_prompt_of_a_list_the_same_seeds() -> None:
    async def main() -> None:
        async with serving("vllm") as (_, client):
            first, second, third, fourth = await complete(client, ["Say hi", "Say hi"], seed=7, n=2)
            assert (first, second) == (third, fourth)
            assert first != second
            batch = {"messages": [HI, HI], "seed": 7, "max_tokens": 12}
            found = await post(client, "/v1/chat/completions/batch", batch)
            told = [choice["message"]["content"] for choice in found["choices"]]
            assert told == 2 * await chat(client, seed=7)

    asyncio.run(main())


def test_sglang_clones_n_and_equal_prompts() -> None:
    async def main() -> None:
        async with serving("sglang") as (_, client):
            assert len(set(await chat(client, seed=7, n=4))) == 1
            assert len(set(await complete(client, ["Say hi", "Say hi"], seed=7))) == 1
            assert len(set(await generate(client, parameters={"sampling_seed": 7, "n": 3}))) == 1

    asyncio.run(main())


def test_clones_have_ids_of_their_own() -> None:
    async def main() -> None:
        async with serving("sglang") as (_, client):
            body = {"messages": HI, "n": 2, "max_tokens": 3, "stream": True, "rid": "abc"}
            told = (await client.post("/v1/chat/completions", json=body)).text.split("\n\n")
            chunks = [json.loads(event[6:]) for event in told if event.startswith("data: {")]
            ids = {choice["index"]: chunk["id"] for chunk in chunks for choice in chunk["choices"]}
            assert len({*ids.values(), "abc"}) == 3

    asyncio.run(main())


def test_sglang_takes_a_seed_for_each_text_of_a_list() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):
            parameters = [{"sampling_seed": seed, "max_new_tokens": 12} for seed in (7, 8)]
            found = await generate(client, ["Say hi", "Say hi"], parameters)
            alone = [(await generate(client, parameters=one))[0] for one in parameters]
            assert found == alone
            assert found[0] != found[1]
            assert server.engine.counters.seen[0].seeds == (7, 8)

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_only_sglang_continues_a_cut_answer_exactly(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (_, client):
            [whole] = await complete(client, "Say hi", seed=7, max_tokens=20, ignore_eos=True)
            [begun] = await complete(client, "Say hi", seed=7, max_tokens=8, ignore_eos=True)
            [rest] = await complete(client, f"Say hi{begun}", seed=7, max_tokens=12, ignore_eos=True)
            assert whole.startswith(begun)
            assert (whole == begun + rest) is (engine == "sglang")

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("given", "taken"), COERCED)
def test_seeds_are_coerced_on_the_openai_routes(engine: str, given: Any, taken: int) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            assert await chat(client, seed=given) == await chat(client, seed=taken)
            assert [seen.seed for seen in server.engine.counters.seen] == [taken, taken]

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_of_two_equal_keys_the_last_counts(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            body = b'{"prompt": "a", "seed": 3, "max_tokens": 1, "seed": 4}'
            assert (await client.post("/v1/completions", content=body)).status_code == 200
            assert server.engine.counters.seen[0].seed == 4
            assert server.engine.counters.bodies[0] == body

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, "seven", [7], {}])
@pytest.mark.parametrize("stream", [False, True])
def test_seeds_that_are_no_int64_are_refused(engine: str, seed: Any, stream: bool) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            body = {"messages": HI, "seed": seed, "stream": stream}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
            assert server.engine.counters.peak_running == 0

    asyncio.run(main())


@pytest.mark.parametrize("seed", ["12", True, 1.0, 2**63])
def test_the_native_route_of_sglang_coerces_nothing(seed: Any) -> None:
    async def main() -> None:
        async with serving("sglang") as (_, client):
            body = {"text": "a", "sampling_params": {"sampling_seed": seed}}
            assert (await client.post("/generate", json=body)).status_code == 400

    asyncio.run(main())


def test_the_native_route_of_vllm_reads_the_seed_in_its_parameters() -> None:
    async def main() -> None:
        async with serving("vllm", scale_out=True) as (_, client):

            async def call(seed: int) -> Any:
                parameters = {"seed": seed, "max_tokens": 12}
                body = {"token_ids": [40, 41], "sampling_params": parameters}
                return (await post(client, "/inference/v1/generate", body))["choices"][0]["token_ids"]

            assert await call(7) == await call(7) != await call(8)

    asyncio.run(main())


def test_a_stored_response_is_what_the_next_one_follows() -> None:
    async def main() -> None:
        async with serving("vllm") as (_, client):
            first = await post(client, "/v1/responses", {"input": "Say hi", "seed": 7})
            body = {"input": "Again", "seed": 7, "previous_response_id": first["id"]}
            second = await post(client, "/v1/responses", body)
            told = first["output"][0]["content"][0]["text"]
            listed = [*HI, {"role": "assistant", "content": told}, {"role": "user", "content": "Again"}]
            apart = await post(client, "/v1/responses", {"input": listed, "seed": 7})
            assert second["output"][0]["content"] == apart["output"][0]["content"]
            answer = await client.post("/v1/responses", json={**body, "previous_response_id": "resp_none"})
            assert answer.status_code == 404

    asyncio.run(main())
