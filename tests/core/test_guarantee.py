from __future__ import annotations

import pytest

from gateway.core import guarantee


@pytest.mark.parametrize(
    ("best", "reasons", "expected"),
    [
        ("strict", [], "strict"),
        ("balanced", [], "balanced"),
        ("strict", ["unverified"], "strict; unverified"),
        ("strict", ["home-down"], "balanced; home-down"),
        ("balanced", ["home-down"], "balanced; home-down"),
        ("strict", ["no-seed"], "none; no-seed"),
        ("strict", ["home-down", "racing", "unverified"], "none; home-down; racing; unverified"),
        ("balanced", ["engine-not-deterministic"], "none; engine-not-deterministic"),
        ("balanced", ["retry-shared"], "balanced; retry-shared"),
    ],
)
def test_the_level_that_is_left_and_every_reason(best: guarantee.Level, reasons: list[str], expected: str) -> None:
    assert guarantee.header(best, reasons) == expected


@pytest.mark.parametrize("reason", guarantee.LOWERS)
def test_no_reason_raises_a_level(reason: str) -> None:
    order = ("none", "balanced", "strict")
    for best in ("none", "balanced", "strict"):
        assert order.index(guarantee.level(best, [reason])) <= order.index(best)
