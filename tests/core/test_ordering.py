"""Orders in which requests are listed."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.digits import natural
from gateway.core.ordering import canonical, sortable, submitted


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


NAMES = st.text(st.sampled_from("0019aé:/~-"), max_size=8) | st.text(
    st.characters(exclude_categories=["C"]), max_size=8
)
RANKS = st.tuples(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), NAMES.map(natural), st.integers(0, 2**31 - 1)
)


@given(RANKS, RANKS)
@example((0, 0, natural("0"), 0), (0, 0, natural("00"), 0))
@example((0, 0, natural("a7"), 0), (0, 0, natural("a07"), 0))
@example((0, 0, natural("a"), 1), (0, 0, natural("a0"), 0))
@example((0, 0, natural("ab"), 0), (0, 0, natural("a"), 1))
def test_bytes_sort_as_the_ranks_that_they_stand_for(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    assert (sortable(*one) < sortable(*other)) == (one < other)
    assert (sortable(*one) == sortable(*other)) == (one == other)


def test_priorities_beyond_64_bits_stand_at_the_ends() -> None:
    ordered = [-(10**30), -5, 0, 2**62, 10**30]
    ranked = [sortable(priority, 0, (), 0) for priority in ordered]
    assert ranked == sorted(ranked)
