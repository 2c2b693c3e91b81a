"""What may be named: files, folders, globs, runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.evidence.ledgers import Unusable, find
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
