"""Which sample a request id names, and what seeds its segments have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.core import ids, seeds
from gateway.core.ordering import canonical
from gateway.core.resume import Origin, origin, read

VECTORS = Path(__file__).parents[1] / "vectors" / "segments.json"
DIGEST = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "identity", "ordinal", "expected"),
    [
        ("17:3:0", "17:3", 0, Origin("17:3", 0, 0)),
        ("17:3:12.2", "17:3", 0, Origin("17:3", 12, 2)),
        ("17:3:12.2!", "17:3", 0, Origin("17:3", 12, 2)),
        ("17:3:12.2-1!", "17:3", 0, Origin("17:3", 12, 2)),
        ("17:3~2:0", "17:3", 2, Origin("17:3", 0, 0)),
        (f"17:3/{DIGEST}:1", "17:3", 0, Origin(f"17:3/{DIGEST}", 1, 0)),
        ("17:3/5.1:0", "17:3", 0, Origin("17:3", 5, 1)),
        ("17:3/5.1:4.0!", "17:3", 0, Origin("17:3", 5, 1)),
        (f"17:3/{DIGEST}/5.1~3:7", "17:3", 3, Origin(f"17:3/{DIGEST}", 5, 1)),
        ("a%7Eb%20c:0", "a~b c", 0, Origin("a~b c", 0, 0)),
        (f"a/{DIGEST}:0", f"a/{DIGEST}", 0, Origin(f"a/{DIGEST}", 0, 0)),
        ("17:3", "17:3", 0, None),
        ("17:4:0", "17:3", 0, None),
        ("17:3:0", "17:3", 1, None),
        ("17:3~1:0", "17:3", 0, None),
        ("17:3:0.4096", "17:3", 0, None),
        ("17:3/5.1:4.1", "17:3", 0, None),
        ("17:3/5.1:4.1-2!", "17:3", 0, None),
        ("17:3:0.99999", "17:3", 0, None),
        (f"17:3:{2**31}", "17:3", 0, None),
        ("17:3:-1", "17:3", 0, None),
        ("17:3:٣", "17:3", 0, None),
        ("", "17:3", 0, None),
    ],
)
def test_which_sample_a_name_means(name: str, identity: str, ordinal: int, expected: Origin | None) -> None:
    found = read(name, identity, ordinal)
    assert (None if found is None else found.origin) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("17:3:12", ("17:3", 12)),
        ("17:3:12.2-1!", ("17:3", 12)),
        (f"17:3/{DIGEST}:1", (f"17:3/{DIGEST}", 1)),
        ("17:3/5.1:4", ("17:3/5.1", 4)),
        (f"17:3/{DIGEST}/5.1:4.0!", (f"17:3/{DIGEST}/5.1", 4)),
    ],
)
def test_which_request_a_name_means(name: str, expected: tuple[str, int]) -> None:
    found = read(name, "17:3")
    assert found is not None
    assert found[:2] == expected


@pytest.mark.parametrize("ordinal", [0, 3])
def test_a_segment_may_be_named_for_its_sample(ordinal: int) -> None:
    first = Origin("a b", 5, 2)
    assert read(first.name(ordinal), "a b", ordinal) == ("a b", 5, first)
    assert origin(first.scope) == first
    for number in range(3):
        assert read(ids.request_id(first.scope, number, ordinal), "a b", ordinal) == (first.scope, number, first)


def test_segments_stand_behind_their_sample_and_before_the_next_identity() -> None:
    ranks = [
        canonical("17:3", 0, "s", 4),
        canonical(Origin("17:3", 0).scope, 0, "s", 0),
        canonical(Origin("17:3", 0).scope, 0, "s", 1),
        canonical(Origin("17:3", 0, 1).scope, 0, "s", 0),
        canonical(Origin("17:3", 10).scope, 0, "s", 0),
        canonical("17:4", 0, "s", 0),
    ]
    assert sorted(ranks) == ranks


def test_where_noise_follows_from_the_position_the_samples_own_seed_goes_on() -> None:
    drawn = seeds.samples(7, 4)
    assert [seeds.segment(7, sample, 3, positional=True) for sample in range(4)] == drawn


def test_where_noise_is_a_stream_no_two_segments_share_a_seed() -> None:
    found = [
        seeds.segment(seed, sample, number, positional=False)
        for seed in (7, 8)
        for sample in range(8)
        for number in range(1, 9)
    ]
    assert len(set(found)) == len(found)
    assert not set(found) & {*seeds.samples(7, 8), *seeds.samples(8, 8)}


def test_golden_seeds_of_segments() -> None:
    for row in json.loads(VECTORS.read_text()):
        found = seeds.segment(int(row["seed"]), row["sample"], row["number"], positional=False)
        assert found == int(row["segment"])
