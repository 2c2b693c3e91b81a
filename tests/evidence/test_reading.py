"""Two sides that are read at once come to what they come to one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.evidence import diff_text, reading, sorting
from gateway.evidence.diff import compare
from gateway.evidence.ledgers import Source, Unusable, find
from tests.evidence.ledger import request, write


@pytest.fixture
def two(tmp_path: Path) -> tuple[Source, Source]:
    """Runs in which a turn has another answer and what follows asks something else."""
    for name, answer in (("a", "x"), ("b", "y")):
        turns = [request("s", 0), request("s", 1, answer=answer), request("s", 2, prompt=answer)]
        waited = {"event": "waited", "session": "u", "identity": "u", "digest": "0a", "asked": -1, "repeat": 0}
        turns += [request("u", 0), request("u", 1, prompt="0a") if name == "a" else [waited]]
        write(tmp_path / name, *turns, *[request(f"task:{n}", turn) for n in range(40) for turn in range(3)])
    return find("a", tmp_path), find("b", tmp_path)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are, and however few processors there are."""
    monkeypatch.setattr(reading, "LARGE", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def test_both_ways_find_the_same(two: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for together in (False, True):
        if together:
            at_once(monkeypatch)
            monkeypatch.setattr(sorting, "HELD_BYTES", 2000)
        read: list[int] = []
        diff = compare(*two, watch=lambda phase, done, read=read: read.append(done) if phase == "read" else None)  # type: ignore[misc]
        assert read == sorted(read)
        assert read[-1] == sum(source.bytes for source in two)
        assert any("waited for a rival in vain" in each.detail for each in diff.kept)
        found.append(diff_text.as_json(diff))
    assert found[0] == found[1]
    assert (found[0]["causes"], found[0]["downstream"]) == (
        {"other-answer": 1, "missing-request": 1},
        {"other-prompt": 1},
    )


@pytest.mark.parametrize("which", [0, 1])
def test_what_one_of_them_cannot_be_read_for_is_said(
    two: tuple[Source, Source], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    empty = two[which].files[0]
    empty.write_bytes(b'{"event":"gap"}\n')
    with pytest.raises(Unusable, match="holds no request"):
        compare(*two)


def test_a_reader_that_dies_is_missed(two: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    monkeypatch.setattr(reading, "_read", _dies)
    with pytest.raises(Unusable, match="the process that read it has ended"):
        compare(*two)


def _dies(*_: object) -> None:
    raise SystemExit(3)
