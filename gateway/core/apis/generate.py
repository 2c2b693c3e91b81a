"""SGLang's own /generate: `meta_info`, and mostly all the text so far in each event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.seen import Seen, number


def event(seen: Seen, event: Mapping[str, Any], index: int) -> None:
    """An event, or a whole answer. `index`: which of several samples it is, where it does not say."""
    said = seen.choice(event.get("index", index))
    meta = event["meta_info"]
    reason = meta.get("finish_reason")
    if reason is not None:
        said.stop(reason["type"] if isinstance(reason, dict) else reason)
    tokens = event.get("output_ids")
    text = event.get("text")
    completed = number(meta.get("completion_tokens"))
    said.counts = (number(meta.get("prompt_tokens")), completed)
    if text is None:
        text = "".join([f"{token}," for token in tokens or ()])
    # A server may stream what is new instead of all so far; then it also sends fewer ids than it counts.
    said.so_far(text, whole=tokens is None or len(tokens) >= completed)
    if reason is not None:
        seen.weigh(meta)
