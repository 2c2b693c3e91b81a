"""The requests of a run from its records, as they may stand in a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.ledger.requests import Key, Requests
from gateway.ledger.writer import Ledger, Mark


def opened(session: str, index: int, identity: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "event": "opened", "session": session, "identity": identity or session, "ordinal": 0, "index": index,
        "flags": [], **more,
    }  # fmt: skip


def closed(session: str, index: int, outcome: str = "delivered", **more: Any) -> dict[str, Any]:
    return {
        "event": "closed", "session": session, "identity": session, "index": index, "outcome": outcome, "flags": [],
        **more,
    }  # fmt: skip


def created(session: str, submission: int | None = None) -> dict[str, Any]:
    return {"event": "session", "session": session, "submission": submission}


def write(folder: Path, *segments: list[dict[str, Any]]) -> Path:
    for number, records in enumerate(segments):
        (folder / f"{number}.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return folder


def read(found: Requests, keys: list[Key]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in b"".join(found.lines(keys)).splitlines()]


def told(found: Requests) -> list[tuple[int, str | None, int]]:
    """Index, outcome and claims of all requests."""
    return [(each["index"], each["outcome"], each["claims"]) for each in read(found, found.canonical())]


def test_opened_and_closed_become_one_object_across_segments(tmp_path: Path) -> None:
    write(
        tmp_path,
        [opened("s", 0, seed=5, flags=["racing"])],
        [closed("s", 0, status=200, flags=["racing", "unverified"])],
    )
    found = Requests(tmp_path)
    [request] = read(found, found.canonical())
    assert request == {
        "session": "s", "identity": "s", "ordinal": 0, "index": 0, "seed": 5, "outcome": "delivered", "status": 200,
        "flags": ["racing", "unverified"], "claims": 1, "reward": None, "session_reward": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([opened("s", 0)], (0, None, 1)),
        ([opened("s", 0), closed("s", 0, "failed")], (0, "failed", 1)),
        ([opened("s", 0), closed("s", 0, "failed"), opened("s", 0)], (0, None, 2)),
        ([opened("s", 0), closed("s", 0, "failed"), opened("s", 0), closed("s", 0)], (0, "delivered", 2)),
        ([opened("s", 0), opened("s", 0), closed("s", 0), closed("s", 0, "abandoned")], (0, "delivered", 2)),
        ([opened("s", 0), opened("s", 0), closed("s", 0)], (0, "delivered", 2)),
        ([opened("s", 0), closed("s", 0, "failed"), opened("s", 0), closed("s", 0, "abandoned")], (0, "abandoned", 2)),
        ([closed("s", 9), opened("s", 0), closed("s", 0)], (0, "delivered", 1)),
    ],
)
def test_of_several_claims_the_delivered_one_tells_how_it_ended(
    tmp_path: Path, records: list[dict[str, Any]], expected: tuple[int, str | None, int]
) -> None:
    assert told(Requests(write(tmp_path, records))) == [expected]


def test_what_a_request_was_is_what_its_last_claim_says(tmp_path: Path) -> None:
    records = [opened("s", 0, digest="a"), closed("s", 0, "failed"), opened("s", 0, digest="b"), closed("s", 0)]
    found = Requests(write(tmp_path, records))
    assert [each["digest"] for each in read(found, found.canonical())] == ["b"]


def test_rewards_are_the_last_that_were_given(tmp_path: Path) -> None:
    def reward(index: int, reward: float, total: float) -> dict[str, Any]:
        given = {"event": "reward", "session": "s", "identity": "s", "index": index}
        return {**given, "reward": reward, "before": None, "session_reward": total}

    ended = {"event": "session_ended", "session": "t", "session_reward": -1}
    records = [opened("s", 0), closed("s", 0), reward(0, 1, 1), opened("s", 1), reward(0, 2, 2), reward(7, 1, 3)]
    found = Requests(write(tmp_path, records, [opened("t", 0), ended]))
    told = [(each["reward"], each["session_reward"]) for each in read(found, found.canonical())]
    assert told == [(2, 3), (None, 3), (None, -1)]


def test_a_delivered_request_is_found_by_its_id_or_its_answers(tmp_path: Path) -> None:
    records = [opened("s", 0, request_id="s:0"), closed("s", 0, answer_id="x")]
    records += [opened("s", 1, request_id="s:1"), closed("s", 1, "failed", answer_id="y"), opened("t", 0)]
    found = Requests(write(tmp_path, records))
    assert [(found.find(name) or {}).get("index") for name in ("s:0", "x", "s:1", "y", "z")] == [0, 0, None, None, None]


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [{"event": "fleet"}, opened("s", 0)])
    with (tmp_path / "0.jsonl").open("ab") as segment:
        segment.write(b'garbage\n[]\n{"event":"opened","session":7}\n' + orjson.dumps(closed("s", 0)))
    found = Requests(tmp_path)
    assert (told(found), found.open) == ([(0, None, 1)], 1)


def test_one_session_and_what_came_after_a_mark(tmp_path: Path) -> None:
    decoy = opened("other", 0, note='"session":"s",')
    write(tmp_path, [opened("s", 0), decoy, opened("ss", 0)], [opened("s", 1), opened("s", 2)])
    assert told(Requests(tmp_path, "s")) == [(0, None, 1), (1, None, 1), (2, None, 1)]
    assert told(Requests(tmp_path, "s", Mark("1.jsonl", 0))) == [(1, None, 1), (2, None, 1)]
    line = len(orjson.dumps(opened("s", 1))) + 1
    assert told(Requests(tmp_path, "s", Mark("1.jsonl", line))) == [(2, None, 1)]
    assert told(Requests(tmp_path, 'q"uote')) == []


def test_a_mark_is_where_the_next_record_stands(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.opened(opened("s", 0))
    ledger._held += orjson.dumps(closed("s", 0)) + b"\n"
    mark = ledger.mark
    ledger.opened(opened("s", 1), opened("s", 2))
    ledger.close()
    assert told(Requests(tmp_path, "s", mark)) == [(1, None, 1), (2, None, 1)]


def test_a_live_run_is_told_up_to_the_first_session_with_an_open_request(tmp_path: Path) -> None:
    records = [
        created("third", 3), created("first", 1), created("second", 2),
        *(opened(name, 0) for name in ("third", "unordered", "second", "first")),
        *(closed(name, 0) for name in ("third", "unordered", "first")),
        opened("first", 10), opened("first", 2), closed("first", 10, "refused"), closed("first", 2),
    ]  # fmt: skip
    found = Requests(write(tmp_path, records))
    assert [tuple(key) for key in found.submitted()] == [
        ("first", "first", 0),
        ("first", "first", 2),
        ("first", "first", 10),
    ]
    write(tmp_path, [*records, closed("second", 0)])
    found = Requests(tmp_path)
    keys = found.submitted()
    assert [key.session for key in keys] == ["first"] * 3 + ["second", "third", "unordered"]
    assert list(found.after(keys, keys[3], live=True)) == keys[4:]
    assert list(found.after(keys, keys[-1], live=True)) == []
    with pytest.raises(KeyError):
        found.after(keys, Key("first", "first", 77), live=True)


def test_after_goes_on_although_the_frontier_has_gone_back(tmp_path: Path) -> None:
    records = [created("a", 1), created("b", 2), opened("a", 0), closed("a", 0), opened("b", 0), closed("b", 0)]
    last = Requests(write(tmp_path, records)).submitted()[-1]
    found = Requests(write(tmp_path, [*records, opened("a", 1)]))
    assert found.submitted() == []
    assert list(found.after(found.submitted(), last, live=True)) == []


def test_what_several_processes_wrote_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    """The one whose name sorts first closes what the other opened."""
    gateway = {"event": "gateway", "gateway": "x"}
    segments = {
        "1-7": [gateway, created("b") | {"time": 15.0}, closed("a", 0, "failed", time=41.0), closed("b", 0, time=50.0)],
        "2-7": [gateway, opened("a", 0, time=10.0), opened("b", 0, time=20.0)],
        "3-7": [opened("late", 0, time=60.0), closed("late", 0, time=61.0)],
    }
    for name, records in segments.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    found = Requests(tmp_path)
    assert found.open == 0
    assert [key.session for key in found.submitted()] == ["a", "b", "late"]


def test_what_one_process_wrote_is_read_as_it_stands_whatever_its_clock_said(tmp_path: Path) -> None:
    first = [opened("b", 0, time=50.0), closed("b", 0, time=51.0), opened("a", 0, time=52.0)]
    found = Requests(write(tmp_path, first, [closed("a", 0, time=10.0), opened("c", 0, time=11.0)]))
    assert found.open == 1
    assert [key.session for key in found.submitted()] == ["b", "a"]


def test_who_wrote_is_known(tmp_path: Path) -> None:
    records = [{"event": "gateway", "gateway": "one"}, opened("s", 0), {"event": "gateway", "gateway": "two"}]
    assert Requests(write(tmp_path, records)).gateways == {"one", "two"}
    assert Requests(tmp_path, "s").gateways == {"one", "two"}


def test_a_large_run_is_handed_over_in_pieces(tmp_path: Path) -> None:
    found = Requests(write(tmp_path, [opened("s", index, pad="x" * 1000) for index in range(300)]))
    pieces = list(found.lines(found.canonical()))
    assert len(pieces) > 3
    assert len(found) == 300
    assert [json.loads(line)["index"] for line in b"".join(pieces).splitlines()] == list(range(300))


@pytest.mark.parametrize(
    ("ends", "still_open"),
    [
        ([closed("s", 0, "failed", claim="g 1"), closed("s", 0, "failed", claim="g 1")], 1),
        ([closed("s", 0, "failed", claim="g 1"), closed("s", 0, "failed", claim="g 2")], 0),
    ],
)
def test_an_end_that_two_wrote_for_a_gateway_that_is_gone_counts_once(
    tmp_path: Path, ends: list[dict[str, Any]], still_open: int
) -> None:
    write(tmp_path, [opened("s", 0), opened("s", 0), *ends])
    assert Requests(tmp_path).open == still_open


def test_who_closed_before_it_was_gone_is_not_closed_again(tmp_path: Path) -> None:
    write(tmp_path, [opened("s", 0), closed("s", 0, "failed"), closed("s", 0, "failed", claim="g 1"), opened("s", 0)])
    assert Requests(tmp_path).open == 1
