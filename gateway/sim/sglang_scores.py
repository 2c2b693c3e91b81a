"""SGLang's reward routes (`--is-embedding`)."""

from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, fresh
from gateway.sim.fields import Refused
from gateway.sim.replies import Reply, answer
from gateway.sim.runs import read_prompts
from gateway.sim.scores import encoded, numbered, pairs, score
from gateway.sim.sglang import Sglang, job_ids, pooled_meta


async def classify(ask: Ask, dialect: Sglang) -> Reply:
    """The raw logit of each text as an embedding of one number; /encode is the same."""
    _check(ask)
    name = "input_ids" if ask.fields.get("text") is None else "text"
    value = ask.fields.get(name)
    if value is None:
        raise Refused(400, "At least one of text, input_ids, image, video, or audio should be provided")
    texts = read_prompts(value, ask.settings.max_model_len, name)
    listed = isinstance(value, list) and not isinstance(value[0], int)
    jobs = await score(ask, job_ids(ask, len(texts), listed), texts)
    items = [{"embedding": job.done.result(), "meta_info": pooled_meta(ask, job)} for job in jobs]
    return answer(items if listed else items[0])


async def classify_v1(ask: Ask, dialect: Sglang) -> Reply:
    """Softmax over the one label: always 1.0."""
    _check(ask)
    texts = _read(ask, ask.fields.get("input"))
    id = dialect.request_id(ask, "classify")
    await score(ask, numbered(id, len(texts)), texts)
    items = [{"index": place, "label": "LABEL_0", "probs": [1.0], "num_classes": 1} for place in range(len(texts))]
    head = {**dialect.head(ask, f"classify-{fresh()}", "list"), "model": ask.settings.model}
    return answer({**head, "data": items, "usage": _usage(dialect, texts)})


async def embeddings(ask: Ask, dialect: Sglang) -> Reply:
    """The raw logit of each text, on an OpenAI route."""
    _check(ask)
    texts = _read(ask, ask.fields.get("input"))
    id = dialect.request_id(ask, "embd")
    jobs = await score(ask, numbered(id, len(texts)), texts)
    form = ask.fields.text("encoding_format", "float")
    items = [
        {"embedding": encoded(job.done.result(), form), "index": place, "object": "embedding"}
        for place, job in enumerate(jobs)
    ]
    usage = _usage(dialect, texts)
    return answer({"data": items, "model": ask.settings.model, "object": "list", "usage": usage})


async def scores(ask: Ask, dialect: Sglang) -> Reply:
    """The raw logit of the query with each item."""
    _check(ask)
    texts = pairs(ask.fields.get("query"), ask.fields.get("items"), lambda value: _read(ask, value))
    id = dialect.request_id(ask, "score")
    jobs = await score(ask, numbered(id, len(texts)), texts)
    found: Object = {"scores": [job.done.result() for job in jobs], "pooled_hidden_states": None}
    found |= {"token_logprobs": None, "model": dialect.head(ask, id, "")["model"]}
    return answer({**found, "usage": _usage(dialect, texts), "object": "scoring"})


async def rerank(ask: Ask, dialect: Sglang) -> Reply:
    """Documents by falling score."""
    _check(ask)
    documents = ask.fields.texts("documents")
    texts = pairs(ask.fields.get("query"), list(documents), lambda value: _read(ask, value))
    jobs = await score(ask, [fresh() for _ in texts], texts)
    items: list[Object] = [
        {"score": job.logit, "document": documents[place], "index": place, "meta_info": pooled_meta(ask, job)}
        for place, job in enumerate(jobs)
    ]
    items.sort(key=lambda item: -item["score"])
    return answer(items[: ask.fields.integer("top_n", 0, 0) or len(items)])


def _check(ask: Ask) -> None:
    if ask.settings.role != "reward":
        raise Refused(400, "This model does not appear to be an embedding model by default.")


def _read(ask: Ask, value: Any) -> list[list[int]]:
    return read_prompts(value, ask.settings.max_model_len, "input")


def _usage(dialect: Sglang, texts: list[list[int]]) -> Object:
    return dialect.usage(sum(map(len, texts)), 0)
