"""When a replica gets requests: thresholds, and the breaker."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.vitals import Outcome, Vitals

LETTERS: dict[str, Outcome] = {"+": "ok", "r": "refused", "b": "bad", "s": "slow", "~": "busy"}
FAILED = ("bad", "slow")


def vitals(*, failures: int = 3, successes: int = 2, breaks: int = 3) -> Vitals:
    return Vitals(failures, successes, breaks)


def states(told: str, *, start: str = "") -> str:
    """The state after each probe, by its first letter; probes as in `LETTERS`, after those in `start`."""
    subject = vitals()
    for letter in start:
        subject.probed(LETTERS[letter])
    return "".join(subject.probed(LETTERS[letter])[0] for letter in told)


@pytest.mark.parametrize("letter", LETTERS)
def test_the_first_probe_decides_alone(letter: str) -> None:
    assert states(letter) == {"+": "u", "~": "u"}.get(letter, "d")
    assert vitals().probed(LETTERS[letter]) == {"+": "up", "~": "unknown"}.get(letter, "down")


@pytest.mark.parametrize(
    ("probes", "after"),
    [
        ("r", "d"),
        ("bb", "uu"),
        ("bbb", "uud"),
        ("sss", "uud"),
        ("bsb", "uud"),
        ("bb+bb+bb", "uuuuuuuu"),
        ("bbr", "uud"),
        ("bb~b", "uuud"),
        ("~~~~~~", "uuuuuu"),
    ],
)
def test_up_goes_down_after_failures_in_a_row_or_one_refusal(probes: str, after: str) -> None:
    assert states(probes, start="+") == after


@pytest.mark.parametrize(
    ("probes", "after"),
    [("+", "d"), ("++", "du"), ("+b+", "ddd"), ("+r++", "dddu"), ("+~+", "ddu"), ("bbbb++", "dddddu")],
)
def test_down_comes_up_after_passes_in_a_row(probes: str, after: str) -> None:
    assert states(probes, start="r") == after


def test_one_failure_does_not_undo_the_patience_of_the_next() -> None:
    """What counted before a change of state counts no more after it."""
    assert states("bb" + "++" + "bb", start="+bbb") == "ddduuu"


@given(
    probes=st.lists(st.sampled_from(list(LETTERS.values())), max_size=40),
    failures=st.integers(1, 4),
    successes=st.integers(1, 4),
)
def test_a_state_changes_only_for_its_reason(probes: list[Outcome], failures: int, successes: int) -> None:
    subject = vitals(failures=failures, successes=successes)
    heard: list[Outcome] = []
    for outcome in probes:
        before = subject.state
        after = subject.probed(outcome)
        if outcome != "busy":
            heard.append(outcome)
        if (before, after) == ("up", "down"):
            assert outcome == "refused" or all(each != "ok" for each in heard[-failures:])
            assert len(heard) > failures or outcome == "refused"
        elif (before, after) == ("down", "up"):
            assert heard[-successes:] == ["ok"] * successes
        elif before == "up":
            assert not (len(heard) > failures and all(each != "ok" for each in heard[-failures:]))


# --- the breaker


def up(breaks: int = 3) -> Vitals:
    subject = vitals(breaks=breaks)
    subject.probed("ok")
    return subject


def test_the_breaker_opens_after_breaks_in_a_row_although_probes_pass() -> None:
    subject = up()
    assert [subject.broke(), subject.broke()] == [False, False]
    subject.probed("ok")
    assert subject.serves
    assert subject.broke()
    assert not subject.serves
    assert subject.state == "up"
    assert not subject.broke(), "it is open already"


def test_an_answer_between_breaks_starts_the_count_anew() -> None:
    subject = up()
    for _ in range(10):
        subject.broke()
        subject.broke()
        assert not subject.served()
    assert subject.serves


def test_each_passing_probe_allows_one_trial_and_a_success_closes_the_breaker() -> None:
    subject = up(breaks=1)
    subject.broke()
    for _ in range(3):
        assert not subject.serves
        subject.probed("ok")
        assert subject.serves
        assert subject.chosen()
        assert not subject.serves
        subject.broke()
    subject.probed("ok")
    subject.chosen()
    assert subject.served()
    assert subject.serves
    assert not subject.chosen()
    assert subject.serves, "no trial is needed any more"


@pytest.mark.parametrize("outcome", [*FAILED, "refused"])
def test_a_failing_probe_allows_no_trial(outcome: str) -> None:
    subject = up(breaks=1)
    subject.broke()
    subject.probed("ok")
    subject.probed(cast(Outcome, outcome))
    assert not subject.serves


def test_a_replica_that_comes_back_is_still_on_trial() -> None:
    subject = up(breaks=1)
    subject.broke()
    subject.probed("refused")
    subject.probed("ok")
    assert not subject.serves
    subject.probed("ok")
    assert subject.serves
    subject.chosen()
    assert not subject.serves


def test_nothing_is_sent_before_the_first_probe() -> None:
    assert not vitals().serves
