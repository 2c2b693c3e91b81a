"""What holds for an answer, by engine, route and whether it is streamed: found by asking, not written down.

Each route of an engine that samples or scores is asked twice, through gateways that know nothing of each other. So the
table in docs/engines.md is made from the simulated engines; `make test-vllm` and `make test-sglang` ask the real ones
and must find the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx

from gateway import engines
from gateway.core.types import Handling
from tests.harness import gateway, pool
from tests.sim.serving import serving

ENGINES = ("vllm", "sglang")
TALK = [{"role": "user", "content": "Name a colour"}]
SAMPLING = {"max_tokens": 8, "temperature": 1}
NATIVE = {"max_new_tokens": 8, "temperature": 1}
REQUESTS: dict[tuple[str, str], dict[str, Any]] = {
    ("", "/v1/chat/completions"): {"messages": TALK, **SAMPLING},
    ("", "/v1/chat/completions/batch"): {"messages": [TALK, TALK], **SAMPLING},
    ("", "/v1/completions"): {"prompt": "The colour is", **SAMPLING},
    ("", "/v1/responses"): {"input": "Name a colour", "max_output_tokens": 8, "temperature": 1},
    ("", "/v1/messages"): {"messages": TALK, **SAMPLING},
    ("", "/inference/v1/generate"): {"token_ids": [1, 2, 3], "sampling_params": SAMPLING},
    ("", "/generate"): {"text": "The colour is", "sampling_params": NATIVE},
    ("vllm", "/classify"): {"input": "A colour"},
    ("", "/classify"): {"text": "A colour"},
    ("", "/encode"): {"text": "A colour"},
    ("", "/pooling"): {"input": "A colour"},
    ("", "/v1/classify"): {"input": "A colour"},
    ("", "/v1/embeddings"): {"input": "A colour"},
    ("vllm", "/v1/score"): {"text_1": "A colour", "text_2": ["red", "blue"]},
    ("", "/score"): {"text_1": "A colour", "text_2": ["red", "blue"]},
    ("", "/v1/score"): {"query": "A colour", "items": ["red", "blue"], "label_token_ids": [1, 2]},
    ("", "/rerank"): {"query": "A colour", "documents": ["red", "blue"]},
    ("", "/v1/rerank"): {"query": "A colour", "documents": ["red", "blue"]},
    ("", "/v2/rerank"): {"query": "A colour", "documents": ["red", "blue"]},
}
"""A request for each route, by engine where they differ."""

WHOLE_ONLY = ("/v1/chat/completions/batch",)
"""Routes that sample and do not stream."""

_OF_ITS_OWN = ("id", "created", "created_at", "completed_at", "system_fingerprint", "meta_info", "usage", "item_id")
"""Fields of an answer that name it, or tell how long it took."""

_DRAWN = ("content", "text", "delta", "token_ids", "finish_reason")
"""Fields of an event of a stream that hold what was drawn."""

Found = dict[tuple[str, bool], str]
"""What was found, by route and whether it was streamed."""


def routes(engine: str) -> Mapping[str, Handling]:
    """The routes of an engine that compute."""
    return {path: each for path, each in engines.load(engine).ROUTES.items() if each.computes}


def request(engine: str, path: str, model: str, *, streamed: bool) -> dict[str, Any]:
    """The request for a route."""
    body = REQUESTS.get((engine, path)) or REQUESTS["", path]
    return {"model": model, **body, **({"stream": True} if streamed else {})}


def with_samples(handling: Handling, body: dict[str, Any]) -> dict[str, Any]:
    """The same request for two samples."""
    assert handling.n is not None
    if len(handling.n) == 1:
        return body | {"n": 2}
    return body | {handling.n[0]: body[handling.n[0]] | {handling.n[1]: 2}}


async def ask_all(
    engine: str, clients: Sequence[httpx.AsyncClient], strict: httpx.AsyncClient, models: Mapping[str, str],
    role: str, only: Sequence[str] | None = None,
) -> Found:  # fmt: skip
    """Ask each route of a role. `clients`: two gateways alike; `strict`: one with that profile."""
    found: Found = {}
    for path, handling in routes(engine).items():
        if handling.role not in (role, "any") or (only is not None and path not in only):
            continue
        for streamed in (False, True) if handling.kind == "sample" and path not in WHOLE_ONLY else (False,):
            body = request(engine, path, models[role], streamed=streamed)
            found[path, streamed] = await _one(handling, path, body, clients, strict)
    return found


async def _one(
    handling: Handling, path: str, body: dict[str, Any], clients: Sequence[httpx.AsyncClient], strict: httpx.AsyncClient
) -> str:
    session = {"x-session-id": f"{path}-{'stream' in body}"}
    answers = [await client.post(path, json=body, headers=session) for client in clients]
    for answer in answers:
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:80]}"
    refused = await strict.post(path, json=body, headers=session)
    code = refused.json()["error"].get("code") if refused.status_code != 200 and handling.api != "anthropic" else None
    if handling.kind == "sample" and handling.seed is None:
        assert refused.status_code == 400, refused.text
        return "no seed: `no-seed`, refused in strict"
    assert refused.status_code == 200, code
    told = [said(answer) for answer in (*answers, refused)]
    words = ["repeats" if all(each == told[0] for each in told) else "**differs**"]
    if handling.n is not None or handling.merge == "conversations":
        several = with_samples(handling, body) if handling.n is not None else body
        both = [await client.post(path, json=several, headers=session) for client in clients]
        drawn = [samples(answer) for answer in both]
        apart = len(set(drawn[0])) == len(drawn[0]) == 2
        words.append("samples differ" if apart and drawn[0] == drawn[1] else f"**samples {drawn}**")
    return ", ".join(words)


def said(answer: httpx.Response) -> Any:
    """What an answer says, without what is its own; of a stream all that was drawn, however it was cut into events."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return _bare(answer.json())
    events = [json.loads(line) for line in _data(answer)]
    if "meta_info" in events[-1]:
        return _bare(events[-1])
    return [piece for event in events for text in _drawn(event) for piece in text]


