"""Orders in which requests are listed."""

from __future__ import annotations

from gateway.core.ordering import canonical, submitted


def test_canonical_order_is_by_identity_then_ordinal_then_index() -> None:
    ordered = [
        ("17:2", 0, "17:2", 0),
        ("17:2", 0, "17:2", 2),
        ("17:2", 0, "17:2", 10),
        ("17:2", 1, "17:2-1", 0),
        ("17:2", 2, "17:2-2", 0),
        ("17:2", 10, "17:2-10", 0),
        ("17:10", 0, "17:10", 0),
        ("a", 0, "x2", 5),
        ("a", 0, "x10", 1),
    ]
    shuffled = ordered[5:] + ordered[:5][::-1]
    assert sorted(shuffled, key=lambda request: canonical(*request)) == ordered


def test_sessions_with_a_place_in_the_order_of_submission_come_before_those_without() -> None:
    given = {"late": (0, 3), "early": (-5, 4), "same": (0, 9), "first seen": (None, 1), "then": (None, 2)}
    ordered = sorted(given, key=lambda name: submitted(*given[name]))
    assert ordered == ["early", "late", "same", "first seen", "then"]
