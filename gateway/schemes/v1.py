"""The default: every request has a seed of its own, spread over 31 bits by a hash."""

from __future__ import annotations

from functools import lru_cache

from gateway.core.seeds import drawn, framed


def seed(master: int, identity: str, index: int, member: int | None) -> int:
    """1 + x mod (2³¹−1), x the first 8 bytes, big-endian, of BLAKE2b-512 of four parts.

    Each part stands behind its length in 8 bytes, big-endian: `detgate-seed-v1`, the master seed in decimal
    ASCII, the identity in UTF-8, the index in decimal ASCII. The member plays no part: the identity tells it.
    """
    return drawn(_beginning(master) + framed(identity.encode()) + framed(b"%d" % index))


@lru_cache(maxsize=256)
def _beginning(master: int) -> bytes:
    return framed(b"detgate-seed-v1", b"%d" % master)
