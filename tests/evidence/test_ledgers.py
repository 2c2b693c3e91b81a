"""What may be named: files, folders, globs, runs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.evidence import reading
from gateway.evidence.ledgers import Lines, Unusable, find
from tests.evidence.ledger import request, write


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write(tmp_path / "ledger" / name, request("s", 0), seed=7)
    return tmp_path / "ledger"


def test_a_run_may_be_named_in_every_way(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ledger.parent)
    for name in ("one", "ledger/one", f"{ledger}/one", "ledger/one/1-1.jsonl", "ledger/one/*", "ledger/o*/*.jsonl"):
        found = find(name, ledger)
        assert [file.resolve() for file in found.files] == [ledger / "one" / "1-1.jsonl"], name
        assert found.deciding["seed"] == 7, name


def test_a_ledger_of_one_run_names_it(tmp_path: Path) -> None:
    write(tmp_path / "alone" / "run", request("s", 0))
    assert find(str(tmp_path / "alone"), tmp_path).files[0].parent.name == "run"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "no such file, folder or run"),
        ("ledger", "holds several runs, name one: .*one, .*two"),
        ("ledger/*/*.jsonl", "files of several folders"),
        ("empty", "no run was recorded here"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ledger.parent)
    (ledger.parent / "empty").mkdir()
    with pytest.raises(Unusable, match=why):
        find(name, ledger)
    assert main(["diff", name, "one", "--ledger", str(ledger), "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["comparable"] is False
    assert told.err.startswith(f"detgate: {name}: ")


def test_a_folder_that_cannot_be_read_is_not_called_empty(
    ledger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir

    def refused(folder: Any = ".") -> list[str]:
        if folder == ledger / "one":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr("gateway.evidence.ledgers.os.listdir", refused)
    for command in (["diff", "one", "two"], ["replay", "plans", "one"], ["replay", "requests", "one", "--url", "x"]):
        assert main([*command, "--ledger", str(ledger)]) == 2
        assert capsys.readouterr().err == f"detgate: {ledger / 'one'}: cannot be read: permission denied\n"


@pytest.mark.parametrize("large", [False, True])
def test_a_segment_that_cannot_be_read_is_named(
    ledger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Also where another process reads it."""
    monkeypatch.setattr(reading, "LARGE", 0 if large else 1 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (ledger / "two" / "1-1.jsonl").unlink()
    (ledger / "two" / "1-1.jsonl").mkdir()
    commands = [["diff", "one", "two"]] if large else [["diff", "one", "two"], ["replay", "plans", "two"]]
    for command in commands:
        assert main([*command, "--ledger", str(ledger)]) == 2
        why = f"{ledger / 'two' / '1-1.jsonl'}: cannot be read: is a directory"
        assert capsys.readouterr().err == f"detgate: {why}\n"


def test_records_of_several_gateways_come_in_the_order_of_their_times(ledger: Path) -> None:
    folder = ledger / "one"
    first = [{"event": "gateway", "gateway": "a", "time": 1}, {"event": "opened", "gateway": "a", "time": 4}, {"n": 4}]
    second = [{"event": "gateway", "gateway": "b", "time": 2}, {"event": "opened", "gateway": "b", "time": 3}]
    for name, records in (("1-1", first), ("2-2", second), ("3-1", [{"event": "opened", "gateway": "a", "time": 5}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read = [(segment, record.get("time")) for segment, _, record in Lines(find("one", ledger), lambda _: None)]
    assert read == [(0, 1), (1, 2), (1, 3), (0, 4), (0, None), (2, 5)]
