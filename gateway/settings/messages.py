"""What is wrong with a configuration, one line a fault: `pools[0].replicas[1].url: names no host`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Loc = tuple[int | str, ...]

_SHOWN = ("literal_error", "extra_forbidden")
_NAMELESS = '""'
_SECRET = ("api_key", "api_keys", "admin_key", "auth", "state")


class InvalidSettings(ValueError):
    """The configuration cannot be used. `lines` says why, each naming its key first."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


def dotted(loc: Loc) -> str:
    """`("pools", 0, "name")` as a person writes it: `pools[0].name`; a key without a name is `""`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part or _NAMELESS}" for part in loc)
    return text.removeprefix(".")


def nearest(word: str, names: Iterable[str]) -> str:
    """What to say after an unknown word: the name that was meant, or all there are."""
    known = {name.lower(): name for name in sorted(names)}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(known.values())}"


def lines(model: type[BaseModel], error: ValidationError, origin: Callable[[Loc], str | None]) -> list[str]:
    """Every fault that `error` holds against `model`, without those that are another's echo.

    `origin` names what gave the value at a place, where that is not the file.
    """
    found = error.errors(include_url=False)
    told = []
    for fault in found:
        if not any(_echoes(fault, other) for other in found):
            source = origin(fault["loc"])
            said = _no_json(fault) if source else None
            told += [line + (f" (from {source})" if source else "") for line in said or _said(model, fault)]
    return told


def _no_json(fault: ErrorDetails) -> list[str] | None:
    """What is wrong with a variable that began as JSON does. Its text is not shown: there may be keys in it."""
    value = fault["input"]
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        why = error.msg[:1].lower() + error.msg[1:]
        return [f"{dotted(fault['loc'])}: is no JSON: {why}, at character {error.pos + 1}"]
    return None


def _echoes(fault: ErrorDetails, other: ErrorDetails) -> bool:
    """A pool takes over the faults of `routing` at the top; a list is short where its elements are wrong."""
    loc, deeper = fault["loc"], len(other["loc"]) > len(fault["loc"])
    taken_over = loc[:1] == ("pools",) and loc[2:3] == ("routing",) and other["loc"] == loc[2:]
    short = fault["type"] == "too_short" and deeper and other["loc"][: len(loc)] == loc
    return short or (taken_over and fault["type"] == other["type"])


def _said(model: type[BaseModel], fault: ErrorDetails) -> Iterator[str]:
    loc, context = fault["loc"], fault.get("ctx", {})
    match fault["type"]:
        case "contradiction":
            yield from context["lines"]
            return
        case "extra_forbidden":
            text = f"unknown key; {_suggestion(model, loc)}"
        case "missing":
            text = "is missing"
        case "literal_error":
            value = fault["input"]
            text = f"{value!r} is unknown; {nearest(str(value), _choices(context['expected']))}"
        case "model_type" | "model_attributes_type" | "dict_type":
            text = "a mapping of keys to values is needed"
        case "tuple_type" | "list_type":
            text = "a list is needed"
        case "too_short":
            text = "at least one is needed"
        case "string_too_short":
            text = "must not be empty"
        case "string_type" | "path_type":
            text = "a text is needed; write it in quotes"
        case "string_pattern_mismatch":
            text = "may hold letters, digits, `.`, `_` and `-`, 128 at most, and begins with a letter or a digit"
        case "int_parsing" | "int_type" | "int_from_float":
            text = "a whole number is needed"
        case "float_parsing" | "float_type" | "finite_number":
            text = "a number is needed"
        case "bool_parsing" | "bool_type":
            text = "true or false is needed"
        case "greater_than_equal":
            text = f"at least {context['ge']:g} is needed"
        case "greater_than":
            text = f"more than {context['gt']:g} is needed"
        case "less_than_equal":
            text = f"at most {context['le']:g} is possible"
        case "less_than":
            text = "is too large: 2⁶³−1 is the largest"
        case _:
            text = fault["msg"]
    yield f"{dotted(loc)}: {text}{_given(fault)}"


def _given(fault: ErrorDetails) -> str:
    value = fault["input"]
    secret = any(part in _SECRET for part in fault["loc"]) or "@" in str(value)
    shown = isinstance(value, str | int | float) and not secret
    return f" (not {value!r})" if shown and value != "" and fault["type"] not in _SHOWN else ""


def _choices(expected: str) -> list[str]:
    return re.findall(r"'([^']*)'", expected)


def _suggestion(model: type[BaseModel], loc: Loc) -> str:
    word = str(loc[-1])
    names = list(section(model, loc[:-1]).model_fields)
    if not difflib.get_close_matches(word.lower(), names):
        elsewhere = [path for path in _paths(model) if path.split(".")[-1] == word]
        if elsewhere:
            # What a pool may say anew is meant at the top.
            own = [path for path in elsewhere if not any(path.endswith(f".{other}") for other in elsewhere)]
            return f"did you mean {' or '.join(own)}?"
    return nearest(word, names)


def section(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """The model that describes the place `loc` within `model`."""
    for part in loc:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation))
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = next(_models(field.annotation), None)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}." if field.annotation is inner else f"{prefix}{name}[].")
