"""vLLM's reward routes (`--runner pooling`)."""

from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Object
from gateway.sim.fields import Fields, Refused
from gateway.sim.replies import Reply, answer
from gateway.sim.runs import read_prompts
from gateway.sim.scores import WIDTH, Reader, logits, normalised, pairs, sigmoid
from gateway.sim.templates import chat_prompt
from gateway.sim.vllm import Vllm


async def classify(ask: Ask, dialect: Vllm) -> Reply:
    """One probability a text; `use_activation: false` gives the raw logit."""
    texts = _inputs(ask, dialect)
    id = dialect.request_id(ask, "classify")
    found = await logits(ask, id, texts)
    raw = ask.fields.get("use_activation") is False or ask.fields.get("activation") is False
    items = [
        {"index": place, "label": "LABEL_0", "probs": [logit if raw else sigmoid(logit)], "num_classes": 1}
        for place, [logit] in enumerate(found)
    ]
    return answer({**_head(ask, dialect, id), "data": items, "usage": _usage(dialect, texts)})


async def pooling(ask: Ask, dialect: Vllm) -> Reply:
    """The pooled vector of each text: here its one raw logit."""
    texts = _inputs(ask, dialect)
    id = dialect.request_id(ask, "pooling")
    found = await logits(ask, id, texts)
    items = [{"index": place, "object": "pooling", "data": vector} for place, vector in enumerate(found)]
    return answer({**_head(ask, dialect, id), "data": items, "usage": _usage(dialect, texts)})


async def embeddings(ask: Ask, dialect: Vllm) -> Reply:
    """A vector of length 1 for each text."""
    texts = _inputs(ask, dialect)
    id = dialect.request_id(ask, "embd")
    found = await logits(ask, id, texts, WIDTH)
    items = [
        {"index": place, "object": "embedding", "embedding": normalised(vector)}
        for place, vector in enumerate(found)
    ]
    return answer({**_head(ask, dialect, id), "data": items, "usage": _usage(dialect, texts)})


async def score(ask: Ask, dialect: Vllm) -> Reply:
    """The likeness of pairs of texts, by any of the names that the fields have had."""
    _check_model(ask, dialect)
    left = _first(ask.fields, "text_1", "queries", "data_1")
    right = _first(ask.fields, "text_2", "documents", "items", "data_2")
    texts = pairs(left, right, _reader(ask))
    id = dialect.request_id(ask, "score")
    found = await logits(ask, id, texts)
    items = [
        {"index": place, "object": "score", "score": sigmoid(logit)} for place, [logit] in enumerate(found)
    ]
    return answer({**_head(ask, dialect, id), "data": items, "usage": _usage(dialect, texts)})


async def rerank(ask: Ask, dialect: Vllm) -> Reply:
    """Documents by falling likeness to the query."""
    _check_model(ask, dialect)
    documents = ask.fields.texts("documents")
    texts = pairs(ask.fields.get("query"), list(documents), _reader(ask))
    id = dialect.request_id(ask, "rerank")
    found = await logits(ask, id, texts)
    items: list[Object] = [
        {"index": place, "document": {"text": documents[place]}, "relevance_score": sigmoid(logit)}
        for place, [logit] in enumerate(found)
    ]
    items.sort(key=lambda item: -item["relevance_score"])
    most = ask.fields.integer("top_n", 0, 0) or len(items)
    usage = {"prompt_tokens": sum(map(len, texts)), "total_tokens": sum(map(len, texts))}
    return answer({"id": id, "model": ask.settings.model, "usage": usage, "results": items[:most]})


def _inputs(ask: Ask, dialect: Vllm) -> list[list[int]]:
    _check_model(ask, dialect)
    if ask.fields.get("messages") is not None:
        return [chat_prompt(ask.fields, ask.settings.max_model_len)]
    return _reader(ask)(ask.fields.get("input"))


def _check_model(ask: Ask, dialect: Vllm) -> None:
    model = ask.fields.get("model")
    if model is not None and model != ask.settings.model:
        raise Refused(404, f"The model `{model}` does not exist.", "model")


def _reader(ask: Ask) -> Reader:
    return lambda value: read_prompts(value, ask.settings.max_model_len, "input")


def _first(fields: Fields, *names: str) -> Any:
    found = next((fields.get(name) for name in names if fields.get(name) is not None), None)
    if found is None:
        raise Refused(400, f"{names[0]} is missing", names[0])
    return found


def _head(ask: Ask, dialect: Vllm, id: str) -> Object:
    return dialect.head(ask, id, "list")


def _usage(dialect: Vllm, texts: list[list[int]]) -> Object:
    return dialect.usage(sum(map(len, texts)), 0, 0)
