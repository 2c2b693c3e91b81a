"""Priorities as an engine's scheduler takes them: in one order in every run, and no two alike.

Equal priorities were reported to have stopped engines, so what is the same in rank is told apart by its id.
"""

from __future__ import annotations

from hashlib import blake2b

LARGEST = 2**19 - 1
"""The largest rank; what is above it goes with it."""

_ID_BITS = 44


def value(rank: int, engine_id: str, *, higher_first: bool) -> int:
    """What an engine is sent for a request of this rank, of which the lower goes first: a positive 63-bit number.

    Below the rank stand 44 bits of the BLAKE2b of the engine's id, which no two requests in flight share.
    """
    digest = blake2b(engine_id.encode(), digest_size=8).digest()
    told = min(rank, LARGEST) << _ID_BITS | int.from_bytes(digest) >> (64 - _ID_BITS)
    return 2**63 - 1 - told if higher_first else told
