"""What leaves memory is found again, and what was never put costs no look into the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.shelf import Shelf


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
