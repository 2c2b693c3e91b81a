"""OpenAI's responses: output items, told whole by the last event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.seen import Seen, hashed, number, without, words

_LAST = (None, "response.completed", "response.incomplete", "response.failed")
_INVENTED = frozenset({"id", "call_id", "created_at"})


def event(seen: Seen, event: Mapping[str, Any]) -> None:
    """An event, or a whole answer."""
    seen.sequence = number(event.get("sequence_number", seen.sequence)) + 1
    response = event.get("response", event)
    if event.get("type") not in _LAST:
        return
    seen.done = True
    status = response.get("status")
    if status == "incomplete":
        status = (response.get("incomplete_details") or {}).get("reason", status)
    seen.choice(0).stop(status)
    seen.use(response.get("usage"))
    if status == "failed":
        seen.error = words(response.get("error"))
    seen.content = hashed([without(item, _INVENTED) for item in response.get("output") or ()])
