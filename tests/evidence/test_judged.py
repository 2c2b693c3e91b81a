"""What begins a divergence, what follows from it, and why: rules that no run shows on demand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import schemes
from gateway.evidence import diff as diffing
from gateway.evidence.diff import Diff, compare
from gateway.evidence.ledgers import find
from tests.evidence.ledger import Records, request, write

Compare = Callable[..., Diff]


@pytest.fixture
def compared(tmp_path: Path) -> Compare:
    def run(a: list[Records], b: list[Records], **options: Any) -> Diff:
        names = options.pop("deciding", ({}, {}))
        folders = [write(tmp_path / name, *records, **deciding) for name, records, deciding in
                   zip("ab", (a, b), names, strict=True)]  # fmt: skip
        return compare(*(find(str(folder), tmp_path) for folder in folders), **options)

    return run


def told(found: Diff) -> list[tuple[int, str, bool]]:
    """Index, cause and whether it is a root, of every difference."""
    return [(each.one.index, each.cause, each.root) for each in found.kept]


def beside(*requests: Records) -> list[Records]:
    """All begin before the first ends."""
    return [[one[0] for one in requests], [one[1] for one in requests]]


# --- what follows from what


def test_what_asks_something_else_after_a_difference_follows_from_it(compared: Compare) -> None:
    a = [request("s", turn) for turn in range(4)]
    b = [request("s", 0), request("s", 1, answer="x"), request("s", 2, prompt="x"), request("s", 3, prompt="y")]
    assert told(compared(a, b)) == [(1, "other-answer", True), (2, "other-prompt", False), (3, "other-prompt", False)]


def test_what_was_in_flight_beside_a_difference_does_not_follow_from_it(compared: Compare) -> None:
    a = beside(*[request("s", turn) for turn in range(2)])
    b = beside(request("s", 0, answer="x"), request("s", 1, prompt="x"))
    assert told(compared(a, b)) == [(0, "other-answer", True), (1, "other-prompt", True)]


def test_what_asks_the_same_is_a_root_of_its_own(compared: Compare) -> None:
    a = [request("s", turn) for turn in range(2)]
    b = [request("s", 0, answer="x"), request("s", 1, answer="y")]
    assert told(compared(a, b)) == [(0, "other-answer", True), (1, "other-answer", True)]


def test_a_response_that_goes_on_from_an_earlier_one_follows_from_it(compared: Compare) -> None:
    """What it goes on from is kept by the engine, and its id is no part of what is asked."""
    route = {"route": "/v1/responses"}
    a = [request("s", turn, **route) for turn in range(2)]
    b = [request("s", 0, answer="x", **route), request("s", 1, answer="y", **route)]
    assert told(compared(a, b)) == [(0, "other-answer", True), (1, "other-answer", False)]


def test_nothing_follows_from_what_the_client_cannot_have_noticed(compared: Compare) -> None:
    moved = [{"replica": "policy-1", "outcome": "answered"}]
    a = [request("s", turn) for turn in range(2)]
    b = [request("s", 0, attempts=moved), request("s", 1, prompt="x")]
    assert told(compared(a, b)) == [(0, "other-replica", True), (1, "other-prompt", True)]


def test_a_shorter_conversation_follows_from_where_it_parted(compared: Compare) -> None:
    a = [request("s", turn) for turn in range(4)]
    b = [request("s", 0), request("s", 1, answer="x")]
    found = compared(a, b)
    assert told(found) == [(1, "other-answer", True), (2, "missing-request", False), (3, "missing-request", False)]
    assert (found.compared, found.common) == (4, 2)


def test_sessions_do_not_follow_from_each_other(compared: Compare) -> None:
    a = [request("s", 0), request("t", 0)]
    b = [request("s", 0, answer="x"), request("t", 0, prompt="x")]
    assert [root for *_, root in told(compared(a, b))] == [True, True]


def test_of_two_that_changed_places_neither_follows_from_the_other(compared: Compare) -> None:
    a = [request("s", turn) for turn in range(3)]
    b = [request("s", 0, prompt="s 1"), request("s", 1, prompt="s 0"), request("s", 2)]
    found = compared(a, b)
    assert told(found) == [(0, "other-order", True), (1, "other-order", True)]
    assert [each.siblings for each in found.kept] == [(0, 1), (0, 1)]


# --- which is the first


def test_the_first_is_the_first_root_in_canonical_order(compared: Compare) -> None:
    a = [request("10:0", 0), request("9:1", 0), request("9:0", 3), request("9:0", 2)]
    found = compared(a, [request(one[0]["session"], one[0]["index"], answer="x") for one in a])
    assert found.first is not None
    assert (found.first.one.identity, found.first.one.index) == ("9:0", 2)


def test_in_content_order_the_first_is_the_first_by_name_and_what_follows_is_told_by_time(compared: Compare) -> None:
    def turns(*digests: str) -> list[Records]:
        return [
            request("s", 0, identity=f"s/{digest * 16}", prompt=digest, order="content", content=digest * 32)
            for digest in digests
        ]

    found = compared(turns("f", "e", "d"), turns("f", "b", "a"))
    assert [(each.cause, each.root) for each in found.kept] == [("other-prompt", True), ("other-prompt", False)]
    assert found.first is not None
    assert found.first.one.identity == "s/" + "e" * 16
    assert found.first.b is not None
    assert found.first.b.identity == "s/" + "b" * 16


def test_of_siblings_in_content_order_the_first_is_the_first_by_name_not_by_time(compared: Compare) -> None:
    def siblings(*digests: str) -> list[Records]:
        return beside(
            *[
                request("s", 0, identity=f"s/{digest * 16}", prompt=digest, order="content", content=digest * 32)
                for digest in digests
            ]
        )

    found = compared(siblings("f", "e"), siblings("d", "c"))
    assert [each.root for each in found.kept] == [True, True]
    assert found.first is not None
    assert found.first.one.identity == "s/" + "e" * 16


def test_prompts_of_no_session_have_nothing_to_do_with_each_other(compared: Compare) -> None:
    def of(digest: str) -> Records:
        name = f"anonymous/{digest * 16}"
        return request("anonymous", 0, identity=name, order="content", content=digest * 32, prompt=digest)

    found = compared([of("a"), of("b")], [of("a"), of("c")])
    assert dict(found.roots) == {"missing-request": 2}


def test_the_first_answer_that_differs_may_come_later(compared: Compare) -> None:
    a = [request("s", 0), request("t", 0)]
    found = compared(a, [request("s", 0, engine="other"), request("t", 0, answer="x")])
    assert found.first is not None
    assert found.first_answer is not None
    assert (found.first.cause, found.first_answer.cause) == ("other-engine", "other-answer")


# --- why


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"replicas": ["policy-0"]}, "other-retries", "policy-0, policy-0 → policy-1"),
        ({"racing": True}, None, ""),
        ({"attempts": [{"replica": "policy-0", "outcome": "aborted"}], "outcome": "abandoned"}, "missing-request", ""),
        ({"attempts": [], "outcome": "refused", "error": "queue_full"}, "other-retries", "in B refused (queue_full)"),
        ({"status": 400, "answer": "x"}, "other-answer", "status 200 in A, 400 in B"),
        ({"finish_reasons": ["length"], "answer": "x"}, "other-answer", "finish stop in A, length in B"),
        ({"usage": {"completion_tokens": 3}, "answer": "x"}, "other-answer", "9 tokens in A, 3 in B"),
        ({"seed": 5, "seed_source": "client"}, "other-seed", "in A it is derived, in B the client's own"),
        ({"seed": 5, "member": 1}, "other-seed", "its place in the group is None in A, 1 in B"),
        ({"seed": 5, "scheme": "offset"}, "other-seed", "the scheme is v1 in A, offset in B"),
        (
            {"route": "/v1/completions", "prompt": "x"},
            "other-prompt",
            "asked of /v1/chat/completions in A, of /v1/completions in B",
        ),
        (
            {"prompt": "x"},
            "other-prompt",
            "digest s 0 in A, x in B: of the bytes alone, so it may be a field that does not sample; "
            "ledger.bodies: true would tell",
        ),
    ],
)
def test_causes(compared: Compare, changes: dict[str, Any], cause: str | None, words: str) -> None:
    a = request("s", 0)
    b = request("s", 0, **{name: value for name, value in changes.items() if name != "replicas"})
    if "replicas" in changes:
        for one, replicas in ((a, ["policy-0"]), (b, ["policy-0", "policy-1"])):
            del one[1]["attempts"]
            one[1]["replicas"] = replicas
        words = "policy-0 in A, policy-0 → policy-1 in B"
    found = compared([a], [b])
    assert [each.cause for each in found.kept] == ([] if cause is None else [cause])
    assert words in (found.kept[0].detail if found.kept else "")


def _derived(session: str, master: int) -> int:
    return schemes.load("v1").seed(master, session, 0, None)


@pytest.mark.parametrize(
    ("alone", "why"),
    [
        ("b", "the master seed is 42 in A; that of B is not known (no run.json beside its records), and most likely"),
        ("a", "the master seed is 43 in B; that of A is not known (no run.json beside its records), and most likely"),
        ("ab", "the ledgers do not tell why (no run.json beside the records); most likely the master seed"),
        ("", "the master seed is 42 in A, 43 in B"),
    ],
)
def test_a_master_seed_that_is_not_known_is_no_clients_seed(tmp_path: Path, alone: str, why: str) -> None:
    for name, master in (("a", 42), ("b", 43)):
        write(tmp_path / name, request("s", 0, seed=_derived("s", master)), seed=master)
    for name in alone:
        (tmp_path / name / "run.json").unlink()
    [found] = compare(find("a", tmp_path), find("b", tmp_path)).kept
    assert why in found.detail


def test_a_seed_that_does_not_follow_from_the_master_seed_is_a_clients(tmp_path: Path) -> None:
    for name, seed in (("a", _derived("s", 42)), ("b", 5)):
        write(tmp_path / name, request("s", 0, seed=seed))
    [found] = compare(find("a", tmp_path), find("b", tmp_path)).kept
    assert "in B it does not follow from the master seed: a client's seed is mixed in" in found.detail


def test_asked_for_again_is_another_history(compared: Compare) -> None:
    [found] = compared([request("s", 0)], [request("s", 0, outcome="abandoned"), request("s", 0)]).kept
    assert (found.cause, found.answers_equal) == ("other-retries", True)
    assert found.detail.endswith("policy-0 (answered), asked for 2 times in B")


def test_what_was_shared_by_a_retry_is_another_history(compared: Compare) -> None:
    [found] = compared([request("s", 0)], [request("s", 0), request("s", 0)]).kept
    assert (found.cause, found.answers_equal) == ("other-retries", True)


STICKY: dict[str, Any] = {"sticky": True, "candidates": ["p"], "loads": None}
FOLLOWS = "it follows the first choice of its session (routing.key: session)"


@pytest.mark.parametrize(
    ("a", "b", "pools", "words"),
    [
        ({"flags": ["home-down"]}, {}, ("x", "x"), "in A its home was down"),
        ({}, {}, ("x", "y"), "the pool has x in A, y in B"),
        ({"loads": {"p": 0, "q": 1}}, {"loads": {"p": 0}}, ("x", "x"), "it could go to p, q in A, p in B"),
        ({"loads": {"p": 0}}, {"loads": {"p": 2}}, ("x", "x"), "it was chosen by load, which was p 0 in A, p 2 in B"),
        ({}, {}, ("x", "x"), "a replica was down, drained, added or removed"),
        (STICKY, STICKY, ("x", "x"), f"{FOLLOWS}, which had gone to another in each run"),
        (STICKY, {"loads": {"p": 0}}, ("x", "x"), f"in A {FOLLOWS}; in B it was chosen anew"),
        ({"loads": {"p": 0}}, STICKY, ("x", "x"), f"in B {FOLLOWS}; in A it was chosen anew"),
        (STICKY, {"flags": ["home-down"]}, ("x", "x"), "in B its home was down"),
        (STICKY, STICKY, ("x", "y"), "the pool has x in A, y in B"),
    ],
)
def test_why_another_replica(
    compared: Compare, a: dict[str, Any], b: dict[str, Any], pools: tuple[str, str], words: str
) -> None:
    one, other = request("s", 0), request("s", 0, attempts=[{"replica": "policy-1", "outcome": "answered"}])
    one[1] |= a
    other[1] |= b
    [found] = compared([one], [other], deciding=[{"pools": {"policy": [name]}} for name in pools]).kept
    assert found.cause == "other-replica"
    assert words in found.detail


def test_the_replica_comes_before_its_engine_and_both_before_the_answer(compared: Compare) -> None:
    moved: dict[str, Any] = {
        "attempts": [{"replica": "policy-1", "outcome": "answered"}],
        "engine": "other",
        "answer": "x",
    }
    [found] = compared([request("s", 0)], [request("s", 0, **moved)]).kept
    assert (found.cause, found.also) == ("other-replica", ("other-answer",))


def test_content_tells_requests_alike_whose_bytes_are_not(compared: Compare) -> None:
    a, b = request("s", 0, prompt="x", content="c"), request("s", 0, prompt="y", content="c")
    for one in (a, b):
        one[1]["answer"] = "same"
    assert compared([a], [b]).equal


def test_where_nobody_asked_for_answers_only_what_is_harmless_counts(compared: Compare) -> None:
    a = [request("s", 0), request("s", 1)]
    b = [request("s", 0, engine="x"), request("s", 1, engine="x", answer="x")]
    assert dict(compared(a, b).roots) == {"other-engine": 2}


def test_an_engine_that_answers_otherwise_is_not_harmless(compared: Compare) -> None:
    found = compared([request("s", 0)], [request("s", 0, engine="x", answer="x")], answers_only=True)
    assert (dict(found.roots), dict(found.harmless)) == ({"other-engine": 1}, {})


# --- bounds


def test_sessions_that_share_identity_and_ordinal_are_paired_as_they_came(compared: Compare) -> None:
    a = [request(f"physical-{n}", 0, identity="17:3", prompt=f"{n}") for n in (7, 3)]
    b = [request(f"other-{n}", 0, identity="17:3", prompt=f"{n}") for n in (7, 3)]
    assert compared(a, b).equal


def test_a_session_with_more_differences_than_are_held_is_judged_in_parts(
    compared: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffing, "HELD", 3)
    a = [request("s", turn) for turn in range(10)]
    b = [request("s", 0), *[request("s", turn, prompt=f"x{turn}") for turn in range(1, 10)]]
    found = compared(a, b)
    assert (dict(found.roots), dict(found.downstream)) == ({"other-prompt": 1}, {"other-prompt": 8})


def test_all_are_counted_though_few_are_kept(compared: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffing, "KEPT", 5)
    monkeypatch.setattr(diffing, "CELLS", 3)
    a = [request(f"s{n}", turn) for n in range(4) for turn in range(10)]
    b = [request(f"s{n}", turn, answer="x") for n in range(4) for turn in range(10)]
    found = compared(a, b)
    assert (found.roots.total(), len(found.kept), found.diverged_sessions) == (40, 5, 4)
    assert [(len(row.cells), row.total) for row in found.rows] == [(3, 10), (2, 10)]
    assert sum(bin.total() for bin in found.bins) == 40


def test_a_difference_is_shown_however_many_are_equal_before_it(
    compared: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffing, "CELLS", 3)
    a = [request("s", turn) for turn in range(10)]
    [row] = compared(a, [*a[:8], request("s", 8, answer="x"), a[9]]).rows
    assert [(cell.number, cell.kept) for cell in row.cells] == [(0, None), (1, None), (8, 0)]
    assert row.total == 10
