"""What a record must hold for a run to go on from it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ledger.shapes import wrong

REQUEST: dict[str, Any] = {"session": "s", "identity": "s", "index": 0}
OPENED = {
    "event": "opened", **REQUEST, "order": "arrival", "digest": "ab", "content": None, "key": None, "repeat": 0,
    "flags": [],
}  # fmt: skip
SESSION = {
    "event": "session", "session": "s", "identity": "s", "ordinal": 0, "index_order": None, "seed": None, "group": None,
    "member": None, "submission": None, "key_digest": "ab",
}  # fmt: skip
SOUND: list[dict[str, Any]] = [
    OPENED,
    OPENED | {"order": "client", "content": "c"},
    OPENED | {"event": "given_back"},
    {"event": "waited", "session": "s", "identity": "s", "digest": "ab", "asked": -2, "repeat": 1},
    {"event": "complete", **REQUEST},
    {"event": "closed", **REQUEST, "used": False},
    SESSION,
    SESSION | {"group": "g", "group_identity": "g", "group_size": 2, "member": 1},
    {"event": "session_ended", "session": "s", "state": "ended", "why": None, "session_reward": None},
    {"event": "session_weights", "session": "s", "pool": "p", "version": "v"},
    {"event": "reward", **REQUEST, "reward": 1, "before": None, "session_reward": 1.5},
    {"event": "weights", "change": "pause", "pool": "p", "version": None, "paused": True, "time": 1.5},
]


@pytest.mark.parametrize("record", SOUND, ids=lambda record: record["event"])
def test_a_sound_record_needs_each_of_its_fields_and_no_more(record: dict[str, Any]) -> None:
    assert wrong(record) is None
    assert wrong(record | {"more": object()}) is None
    for name in record:
        assert wrong({key: value for key, value in record.items() if key != name}) is not None, name
        assert name.split("_")[0] in str(wrong(record | {name: object()})), name


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({}, "event is missing"),
        ({"event": "fleet", "session": []}, "session is of another type"),
        (OPENED | {"order": "client"}, "content is missing"),
        (OPENED | {"key": "k"}, "content is missing"),
        (OPENED | {"kind": "sample"}, "request_id is missing"),
        (OPENED | {"index": True}, "index cannot be True"),
        (OPENED | {"index": 1 << 31}, "index cannot be 2147483648"),
        (OPENED | {"digest": "xy"}, "digest cannot be 'xy'"),
        (OPENED | {"digest": "x" * 1000}, "digest cannot be 'xxx"),
        (SESSION | {"group": "g"}, "group_identity, group_size or member"),
        (SESSION | {"failed_reward": "1"}, "failed_reward is of another type"),
    ],
)
def test_what_is_wrong_is_told(record: dict[str, Any], why: str) -> None:
    told = wrong(record)
    assert told is not None
    assert told.startswith(why)
    assert len(told) < 150


@pytest.mark.parametrize("event", ["fleet", "gap", "gateway", "one that is not known yet"])
def test_of_other_records_nothing_is_wanted(event: str) -> None:
    assert wrong({"event": event}) is None
