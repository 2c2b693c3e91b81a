"""vLLM's reward routes (`--runner pooling`)."""

from collections.abc import Sequence
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Object
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Scoring
from gateway.sim.replies import Reply, answer
from gateway.sim.runs import read_prompts
from gateway.sim.scores import WIDTH, encoded, normalised, numbered, pairs, score, sigmoid
from gateway.sim.templates import chat_prompt
from gateway.sim.vllm import Vllm, check_model


async def classify(ask: Ask, dialect: Vllm) -> Reply:
    """One probability a text; `use_activation: false` gives the raw logit."""
    id, jobs = await _scored(ask, dialect, "classify", _inputs(ask))
    raw = ask.fields.flag("use_activation", True) is False
    items = [
        {
            "index": place,
            "label": "LABEL_0",
            "probs": [job.logit if raw else sigmoid(job.logit)],
            "num_classes": 1,
        }
        for place, job in enumerate(jobs)
    ]
    return _listed(ask, dialect, id, jobs, items)


async def pooling(ask: Ask, dialect: Vllm) -> Reply:
    """The pooled vector of each text: here the one probability."""
    id, jobs = await _scored(ask, dialect, "pooling", _inputs(ask))
    items = [{"index": place, "object": "pooling", "data": [sigmoid(job.logit)]} for place, job in enumerate(jobs)]
    return _listed(ask, dialect, id, jobs, items)


async def embeddings(ask: Ask, dialect: Vllm) -> Reply:
    """A vector of length 1 for each text."""
    id, jobs = await _scored(ask, dialect, "embd", _inputs(ask), WIDTH)
    form = ask.fields.text("encoding_format", "float")
    items = [
        {"index": place, "object": "embedding", "embedding": encoded(normalised(job.done.result()), form)}
        for place, job in enumerate(jobs)
    ]
    return _listed(ask, dialect, id, jobs, items)


async def scores(ask: Ask, dialect: Vllm) -> Reply:
    """The likeness of pairs of texts, by any of the names that the fields have had."""
    check_model(ask)
    left = _first(ask.fields, "text_1", "queries", "data_1")
    right = _first(ask.fields, "text_2", "documents", "items", "data_2")
    id, jobs = await _scored(ask, dialect, "score", pairs(left, right, lambda value: _read(ask, value)))
    items = [{"index": place, "object": "score", "score": sigmoid(job.logit)} for place, job in enumerate(jobs)]
    return _listed(ask, dialect, id, jobs, items)


async def rerank(ask: Ask, dialect: Vllm) -> Reply:
    """Documents by falling likeness to the query."""
    check_model(ask)
    documents = ask.fields.texts("documents")
    texts = pairs(_first(ask.fields, "query"), list(documents), lambda value: _read(ask, value))
    id, jobs = await _scored(ask, dialect, "score", texts)
    items: list[Object] = [
        {
            "index": place,
            "document": {"text": documents[place], "multi_modal": None},
            "relevance_score": sigmoid(job.logit),
        }
        for place, job in enumerate(jobs)
    ]
    items.sort(key=lambda item: -item["relevance_score"])
    most = ask.fields.integer("top_n", 0, 0) or len(items)
    total = sum(map(len, texts))
    usage = {"prompt_tokens": total, "total_tokens": total}
    return answer({"id": id, "model": ask.settings.model, "usage": usage, "results": items[:most]})


async def _scored(
    ask: Ask, dialect: Vllm, kind: str, texts: list[list[int]], width: int = 1
) -> tuple[str, list[Scoring]]:
    id = dialect.request_id(ask, kind)
    return id, await score(ask, numbered(id, len(texts)), texts, width)


def _listed(ask: Ask, dialect: Vllm, id: str, jobs: list[Scoring], items: Sequence[Object]) -> Reply:
    usage = dialect.usage(sum(len(job.tokens) for job in jobs), 0)
    return answer({**dialect.head(ask, id, "list"), "data": items, "usage": usage})


def _inputs(ask: Ask) -> list[list[int]]:
    check_model(ask)
    if ask.fields.get("messages") is not None:
        return [chat_prompt(ask.fields, ask.settings.max_model_len)]
    return _read(ask, _first(ask.fields, "input"))


def _read(ask: Ask, value: Any) -> list[list[int]]:
    return read_prompts(value, ask.settings.max_model_len, "input")


def _first(fields: Fields, *names: str) -> Any:
    found = next((fields.get(name) for name in names if fields.get(name) is not None), None)
    if found is None:
        raise Refused(400, "Field required", names[0], schema=True)
    return found
