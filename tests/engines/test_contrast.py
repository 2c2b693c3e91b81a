"""How two runs are compared, and how calls are spread, without an engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.engines.contrast import Answer, compare, own_seed, rollout, said


def answers(texts: list[str], seeds: list[str] | None = None) -> list[Answer]:
    """Two samples a prompt, in order; with seeds that a gateway says it gave."""
    told = [{}] * len(texts) if seeds is None else [{"x-detgate-seed": seed} for seed in seeds]
    return [Answer(n // 2, n % 2, text, told[n]) for n, text in enumerate(texts)]


def test_differences_are_counted_by_place() -> None:
    figures = compare(answers(["a", "b", "c", "c"]), answers(["b", "a", "c", "d"]))
    assert figures["answers"] == 4
    assert figures["different_texts"] == 3
    assert figures["different_decisions"] == {}


def test_equal_samples_of_a_prompt_are_counted() -> None:
    figures = compare(answers(["a", "b", "c", "c"]), answers(["a", "b", "c", "c"]))
    assert figures["distinct_samples"] == {1: 1, 2: 1}
    assert said(figures) == "0 of 4 answers differ between two runs; 2 of 64 prompts got equal samples"


def test_decisions_are_compared_where_there_are_any() -> None:
    figures = compare(answers(["a", "b"], ["1", "2"]), answers(["a", "b"], ["1", "3"]))
    assert figures["different_decisions"] == {"x-detgate-seed": 1}


def test_a_rollout_asks_each_place_once_and_in_turn() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append((request.path, body))
        choice = {"index": 0, "message": {"role": "assistant", "content": request.path}, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(answer, headers={"x-detgate-seed": str(body.get("seed"))})

    async def main() -> list[Answer]:
        async with serving(complete) as url:
            places = [f"{url}/{name}/{{run}}/{{prompt}}:{{sample}}/v1" for name in ("one", "two")]
            return await rollout(places, "m", own_seed, run="r")

    given = asyncio.run(main())
    assert [(answer.prompt, answer.sample) for answer in given] == [(p, s) for p in range(64) for s in range(4)]
    assert all(f"/r/{a.prompt}:{a.sample}/v1/chat/completions" in a.text for a in given)
    assert sum(path.startswith("/one/") for path, _ in seen) == 128
    assert len({json.dumps(body["messages"]) for _, body in seen}) == 64
    assert {answer.decisions["x-detgate-seed"] for answer in given} == {str(body["seed"]) for _, body in seen}
    assert len({body["seed"] for _, body in seen}) == 256


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """A server on a free port that answers every POST by the handler."""
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
