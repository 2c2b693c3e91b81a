"""The orders in which requests are listed: a function of what they are, never of when they ended."""

from __future__ import annotations

from gateway.core.digits import natural

Rank = tuple[object, ...]


def canonical(identity: str, ordinal: int, session: str, index: int) -> Rank:
    """The canonical order of a run's requests: by identity, with numbers in it as numbers, then the session's
    ordinal within its identity, then index. The session tells apart those that share all three."""
    return natural(identity), ordinal, natural(session), index


def submitted(order: int | None, seen: int) -> Rank:
    """The submission order of sessions: those that were given an `order` by it, then all others as they came.

    `seen` counts the sessions of the run as they came.
    """
    return (1, 0, seen) if order is None else (0, order, seen)
