"""Answers that score or embed: items, in the shape of the engine's route."""

from __future__ import annotations

from typing import Any

from gateway.core.seen import Seen, hashed, without, words

_INCIDENTAL = frozenset({"id", "created", "model", "object", "usage", "meta_info", "metadata", "system_fingerprint"})


def answer(seen: Seen, value: Any) -> None:
    """A whole answer."""
    items = value if isinstance(value, list) else [value]
    seen.content = hashed([without(item, _INCIDENTAL) for item in items])
    if isinstance(value, dict):
        seen.use(value.get("usage"))
        if value.get("error") is not None:
            seen.error = words(value["error"])
