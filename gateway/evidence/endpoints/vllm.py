"""vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.evidence.endpoints import Answer, Body, Sampling, Scoring, chat, completions, one_or_all, rows


def _respond(model: str, prompt: str, seed: int, tokens: int) -> Body:
    return {
        "model": model,
        "input": prompt,
        "seed": seed,
        "max_output_tokens": tokens,
        "temperature": 1,
        "store": False,
    }


def _responded(told: Any) -> Answer:
    parts = [part["text"] for item in told["output"] for part in item.get("content") or () if part.get("text")]
    return Answer(tuple("".join(parts)), ())


def _classify(model: str, texts: Sequence[str]) -> Body:
    # Raw: an activation may round what differs to what is equal.
    return {"model": model, "input": one_or_all(texts), "use_activation": False}


def _pool(model: str, texts: Sequence[str]) -> Body:
    return {"model": model, "input": one_or_all(texts)}


_WHOLE = {"ignore_eos": True}

SAMPLING = (
    chat(_WHOLE),
    completions(_WHOLE),
    Sampling("/v1/responses", _respond, _responded, unit="character"),
)

SCORING = (
    Scoring("/classify", _classify, rows("probs")),
    Scoring("/pooling", _pool, rows("data")),
    Scoring("/v1/embeddings", _pool, rows("embedding")),
)
