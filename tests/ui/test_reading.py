"""Pages of a run: exact, and in memory that does not grow with it."""

from __future__ import annotations

import random
import tracemalloc
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.ledger.requests import Requests
from gateway.ui import reading
from gateway.ui.reading import ROWS, WrongCursor, difference, requests, sessions
from tests.evidence.ledger import Records, request, write


def all_pages(read: Any, part: str, *given: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = None
    while True:
        told = read(*given, after)
        assert len(told[part]) <= ROWS
        found += told[part]
        if (after := told["next"]) is None:
            return found
        assert len(told[part]) == ROWS


def shuffled(records: list[Records]) -> list[Records]:
    """Requests that overlap: all opened in one order, then closed in another."""
    chance = random.Random(1)
    opened, closed = [each[:1] for each in records], [each[1:] for each in records]
    chance.shuffle(opened)
    chance.shuffle(closed)
    return [*opened, *closed]


def test_pages_are_the_run_in_canonical_order(tmp_path: Path) -> None:
    made = [request(f"{task}:{sample}", turn) for task in range(12) for sample in (0, 1, 10) for turn in range(4)]
    made += [request("2:0-1", turn, identity="2:0", ordinal=1) for turn in range(2)]
    made += [request("s", 0, identity=f"s/{number:016x}", order="content") for number in range(60)]
    made += [request("1:0", 0, outcome="failed")]
    folder = write(tmp_path / "run", *shuffled(made))
    whole = Requests(folder)
    expected = [orjson.loads(line) for part in whole.lines(whole.canonical()) for line in part.splitlines()]
    found = all_pages(requests, "requests", str(folder), None)
    assert len(found) == len(made) - 1
    assert found == expected
    one = all_pages(requests, "requests", str(folder), "2:0")
    assert [(each["session"], each["index"]) for each in one] == [("2:0", turn) for turn in range(4)]


def test_sessions_are_counted_by_pages_and_those_that_raced_can_be_had_alone(tmp_path: Path) -> None:
    made = [
        request(f"s{number}", turn, racing=number % 3 == 0 and turn > 0) for number in range(200) for turn in (0, 1, 2)
    ]
    still_open = request("s7", 3)[:1]
    ended = [{"event": "session_ended", "run": "r", "session": "s5", "why": "idle", "session_reward": None}]
    created = [{"event": "session", "run": "r", "session": "s5", "identity": "s5", "ordinal": 0, "group": "g"}]
    folder = write(tmp_path / "run", created, *made, still_open, ended)
    found = all_pages(lambda folder, after: sessions(folder, False, after), "sessions", str(folder))
    assert [each["session"] for each in found] == [f"s{number}" for number in range(200)]
    assert found[0] | {"first_racing": None} == {
        "session": "s0", "identity": "s0", "group": None, "state": None, "why": None,
        "claims": 3, "delivered": 3, "open": 0, "racing": 2, "first_racing": None,
    }  # fmt: skip
    assert found[0]["first_racing"] == [1, 2]
    assert (found[5]["state"], found[5]["why"], found[5]["group"]) == ("failed", "idle", "g")
    assert (found[7]["claims"], found[7]["open"]) == (4, 1)
    raced = all_pages(lambda folder, after: sessions(folder, True, after), "sessions", str(folder))
    assert [each["session"] for each in raced] == [f"s{number}" for number in range(0, 200, 3)]
    assert all(each["claims"] == 3 for each in raced)


def test_a_page_takes_no_more_memory_of_a_longer_run(tmp_path: Path) -> None:
    peaks = []
    for number in (1_000, 10_000):
        folder = write(tmp_path / str(number), *(request(f"s{each % 500}", each) for each in range(number)))
        tracemalloc.start()
        assert len(requests(str(folder), None, None)["requests"]) == ROWS
        assert len(sessions(str(folder), False, None)["sessions"]) == ROWS
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000


def test_what_is_long_is_cut_and_what_is_torn_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", request("s", 0, request_body="x" * 5000))
    with (folder / "1-1.jsonl").open("ab") as segment:
        segment.write(orjson.dumps(request("t", 0)[0]))  # whole but for its end: the next moment may show it
    (told,) = requests(str(folder), None, None)["requests"]
    assert told["request_body"] == "x" * reading.TEXT + " … and 3,000 characters more"


@pytest.mark.parametrize("after", ["", "!", "e30", "WzFd", "bnVsbA", "WyJhIiwwLCJiIiwidHJ1ZSJd"])
def test_a_page_begins_where_another_ended_and_nowhere_else(tmp_path: Path, after: str) -> None:
    folder = str(write(tmp_path / "run", request("s", 0)))
    with pytest.raises(WrongCursor):
        requests(folder, None, after)


def test_differences_come_by_pages(tmp_path: Path) -> None:
    a = [request(f"{task}", turn) for task in range(60) for turn in (0, 1)]
    b = [request(f"{task}", turn, answer="other") for task in range(60) for turn in (0, 1)]
    one, other = (str(write(tmp_path / name, *records)) for name, records in (("a", a), ("b", b)))
    pages = [difference(one, other, False, start) for start in (0, 50, 100)]
    assert [len(page["differences"]) for page in pages] == [50, 50, 20]
    shown = [each["where"] for each in chain.from_iterable(page["differences"] for page in pages)]
    assert shown == [f"{task} index {turn}" for task in range(60) for turn in (0, 1)]
    assert (pages[0]["summary"]["a"], pages[0]["summary"]["b"], pages[0]["kept"]) == ("a", "b", 120)
    assert difference(one, one, False, 0)["summary"]["equal"] is True
    (tmp_path / "empty").mkdir()
    assert "no *.jsonl" in difference(one, str(tmp_path / "empty"), False, 0)["unusable"]
