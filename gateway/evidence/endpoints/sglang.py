"""SGLang. min_p 0 goes with each request: one that the model brought would end the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.evidence.endpoints import (
    Answer,
    Body,
    Sampling,
    Scoring,
    chat,
    completions,
    numbers,
    one_or_all,
    rows,
)


def _generate(model: str, prompt: str, seed: int, tokens: int) -> Body:
    sampling = {"max_new_tokens": tokens, "temperature": 1, "sampling_seed": seed, "min_p": 0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling, "return_logprob": True}


def _generated(told: Any) -> Answer:
    steps = told["meta_info"].get("output_token_logprobs")
    if not steps:
        return Answer(tuple(told["text"]), ())
    return Answer(tuple(str(token) for _, token, *_ in steps), tuple(logprob for logprob, *_ in steps))


def _native(model: str, texts: Sequence[str]) -> Body:
    return {"text": one_or_all(texts)}


def _scored(told: Any) -> list[Answer]:
    return [Answer((), tuple(numbers(row["embedding"]))) for row in (told if isinstance(told, list) else [told])]


def _embed(model: str, texts: Sequence[str]) -> Body:
    return {"model": model, "input": one_or_all(texts)}


_WHOLE = {"ignore_eos": True, "min_p": 0}

SAMPLING = (chat(_WHOLE), completions(_WHOLE), Sampling("/generate", _generate, _generated))

SCORING = (
    Scoring("/classify", _native, _scored),
    Scoring("/encode", _native, _scored),
    Scoring("/v1/embeddings", _embed, rows("embedding")),
)
