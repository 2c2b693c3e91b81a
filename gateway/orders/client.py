"""The number that the client gives in X-Request-Index, under the plain identity. Never races."""

from __future__ import annotations

from collections.abc import Callable


def effective(identity: str, content: Callable[[], str]) -> str:
    """The identity itself: one counter a session."""
    return identity
