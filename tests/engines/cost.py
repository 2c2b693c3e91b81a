"""What determinism costs: tokens a second through the gateway, setting by setting, on real vLLM servers.

    python -m tests.engines.cost

Two replicas of mid-llm in bfloat16 generate, and one of mid-rm scores, all without prefix caches and with one
thread each. The same load goes straight to them, and through a gateway for each setting. All settings take
turns, several rounds; the fastest round of each counts, since other programs can only slow one down. The
servers, the gateways and the load share the machine's cores. Prints a table in Markdown; about 3 minutes.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from tests.engines import contrast, gates, servers
from tests.engines.servers import Server, Spec

GENERATE = Spec("vllm", "mid-llm", ("--no-enable-prefix-caching",), environment={"DTYPE": "bfloat16"})
REWARD = Spec("vllm", "mid-rm", servers.VLLM_REWARD.options)
LANE = {"scope": "replica", "limit": 1}


@dataclass(frozen=True)
class Setting:
    """A row of the table: the gateway's settings and the pool's, and how many requests measure it."""

    name: str
    requests: int
    gateway: Mapping[str, Any] | None = field(default_factory=dict)
    """None: no gateway."""
    pool: Mapping[str, Any] = field(default_factory=dict)


STRICT = {"profile": "strict"}
GENERATING = (
    Setting("no gateway, by round robin", 96, None),
    Setting("`profile: balanced`", 96),
    Setting("`profile: strict`", 96, STRICT),
    Setting("`balanced`, a lane of one a replica", 24, pool={"lane": LANE}),
    Setting("`strict`, a lane of one a replica", 24, STRICT, {"lane": LANE}),
)
SCORING = (
    Setting("no gateway", 32, None),
    Setting("no lane (`reward-batched`)", 32, pool={"lane": {"scope": "none"}}),
    Setting("a lane of one a replica, the default", 32),
)
IN_FLIGHT = 32
OUTPUT_TOKENS = 32
WORDS = 120

Load = Callable[[Sequence[str], int], Coroutine[Any, Any, int]]


async def generate(urls: Sequence[str], requests: int) -> int:
    """Send so many requests, to several URLs in turn; the number of output tokens."""
    body = {"model": GENERATE.model, "max_tokens": OUTPUT_TOKENS, "temperature": 1, "ignore_eos": True}
    prompts = ([{"role": "user", "content": contrast.prompt_text(number)}] for number in range(requests))
    answers = await send(urls, "/v1/chat/completions", [body | {"messages": prompt} for prompt in prompts])
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


async def score(urls: Sequence[str], requests: int) -> int:
    """Send so many inputs to score; the number of their tokens."""
    inputs = (f"{contrast.prompt_text(number)} " + "So it is. " * (WORDS // 3) for number in range(requests))
    answers = await send(urls, "/classify", [{"model": REWARD.model, "input": text} for text in inputs])
    return sum(answer["usage"]["prompt_tokens"] for answer in answers)


async def send(urls: Sequence[str], path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all bodies, `IN_FLIGHT` at once. Raises `httpx.HTTPStatusError` for any but 200."""
    places = asyncio.Semaphore(IN_FLIGHT)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:

        async def one(url: str, body: dict[str, Any]) -> dict[str, Any]:
            async with places:
                answer = await http.post(url + path, json=body)
            answer.raise_for_status()
            told: dict[str, Any] = answer.json()
            return told

        return await asyncio.gather(*(one(url, body) for url, body in zip(cycle(urls), bodies, strict=False)))


def measured(
    specs: Sequence[Spec], role: str, settings: Sequence[Setting], load: Load, rounds: int
) -> list[tuple[str, float]]:
    """The tokens a second of each setting, the best of all rounds after one to warm up."""
    logs = Path(tempfile.mkdtemp(prefix="cost-"))
    best = [0.0] * len(settings)
    with servers.running(specs, logs) as replicas, ExitStack() as stack:
        places = [place(replicas, role, each, logs / str(row), stack) for row, each in enumerate(settings)]
        asyncio.run(load(places[0], settings[0].requests))
        for _ in range(rounds):
            for row, (setting, urls) in enumerate(zip(settings, places, strict=True)):
                since = time.perf_counter()
                tokens = asyncio.run(load(urls, setting.requests))
                best[row] = max(best[row], tokens / (time.perf_counter() - since))
    return [(setting.name, figure) for setting, figure in zip(settings, best, strict=True)]


def place(replicas: Sequence[Server], role: str, setting: Setting, folder: Path, stack: ExitStack) -> list[str]:
    """Where a setting's load goes: the replicas, or a gateway that is started before them."""
    urls = [replica.url for replica in replicas]
    if setting.gateway is None:
        return urls
    pool = gates.pool("pool", "vllm", urls, role=role, deterministic="declared", **setting.pool)
    return [stack.enter_context(gates.gateway(folder, pool, **setting.gateway)).url]


def table(kind: str, tokens: str, figures: Sequence[tuple[str, float]]) -> list[str]:
    """The rows of one pool; shares are of the second row, which has a gateway and no lane."""
    _, whole = figures[1]
    return [f"| {kind} | {name} | {figure:,.0f} {tokens} | {100 * figure / whole:.0f} % |" for name, figure in figures]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what determinism costs.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    generating = measured([GENERATE, GENERATE], "generate", GENERATING, generate, rounds)
    scoring = measured([REWARD], "reward", SCORING, score, rounds)
    print("| pool | setting | tokens a second | share |\n|---|---|---|---|")
    print("\n".join(table("generate", "out", generating) + table("reward", "in", scoring)))


if __name__ == "__main__":
    main()
