"""What holds for one answer: the level that X-Detgate-Guarantee names, and every reason why it is no better."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Level = Literal["strict", "balanced", "none"]

LOWERS: dict[str, Level] = {
    "off": "none",
    "racing": "none",
    "retry-unmatched": "none",
    "random-session": "none",
    "no-seed": "none",
    "engine-not-deterministic": "none",
    "reward-batched": "none",
    "foreign-traffic": "none",
    "lane-uncertain": "balanced",
    "group-order": "balanced",
    "home-down": "balanced",
    "weights-mixed": "none",
    "weights-changed": "balanced",
    "epoch": "balanced",
    "unrecorded": "balanced",
    "dp-unpinned": "balanced",
    "engine-other": "none",
    "role-mismatch": "none",
    "prefix-cache": "none",
    "fingerprint-changed": "none",
    "preempted": "balanced",
    "cache-shared": "balanced",
}
"""What a reason leaves of the promise. One that is not listed (`unverified`, `retry-shared`, `replicas-differ` …) takes
nothing away."""

_ORDER: tuple[Level, ...] = ("none", "balanced", "strict")


def level(best: Level, reasons: Iterable[str]) -> Level:
    """The best level that is left."""
    return min((best, *(LOWERS[reason] for reason in reasons if reason in LOWERS)), key=_ORDER.index)


def header(best: Level, reasons: list[str]) -> str:
    """The value of X-Detgate-Guarantee: the level, then each reason."""
    if not reasons:
        return best
    return "; ".join((level(best, reasons), *reasons))
