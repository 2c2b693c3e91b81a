"""Sample and score, as a trainer does, over a policy pool and a reward pool: is a second run equal to the bit?

    python -m tests.engines.steps vllm --plot docs/images/steps.svg

A step asks 8 prompts for 4 samples each, all at once, has each scored by the reward model, and puts the best answer of
each prompt into the prompt's next step: a token that differs changes all that follows. Engines and gateway are started
anew for each run. It is done twice through a gateway, and twice straight to the engines by round robin, without seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.charts import Line, Panel, draw
from tests.engines import gates, servers
from tests.engines.asking import told
from tests.engines.servers import Spec

STEPS, PROMPTS, SAMPLES, TOKENS = 6, 8, 4, 16

POLICY = {"vllm": servers.VLLM, "sglang": servers.SGLANG}
REWARD = {"vllm": servers.VLLM_REWARD, "sglang": servers.SGLANG_REWARD}


@dataclass
class Run:
    """What came of one: the texts of each step in order, and the mean reward of each step."""

    texts: list[list[str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def equal(self, other: Run) -> int:
        """How many texts are equal."""
        steps = zip(self.texts, other.texts, strict=True)
        return sum(a == b for mine, theirs in steps for a, b in zip(mine, theirs, strict=True))


async def train(policies: Sequence[str], scorers: Sequence[str], engine: str, *, named: bool) -> Run:
    """All steps. `named`: each sample has a session, which a gateway knows what to do with."""
    turns = count()
    prompts = [f"Task {number}: describe a colour." for number in range(PROMPTS)]
    run = Run()
    async with httpx.AsyncClient(timeout=300) as http:

        async def sample(step: int, prompt: int, number: int) -> str:
            base = policies[next(turns) % len(policies)]
            path = f"/sessions/{step}:{prompt}:{number}" if named else ""
            body = {"model": "tiny-llm", "prompt": prompts[prompt], "max_tokens": TOKENS, "temperature": 1}
            text: str = told(await http.post(f"{base}{path}/v1/completions", json=body))["choices"][0]["text"]
            return text

        async def score(text: str) -> float:
            base = scorers[next(turns) % len(scorers)]
            if engine == "sglang":
                return float(told(await http.post(base + "/classify", json={"text": text}))["embedding"][0])
            body = {"model": "tiny-rm", "input": text, "use_activation": False}
            return float(told(await http.post(base + "/classify", json=body))["data"][0]["probs"][0])

        for step in range(STEPS):
            places = [(prompt, number) for prompt in range(PROMPTS) for number in range(SAMPLES)]
            texts = await asyncio.gather(*(sample(step, *place) for place in places))
            asked = [f"{prompts[prompt]}{text}" for (prompt, _), text in zip(places, texts, strict=True)]
            rewards = await asyncio.gather(*(score(text) for text in asked))
            run.texts.append(list(texts))
            run.rewards.append(sum(rewards) / len(rewards))
            for prompt in range(PROMPTS):
                own = range(prompt * SAMPLES, (prompt + 1) * SAMPLES)
                prompts[prompt] = f"Task {prompt}: {texts[max(own, key=lambda place: (rewards[place], -place))]}"
    return run


def through_gateway(folder: Path, engine: str, hash_seed: int) -> Run:
    """Start engines and a gateway, train, end them all."""
    with servers.running([POLICY[engine]] * 2 + [REWARD[engine]], _made(folder)) as [first, second, scorer]:
        policy = gates.pool("policy", engine, [first.url, second.url], **_declared(engine))
        reward = gates.pool("reward", engine, [scorer.url], role="reward")
        settings: dict[str, Any] = {"profile": "strict", "guards": {"clones": "warn"}, "health": {"interval": 0.5}}
        with gates.gateway(folder / "gate", policy, reward, hash_seed=hash_seed, **settings) as gate:
            return asyncio.run(train([gate.url], [gate.url], engine, named=True))


def straight(folder: Path, engine: str) -> Run:
    """The same without a gateway."""
    loose = Spec(engine, "tiny-llm") if engine == "sglang" else POLICY[engine]  # type: ignore[arg-type]
    with servers.running([loose] * 2 + [REWARD[engine]], _made(folder)) as [first, second, scorer]:
        return asyncio.run(train([first.url, second.url], [scorer.url], engine, named=False))


def _declared(engine: str) -> dict[str, str]:
    return {"deterministic": "declared"} if engine == "vllm" else {}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def plot(with_gateway: Sequence[Run], without: Sequence[Run]) -> str:
    """The reward of each step, above the least of all."""
    least = min(min(run.rewards) for run in (*with_gateway, *without))

    def lines(runs: Sequence[Run], style: int) -> list[Line]:
        return [
            Line(f"run {number}", [reward - least for reward in run.rewards], style + number - 1)
            for number, run in enumerate(runs, 1)
        ]

    panels = [
        Panel("straight to the engines, no seeds", lines(without, 2)),
        Panel("through the gateway, strict", lines(with_gateway, 0)),
    ]
    return draw("step", [str(step + 1) for step in range(STEPS)], panels)


def main() -> None:
    """Measure both ways, print the figures as JSON, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(POLICY))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with_gateway = [through_gateway(Path(folder, f"with-{run}"), options.engine, run) for run in (1, 2)]
        without = [straight(Path(folder, f"without-{run}"), options.engine) for run in (1, 2)]
    for name, (first, second) in (("gateway", with_gateway), ("straight", without)):
        texts = STEPS * PROMPTS * SAMPLES
        same = sum(a == b for a, b in zip(first.rewards, second.rewards, strict=True))
        print(json.dumps({"by": name, "texts": texts, "equal": first.equal(second), "equal_rewards": same,
                          "rewards": [first.rewards, second.rewards]}))  # fmt: skip
    if options.plot is not None:
        options.plot.write_text(plot(with_gateway, without))


if __name__ == "__main__":
    main()
