"""Anthropic's own SDK, changed in nothing but its `base_url`, before each simulated engine."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.harness import gateway, pool
from tests.sim.serving import serving

HI: Any = [{"role": "user", "content": "Say hi"}]
TOOL: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_messages_streams_tools_and_counts(engine: str) -> None:
    async with (
        serving(engine) as (server, _),
        gateway(pool("policy", server.url, engine=engine, models=["sim-model"])) as gate,
        anthropic.AsyncAnthropic(base_url=f"{gate.url}/sessions/17:3", api_key="unused", max_retries=0) as client,
    ):
        call: dict[str, Any] = {"model": "sim-model", "max_tokens": 16, "messages": HI}
        raw = await client.messages.with_raw_response.create(**call)
        assert (await raw.parse()).usage.output_tokens > 0
        assert "no-seed" in raw.headers["x-detgate-guarantee"]
        async with client.messages.stream(**call) as stream:
            said = "".join([text async for text in stream.text_stream])
            whole = await stream.get_final_message()
        assert said == "".join(part.text for part in whole.content if part.type == "text")
        called = await client.messages.create(**(call | {"max_tokens": 200}), tools=[TOOL], tool_choice={"type": "any"})
        assert [part.name for part in called.content if part.type == "tool_use"] == ["look"]
        assert (await client.messages.count_tokens(model="sim-model", messages=HI)).input_tokens > 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_in_strict_it_is_told_which_route_to_use(engine: str) -> None:
    async with (
        serving(engine) as (server, _),
        gateway(
            pool("policy", server.url, engine=engine, models=["sim-model"], deterministic="declared"), profile="strict"
        ) as gate,
        anthropic.AsyncAnthropic(base_url=gate.url, api_key="unused", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.BadRequestError, match="/v1/chat/completions"):
            await client.messages.create(model="sim-model", max_tokens=4, messages=HI)
