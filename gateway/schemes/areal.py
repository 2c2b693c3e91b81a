"""The seeds of AReaL's own gateway, for runs that are to repeat its (AReaL, pull request 1625)."""

from __future__ import annotations

from hashlib import sha256


def seed(master: int, identity: str, index: int, member: int | None) -> int:
    """The first 4 bytes, big-endian, of SHA-256 of UTF-8 `identity:index`, AND 0x7FFFFFFF.

    Neither master seed nor member plays a part. From 0 to 2³¹−1.
    """
    return int.from_bytes(sha256(f"{identity}:{index}".encode()).digest()[:4]) & 0x7FFFFFFF
