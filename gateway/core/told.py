"""Reads what servers tell of themselves. What is missing, or of another kind than it should be, is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

OWNERS = ("vllm", "sglang")
"""Engines that name themselves in /v1/models."""


def at(told: Any, *path: str) -> Mapping[str, Any]:
    """The object at this place; an empty one where there is none."""
    for name in path:
        told = told.get(name) if isinstance(told, Mapping) else None
    return told if isinstance(told, Mapping) else {}


def flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def count(value: Any) -> int | None:
    return value if type(value) is int else None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def named(told: Mapping[str, Any], name: str) -> str | None:
    """A choice that may be told to be no choice at all: then "none"."""
    return text(told.get(name)) or ("none" if name in told and told[name] is None else None)


def numbers(value: Any) -> tuple[tuple[str, float], ...]:
    """The numbers of an object, or of its JSON text, sorted by name."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return ()
    found = at(value)
    return tuple(sorted((name, told) for name, told in found.items() if type(told) in (int, float)))


def owner(told: Mapping[str, Any]) -> str | None:
    """The engine that /v1/models names as the owner of its models."""
    return next((name for name in OWNERS if any(model.get("owned_by") == name for model in _models(told))), None)


def root(told: Mapping[str, Any]) -> str | None:
    """What the first model of /v1/models was loaded from."""
    return next((text(model.get("root")) for model in _models(told)), None)


def _models(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    data = at(told, "/v1/models").get("data")
    return [model for model in data if isinstance(model, Mapping)] if isinstance(data, list) else []
