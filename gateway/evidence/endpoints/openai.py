"""Any other server with the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.evidence.endpoints import Body, Scoring, chat, completions, one_or_all, rows


def _embed(model: str, texts: Sequence[str]) -> Body:
    return {"model": model, "input": one_or_all(texts)}


SAMPLING = (chat({}), completions({}))

SCORING = (Scoring("/v1/embeddings", _embed, rows("embedding")),)
