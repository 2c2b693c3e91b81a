"""The real clients of OpenAI and Anthropic against the simulated engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from gateway.sim import SimServer
from tests.sim.serving import serving

HI: Any = [{"role": "user", "content": "Say hi"}]
ENGINES = ("vllm", "sglang")
GREEDY = {"temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


@asynccontextmanager
async def sdk(engine: str, **settings: Any) -> AsyncIterator[tuple[SimServer, openai.AsyncOpenAI]]:
    async with serving(engine, **settings) as (server, _):
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="key", max_retries=0, timeout=10) as client:
            yield server, client


@asynccontextmanager
async def claude(engine: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with serving(engine) as (server, _):
        base = server.url
        async with anthropic.AsyncAnthropic(base_url=base, api_key="key", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("engine", ENGINES)
def test_chat_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine) as (_, client):
            call: dict[str, Any] = {"model": "sim-model", "messages": HI, "seed": 5, "max_tokens": 20, "n": 2}
            whole = await client.chat.completions.create(**call)
            assert whole.usage is not None
            assert whole.usage.completion_tokens > 2
            told = {0: "", 1: ""}
            reasons = {}
            usage = None
            call["stream_options"] = {"include_usage": True}
            async for chunk in await client.chat.completions.create(**call, stream=True):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    told[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason
            assert told == {choice.index: choice.message.content for choice in whole.choices}
            assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
            assert usage is not None
            assert usage.total_tokens == whole.usage.total_tokens
            assert (told[0] == told[1]) is (engine == "sglang")

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_completions_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine) as (_, client):
            call: dict[str, Any] = {"model": "sim-model", "prompt": "Say hi", "seed": 5, "logprobs": 2}
            whole = await client.completions.create(**call)
            told = ""
            logprobs: list[float | None] = []
            async for chunk in await client.completions.create(**call, stream=True):
                told += chunk.choices[0].text
                found = chunk.choices[0].logprobs
                logprobs += found.token_logprobs or [] if found else []
            assert told == whole.choices[0].text
            assert whole.choices[0].logprobs is not None
            assert logprobs == whole.choices[0].logprobs.token_logprobs

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_chat_logprobs_are_equal_to_the_last_bit_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine) as (_, client):
            call: dict[str, Any] = {"model": "sim-model", "messages": HI, "seed": 5, "max_tokens": 9}
            call |= {"logprobs": True, "top_logprobs": 3}
            whole = await client.chat.completions.create(**call)
            assert whole.choices[0].logprobs is not None
            streamed: list[Any] = []
            async for chunk in await client.chat.completions.create(**call, stream=True):
                found = chunk.choices[0].logprobs
                streamed += found.content or [] if found else []
            assert streamed == whole.choices[0].logprobs.content

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine) as (_, client):
            call: dict[str, Any] = {"model": "sim-model", "input": "Say hi", "extra_body": {"seed": 5}}
            whole = await client.responses.create(**call)
            async with client.responses.stream(**call) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text == whole.output_text != ""

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_tool_calls_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine) as (_, client):
            call: dict[str, Any] = {"model": "sim-model", "messages": HI, "seed": 5, "max_tokens": 300}
            call |= {"tools": [TOOL], "tool_choice": "required"}
            whole = await client.chat.completions.create(**call)
            assert whole.choices[0].message.tool_calls is not None
            function = whole.choices[0].message.tool_calls[0].function
            async with client.chat.completions.stream(**call) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.tool_calls is not None
            assert final.choices[0].message.tool_calls[0].function.arguments == function.arguments
            assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_errors_are_raised(engine: str) -> None:
    async def main() -> None:
        async with sdk(engine, api_key="key") as (server, client):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="sim-model", messages=HI, seed=2**63)
            server.engine.faults.add(error_event_after_tokens=1)
            with pytest.raises(openai.APIError):
                await consumed(client.chat.completions.create(model="sim-model", messages=HI, stream=True))
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").models.list()

    asyncio.run(main())


async def consumed(stream: Any) -> None:
    async for _ in await stream:
        pass


def test_rewards_by_the_embeddings_client() -> None:
    async def main() -> None:
        async with sdk("vllm", role="reward") as (_, client):
            found = await client.embeddings.create(model="sim-model", input=["a", "b"])
            assert sum(value * value for value in found.data[0].embedding) == pytest.approx(1)
            assert found.data[0].embedding != found.data[1].embedding

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_streamed_and_not(engine: str) -> None:
    async def main() -> None:
        async with claude(engine) as client:
            call: dict[str, Any] = {
                "model": "sim-model",
                "messages": HI,
                "max_tokens": 300,
                "extra_body": GREEDY,
            }
            whole = await client.messages.create(**call, system="Be brief.")
            async with client.messages.stream(**call, system="Be brief.") as stream:
                told = "".join([text async for text in stream.text_stream])
                final = await stream.get_final_message()
            assert whole.content[0].type == "text"
            assert told == whole.content[0].text != ""
            assert (final.stop_reason, whole.stop_reason) == ("end_turn", "end_turn")
            assert final.usage.output_tokens == whole.usage.output_tokens
            other = await client.messages.create(**call)
            assert other.usage.input_tokens < whole.usage.input_tokens
            counted = await client.messages.count_tokens(model="sim-model", messages=HI)
            assert counted.input_tokens == other.usage.input_tokens

    asyncio.run(main())


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_call_tools(engine: str) -> None:
    async def main() -> None:
        async with claude(engine) as client:
            tool: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"q": {}}}}
            call: dict[str, Any] = {
                "model": "sim-model",
                "messages": HI,
                "max_tokens": 300,
                "extra_body": GREEDY,
            }
            call |= {"tools": [tool], "tool_choice": {"type": "any"}}
            whole = await client.messages.create(**call)
            async with client.messages.stream(**call) as stream:
                final = await stream.get_final_message()
            found: Any = (whole, final)
            assert [one.stop_reason for one in found] == ["tool_use", "tool_use"]
            assert found[0].content[0].input == found[1].content[0].input
            assert found[0].content[0].id != found[1].content[0].id

    asyncio.run(main())
