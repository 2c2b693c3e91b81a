"""The rule of routing: golden scores, what a change of the fleet moves, and that keys spread evenly."""

import json
import math
from collections import Counter
from collections.abc import Collection
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import routing
from gateway.core.routing import best, candidates, choose, ranked, score

VECTORS = Path(__file__).parents[1] / "vectors" / "routing.json"

keys = st.text(max_size=20)
names = st.text("abcxyz019._-", min_size=1, max_size=6)
fleets = st.dictionaries(names, st.integers(0, 9), min_size=1, max_size=6)
slacks = st.sampled_from([0.0, 1.0, 2.0, 4.0, math.inf])

POLICY = [f"policy-{number}" for number in range(4)]
FLEETS = {
    "two": ["a", "b"],
    "four": POLICY,
    "seven": [f"10.0.0.{number}" for number in range(7)],
    "ten, long names": [f"{'replica-' * 14}{number}" for number in range(10)],
    "sixteen URLs": [f"http://10.0.0.{number}:8000" for number in range(16)],
    "many": [f"policy-{number}" for number in range(256)],
}
REQUESTS = {
    "one session": [f"17:3:{index}" for index in range(4000)],
    "many sessions": [f"{task}:{sample}:0" for task in range(500) for sample in range(8)],
    "by content": [f"anonymous/{number * 0x9E3779B97F4A7C15 % 2**64:016x}:0" for number in range(4000)],
}


def surprise(counts: Counter[str], over: Collection[str]) -> float:
    """How far counts are from even, in standard deviations of Pearson's χ², by the Wilson-Hilferty cube root."""
    assert set(counts) <= set(over)
    expected = counts.total() / len(over)
    square = sum((counts[name] - expected) ** 2 for name in over) / expected
    freedom = len(over) - 1
    spread = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def test_the_golden_vectors_of_the_score_hold() -> None:
    rows = json.loads(VECTORS.read_text())
    assert len(rows) >= 10
    for row in rows:
        assert score(row["key"], row["name"]) == int(row["score"])


@given(keys, fleets, slacks)
def test_the_highest_score_among_those_within_slack_of_the_least_loaded_wins(
    key: str, loads: dict[str, int], slack: float
) -> None:
    within = [name for name, load in loads.items() if load - min(loads.values()) <= slack]
    assert sorted(candidates(loads, slack)) == sorted(within)
    assert choose(key, loads, slack) == max(within, key=lambda name: score(key, name))


@given(keys, fleets, slacks, st.randoms(use_true_random=False))
def test_the_order_of_the_configuration_changes_nothing(
    key: str, loads: dict[str, int], slack: float, random: Random
) -> None:
    shuffled = list(loads.items())
    random.shuffle(shuffled)
    assert choose(key, dict(shuffled), slack) == choose(key, loads, slack)


@given(keys, fleets, st.data())
def test_without_a_bound_no_load_changes_a_choice(key: str, loads: dict[str, int], data: st.DataObject) -> None:
    others = {name: data.draw(st.integers(0, 10**6)) for name in loads}
    assert choose(key, others, math.inf) == choose(key, loads, math.inf) == best(key, list(loads))


@given(keys, fleets, slacks, names, st.integers(0, 9))
def test_a_replica_that_comes_draws_keys_to_itself_and_moves_no_other(
    key: str, loads: dict[str, int], slack: float, name: str, load: int
) -> None:
    before = choose(key, loads, slack)
    grown = loads | {name: min(loads.values()) + load}
    assert name in loads or choose(key, grown, slack) in (before, name)


@given(keys, fleets, st.data())
def test_a_replica_that_goes_moves_only_its_own_keys(key: str, loads: dict[str, int], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(loads)))
    rest = {name: load for name, load in loads.items() if name != gone}
    before = choose(key, loads, math.inf)
    assert not rest or before == gone or choose(key, rest, math.inf) == before


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("fleet", FLEETS)
def test_a_replica_that_comes_takes_its_share_of_keys(fleet: str, requests: str) -> None:
    present, sent = FLEETS[fleet], REQUESTS[requests]
    grown = [*present, "newcomer"]
    moved = sum(best(key, grown) != best(key, present) for key in sent)
    share = 1 / len(grown)
    assert abs(moved - share * len(sent)) < 4 * math.sqrt(len(sent) * share * (1 - share))


@pytest.mark.parametrize("slack", [0.0, math.inf])
@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("fleet", FLEETS)
def test_ties_spread_evenly(fleet: str, requests: str, slack: float) -> None:
    """An idle fleet, one request at a time: no replica is the first candidate of more than its share."""
    idle = dict.fromkeys(FLEETS[fleet], 0)
    assert surprise(Counter(choose(key, idle, slack) for key in REQUESTS[requests]), idle) < 4


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("fleet", ["four", "seven", "ten, long names", "sixteen URLs"])
def test_the_keys_of_dead_replicas_spread_evenly_over_the_rest(fleet: str, requests: str) -> None:
    present = FLEETS[fleet]
    for dead in (present[:1], present[-1:], present[1:3]):
        rest = [name for name in present if name not in dead]
        lost = [key for key in REQUESTS[requests] if best(key, present) in dead]
        assert surprise(Counter(best(key, rest) for key in lost), rest) < 4


@pytest.mark.parametrize("present", [POLICY, FLEETS["sixteen URLs"][:4]])
def test_every_order_is_as_likely_as_any_other(present: list[str]) -> None:
    counts = Counter(" ".join(ranked(key, dict.fromkeys(present, 0), 0)) for key in REQUESTS["one session"])
    assert surprise(counts, [" ".join(names) for names in permutations(present)]) < 4


def test_a_burst_fills_replicas_evenly_at_slack_zero() -> None:
    loads = dict.fromkeys(POLICY, 0)
    for key in REQUESTS["many sessions"][:64]:
        loads[choose(key, loads, 0)] += 1
    assert set(loads.values()) == {16}


def test_neighbouring_keys_are_not_sent_in_turn() -> None:
    """What a session's requests get is no pattern of their index: pairs of neighbours are spread evenly too."""
    idle = dict.fromkeys(POLICY, 0)
    went = [choose(key, idle, 0) for key in REQUESTS["one session"]]
    pairs = Counter(f"{first} {second}" for first, second in zip(went[::2], went[1::2], strict=True))
    assert surprise(pairs, [f"{first} {second}" for first in POLICY for second in POLICY]) < 4


@given(st.permutations(POLICY))
def test_equal_scores_fall_back_to_the_name(order: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "xxh64_digest", lambda name, seed: bytes(8))
        assert best("key", order) == "policy-3"
        assert ranked("key", dict.fromkeys(order, 0), 0) == sorted(POLICY, reverse=True)


@given(keys, fleets, slacks)
def test_the_order_is_that_in_which_they_would_be_chosen(key: str, loads: dict[str, int], slack: float) -> None:
    left = list(candidates(loads, slack))
    for name in ranked(key, loads, slack):
        assert name == best(key, left)
        left.remove(name)
    assert left == []


def test_where_nothing_is_there_nothing_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose("key", {}, 0)
