"""What leaves memory is found again, and what was never put costs no look into the file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway import shelf as module
from gateway.core.errors import StoreFault
from gateway.shelf import Entries, Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "state.db")


def key(number: int) -> bytes:
    return b"scope\0anonymous\0anonymous/%016x" % number


def looks(shelf: Shelf, keys: range) -> tuple[list[bytes | None], int]:
    """What is found under these keys, and how often the file was asked."""
    asked: list[str] = []
    assert shelf._database is not None
    shelf._database.set_trace_callback(asked.append)
    found = [shelf.get(key(number)) for number in keys]
    shelf._database.set_trace_callback(None)
    return found, len(asked)


def test_all_that_was_put_is_found(shelf: Shelf) -> None:
    for first in range(0, 20_000, 100):
        assert shelf.put([(key(number), b"%d" % number) for number in range(first, first + 100)])
    assert looks(shelf, range(20_000))[0] == [b"%d" % number for number in range(20_000)]


def test_what_was_never_put_is_hardly_ever_looked_for_in_the_file(shelf: Shelf) -> None:
    shelf.put([(key(number), b"") for number in range(20_000)])
    found, asked = looks(shelf, range(20_000, 40_000))
    assert set(found) == {None}
    assert asked < 20


def test_what_was_dropped_or_put_anew_is_as_it_is_now(shelf: Shelf) -> None:
    shelf.put([(key(0), b"a"), (key(1), b"b")])
    shelf.drop(key(0))
    shelf.put([(key(1), b"c")])
    assert looks(shelf, range(2))[0] == [None, b"c"]
    shelf.put([(key(0), b"d")])
    assert shelf.get(key(0)) == b"d"


def test_a_shelf_that_was_closed_begins_empty(shelf: Shelf) -> None:
    shelf.put([(key(0), b"a")])
    shelf.close()
    assert shelf.empty
    assert shelf.get(key(0)) is None
    shelf.put([(key(1), b"b")])
    assert looks(shelf, range(2))[0] == [None, b"b"]


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("chained", [0, 20, 1000])
def test_rows_that_share_slots_or_come_late_are_found(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, slots: int, chained: int
) -> None:
    monkeypatch.setattr(module, "SLOTS", slots)
    monkeypatch.setattr(module, "CHAINED", chained)
    draw, known = random.Random(slots + chained), dict[bytes, bytes | None]()
    for step in range(400):
        some = [key(draw.randrange(60)) for _ in range(draw.randrange(5))]
        rows = [(each, b"%d %d" % (step, place)) for place, each in enumerate(some)]
        assert shelf.put(rows)
        known |= dict(rows)
        if draw.random() < 0.3:
            gone = key(draw.randrange(60))
            shelf.drop(gone)
            known[gone] = None
        each = key(draw.randrange(60))
        assert shelf.get(each) == known.get(each)
    assert [shelf.get(key(number)) for number in range(60)] == [known.get(key(number)) for number in range(60)]
    assert shelf._database is not None
    rows_in_file = shelf._database.execute("SELECT count(*) FROM row").fetchone()[0]
    assert rows_in_file <= 60


@pytest.mark.parametrize("chained", [5, 1000])
def test_a_full_disk_changes_nothing_of_what_is_there(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, chained: int
) -> None:
    monkeypatch.setattr(module, "SLOTS", 4)
    monkeypatch.setattr(module, "CHAINED", chained)
    assert shelf.put([(key(number), b"%d" % number) for number in range(10)])
    shelf.drop(key(3))
    database = shelf._database
    assert database is not None
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    assert not shelf.put([(key(number), bytes(2000)) for number in range(5, 40)])
    there = [None if number == 3 else b"%d" % number for number in range(10)] + [None] * 30
    assert [shelf.get(key(number)) for number in range(40)] == there
    database.execute("PRAGMA max_page_count = 1000")
    assert shelf.put([(key(number), b"new") for number in range(5, 40)])
    assert [shelf.get(key(number)) for number in range(40)] == there[:5] + [b"new"] * 35


def test_rows_that_cannot_be_read_are_a_fault_and_not_unknown(shelf: Shelf) -> None:
    shelf.put([(key(0), b"a"), (key(1), b"b")])
    assert shelf._database is not None
    shelf._database.execute("DELETE FROM row WHERE key = ?", (key(0),))
    for ask in (shelf.get, shelf.drop):
        with pytest.raises(StoreFault, match="cannot be read"):
            ask(key(0))
    assert not shelf.put([(key(2), b"c"), (key(0), b"c")])
    assert (shelf.get(key(1)), shelf.get(key(2))) == (b"b", None)
    shelf._database.close()
    for ask in (shelf.get, shelf.drop):
        with pytest.raises(StoreFault, match="cannot be read"):
            ask(key(1))
    assert not shelf.put([(key(1), b"c")])


def test_an_entry_that_cannot_be_dropped_is_still_there(shelf: Shelf) -> None:
    entries = Entries[bytes, int](shelf, b"e ", lambda value: value, lambda row: row)
    entries[b"a"], entries[b"b"] = 1, 2
    entries.shed(1)
    assert (entries[b"a"], dict(entries)) == (1, {b"b": 2, b"a": 1})
    entries[b"a"] = 3
    assert shelf._database is not None
    shelf._database.execute("PRAGMA query_only = 1")
    with pytest.raises(StoreFault):
        del entries[b"a"]
    assert entries[b"a"] == 3
    shelf._database.execute("PRAGMA query_only = 0")
    del entries[b"a"]
    assert b"a" not in entries
    assert entries.get(b"a") is None
