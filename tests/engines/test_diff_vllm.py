"""Runs of an agent's loop with tools, by OpenAI's SDK through the gateway before real vLLM, compared."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gateway.core import routing
from gateway.evidence.diff import compare
from gateway.evidence.diff_text import as_json
from gateway.evidence.ledgers import find
from tests.engines import gates, servers
from tests.engines.servers import Server, Spec

pytestmark = pytest.mark.timeout(1800)

AGENT = Spec(
    "vllm",
    "mid-llm",
    ("--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    environment={"DTYPE": "bfloat16"},
)
CITY = {"type": "string", "enum": ["Rome", "Oslo", "Lima"]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": CITY}}},
}
TASKS = ("0:0", "0:1", "1:0", "1:1")
TURNS = 4

Forged = dict[tuple[str, int], str]
"""Task and turn → what the tool answers there instead."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A replica that calls tools, and whose answers depend on what else is in its batch."""
    with servers.running([AGENT], tmp_path_factory.mktemp("vllm-agent")) as [started]:
        yield started


def weather(task: str, turn: int, asked: str, forged: Forged) -> str:
    """The tool: a pure function of what it is asked."""
    return forged.get((task, turn), f"{len(asked)} degrees, wind {sum(asked.encode()) % 40}")


async def loop(url: str, task: str, forged: Forged) -> list[str]:
    """One agent: it asks the model, calls the tool that the model names, and goes on with what that says."""
    messages: list[Any] = [{"role": "user", "content": f"Where is it warmer, and why? Task {task}."}]
    said = []
    async with AsyncOpenAI(
        base_url=f"{url}/sessions/{task}/v1", api_key="unused", max_retries=0, timeout=300
    ) as client:
        for turn in range(TURNS):
            choice = (
                await client.chat.completions.create(
                    model="mid-llm",
                    messages=messages,
                    tools=[TOOL],
                    tool_choice="required" if turn < TURNS - 1 else "none",
                    temperature=1,
                    max_tokens=60,
                )
            ).choices[0]
            message = choice.message.model_dump(exclude_none=True)
            said.append(json.dumps([message.get("content"), [c["function"] for c in message.get("tool_calls", [])]]))
            messages.append(message)
            for call in message.get("tool_calls", []):
                content = weather(task, turn, call["function"]["arguments"], forged)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": weather(task, turn, message.get("content") or "", forged)})
    return said


def run(agent: Server, folder: Path, hash_seed: int, forged: Forged, bodies: bool = True) -> list[list[str]]:
    """All agents beside each other, through a gateway process of its own."""
    pool = gates.pool("policy", "vllm", [agent.url], deterministic="declared", lane={"scope": "replica", "limit": 1})
    ledger = {"path": str(folder / "ledger"), "bodies": bodies}

    async def all_of_them(url: str) -> list[list[str]]:
        return list(await asyncio.gather(*[loop(url, task, forged) for task in TASKS]))

    with gates.gateway(folder, pool, hash_seed=hash_seed, ledger=ledger, profile="strict") as gate:
        return asyncio.run(all_of_them(gate.url))


def detgate(*arguments: str) -> tuple[int, Any]:
    """Exit status and JSON of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments, "--json"],
        cwd=gates.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def diff(folder: Path, a: str, b: str) -> tuple[int, Any]:
    return detgate("diff", str(folder / a / "ledger"), str(folder / b / "ledger"))


class TestAnAgentsLoop:
    def test_two_runs_are_equal_and_a_forged_tool_answer_is_the_root(self, agent: Server, tmp_path: Path) -> None:
        first = run(agent, tmp_path / "a", 1, {})
        second = run(agent, tmp_path / "b", 2, {})
        assert first == second
        assert any("weather" in said for said in first[0])
        status, found = diff(tmp_path, "a", "b")
        assert (status, found["equal"], found["compared"]) == (0, True, len(TASKS) * TURNS)

        run(agent, tmp_path / "c", 3, {("1:0", 1): "it snows toads"})
        status, found = diff(tmp_path, "a", "c")
        assert (status, found["causes"], found["sessions"]["different"]) == (1, {"other-prompt": 1}, 1)
        root = found["first"]
        assert (root["identity"], root["index"], root["cause"]) == ("1:0", 2, "other-prompt")
        assert '"it snows toads" in B' in root["detail"]
        assert sum(found["downstream"].values()) == TURNS - 3

    def test_the_recorded_run_sent_again_is_equal(self, agent: Server, tmp_path: Path) -> None:
        run(agent, tmp_path / "a", 1, {})
        pool = gates.pool(
            "policy", "vllm", [agent.url], deterministic="declared", lane={"scope": "replica", "limit": 1}
        )
        with gates.gateway(tmp_path / "b", pool, profile="strict") as gate:
            status, found = detgate("replay", "requests", str(tmp_path / "a" / "ledger"), "--url", gate.url)
        assert (status, found["equal"], found["compared"]) == (0, True, len(TASKS) * TURNS)
        assert detgate("replay", "plans", str(tmp_path / "a" / "ledger"))[1]["equal"]


class TestAnEngineThatIsNotBatchInvariant:
    def test_crowded_against_alone_is_named_as_the_engines_doing(self, agent: Server, tmp_path: Path) -> None:
        """The same requests alone and side by side, with no lane: equal inputs, other answers."""
        pool = gates.pool("policy", "vllm", [agent.url], deterministic="declared")
        for name, at_once in (("a", 1), ("b", 16)):
            ledger = {"path": str(tmp_path / name / "ledger"), "bodies": True}
            with gates.gateway(tmp_path / name, pool, ledger=ledger, profile="strict") as gate:
                asyncio.run(_ask_all(gate.url, at_once))
        found = as_json(compare(*(find(str(tmp_path / name / "ledger"), tmp_path) for name in "ab")))
        assert set(found["causes"]) == {"other-answer"}
        assert found["first"]["detail"].startswith(
            "equal inputs, another answer: replica policy-0; 1 of this run in flight in A, "
        )
        assert found["first"]["b"]["in_flight"] > 1


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model with a prefix cache."""
    options = tuple(option for option in AGENT.options if option != "--no-enable-prefix-caching")
    with servers.running([replace(AGENT, options=options)], tmp_path_factory.mktemp("vllm-cached")) as [started]:
        yield started


