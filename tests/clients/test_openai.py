"""OpenAI's own SDK, changed in nothing but its `base_url`, before each simulated engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.harness import DONE, FakeWorker, Gate, Reply, Seen, completion, delta, gateway, pool
from tests.sim.serving import serving

ENGINES = pytest.mark.parametrize("engine", ["vllm", "sglang"])
STREAM = pytest.mark.parametrize("stream", [False, True])
HI: Any = [{"role": "user", "content": "Say hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


class Fauna(BaseModel):
    """What a structured answer holds, in an order that is not the alphabet's."""

    zebra: str
    apple: int


@asynccontextmanager
async def served(engine: str, **settings: Any) -> AsyncIterator[Gate]:
    """A gateway before one simulated engine."""
    async with (
        serving(engine) as (server, _),
        gateway(pool("policy", server.url, engine=engine, models=["sim-model"], **settings)) as gate,
    ):
        yield gate


def asynchronous(gate: Gate, session: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gate.url}/sessions/{session}/v1", api_key="unused", max_retries=0)


async def synchronous(gate: Gate, session: str, call: Callable[[openai.OpenAI], Any]) -> Any:
    """Call with the SDK for threads, in one."""

    def run() -> Any:
        with openai.OpenAI(base_url=f"{gate.url}/sessions/{session}/v1", api_key="unused", max_retries=0) as client:
            return call(client)

    return await asyncio.to_thread(run)


@ENGINES
@STREAM
async def test_chat_by_either_sdk_has_the_same_answer_for_the_same_session(engine: str, stream: bool) -> None:
    call: dict[str, Any] = {"model": "sim-model", "messages": HI, "max_tokens": 12, "temperature": 1}

    def by_thread(client: openai.OpenAI) -> str:
        if not stream:
            return client.chat.completions.create(**call).choices[0].message.content or ""
        chunks = client.chat.completions.create(**call, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    said = []
    for _ in range(2):
        async with served(engine) as gate:
            said.append(await synchronous(gate, "17:3", by_thread))
            async with asynchronous(gate, "17:4") as client:
                if stream:
                    parts = await client.chat.completions.create(**call, stream=True)
                    said.append("".join([part.choices[0].delta.content or "" async for part in parts if part.choices]))
                else:
                    said.append((await client.chat.completions.create(**call)).choices[0].message.content or "")
    assert said[:2] == said[2:]
    assert said[0] != said[1]
    assert all(said)


@ENGINES
@STREAM
async def test_a_tool_is_called_and_its_result_taken(engine: str, stream: bool) -> None:
    async with served(engine) as gate, asynchronous(gate, "tools") as client:
        call: dict[str, Any] = {"model": "sim-model", "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}
        if stream:
            name, arguments, id = "", "", ""
            async for chunk in await client.chat.completions.create(**call, messages=HI, stream=True):
                for choice in chunk.choices:
                    for delta in choice.delta.tool_calls or []:
                        id = delta.id or id
                        if delta.function is not None:
                            name += delta.function.name or ""
                            arguments += delta.function.arguments or ""
        else:
            answer = await client.chat.completions.create(**call, messages=HI)
            [used] = answer.choices[0].message.tool_calls or []
            assert used.type == "function"
            name, arguments, id = used.function.name, used.function.arguments, used.id
        assert name == "look"
        assert isinstance(json.loads(arguments), dict)
        told: Any = [
            *HI,
            {
                "role": "assistant",
                "tool_calls": [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": id, "content": "found"},
        ]
        second = await client.chat.completions.with_raw_response.create(
            model="sim-model", messages=told, tools=[TOOL], tool_choice="none"
        )
        assert second.headers["x-detgate-index"] == "1"
        assert second.parse().choices[0].message.content


@ENGINES
@STREAM
async def test_a_structured_answer_is_parsed(engine: str, stream: bool) -> None:
    """By a scripted worker: the simulated engines write no JSON."""

    async def shaped(seen: Seen, reply: Reply) -> None:
        schema = seen.json["response_format"]["json_schema"]["schema"]
        assert list(schema["properties"]) == ["zebra", "apple"]
        if seen.json.get("stream"):
            reply.sse()
            for event in (delta('{"zebra": "striped", '), delta('"apple": 3}'), delta("", "stop"), DONE):
                reply.chunk(event)
            reply.end()
        else:
            reply.json(completion('{"zebra": "striped", "apple": 3}'))

    async with (
        FakeWorker(shaped) as worker,
        gateway(pool("policy", worker.url, engine=engine)) as gate,
        asynchronous(gate, "shape") as client,
    ):
        if stream:
            async with client.chat.completions.stream(model="test-model", messages=HI, response_format=Fauna) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.parse(model="test-model", messages=HI, response_format=Fauna)
        assert answer.choices[0].message.parsed == Fauna(zebra="striped", apple=3)


@ENGINES
@STREAM
async def test_responses(engine: str, stream: bool) -> None:
    async with served(engine) as gate, asynchronous(gate, "responses") as client:
        if stream:
            events = [
                event async for event in await client.responses.create(model="sim-model", input="Say hi", stream=True)
            ]
            assert events[-1].type == "response.completed"
            said = events[-1].response.output_text
        else:
            raw = await client.responses.with_raw_response.create(model="sim-model", input="Say hi")
            said = raw.parse().output_text
            assert ("no-seed" in raw.headers["x-detgate-guarantee"]) is (engine == "sglang")
        assert said


@ENGINES
async def test_errors_are_those_that_the_sdk_knows(engine: str) -> None:
    async with served(engine) as gate, asynchronous(gate, "errors") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="sim-model", messages=HI, seed=-1)
        assert refused.value.code == "invalid_seed"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=HI)
        assert missing.value.code == "model_not_found"
        assert [model.id async for model in client.models.list()] == ["sim-model"]
