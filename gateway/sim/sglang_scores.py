"""SGLang's reward routes (`--is-embedding`)."""

from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, fresh
from gateway.sim.fields import Refused
from gateway.sim.replies import Reply, answer
from gateway.sim.runs import read_prompts
from gateway.sim.scores import WIDTH, logits, normalised, pairs
from gateway.sim.sglang import Sglang, free_id


async def classify(ask: Ask, dialect: Sglang) -> Reply:
    """The raw logit of each text as an embedding of one number; /encode is the same."""
    _check(ask)
    name = "input_ids" if ask.fields.get("text") is None else "text"
    value = ask.fields.get(name)
    texts = read_prompts(value, ask.settings.max_model_len, name)
    listed = isinstance(value, list) and not isinstance(value[0], int)
    ids = _ids(ask, len(texts), listed)
    found = await logits(ask, ids[0], texts)
    items = [
        {"embedding": vector, "meta_info": _meta(ask, id, text)}
        for id, text, vector in zip(ids, texts, found, strict=True)
    ]
    return answer(items if listed else items[0])


async def classify_v1(ask: Ask, dialect: Sglang) -> Reply:
    """Softmax over the one label: always 1.0."""
    _check(ask)
    texts = _read(ask, ask.fields.get("input"))
    id = dialect.request_id(ask, "classify")
    await logits(ask, id, texts)
    items = [
        {"index": place, "label": "LABEL_0", "probs": [1.0], "num_classes": 1} for place in range(len(texts))
    ]
    usage = dialect.usage(sum(map(len, texts)), 0, 0)
    return answer({**dialect.head(ask, f"classify-{id}", "list"), "data": items, "usage": usage})


async def embeddings(ask: Ask, dialect: Sglang) -> Reply:
    """A vector of length 1 for each text."""
    _check(ask)
    texts = _read(ask, ask.fields.get("input"))
    found = await logits(ask, dialect.request_id(ask, "embd"), texts, WIDTH)
    items = [
        {"object": "embedding", "index": place, "embedding": normalised(vector)}
        for place, vector in enumerate(found)
    ]
    usage = dialect.usage(sum(map(len, texts)), 0, 0)
    return answer({"object": "list", "data": items, "model": ask.settings.model, "usage": usage})


async def score(ask: Ask, dialect: Sglang) -> Reply:
    """The raw logit of the query with each item."""
    _check(ask)
    texts = pairs(ask.fields.get("query"), ask.fields.get("items"), lambda value: _read(ask, value))
    found = await logits(ask, dialect.request_id(ask, "score"), texts)
    return answer({"scores": found, "model": ask.settings.model, "object": "scoring"})


async def rerank(ask: Ask, dialect: Sglang) -> Reply:
    """Documents by falling score."""
    _check(ask)
    documents = ask.fields.texts("documents")
    texts = pairs(ask.fields.get("query"), list(documents), lambda value: _read(ask, value))
    id = dialect.request_id(ask, "rerank")
    found = await logits(ask, id, texts)
    items: list[Object] = [
        {
            "score": logit,
            "document": documents[place],
            "index": place,
            "meta_info": _meta(ask, id, texts[place]),
        }
        for place, [logit] in enumerate(found)
    ]
    items.sort(key=lambda item: -item["score"])
    return answer(items[: ask.fields.integer("top_n", 0, 0) or len(items)])


def _check(ask: Ask) -> None:
    if ask.settings.role != "reward":
        raise Refused(400, "This model does not appear to be an embedding model by default.")


def _read(ask: Ask, value: Any) -> list[list[int]]:
    return read_prompts(value, ask.settings.max_model_len, "input")


def _ids(ask: Ask, count: int, listed: bool) -> list[str]:
    rid = ask.fields.get("rid")
    if rid is None:
        return [fresh() for _ in range(count)]
    given = (
        rid if isinstance(rid, list) else [f"{rid}_{place}" for place in range(count)] if listed else [rid]
    )
    if len(given) != count:
        raise Refused(400, "rid must be as many as the texts", "rid")
    return [free_id(ask, one) for one in given]


def _meta(ask: Ask, id: str, text: list[int]) -> Object:
    return {
        "id": id,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(text),
        "weight_version": ask.settings.weight_version,
        "cached_tokens": 0,
    }