class TestEachCause:
    """All causes but the engine's own in one pair of runs, each in a session of its own."""

    def run(self, agent: Server, engine: Server, folder: Path, second: bool) -> None:
        lane = {"scope": "pool", "limit": 1}
        moved = gates.pool("policy", "vllm", [agent.url, agent.url], deterministic="declared", lane=lane)
        swapped = gates.pool("swapped", "vllm", [engine.url], deterministic="declared", lane=lane)
        ledger = {"path": str(folder / "ledger"), "bodies": True}
        fixed = {"slack": "inf", "on_home_down": "next"}
        with gates.gateway(folder, moved, swapped, ledger=ledger, routing=fixed) as gate:
            asyncio.run(self.ask(gate.url, second))

    async def ask(self, url: str, second: bool) -> None:
        def chat(text: str, **more: Any) -> dict[str, Any]:
            return {"model": "mid-llm", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | more

        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def post(session: str, body: dict[str, Any], pool: str = "policy") -> httpx.Response:
                headers = {"X-Session-ID": session, "X-Detgate-Pool": pool}
                answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer

            await post("equal", chat("The same."))
            await post("missing", chat("Always."))
            if not second:
                await post("missing", chat("Once."))
            await post("prompt", chat("Right?" if second else "Left?"))
            await post("seed", chat("By whose seed?", seed=6 if second else 5))
            await post("engine", chat("By which engine?"), "swapped")
            texts = ("right", "left") if second else ("left", "right")
            first = asyncio.create_task(post("order", chat(texts[0], max_tokens=200, ignore_eos=True)))
            await self.until(http, "order", 1)
            await asyncio.gather(first, post("order", chat(texts[1], max_tokens=200, ignore_eos=True)))
            if second:
                leaving = asyncio.create_task(post("retries", chat("Asked twice?", max_tokens=200, ignore_eos=True)))
                await self.until(http, "retries", 1)
                leaving.cancel()
                await self.until(http, "retries", 0)
            await post("retries", chat("Asked twice?", max_tokens=200, ignore_eos=True))
            if second:
                home = routing.best("replica:0", ["policy-0", "policy-1"])
                (await http.post(f"/admin/pools/policy/replicas/{home}/drain")).raise_for_status()
            await post("replica", chat("Where?"))

    async def until(self, http: httpx.AsyncClient, session: str, requests: int) -> None:
        """Wait until so many requests of a session are open."""
        async with asyncio.timeout(60):
            while True:
                answer = await http.get(f"/sessions/{session}")
                if answer.status_code == 200 and answer.json()["open_requests"] == requests:
                    return
                await asyncio.sleep(0.05)

    def test_each_is_named(self, agent: Server, cached: Server, tmp_path: Path) -> None:
        self.run(agent, agent, tmp_path / "a", second=False)
        self.run(agent, cached, tmp_path / "b", second=True)
        status, found = diff(tmp_path, "a", "b")
        assert status == 1
        assert found["causes"] == {
            "missing-request": 1,
            "other-prompt": 1,
            "other-seed": 1,
            "other-engine": 1,
            "other-order": 2,
            "other-retries": 1,
            "other-replica": 1,
        }
        assert found["downstream"] == {}


async def _ask_all(url: str, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def ask(number: int) -> None:
        body = {"model": "mid-llm", "messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 48}
        async with places:
            answer = await http.post(f"{url}/sessions/{number}/v1/chat/completions", json=body | {"temperature": 1})
            assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(timeout=300) as http:
        await asyncio.gather(*[ask(number) for number in range(16)])
