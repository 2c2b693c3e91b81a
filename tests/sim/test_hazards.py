"""What a request can do to an engine, and what each refuses."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.sim.serving import serving

HI = {"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}
GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 4}}


async def dies(engine: str, path: str, body: dict[str, Any], **settings: Any) -> bool:
    """Whether the request ends the server."""
    async with serving(engine, **settings) as (server, client):
        try:
            answer = await client.post(path, json=body)
        except httpx.TransportError:
            with pytest.raises(httpx.TransportError):
                await client.get("/ready")
            assert server.engine.dead
            return True
        assert answer.status_code < 500
        return server.engine.dead


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**HI, "min_p": 0.1}),
        ("/v1/completions", {"prompt": "a", "min_p": 0.1}),
        ("/generate", {"text": "a", "sampling_params": {"min_p": 0.1}}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"min_p": 0.1}]}),
    ],
)
def test_min_p_ends_a_deterministic_sglang(path: str, body: dict[str, Any]) -> None:
    assert asyncio.run(dies("sglang", path, body))
    assert not asyncio.run(dies("sglang", path, body, deterministic=False))


def test_min_p_does_nothing_to_vllm() -> None:
    assert not asyncio.run(dies("vllm", "/v1/chat/completions", {**HI, "min_p": 0.1}))


@pytest.mark.parametrize("where", ["generation_config", "preferred_sampling_params"])
def test_min_p_that_came_with_the_model_ends_sglang_unless_the_request_says_0(where: str) -> None:
    settings = {where: {"min_p": 0.1}}
    assert asyncio.run(dies("sglang", "/v1/chat/completions", HI, **settings))
    assert not asyncio.run(dies("sglang", "/v1/chat/completions", {**HI, "min_p": 0}, **settings))
    assert asyncio.run(dies("sglang", "/generate", GENERATE, **settings)) is (where != "generation_config")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", GENERATE), ("/v1/chat/completions", HI), ("/v1/completions", {"prompt": "a"})],
)
def test_generation_ends_an_sglang_reward_server(path: str, body: dict[str, Any]) -> None:
    assert asyncio.run(dies("sglang", path, body, role="reward"))


def test_what_runs_is_lost_when_the_server_dies() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):
            server.engine.pause()
            running = asyncio.ensure_future(client.post("/v1/chat/completions", json=HI))
            await server.engine.reached(1)
            with pytest.raises(httpx.TransportError):
                await client.post("/v1/chat/completions", json={**HI, "min_p": 0.1})
            with pytest.raises(httpx.TransportError):
                await running

    asyncio.run(main())


def test_a_rid_in_use_is_refused() -> None:
    async def main() -> None:
        async with serving("sglang") as (server, client):
            body = {**HI, "rid": "abc"}
            server.engine.pause()
            first = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            await server.engine.reached(1)
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
            assert (await client.post("/generate", json={**GENERATE, "rid": "abc"})).status_code == 400
            server.engine.resume()
            assert (await first).json()["id"] == "abc"
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    asyncio.run(main())


def test_ids_come_from_the_header_at_vllm_and_may_be_in_use() -> None:
    async def main() -> None:
        headers = {"X-Request-Id": "abc"}
        async with serving("vllm") as (server, client), serving("vllm", role="reward") as (_, reward):
            server.engine.pause()
            posts = [client.post("/v1/chat/completions", json=HI, headers=headers) for _ in range(2)]
            tasks = [asyncio.ensure_future(one) for one in posts]
            await server.engine.reached(2)
            server.engine.resume()
            assert [(await task).json()["id"] for task in tasks] == ["chatcmpl-abc"] * 2
            found = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert found.json()["id"] == "cmpl-abc"
            found = await client.post("/v1/responses", json={"input": "a"}, headers=headers)
            assert "abc" not in found.json()["id"]
            found = await reward.post("/classify", json={"input": "a"}, headers=headers)
            assert found.json()["id"] == "classify-abc"

    asyncio.run(main())


def test_vllm_tells_the_request_id_in_a_header_only_where_that_was_switched_on() -> None:
    async def main() -> None:
        for switched in (True, False):
            async with serving("vllm", request_id_headers=switched) as (_, client):
                answer = await client.get("/health", headers={"X-Request-Id": "abc"})
                assert answer.headers.get("x-request-id") == ("abc" if switched else None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("engine", "path", "guarded"),
    [
        ("vllm", "/v1/models", True),
        ("vllm", "/tokenize", False),
        ("vllm", "/health", False),
        ("vllm", "/inference/v1/generate", True),
        ("sglang", "/generate", True),
        ("sglang", "/server_info", True),
        ("sglang", "/ready", False),
        ("sglang", "/metrics", False),
    ],
)
def test_a_key_is_wanted_where_the_engine_wants_it(engine: str, path: str, guarded: bool) -> None:
    async def main() -> None:
        async with serving(engine, api_key="secret", scale_out=True) as (_, client):
            method = "POST" if "generate" in path or path == "/tokenize" else "GET"
            answer = await client.request(method, path, json={})
            assert (answer.status_code == 401) is guarded
            if guarded:
                assert answer.json() == {"error": "Unauthorized"}
            headers = {"Authorization": "Bearer secret"}
            assert (await client.request(method, path, json={}, headers=headers)).status_code != 401

    asyncio.run(main())


def test_a_key_can_be_wanted_on_probes() -> None:
    async def main() -> None:
        async with serving("vllm", api_key="secret", guard_probes=True) as (_, client):
            assert (await client.get("/health")).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert (await client.get("/health", headers=headers)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("engine", "role", "path"),
    [
        ("vllm", "generate", "/classify"),
        ("vllm", "reward", "/v1/classify"),
        ("vllm", "reward", "/v1/chat/completions"),
        ("vllm", "generate", "/inference/v1/generate"),
        ("vllm", "generate", "/server_info"),
        ("sglang", "generate", "/version"),
    ],
)
def test_routes_that_a_server_does_not_have(engine: str, role: str, path: str) -> None:
    async def main() -> None:
        async with serving(engine, role=role) as (_, client):
            assert (await client.post(path, json={})).status_code == 404

    asyncio.run(main())


def test_sglang_refuses_scores_from_a_generating_server_and_stays_alive() -> None:
    assert not asyncio.run(dies("sglang", "/classify", {"text": "a"}))


def test_a_huge_prompt_is_refused_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.delattr("gateway.sim.model.encode")
        async with serving("vllm") as (server, client):
            answer = await client.post("/v1/completions", json={"prompt": "x" * 20_000_000})
            assert answer.status_code == 400
            assert len(server.engine.counters.bodies[0]) > 20_000_000

    asyncio.run(main())


@pytest.mark.parametrize(("engine", "least"), [("vllm", 0.0), ("sglang", 0.2)])
def test_only_the_health_route_of_sglang_generates(engine: str, least: float) -> None:
    async def main() -> None:
        async with serving(engine, health_seconds=0.2) as (server, client):
            begun = asyncio.get_running_loop().time()
            assert (await client.get("/health")).status_code == 200
            assert asyncio.get_running_loop().time() - begun >= least
            assert server.engine.counters.peak_running == (1 if least else 0)
            assert server.engine.counters.requests == 0

    asyncio.run(main())


def test_what_a_server_is_tells_its_mode() -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"deterministic": False, "prefix_cache": False, "weight_version": "w2"}
        async with serving("sglang", role="reward", **settings) as (_, client):
            info = (await client.get("/server_info")).json()
            assert (info["enable_deterministic_inference"], info["disable_radix_cache"]) == (False, True)
            model = (await client.get("/get_model_info")).json()
            assert (model["is_generation"], model["weight_version"]) == (False, "w2")
        async with serving("vllm", dev_mode=True, **settings) as (_, client):
            assert 'enable_prefix_caching="False"' in (await client.get("/metrics")).text
            info = (await client.get("/server_info?config_format=json")).json()
            assert info["vllm_env"]["VLLM_BATCH_INVARIANT"] is False
            assert (await client.get("/weight_info")).json() == {"weight_version": "w2"}

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_forced_tools_are_called_with_a_random_id(engine: str) -> None:
    async def main() -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"q": {}}}}}
        body = {**HI, "tools": [tool], "tool_choice": "required", "seed": 3, "max_tokens": 300}
        async with serving(engine) as (_, client):
            answers = [(await client.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
            calls = [one["choices"][0]["message"]["tool_calls"][0] for one in answers]
            assert calls[0]["function"] == calls[1]["function"]
            assert calls[0]["id"] != calls[1]["id"]
            assert answers[0]["choices"][0]["finish_reason"] == "tool_calls"

    asyncio.run(main())
