"""Anthropic's messages: content blocks, and a last event of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.seen import Seen


def event(seen: Seen, event: Mapping[str, Any]) -> None:
    """An event, or a whole answer."""
    said = seen.choice(0)
    kind = event.get("type")
    if kind == "content_block_delta":
        for name, value in event["delta"].items():
            if name != "type" and isinstance(value, str):
                said.add(f"{event['index']} {name}", value)
    elif kind == "content_block_start":
        said.block(event["index"], event["content_block"], opening=True)
    elif kind == "message_delta":
        said.stop(event["delta"].get("stop_reason"))
        seen.use({**(seen.usage or {}), **(event.get("usage") or {})})
    elif kind == "message_start":
        seen.use(event["message"].get("usage"))
    elif kind == "message_stop":
        seen.done = True
    elif kind == "message":
        said.stop(event.get("stop_reason"))
        seen.use(event.get("usage"))
        for position, block in enumerate(event.get("content") or ()):
            said.block(position, block)
