"""Base plus member, the same for every prompt, as slime and xtuner (pull request 1644) seed."""

from __future__ import annotations


def seed(master: int, identity: str, index: int, member: int | None) -> int:
    """(master + member + 1,000,003 · index) mod 2³¹. The identity plays no part.

    Outside of groups the member is 0. From 0 to 2³¹−1.
    """
    return (master + (member or 0) + 1_000_003 * index) % 2**31
