"""What the ledger tells of gateways that can, and of those that can tell no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.indexing import LATE, MANY, NONE
from gateway.ledger.shapes import Unreadable
from gateway.shared import deeds
from gateway.shared.part import Memory, Terms

REPEAT, RACED, STANDS, TOKENS = 7, 8, 9, 11


def opened(gateway: str, index: int, **given: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"event": "opened", "gateway": gateway, "session": "s", "identity": "me", "index": index}
    record |= {"order": "arrival", "digest": "ab", "content": None, "key": None, "repeat": 0, "flags": []}
    return record | given


def closed(index: int, *, used: bool) -> dict[str, Any]:
    return {"event": "closed", "session": "s", "identity": "me", "index": index, "used": used, "racing": False}


def written(folder: Path, name: str, *records: dict[str, Any], torn: bytes = b"") -> None:
    lines = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)
    (folder / f"{name}.jsonl").write_bytes(lines + torn)


def stands(telling: Any) -> dict[int, str]:
    return {deed[4]: deed[STANDS] + str(deed[TOKENS]) for deed in telling.deeds}


def test_it_tells_of_its_own_claims_which_are_live_used_and_released(tmp_path: Path) -> None:
    ends = [closed(0, used=True), closed(1, used=False)]
    written(tmp_path, "1", *(opened("g", index) for index in range(4)), *ends, torn=b'{"event": "op')
    telling = deeds.told(tmp_path, "g", {("s", "me", 2): ["o7"]})
    assert stands(telling) == {0: "u", 1: "r", 2: "ro7", 3: "r"}
    assert list(telling.others) == []


def test_an_answer_that_was_complete_is_used_though_its_gateway_died(tmp_path: Path) -> None:
    written(tmp_path, "1", opened("dead", 0), {"event": "complete", "session": "s", "identity": "me", "index": 0})
    telling = deeds.told(tmp_path, "g", {})
    assert stands(telling) == {0: "u"}
    assert list(telling.others) == ["dead"]


def test_what_is_in_flight_at_another_that_lives_it_does_not_tell(tmp_path: Path) -> None:
    written(tmp_path, "1", opened("alive", 0), opened("alive", 1), closed(1, used=False), opened("dead", 2))
    shown = deeds.show(tmp_path, "alive")
    os.close(deeds.show(tmp_path, "dead"))
    telling = deeds.told(tmp_path, "g", {})
    assert stands(telling) == {1: "r", 2: "r"}
    assert list(telling.others) == ["dead"]
    assert [file.name for file in tmp_path.glob("*.gateway")] == ["alive.gateway"]
    deeds.hide(tmp_path, "alive", shown)
    assert deeds.living(tmp_path) == set()


def test_what_is_in_flight_here_and_at_another_both_tell(tmp_path: Path) -> None:
    written(tmp_path, "1", opened("other", 0))
    written(tmp_path, "2", opened("here", 0, repeat=1))
    shown = [deeds.show(tmp_path, name) for name in ("here", "other")]
    assert stands(deeds.told(tmp_path, "here", {("s", "me", 0): ["o7"]})) == {0: "ro7"}
    assert stands(deeds.told(tmp_path, "other", {("s", "me", 0): ["o3"]})) == {0: "ro3"}
    for descriptor in shown:
        os.close(descriptor)


def test_repeats_of_one_request_are_told_from_many_requests(tmp_path: Path) -> None:
    again = [opened("g", 0), closed(0, used=False), opened("g", 0, repeat=1), closed(0, used=True)]
    many = [opened("g", 1), closed(1, used=False), opened("g", 1), closed(1, used=True)]
    written(tmp_path, "1", *again, *many)
    told = {deed[4]: (deed[REPEAT], deed[STANDS]) for deed in deeds.told(tmp_path, "g", {}).deeds}
    assert told == {0: (1, "u"), 1: (0, "m")}


def test_what_was_known_of_the_store_is_kept_with_the_run(tmp_path: Path) -> None:
    assert deeds.recall(tmp_path) == Memory()
    deeds.remember(tmp_path, "g", Memory(3, "name"))
    assert deeds.recall(tmp_path) == Memory(3, "name")


def test_who_has_begun_a_segment_is_told_for_though_it_served_nothing(tmp_path: Path) -> None:
    written(tmp_path, "1", {"event": "gateway", "gateway": "idle"})
    written(tmp_path, "2", {"event": "gateway", "gateway": "g"}, opened("g", 0))
    assert list(deeds.told(tmp_path, "g", {}).others) == ["idle"]


def test_an_index_that_was_found_to_be_given_twice_is_told_so(tmp_path: Path) -> None:
    fenced = {"event": "fenced", "session": "s", "identity": "me", "index": 0}
    written(tmp_path, "1", opened("g", 0), opened("g", 1), closed(0, used=False), closed(1, used=True), fenced)
    assert stands(deeds.told(tmp_path, "g", {})) == {0: "x", 1: "u"}


def test_who_took_part_is_known_to_who_comes_later_in_the_folder(tmp_path: Path) -> None:
    assert deeds.known(tmp_path) == []
    deeds.met(tmp_path, ["g", "h"])
    deeds.met(tmp_path, ["k"])
    with (tmp_path / "gateways.txt").open("a") as file:
        file.write("torn")
    assert deeds.known(tmp_path) == ["g", "h", "k"]


def waited(asked: int, repeat: int = 0) -> dict[str, Any]:
    return {"event": "waited", "session": "s", "identity": "me", "digest": "ab", "asked": asked, "repeat": repeat}


def test_an_index_that_a_request_left_in_the_moment_of_getting_it_is_released(tmp_path: Path) -> None:
    left = opened("g", 1, repeat=2) | {"event": "given_back", "flags": ["racing"]}
    written(tmp_path, "1", opened("g", 0), closed(0, used=True), left)
    telling = deeds.told(tmp_path, "g", {})
    [_, deed] = telling.deeds
    assert (deed[4], deed[REPEAT], deed[RACED], deed[STANDS], list(telling.others)) == (1, 2, 1, "r", [])


def test_who_came_after_one_that_waited_in_vain_with_its_bytes_is_another_unless_it_is_a_later_retry(
    tmp_path: Path,
) -> None:
    for repeat, how in ((0, "m"), (1, "u")):
        again = [opened("g", 0, repeat=repeat), closed(0, used=False), opened("g", 0, repeat=2), closed(0, used=True)]
        written(tmp_path, "1", waited(NONE), *again)
        [deed, vain] = deeds.told(tmp_path, "g", {}).deeds
        assert (deed[STANDS], vain[STANDS], vain[4], vain[REPEAT]) == (how, "w", NONE, 0)


def test_of_several_vain_waits_the_one_that_knew_of_more_is_told(tmp_path: Path) -> None:
    for first, last, stands_for in ((MANY, NONE, MANY), (NONE, MANY, MANY), (LATE, LATE, LATE), (NONE, 3, 3)):
        written(tmp_path, "1", waited(first, 1), waited(last))
        [vain] = deeds.told(tmp_path, "g", {}).deeds
        assert (vain[4], vain[REPEAT]) == (stands_for, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((deeds.MEMORY, content) for content in (b"", b'[1,"na', b"{}", b'[1,"a",2]', b'[true,"a"]', b'["1","a"]')),
        ("run.json", b'{"reloaded'),
        (deeds.GATEWAYS, b"g\xff\n"),
    ],
)
def test_what_is_broken_of_what_was_known_is_not_taken_for_nothing(tmp_path: Path, name: str, content: bytes) -> None:
    ours = Terms("g", b"{}", 1.0, 1.0, 1.0)
    assert (deeds.recall(tmp_path), deeds.known(tmp_path), deeds.terms(tmp_path, ours)) == (Memory(), [], ours)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Unreadable, match=rf"{name}: .* Put it back from a copy"):
        deeds.recall(tmp_path), deeds.known(tmp_path), deeds.terms(tmp_path, ours)
