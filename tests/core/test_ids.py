"""Ids: no two requests share one, no engine id begins another, and random sessions are known."""

import hashlib
import json
import re
import uuid
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core.ids import engine_id, random_like, request_id

VECTORS = Path(__file__).parents[1] / "vectors" / "ids.json"
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.text("a:~.!-/01%", max_size=6),
    st.sampled_from(("x" * 97, "x" * 98, "x" * 197, "x" * 199, "é" * 99, "17:3")),
)
requests = st.tuples(texts, st.integers(0, 12) | st.just(2**31 - 1), st.integers(0, 12))
sendings = st.tuples(requests, st.integers(0, 12), st.integers(0, 12))


def test_the_golden_vectors_hold() -> None:
    rows = json.loads(VECTORS.read_text())
    assert len(rows) >= 10
    for row in rows:
        assert request_id(row["identity"], row["index"], row["ordinal"]) == row["request_id"]
        assert engine_id(row["request_id"], row["sample"], row["live"]) == row["engine_id"]


@pytest.mark.parametrize(
    ("identity", "index", "ordinal", "expected"),
    [
        ("17:3", 0, 0, "17:3:0"),
        ("17:3", 5, 2, "17:3~2:5"),
        ("17:3/0123456789abcdef", 1, 0, "17:3/0123456789abcdef:1"),
        ("a~1", 0, 0, "a%7E1:0"),
        ("a b\n%é", 0, 0, "a%20b%0A%25%C3%A9:0"),
    ],
)
def test_a_request_id_can_be_read(identity: str, index: int, ordinal: int, expected: str) -> None:
    assert request_id(identity, index, ordinal) == expected


@given(requests)
def test_a_request_id_is_safe_in_headers_and_bounded(request: tuple[str, int, int]) -> None:
    assert re.fullmatch(r"[A-Za-z0-9\-._~:/%]{2,200}", request_id(*request))


@given(requests, requests)
@example(("a", 0, 1), ("a~1", 0, 0))
@example(("x" * 199, 0, 0), ("x" * 199, 1, 0))
def test_no_two_requests_share_an_id(left: tuple[str, int, int], right: tuple[str, int, int]) -> None:
    assert (request_id(*left) == request_id(*right)) == (left == right)


def test_a_long_id_keeps_its_beginning_and_a_digest_of_all_of_it() -> None:
    identity = "task/" + "x" * 300
    whole = f"{identity}:7"
    assert request_id(identity, 7) == f"{whole[:100]}~{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
    assert len(request_id("x" * 198, 0)) == 200


@given(sendings, sendings)
@example((("a", 0, 0), 1, 0), (("a", 0, 0), 12, 0))
@example((("a", 0, 0), 1, 0), (("a", 0, 0), 1, 2))
@example((("a", 1, 0), 0, 0), (("a", 12, 0), 0, 0))
@example((("s1", 0, 0), 0, 0), (("s12", 0, 0), 0, 0))
def test_no_engine_id_is_a_prefix_of_another(
    left: tuple[tuple[str, int, int], int, int], right: tuple[tuple[str, int, int], int, int]
) -> None:
    first, second = (engine_id(request_id(*request), sample, live) for request, sample, live in (left, right))
    assert second.startswith(first) == (left == right)


# Sessions that cannot repeat

frames = st.tuples(
    st.sampled_from(("", "rollout-", "s_", "task 17/", "id:", "run=", "üx")),
    st.sampled_from(("", "-0", "_b", "/3", ".json", ":7", " ü")),
)
random_uuids = st.builds(
    lambda x, version: uuid.UUID(int=x, version=version), st.integers(0, 2**128 - 1), st.sampled_from((1, 4))
)


@given(random_uuids, frames, st.booleans(), st.booleans())
def test_a_uuid_is_known_anywhere(drawn: uuid.UUID, frame: tuple[str, str], bare: bool, upper: bool) -> None:
    text = drawn.hex if bare else str(drawn)
    assume(not bare or not text.isdigit())
    assert random_like(frame[0] + (text.upper() if upper else text) + frame[1])


@pytest.mark.parametrize(
    "drawn",
    [uuid.uuid1(), uuid.uuid4(), uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")],
    ids=["1", "4", "7"],
)
def test_uuids_as_libraries_make_them_are_known(drawn: uuid.UUID) -> None:
    assert random_like(str(drawn))
    assert random_like(f"s-{drawn.hex}")
    assert random_like(f"{{{str(drawn).upper()}}}")
    assert random_like(drawn.urn)


@given(st.integers(1_200_000_000_000, 2_100_000_000_000), st.integers(2**70, 2**80 - 1), frames, st.booleans())
def test_a_ulid_is_known_anywhere(time: int, chance: int, frame: tuple[str, str], lower: bool) -> None:
    number = time << 80 | chance
    text = "".join(CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
    assume(re.search("[G-Z]", text))
    assume(not frame[0].endswith("x"))
    assert random_like(frame[0] + (text.lower() if lower else text) + frame[1])


@given(st.from_regex(r"\A[a-z]{0,8}[-_/:]?[0-9]{1,12}([:/._-][0-9]{1,12}){0,5}\Z"))
def test_names_and_numbers_are_not_taken_for_random(session: str) -> None:
    assert not random_like(session)


@pytest.mark.parametrize(
    "session",
    [
        "",
        "17:3",
        "deadbeef-cafe-babe-face-feedfacefeed",
        "00000000-0000-0000-0000-000000000001",
        "12345678-1234-1234-1234-123456789012",
        "12345678901234567890123456",
        "01234567890123456789012345",
        "12345678901245678901234567890123",
        "A01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "11111111-2222-3333-4444",
        hashlib.sha256(b"item 17").hexdigest(),
        hashlib.sha1(b"item 17").hexdigest(),
        hashlib.sha256(b"item 4").hexdigest()[:26],
        str(uuid.uuid5(uuid.NAMESPACE_URL, "item 17")),
        uuid.uuid5(uuid.NAMESPACE_URL, "item 17").hex,
        str(uuid.uuid3(uuid.NAMESPACE_URL, "item 17")),
        "01_the_quick_brown_fox_jumps_over",
        "01thequickbrownfoxjumpsover",
        "gsm8k/train/000123/rollout/0007/attempt/01",
        "2026-11-29T20:47:21.123456789Z-run-17",
        "math-word-problems-01arithmeticsequences",
        "z" * 32,
        "a" * 32,
    ],
)
def test_what_only_looks_random_is_not(session: str) -> None:
    assert not random_like(session)
