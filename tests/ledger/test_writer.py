"""Segments, and what becomes of records that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from gateway.ledger.reader import Segments, unmarked
from gateway.ledger.writer import Ledger, LedgerFault


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes, not even that which holds the test's output."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with capture_logs():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_every_record_is_written_whatever_is_in_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    odd = {"text": "a\ud800b", "large": 1 << 70, "small": -(1 << 70), "nan": float("nan"), "deep": deep, "\udfff": b"x"}
    ledger.claimed({"event": "opened", "odd": odd, "index": 1 << 64, "fine": (1, 2.5, True, None, "ü")})
    ledger.opened({"event": "one"}, {"event": "two", "odd": "\ud800"})
    ledger.complete({"event": "complete", "odd": "\ud800"})
    ledger.flush()
    first, *others = lines(tmp_path)
    assert first["fine"] == [1, 2.5, True, None, "ü"]
    assert first["odd"]["text"] == "a\\ud800b"
    assert (first["index"], first["odd"]["large"], first["odd"]["small"], first["odd"]["nan"]) == (None,) * 4
    assert [each["event"] for each in others] == ["one", "two", "complete"]


def test_a_full_segment_is_followed_by_another_and_no_line_is_parted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, segment_bytes=100)
    for number in range(50):
        ledger.opened({"n": number})
    assert ledger.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) == 5
    assert all(100 <= file.stat().st_size < 112 for file in files[:-1])
    assert [record["n"] for record in lines(tmp_path)] == list(range(50))
    assert not list(tmp_path.glob("*.spare"))


def test_segments_are_in_order_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, now in enumerate((5000, 4000, 4000)):
        monkeypatch.setattr("gateway.ledger.writer.time.time_ns", lambda now=now: now)
        ledger = Ledger(tmp_path)
        ledger.opened({"n": number})
        ledger.close()
    assert [record["n"] for record in Segments(tmp_path)] == [0, 1, 2]


def test_a_write_that_fails_in_the_middle_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.opened({"n": 0})
    with room(20):
        with pytest.raises(LedgerFault, match=os.strerror(errno.EFBIG)):
            ledger.opened({"n": 1}, {"n": 2})
        assert ledger.file.read_bytes() == b'{"n":0}\n'
    ledger.opened({"n": 3})
    assert [record["n"] for record in lines(tmp_path)] == [0, 3]


def test_a_claim_that_is_refused_is_known_once_there_is_room(tmp_path: Path) -> None:
    failures = []
    ledger = Ledger(tmp_path, failed=lambda: failures.append(1))
    with room(0):
        with pytest.raises(LedgerFault):
            ledger.claimed({"event": "opened", "n": 0})
        ledger._held += b'{"event":"closed","n":0}\n'
        with pytest.raises(LedgerFault):
            ledger.check()
        assert ledger.broken
    ledger.check()
    assert not ledger.broken
    assert [record["event"] for record in lines(tmp_path)] == ["opened", "closed"]
    assert len(failures) == 2
    assert ledger.close()


def test_what_went_on_unrecorded_is_told_of_as_a_gap(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "r", on_error="continue")
    assert ledger.claimed({"n": 0})
    with room(0):
        assert not ledger.claimed({"n": 1})
        assert not ledger.claimed({"n": 2})
        ledger.check()
        assert unmarked(tmp_path) == 1
    assert ledger.claimed({"n": 3})
    assert unmarked(tmp_path) == 0
    told = lines(tmp_path)
    assert [record.get("n") for record in told] == [0, None, 3]
    assert (told[1]["event"], told[1]["run"], told[1]["missing"]) == ("gap", "r", 2)
    segments = Segments(tmp_path)
    assert len(list(segments)) == 3
    assert segments.gaps == 1


def test_a_process_that_ends_with_a_gap_leaves_its_mark(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, on_error="continue")
    with room(0):
        ledger.claimed({"n": 0})
        assert not ledger.close()
    assert unmarked(tmp_path) == 1


def replaced(file: Path) -> None:
    file.rename(file.with_suffix(".old"))
    file.write_bytes(file.with_suffix(".old").read_bytes())


TAKEN: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "renamed": lambda file: file.rename(file.with_suffix(".old")),
    "replaced": replaced,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("on_error", ["fail", "continue"])
def test_a_segment_that_was_taken_away_is_written_no_more(
    tmp_path: Path, on_error: Literal["fail", "continue"], take: Callable[[Path], object]
) -> None:
    failures: list[int] = []
    ledger = Ledger(tmp_path, "r", on_error=on_error, failed=lambda: failures.append(1))
    ledger.opened({"n": 0})
    ledger.look()
    assert not ledger.broken
    take(ledger.file)
    with capture_logs() as logs:
        for _ in range(3):
            ledger.look()
        assert ledger.broken
        assert len(failures) == 1
        if on_error == "fail":
            assert ledger.unwritable() == "The ledger cannot be written: its segment was removed or renamed."
            with pytest.raises(LedgerFault, match="removed or renamed"):
                ledger.check()
            with pytest.raises(LedgerFault, match="removed or renamed"):
                ledger.claimed({"n": 1})
        else:
            assert not ledger.claimed({"n": 1})
        assert unmarked(tmp_path) == 1
        assert not ledger.close()
    assert [each["event"] for each in logs] == ["the ledger cannot be written"]
    assert unmarked(tmp_path) == 1


@pytest.mark.parametrize("missed", [0, 2])
def test_a_segment_that_is_back_is_written_again(tmp_path: Path, missed: int) -> None:
    ledger = Ledger(tmp_path, "r", on_error="continue" if missed else "fail")
    ledger.opened({"n": 0})
    elsewhere = ledger.file.rename(tmp_path / "elsewhere")
    with capture_logs():
        ledger.look()
        for number in range(missed):
            assert not ledger.claimed({"n": number})
        elsewhere.rename(ledger.file)
        ledger.look()
        assert unmarked(tmp_path) == bool(missed)
        assert ledger.unwritable() is None
        ledger.opened({"n": 3})
    assert unmarked(tmp_path) == 0
    assert [record.get("n", record.get("missing")) for record in lines(tmp_path)] == [0, *[missed] * bool(missed), 3]
    assert ledger.close()


def test_a_folder_that_was_taken_away_is_told_of_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "r", on_error="continue")
    shutil.rmtree(tmp_path)
    with capture_logs() as logs:
        ledger.look()
        assert not ledger.claimed({"n": 0})
        assert not ledger.close()
    assert [each["event"] for each in logs] == ["the ledger cannot be written"]


def test_a_full_segment_that_was_taken_away_is_not_followed_by_another(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, segment_bytes=10)
    ledger.file.unlink()
    with capture_logs():
        ledger.opened({"number": 0})
        with pytest.raises(LedgerFault):
            ledger.opened({"number": 1})
    assert not lines(tmp_path)


def test_a_close_does_not_call_whole_what_was_taken_away(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.opened({"n": 0})
    ledger.file.unlink()
    with capture_logs():
        assert not ledger.close()
    assert unmarked(tmp_path) == 1


def test_where_nothing_can_be_taken_back_the_line_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    with room(5), monkeypatch.context() as patch:
        patch.setattr("gateway.ledger.writer.os.ftruncate", _fails)
        with pytest.raises(LedgerFault):
            ledger.opened({"n": 0})
    ledger.opened({"n": 1})
    assert ledger.file.read_bytes() == b'{"n":\n{"n":1}\n'


def _fails(descriptor: int, length: int) -> None:
    raise OSError(errno.EIO, "no")


def test_a_torn_last_line_is_cut_off_and_one_in_the_middle_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b'{"n":0}\n{"n"')
    (tmp_path / "2.jsonl").write_bytes(b'{"n":1}\n{"n"\n[]\n{"n":2}\n{"n":3}')
    segments = Segments(tmp_path)
    assert [record["n"] for record in segments] == [0, 1, 2]
    assert segments.gaps == 1
    assert (tmp_path / "1.jsonl").read_bytes() == b'{"n":0}\n'
