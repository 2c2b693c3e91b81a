"""Derived seeds: framing, range, distinct samples; and the seeds that clients may send."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import seeds
from gateway.core.document import Document
from gateway.core.seeds import InvalidSeed, derive, framed, parse, samples

VECTORS = Path(__file__).parents[1] / "vectors" / "samples.json"

client_seeds = st.integers(0, 2**63 - 1)


@given(st.lists(st.binary(max_size=10), max_size=4), st.lists(st.binary(max_size=10), max_size=4))
def test_no_two_lists_of_parts_are_framed_alike(left: list[bytes], right: list[bytes]) -> None:
    assert (framed(*left) == framed(*right)) == (left == right)


def test_a_part_stands_behind_its_length() -> None:
    assert framed(b"ab", b"") == b"\0\0\0\0\0\0\0\x02ab\0\0\0\0\0\0\0\0"


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_a_derived_seed_is_positive_and_has_31_bits(parts: list[bytes]) -> None:
    assert 1 <= derive(*parts) <= 2**31 - 1


def test_the_golden_vectors_of_samples_hold() -> None:
    rows = json.loads(VECTORS.read_text())
    assert len(rows) >= 5
    for row in rows:
        assert samples(int(row["seed"]), row["n"]) == [int(seed) for seed in row["seeds"]]


@given(client_seeds, st.integers(1, 200))
def test_no_two_samples_of_a_call_share_a_seed(seed: int, n: int) -> None:
    found = samples(seed, n)
    assert len(found) == len({value % 2**32 for value in found}) == n
    assert found[0] == seed
    assert all(1 <= value <= 2**31 - 1 for value in found[1:])


@given(client_seeds, st.integers(1, 30), st.integers(1, 30))
def test_a_larger_n_begins_like_a_smaller_one(seed: int, n: int, m: int) -> None:
    assert samples(seed, n)[:m] == samples(seed, m)[:n]


def test_calls_with_neighbouring_seeds_share_no_sample() -> None:
    found = [value for seed in range(1000, 1008) for value in samples(seed, 64)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("collides", ["with the call's own", "with an earlier sample"])
def test_a_collision_is_derived_again(collides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = 2**32 + 77
    first = 77 if "own" in collides else 5
    answers = {(b"1", b"0"): 5, (b"2", b"0"): first, (b"2", b"1"): 5, (b"2", b"2"): 5, (b"2", b"3"): 6}
    monkeypatch.setattr(seeds, "derive", lambda tag, seed, sample, tries: answers[sample, tries])
    assert samples(own, 3) == [own, 5, 6]


@pytest.mark.parametrize(
    ("literal", "seed"),
    [
        (b"0", 0),
        (b"7", 7),
        (b"9007199254740993", 9007199254740993),
        (b"9223372036854775807", 2**63 - 1),
        (b"null", None),
    ],
)
def test_what_a_client_may_send(literal: bytes, seed: int | None) -> None:
    assert parse(literal) == seed


@given(client_seeds)
def test_every_integer_in_range_is_itself(seed: int) -> None:
    literal = Document(f'{{"seed": {seed}}}'.encode()).literal(("seed",))
    assert literal is not None
    assert parse(literal) == seed


@pytest.mark.parametrize(
    "literal",
    [
        "9223372036854775808",
        "18446744073709551616",
        "99999999999999999999999",
        "9" * 5_000,
        "-1",
        "-0",
        "007",
        "-9223372036854775808",
        "1.0",
        "1.5",
        "1e3",
        "0e0",
        '"12"',
        '""',
        "true",
        "false",
        "NaN",
        "Infinity",
        "[7]",
        "{}",
        "[]",
        '{"a": 1}',
        '"' + "é" * 50 + '"',
        "٣",
    ],
)
def test_what_no_engine_takes_alike_is_refused_and_the_message_says_what_to_send(literal: str) -> None:
    with pytest.raises(InvalidSeed, match="an integer from 0 to 9223372036854775807") as caught:
        parse(literal.encode())
    assert literal[:12] in str(caught.value)
    assert len(str(caught.value)) < 150


def test_literals_of_refused_seeds_are_found_in_bodies() -> None:
    for seed in ("9223372036854775808", '"12"', "true", "1.5"):
        literal = Document(f'{{"model": "m", "seed": {seed}}}'.encode()).literal(("seed",))
        assert literal == seed.encode()
        with pytest.raises(InvalidSeed):
            parse(literal)
