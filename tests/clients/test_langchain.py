"""LangChain, changed in nothing but its `base_url`: `make test-langchain`, in an environment of its own."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from tests.harness import Gate, gateway, pool
from tests.sim.serving import serving

PROMPTS = [f"Say {number}" for number in range(8)]


def model(gate: Gate, session: str, **settings: Any) -> Any:
    return ChatOpenAI(
        base_url=f"{gate.url}/sessions/{session}/v1",
        api_key="unused",
        model="sim-model",
        max_completion_tokens=24,
        max_retries=0,
        **settings,
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_it_invokes_streams_batches_and_calls_tools(engine: str) -> None:
    def look(q: str) -> str:
        """Look something up."""
        return q

    runs = []
    for _ in range(2):
        async with (
            serving(engine) as (server, _),
            gateway(pool("policy", server.url, engine=engine, models=["sim-model"])) as gate,
        ):
            said = [(await model(gate, "17:3").ainvoke("Say hi")).content]
            said.append("".join([part.content async for part in model(gate, "17:4").astream("Say hi")]))
            in_content_order = model(gate, "17:5", default_headers={"X-Index-Order": "content"})
            said += [answer.content for answer in await in_content_order.abatch(PROMPTS)]
            called = await model(gate, "17:6").bind_tools([look], tool_choice="look").ainvoke("Look")
            assert [call["name"] for call in called.tool_calls] == ["look"]
            opened = [record for record in gate.records() if record["event"] == "opened"]
            assert len({record["seed"] for record in opened}) == len(opened) == 11
            runs.append(said)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == len(runs[0])
