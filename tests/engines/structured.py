"""Structured answers of a real engine through the gateway, by what the OpenAI SDK has: `parse` and its streams."""

from __future__ import annotations

import json
from typing import Any, Literal

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.engines.asking import CHAT, Endpoint, ask, told

TALK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name an animal"}]
# A model of random weights writes no end of whitespace where it may.
SAMPLING: dict[str, Any] = {"model": "tiny-llm", "messages": TALK, "max_tokens": 400, "temperature": 1}


class Animal(BaseModel):
    """What is asked for, in an order that is not the alphabet's. It holds no text of any length."""

    stripes: Literal["black", "white"]
    legs: Literal["two", "four", "eight"]
    awake: bool


def parsed(client: OpenAI) -> tuple[str, int]:
    """A whole answer that the SDK found good: its text and the seed that the gateway gave it."""
    raw = client.chat.completions.with_raw_response.parse(**SAMPLING, response_format=Animal)
    [choice] = raw.parse().choices
    assert isinstance(choice.message.parsed, Animal)
    return _checked(choice.message.content), int(raw.headers["x-detgate-seed"])


def streamed(client: OpenAI) -> str:
    """The same, streamed."""
    with client.chat.completions.stream(**SAMPLING, response_format=Animal) as events:
        [choice] = events.get_final_completion().choices
    assert isinstance(choice.message.parsed, Animal)
    return _checked(choice.message.content)


def several(client: OpenAI, n: int) -> list[str]:
    """The texts of one call's samples."""
    answer = client.chat.completions.parse(**SAMPLING, response_format=Animal, n=n)
    assert all(isinstance(choice.message.parsed, Animal) for choice in answer.choices)
    return [_checked(choice.message.content) for choice in answer.choices]


def straight(engine: Endpoint, seed: int) -> str:
    """What the engine itself answers to the same request with this seed."""
    schema = {"name": "Animal", "schema": _schema(), "strict": True}
    body = SAMPLING | {"response_format": {"type": "json_schema", "json_schema": schema}, "seed": seed}
    said: str = told(ask(engine, CHAT, body))["choices"][0]["message"]["content"]
    return said


def _schema() -> dict[str, Any]:
    """The schema as the SDK writes it."""
    return Animal.model_json_schema() | {"additionalProperties": False}


def _checked(text: str | None) -> str:
    assert text is not None
    assert list(json.loads(text)) == ["stripes", "legs", "awake"]
    return text
