"""Asks a server what it is. No question generates a token or scores a text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.fingerprint import fingerprint
from gateway.core.types import Facts
from gateway.engines import Engine
from gateway.questions import Answered, Ask
from gateway.upstream import Broken

MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a server said of itself."""

    facts: Facts
    models: list[dict[str, Any]] | None
    """The entries of /v1/models; None where that was not answered in its shape."""
    whole: bool
    """Every question was answered, be it by a refusal; else it may know more than it said."""
    reached: bool
    """A question was answered."""
    refusal: str = ""
    """Why it would answer no request; "": nothing is known against it."""

    @property
    def fingerprint(self) -> str:
        """ "" where nobody was there to have one."""
        if not self.reached:
            return ""
        return fingerprint(self.facts, [model["id"] for model in self.models or ()])


async def introduce(ask: Ask, engine: Engine) -> Introduction:
    """Ask a server all that its engine's file lists."""
    routes = (MODELS, *engine.ASKS)
    answers = dict(zip(routes, await asyncio.gather(*(_answer(ask, route) for route in routes)), strict=True))
    told = {
        route: _read(answer.body) if answer.good else answer.status
        for route, answer in answers.items()
        if answer is not None
    }
    models = told.get(MODELS)
    data = models.get("data") if isinstance(models, dict) else None
    return Introduction(
        engine.facts(told),
        [model for model in data if isinstance(model, dict) and isinstance(model.get("id"), str)]
        if isinstance(data, list)
        else None,
        all(answer is not None and answer.status < 500 for answer in answers.values()),
        any(answer is not None for answer in answers.values()),
        f"{MODELS} answers 401: it wants a key, or another (pools[].api_key)" if models == 401 else "",
    )


async def _answer(ask: Ask, route: str) -> Answered | None:
    try:
        return await ask(route)
    except Broken:
        return None


def _read(body: bytes) -> dict[str, Any] | str:
    """A JSON object, or the text of what is none."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    return told if isinstance(told, dict) else body.decode("utf-8", "replace")
