"""Seeds: how they are derived, the seeds of a call's samples, and a client's own seed.

What is fixed here is fixed for good: a seed that changes makes every earlier run unrepeatable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

LARGEST = 2**31 - 1
"""The largest derived seed. Derived seeds begin at 1: some engines read 0 as "random"."""

LARGEST_CLIENT = 2**63 - 1
"""The largest seed that a client may send; the smallest is 0."""

_INTEGER = re.compile(rb"0|[1-9][0-9]{0,18}")


class InvalidSeed(ValueError):
    """A client's seed that the engines would refuse, coerce or read as "no seed"."""


def framed(*parts: bytes) -> bytes:
    """The parts one after another, each behind its length in 8 bytes, big-endian."""
    if len(parts) == 1:
        return len(parts[0]).to_bytes(8) + parts[0]
    return b"".join([len(part).to_bytes(8) + part for part in parts])


def derive(*parts: bytes) -> int:
    """A seed from 1 to 2³¹−1.

    1 + x mod (2³¹−1), x being the first 8 bytes, big-endian, of BLAKE2b-512 of the framed parts.
    """
    return drawn(framed(*parts))


def drawn(whole: bytes) -> int:
    """The same of parts that are framed already, one after another."""
    return 1 + int.from_bytes(blake2b(whole).digest()[:8]) % LARGEST


def samples(seed: int, n: int) -> list[int]:
    """The seeds of a call's samples: its own for sample 0, derived ones for the others, no two equal.

    Sample j > 0 has `derive("detgate-sample-v1", seed, j, k)`, its numbers in decimal ASCII, with the first k
    from 0 on that gives a seed which no earlier sample has modulo 2³² (engines use 32 bits of a longer one).
    So the seeds of a smaller n are the first of a larger one.
    """
    return apart([seed] * n)


def apart(own: Sequence[int]) -> list[int]:
    """Seeds of a call's samples, no two equal: sample j has what it would have if `own[j]` were the call's seed."""
    found = [own[0]]
    taken = {own[0] % 2**32}
    for sample in range(1, len(own)):
        seed, place = b"%d" % own[sample], b"%d" % sample
        tries = 0
        while (derived := derive(b"detgate-sample-v1", seed, place, b"%d" % tries)) in taken:
            tries += 1
        taken.add(derived)
        found.append(derived)
    return found


def segment(seed: int, sample: int, number: int, *, positional: bool) -> int:
    """The seed of segment `number`, from 1, of a sample of a call that had `seed`.

    `positional`: the engine's noise is a function of seed and position, so the sample's own seed draws on as if nothing
    had ended. Else the noise is a stream that would begin anew, so the segment has a seed of its own:
    `derive("detgate-segment-v1", seed, sample, number)`, the numbers in decimal ASCII.
    """
    if positional:
        return samples(seed, sample + 1)[sample]
    return derive(b"detgate-segment-v1", b"%d" % seed, b"%d" % sample, b"%d" % number)


def parse(literal: bytes) -> int | None:
    """A client's seed from its JSON, digit by digit as it was sent; None for null.

    Raises `InvalidSeed` for what is no integer from 0 to 2⁶³−1 written as one: the engines refuse "12",
    true, 1.0, 1e3 and 2⁶³ or coerce them, each in its own way, and vLLM reads −1 as "no seed".
    """
    if literal == b"null":
        return None
    if _INTEGER.fullmatch(literal) is None or (seed := int(literal)) > LARGEST_CLIENT:
        shown = literal[:40].decode(errors="replace") + ("…" if len(literal) > 40 else "")
        raise InvalidSeed(f"A seed must be an integer from 0 to {LARGEST_CLIENT}, written as one, not {shown}.")
    return seed
