"""Chat completions and completions: choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.seen import Seen


def event(seen: Seen, choices: Any, event: Mapping[str, Any]) -> None:
    """An event of a stream, whose choices these are."""
    usage = event.get("usage")
    if usage is not None:
        seen.use(usage)
    for choice in choices:
        _choice(seen, choice)


def answer(seen: Seen, choices: Any, answer: Mapping[str, Any]) -> None:
    """A whole answer, whose choices these are."""
    seen.use(answer.get("usage"))
    for choice in choices:
        message = choice.get("message")
        if message is not None:
            seen.choice(choice.get("index", 0)).stop(choice.get("finish_reason"))
            choice["delta"] = _numbered(message)
        _choice(seen, choice)
    seen.weigh(answer.get("metadata") or {})


def _choice(seen: Seen, choice: dict[str, Any]) -> None:
    index = choice.get("index", 0)
    said = seen.said.get(index) or seen.choice(index)
    finish = choice.get("finish_reason")
    if finish is not None:  # before what may not be readable
        said.stop(finish)
    delta = choice.get("delta")
    if delta is not None:
        text = delta.get("content")
        if text:
            said.add("content", text)
        if len(delta) > 1 or not text:
            for name, value in delta.items():
                if value and name != "content":
                    said.message(delta)
                    break
    elif "text" in choice:
        said.add("content", choice["text"])
    elif choice.get("token_ids"):
        said.add("tokens", "".join([f"{token}," for token in choice["token_ids"]]))
    if finish is not None and "weight_versions" in choice:
        seen.weigh(choice)


def _numbered(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole message as if it had come as one delta: its tool calls are numbered by place."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "index": place} for place, call in enumerate(calls)]}
