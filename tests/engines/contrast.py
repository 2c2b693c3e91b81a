"""Do two runs of the same rollout give the same answers? Measured with the real OpenAI SDK.

    python -m tests.engines.contrast vllm              two replicas by round robin, no seeds
    python -m tests.engines.contrast vllm --seeded     the same with a seed of its own in each call
    python -m tests.engines.contrast --base-url URL    whatever answers there, such as a gateway

A rollout is 64 prompts with 4 samples each: 256 calls of chat completions at temperature 1, 32 in flight. It
is done twice, and answer (prompt, sample) of the one run is compared with the same of the other. `--base-url`
may be given several times (round robin); `{run}`, `{prompt}` and `{sample}` in it are filled in for each
call, which can give every call a session of its own:

    --base-url "http://127.0.0.1:8000/runs/{run}/sessions/{prompt}:{sample}/v1"
"""

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.engines import servers

PROMPTS = 64
SAMPLES = 4
CONCURRENCY = 32
MAX_TOKENS = 24
# What a gateway says that it decided, by the names of its response headers.
DECISIONS = ("x-detgate-request-id", "x-detgate-index", "x-detgate-seed", "x-detgate-replica")


@dataclass(frozen=True)
class Answer:
    """One call's answer; `decisions` holds the gateway's headers, empty without one."""

    prompt: int
    sample: int
    text: str
    decisions: dict[str, str] = field(default_factory=dict)


def prompt_text(prompt: int) -> str:
    """The prompt with this number: all differ."""
    return f"Task {prompt}: how many days are there in {prompt + 2} weeks and {prompt % 7} days?"


def own_seed(prompt: int, sample: int) -> int:
    """A seed for each call, far from its neighbours'."""
    return 1 + (7_919 * (prompt * SAMPLES + sample)) % (2**31 - 1)


async def rollout(
    base_urls: Sequence[str], model: str, seed: Callable[[int, int], int] | None = None, run: str = "0"
) -> list[Answer]:
    """All calls of one run, ordered by prompt and sample. Raises the SDK's errors, after its own retries."""
    turns = count()
    places = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=base_urls[0], api_key="none", timeout=300) as client:

        async def call(prompt: int, sample: int) -> Answer:
            async with places:
                template = base_urls[next(turns) % len(base_urls)]
                url = template.format(run=run, prompt=prompt, sample=sample)
                extra: dict[str, Any] = {} if seed is None else {"seed": seed(prompt, sample)}
                raw = await client.with_options(base_url=url).chat.completions.with_raw_response.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt_text(prompt)}],
                    max_tokens=MAX_TOKENS,
                    temperature=1,
                    **extra,
                )
                text = raw.parse().choices[0].message.content or ""
                decisions = {name: raw.headers[name] for name in DECISIONS if name in raw.headers}
                return Answer(prompt, sample, text, decisions)

        calls = (call(prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES))
        return await asyncio.gather(*calls)


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Any]:
    """How the runs differ: in texts, in each of the gateway's decisions, and how many samples are clones.

    `distinct_samples` tells of the first run for how many prompts the samples have so many different texts.
    """
    pairs = list(zip(first, second, strict=True))
    per_prompt: dict[int, set[str]] = {}
    for answer in first:
        per_prompt.setdefault(answer.prompt, set()).add(answer.text)
    decided = [name for name in DECISIONS if any(name in answer.decisions for answer in first)]
    return {
        "answers": len(pairs),
        "different_texts": sum(a.text != b.text for a, b in pairs),
        "different_decisions": {
            name: sum(a.decisions.get(name) != b.decisions.get(name) for a, b in pairs) for name in decided
        },
        "distinct_samples": dict(sorted(Counter(len(texts) for texts in per_prompt.values()).items())),
    }


def said(figures: dict[str, Any]) -> str:
    """The figures as a line for people."""
    clones = sum(n for distinct, n in figures["distinct_samples"].items() if distinct < SAMPLES)
    return (
        f"{figures['different_texts']} of {figures['answers']} answers differ between two runs; "
        f"{clones} of {PROMPTS} prompts got equal samples"
    )


def against_engines(spec: servers.Spec, replicas: int, seeded: bool, restart: bool) -> dict[str, Any]:
    """Two runs straight to real replicas, on servers started anew for the second run or not."""
    seed = own_seed if seeded else None
    runs: list[list[Answer]] = []
    logs = Path(tempfile.mkdtemp(prefix="contrast-"))
    for starts in [1, 1] if restart else [2]:
        with servers.running([spec] * replicas, logs) as started:
            urls = [server.url + "/v1" for server in started]
            runs += [asyncio.run(rollout(urls, spec.model, seed)) for _ in range(starts)]
    return compare(*runs)


def against_urls(base_urls: Sequence[str], model: str, seeded: bool) -> dict[str, Any]:
    """Two runs to servers that are there already."""
    seed = own_seed if seeded else None
    return compare(*(asyncio.run(rollout(base_urls, model, seed, run)) for run in ("a", "b")))


def main() -> None:
    """Measure, and print the figures as JSON and as a line for people."""
    parser = argparse.ArgumentParser(description="Compare two runs of one rollout.")
    parser.add_argument("engine", nargs="?", choices=["vllm", "sglang"], help="start real replicas of it")
    parser.add_argument("--base-url", action="append", help="use what answers there instead")
    parser.add_argument("--model", default="tiny-llm")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seeded", action="store_true", help="send a seed with each call")
    parser.add_argument("--restart", action="store_true", help="start the servers anew for the second run")
    args = parser.parse_args()
    if bool(args.engine) == bool(args.base_url):
        parser.error("name an engine, or give --base-url")
    if args.base_url:
        figures = against_urls(args.base_url, args.model, args.seeded)
    else:
        spec = servers.spec(args.engine, args.model)
        figures = against_engines(spec, args.replicas, args.seeded, args.restart)
    print(json.dumps(vars(args) | figures))
    print(said(figures))


if __name__ == "__main__":
    main()
