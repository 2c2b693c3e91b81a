"""By what is asked: equal requests share a counter, others have their own. Siblings sent at once repeat."""

from __future__ import annotations

from collections.abc import Callable


def effective(identity: str, content: Callable[[], str]) -> str:
    """The identity and the first 16 hex digits of the content digest."""
    return f"{identity}/{content()[:16]}"
