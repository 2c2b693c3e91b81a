"""Where the bodies of two requests differ: the JSON paths, in the order in which they stand in the first of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from gateway.core import canonical
from gateway.core.document import Document, Malformed
from gateway.core.sse import payloads

SHOWN = 60
"""Characters of a value that are shown."""

SEED = re.compile(r"(sampling_params(\[\d+\])?\.)?(sampling_)?seed")
"""Paths at which a client's seed may stand."""

_ABSENT = object()
_IDS = frozenset({"id", "call_id", "tool_call_id", "tool_use_id"})
_HOLDERS = ("messages", "input")
_INVENTED = "previous_response_id"
_UNSAID = frozenset({"id", "created", "created_at", "model", "object", "usage", "system_fingerprint", "meta_info"})


class Spot(NamedTuple):
    """One place where two bodies differ."""

    path: str
    a: str
    """What stands there in A, as JSON cut to a readable length; empty where there is nothing."""
    b: str

    def __str__(self) -> str:
        return f"{self.path}: {self.a or 'absent'} in A, {self.b or 'absent'} in B"


def same(a: bytes, b: bytes, route: str) -> bool | None:
    """Whether two bodies ask the same of an engine. None: one of them is no JSON object."""
    try:
        return canonical.content(Document(a), route) == canonical.content(Document(b), route)
    except Malformed:
        return None


def spots(a: bytes, b: bytes, most: int = 3) -> list[Spot]:
    """The first places where two bodies differ in what they ask of an engine."""
    try:
        mine, theirs = orjson.loads(a), orjson.loads(b)
    except orjson.JSONDecodeError:
        return []
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return []
    found = _objects(_asking(mine), _asking(theirs), "", ids=False)
    return [spot for spot, _ in zip(found, range(most), strict=False)]


def _asking(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in canonical.UNSAMPLED and name != _INVENTED}


def _values(a: Any, b: Any, path: str, *, ids: bool) -> Iterator[Spot]:
    if type(a) is dict and type(b) is dict:
        yield from _objects(a, b, path, ids=ids)
    elif type(a) is list and type(b) is list:
        yield from _lists(a, b, path, ids=ids)
    elif a != b or not (type(a) is type(b) or (_number(a) and _number(b))):
        yield Spot(path, *_shown(a, b))


def _objects(a: dict[str, Any], b: dict[str, Any], path: str, *, ids: bool) -> Iterator[Spot]:
    for name in [*a, *(name for name in b if name not in a)]:
        if not (ids and name in _IDS):
            inner = f"{path}.{name}" if path else name
            yield from _values(
                a.get(name, _ABSENT), b.get(name, _ABSENT), inner, ids=ids or (not path and name in _HOLDERS)
            )


def _lists(a: list[Any], b: list[Any], path: str, *, ids: bool) -> Iterator[Spot]:
    for number in range(max(len(a), len(b))):
        mine = a[number] if number < len(a) else _ABSENT
        theirs = b[number] if number < len(b) else _ABSENT
        yield from _values(mine, theirs, f"{path}[{number}]", ids=ids)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _shown(a: Any, b: Any) -> tuple[str, str]:
    """Both values, cut so that the first character that differs is among what is left."""
    texts = ["" if value is _ABSENT else orjson.dumps(value).decode() for value in (a, b)]
    at = next((n for n, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    start = 0 if at < SHOWN else at - SHOWN // 3
    return _cut(texts[0], start), _cut(texts[1], start)


def _cut(text: str, start: int) -> str:
    return ("…" if start and text else "") + text[start : start + SHOWN] + ("…" if len(text) > start + SHOWN else "")


# --- answers


def answers(a: bytes, b: bytes) -> list[Spot]:
    """The first place where two answers say something else; a stream is read as the text it makes."""
    mine, theirs = _said(a), _said(b)
    if mine is None or theirs is None:
        return []
    return [spot for spot, _ in zip(_objects(mine, theirs, "", ids=True), range(1), strict=False)]


def _said(body: bytes) -> dict[str, Any] | None:
    carried = payloads(body)
    try:
        if carried is not None:
            return _streamed([orjson.loads(data) for data in carried if data.startswith(b"{")])
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return {name: inner for name, inner in value.items() if name not in _UNSAID} if isinstance(value, dict) else None


def _streamed(events: list[Any]) -> dict[str, Any]:
    """The texts of a stream, each joined: by choice and field."""
    texts: dict[str, str] = {}
    for event in events:
        for choice in event.get("choices") or ():
            for path, text in _texts(choice.get("delta") or {"text": choice.get("text")}, "delta"):
                name = f"choices[{choice.get('index', 0)}].{path}"
                texts[name] = texts.get(name, "") + text
        if isinstance(event.get("delta"), str):
            texts["output"] = texts.get("output", "") + event["delta"]
    return texts


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in _IDS and name not in ("role", "type", "index"):
                yield from _texts(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{inner.get('index', number) if isinstance(inner, dict) else number}]")
