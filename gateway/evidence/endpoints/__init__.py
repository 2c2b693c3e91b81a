"""How canaries ask each engine, and how its answers are read. One file is one engine; its name is a pool's `engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

Body = dict[str, Any]


class Answer(NamedTuple):
    """What is compared: equal to the last bit or not."""

    parts: tuple[str, ...]
    """The tokens, or the characters where tokens are not told."""
    values: tuple[float, ...]
    """Their logprobs, or the scores; empty where none are told."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A route that draws tokens."""

    path: str
    body: Callable[[str, str, int, int], Body]
    """Of model, prompt, seed and the number of tokens."""
    read: Callable[[Any], Answer]
    unit: str = "token"
    """What a part of its answers is."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A route that scores texts."""

    path: str
    body: Callable[[str, Sequence[str]], Body]
    """Of model and texts: one text stands alone, several in a list."""
    read: Callable[[Any], list[Answer]]
    """One for each text, in their order."""


class Endpoints(Protocol):
    """What the file of an engine gives. `read` may raise KeyError, IndexError, TypeError and ValueError."""

    SAMPLING: tuple[Sampling, ...]
    SCORING: tuple[Scoring, ...]


def load(engine: str) -> Endpoints:
    """The endpoints of an engine."""
    return cast(Endpoints, import_module(f"gateway.evidence.endpoints.{engine}"))


def chat(extra: Body) -> Sampling:
    """/v1/chat/completions."""

    def body(model: str, prompt: str, seed: int, tokens: int) -> Body:
        messages = [{"role": "user", "content": prompt}]
        asked = {"model": model, "messages": messages, "seed": seed, "max_tokens": tokens}
        return asked | {"temperature": 1, "logprobs": True} | extra

    def read(told: Any) -> Answer:
        choice = told["choices"][0]
        steps = (choice.get("logprobs") or {}).get("content")
        if not steps:
            return Answer(tuple(choice["message"]["content"]), ())
        return Answer(tuple(step["token"] for step in steps), tuple(step["logprob"] for step in steps))

    return Sampling("/v1/chat/completions", body, read)


def completions(extra: Body) -> Sampling:
    """/v1/completions."""

    def body(model: str, prompt: str, seed: int, tokens: int) -> Body:
        asked = {"model": model, "prompt": prompt, "seed": seed, "max_tokens": tokens}
        return asked | {"temperature": 1, "logprobs": 1} | extra

    def read(told: Any) -> Answer:
        choice = told["choices"][0]
        steps = choice.get("logprobs")
        if not steps or not steps.get("tokens"):
            return Answer(tuple(choice["text"]), ())
        return Answer(tuple(steps["tokens"]), tuple(steps["token_logprobs"]))

    return Sampling("/v1/completions", body, read)


def rows(name: str) -> Callable[[Any], list[Answer]]:
    """Reads the member `name` of each entry of an OpenAI-like list."""

    def read(told: Any) -> list[Answer]:
        return [
            Answer((), tuple(numbers(row[name]))) for row in sorted(told["data"], key=lambda row: int(row["index"]))
        ]

    return read


def numbers(value: Any) -> Iterator[float]:
    """All numbers of nested lists, in order."""
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    else:
        yield float(value)


def one_or_all(texts: Sequence[str]) -> str | list[str]:
    """One text as it is, several as a list."""
    return texts[0] if len(texts) == 1 else list(texts)
