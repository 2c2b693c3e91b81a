"""What a server's count tells of others, look by look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.strangers import Look, Watch


def told(*looks: Look, exact: bool = True) -> list[bool]:
    """What each look tells."""
    watch = Watch(exact=exact)
    return [watch.outdone(look) for look in looks]


def look(done: float, sent: int = 0, *, open: int = 0, dropped: int = 0, after: int | None = None) -> Look:
    """`after`: what was sent when the answer was there; the same as before it unless given."""
    return Look(done, sent, open, dropped, sent if after is None else after)


def test_what_was_done_before_the_first_look_tells_nothing() -> None:
    assert told(look(1000), look(1000)) == [False, False]


@pytest.mark.parametrize("exact", [True, False])
def test_one_request_of_a_stranger_is_told_once(exact: bool) -> None:
    assert told(look(5), look(6), look(6), exact=exact) == [False, True, False]


@pytest.mark.parametrize(
    "looks",
    [
        (look(0), look(3, sent=3)),
        # Sent while the question was under way, and done when it was answered.
        (look(0), look(1, sent=0, after=1), look(1, sent=1)),
        # In it at one look, done at the next.
        (look(0), look(0, sent=2, open=2), look(2, sent=2)),
        # Given up, and counted all the same, at once or after one more look.
        (look(0), look(1, sent=1, dropped=1), look(1, sent=1, dropped=1)),
        (look(0), look(0, sent=1, dropped=1), look(1, sent=1, dropped=1)),
        (look(0), *[look(0, sent=1, dropped=1)] * 3, look(1, sent=1, dropped=1)),
        # Never counted.
        (look(0), look(0, sent=4), look(0, sent=4)),
        # Whoever counts what is sent has forgotten: what was done since is not known to be others'.
        (look(50, sent=50), look(53, sent=1), look(54, sent=2)),
        # Started anew.
        (look(50, sent=50), look(0, sent=50), look(1, sent=51)),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_ours_are_no_strangers(looks: tuple[Look, ...], exact: bool) -> None:
    assert not any(told(*looks, exact=exact))


def test_strangers_among_ours_are_told_where_requests_are_counted() -> None:
    busy = (look(0), look(4, sent=3))
    assert told(*busy) == [False, True]
    assert told(*busy, exact=False) == [False, False]


def test_what_was_never_counted_hides_nobody_later() -> None:
    assert told(look(0), *[look(0, sent=9, dropped=9)] * 4, look(1, sent=9, dropped=9))[-1]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_whatever_ends_between_looks_ours_alone_are_never_outdone(steps: list[tuple[int, bool]]) -> None:
    """Some are sent between two looks; all that are in it end before the next, or none."""
    watch = Watch(exact=True)
    sent = done = 0
    for more, all_end in steps:
        sent += more
        done = sent if all_end else done
        assert not watch.outdone(look(done, sent, open=sent - done))
