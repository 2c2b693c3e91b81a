"""Where two bodies differ, as a person would say it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.evidence import prompts


def spots(a: Any, b: Any) -> list[str]:
    return [str(spot) for spot in prompts.spots(json.dumps(a).encode(), json.dumps(b).encode())]


def chat(*said: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in said], **fields}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (chat("x"), chat("y"), ['messages[0].content: "x" in A, "y" in B']),
        (chat("x", top_p=0.5), chat("x"), ["top_p: 0.5 in A, absent in B"]),
        (chat("x"), chat("x", "y"), ['messages[1]: absent in A, {"role":"user","content":"y"} in B']),
        (chat("x", stop=["a"]), chat("x", stop="a"), ['stop: ["a"] in A, "a" in B']),
        (chat("x", n=1), chat("x", n=True), ["n: 1 in A, true in B"]),
        (chat("x", n=1), chat("x", n=None), ["n: 1 in A, null in B"]),
        (chat("x", top_p=1), chat("x", top_p=1.0), []),
        (chat("x", user="a", stream=True, rid="1"), chat("x", user="b", rid="2"), []),
        (chat("a", "b", "c", "d"), chat("1", "2", "3", "4"), ['messages[0].content: "a" in A, "1" in B',
         'messages[1].content: "b" in A, "2" in B', 'messages[2].content: "c" in A, "3" in B']),
    ],
)  # fmt: skip
def test_what_differs_is_named_by_its_path(a: Any, b: Any, told: list[str]) -> None:
    assert spots(a, b) == told


def test_ids_that_are_invented_are_passed_over_and_ids_that_are_asked_are_not() -> None:
    def loop(invented: str, asked: str) -> dict[str, Any]:
        call = {"id": invented, "type": "function", "function": {"name": "f", "arguments": asked}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": invented, "content": "x"}]}  # fmt: skip

    assert spots(loop("1", "{}"), loop("2", "{}")) == []
    assert spots(loop("1", "{}"), loop("2", "[]")) == [
        'messages[0].tool_calls[0].function.arguments: "{}" in A, "[]" in B'
    ]
    assert spots({"id": 1}, {"id": 2}) == ["id: 1 in A, 2 in B"]


def test_of_long_texts_the_place_is_shown_where_they_part() -> None:
    [spot] = prompts.spots(
        json.dumps({"prompt": "x" * 5000 + "left"}).encode(), json.dumps({"prompt": "x" * 5000 + "right"}).encode()
    )
    assert spot.a.endswith('xxleft"')
    assert spot.b.endswith('xxright"')
    assert spot.a.startswith("…x")
    assert len(spot.a) <= prompts.SHOWN + 2


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]"])
def test_what_is_no_object_has_no_paths(body: bytes) -> None:
    assert prompts.spots(body, b"{}") == []
    assert prompts.same(body, b"{}", "/v1/completions") is None


def stream(*pieces: str, id: str = "1") -> bytes:
    events = [{"id": id, "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_answers_are_compared_by_what_they_say() -> None:
    def whole(text: str, id: str) -> bytes:
        return json.dumps({"id": id, "created": id, "choices": [{"index": 0, "message": {"content": text}}]}).encode()

    assert prompts.answers(whole("a", "1"), whole("a", "2")) == []
    assert [spot.path for spot in prompts.answers(whole("a", "1"), whole("b", "2"))] == ["choices[0].message.content"]
    assert prompts.answers(stream("ab", "c"), stream("a", "bc", id="2")) == []
    [spot] = prompts.answers(stream("ab", "c"), stream("a", "bd"))
    assert str(spot) == 'choices[0].delta.content: "abc" in A, "abd" in B'
    assert prompts.answers(b"torn {", stream("a")) == []
