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


def sortable(priority: int, index: int, names: tuple[tuple[int, int, str], ...], sample: int) -> bytes:
    """Bytes in the order of (priority, index, natural order of the names, sample), for stores that sort by bytes.

    Priorities beyond 64 bits count as the last within. A NUL in a name is none that a name can hold.
    """
    clamped = min(max(priority, -(2**63)), 2**63 - 1) + 2**63
    parts = [clamped.to_bytes(8, "big"), index.to_bytes(4, "big")]
    for kind, value, run in names:
        if kind == 0:
            digits = str(value).encode() if value else b""
            zeros = len(run) - len(digits)
            order = zeros if not value else 0xFFFF - zeros
            parts += (b"\x01", len(digits).to_bytes(2, "big"), digits, order.to_bytes(2, "big"))
        else:
            parts += (b"\x02", run.encode(errors="surrogatepass"), b"\0")
    return b"".join((*parts, b"\0", sample.to_bytes(4, "big")))