def _drawn(value: Any) -> list[Any]:
    """Texts and token ids that an event holds."""
    if isinstance(value, list):
        return [text for each in value for text in _drawn(each)]
    if not isinstance(value, dict):
        return []
    own = [each for name, each in value.items() if name in _DRAWN and isinstance(each, str | list)]
    texts = [each for each in own if isinstance(each, str) or (each and isinstance(each[0], int))]
    return texts + [text for each in value.values() for text in _drawn(each)]


def samples(answer: httpx.Response) -> list[str]:
    """The samples of an answer, by their numbers."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        told = answer.json()
        rows = told if isinstance(told, list) else told["choices"]
        return [json.dumps(_content(row)) for row in rows]
    parts: dict[int, list[Any]] = {}
    for event in map(json.loads, _data(answer)):
        for row in event.get("choices", [event]):
            if "meta_info" in row:
                parts[row.get("index", 0)] = list(row["text"])
            else:
                parts.setdefault(row["index"], []).extend(_content(row) or ())
    return [json.dumps(parts[number]) for number in sorted(parts)]


def _content(row: dict[str, Any]) -> Any:
    for name in ("message", "delta"):
        if name in row:
            return row[name].get("content")
    return row["text"] if "text" in row else row["token_ids"]


def _data(answer: httpx.Response) -> list[str]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: "))
    return [line for line in lines if line != "[DONE]"]


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(each) for key, each in value.items() if key not in _OF_ITS_OWN}
    return [_bare(each) for each in value] if isinstance(value, list) else value


async def simulated(engine: str) -> Found:
    """What holds before the simulated engine."""
    found: Found = {}
    for role in ("generate", "reward"):
        async with AsyncExitStack() as stack:
            settings: dict[str, Any] = {"scale_out": True} if role == "generate" else {"prefix_cache": False}
            gates = []
            own: list[dict[str, Any]] = [{}, {}, {"profile": "strict", "guards": {"clones": "warn"}}]
            for each in own:  # a server shared by gateways that know nothing of each other has foreign traffic
                server, _ = await stack.enter_async_context(serving(engine, role=role, **settings))
                made = pool(role, server.url, engine=engine, role=role, models=["sim-model"], deterministic="declared")
                gates.append(await stack.enter_async_context(gateway(made, **each)))
            *clients, strict = [gate.http for gate in gates]
            models = {role: "sim-model"}
            found |= await ask_all(engine, clients, strict, models, role)
    return found


def rows(engine: str, found: Found) -> list[tuple[str, str, str]]:
    """Lines of the table: route, whole, streamed."""
    return [(f"`{path}`", found[path, False], found.get((path, True), "–")) for path in routes(engine)]


def table(engine: str) -> list[tuple[str, str, str]]:
    """The lines for an engine, found by asking its simulation."""
    return rows(engine, asyncio.run(simulated(engine)))
