"""Ledgers whose records are JSON and not what they should be: refused with their place, or read; never a traceback."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.evidence import diff, diff_text, recorded, replay_plans, report
from gateway.evidence.bodies import Records
from gateway.evidence.ledgers import Source, Unusable, find
from tests.evidence.ledger import request, write

GOLDEN = Path(__file__).parent.parent / "golden" / "0.1.0"

VALUES: list[Any] = [..., None, "x", 1e30, -1, [1]]


def told(name: str) -> list[dict[str, Any]]:
    """One record of each kind, of a golden run, with the ends of its claims."""
    records = [
        json.loads(line) for file in sorted((GOLDEN / name).glob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        kinds.setdefault((record["event"], record.get("order"), record.get("key") is None), record)
    claims = {
        (each["session"], each["identity"], each["index"]) for each in kinds.values() if each["event"] == "opened"
    }
    return [
        each for each in records
        if each in kinds.values() or (each.get("session"), each.get("identity"), each.get("index")) in claims
    ]  # fmt: skip


def replayed(source: Source, whole: Source) -> None:
    replay_plans.replay(source)


def compared(source: Source, whole: Source) -> None:
    found = diff.compare(source, whole)
    json.dumps(diff_text.as_json(found))
    report.page(found)
    diff.compare(whole, source)


def scripted(source: Source, whole: Source) -> None:
    script = recorded.script(source)
    with_bodies = Records(source)
    for session in script.sessions:
        for sent in session.requests:
            recorded.message(with_bodies, sent, session)
    with_bodies.close()


@pytest.mark.parametrize(("name", "read"), [("strict", replayed), ("balanced", compared), ("balanced", scripted)])
def test_whatever_is_wrong_with_a_record_it_is_refused_with_its_place_or_read(
    tmp_path: Path, name: str, read: Callable[[Source, Source], None]
) -> None:
    records = told(name)
    deciding = json.loads((GOLDEN / name / "run.json").read_text())["deciding"]
    whole = find(str(write(tmp_path / "whole", records, **deciding)), tmp_path)
    odd = find(str(write(tmp_path / "odd", records, **deciding)), tmp_path)
    read(odd, whole)
    refused = 0
    lines = [json.dumps(record) for record in records]
    tried: Counter[tuple[str, str]] = Counter()
    for number, record in enumerate(records):
        for field in record:
            tried[record["event"], field] += 1
            if tried[record["event"], field] > 2:
                continue
            for value in VALUES:
                broken = {key: each for key, each in record.items() if key != field or value is not ...}
                if value is not ...:
                    broken[field] = value
                text = "\n".join([*lines[:number], json.dumps(broken), *lines[number + 1 :]]) + "\n"
                odd.files[0].write_text(text)
                try:
                    read(odd, whole)
                except Unusable as why:
                    refused += f"1-1.jsonl, line {number + 1}, is no sound record: " in str(why)
    assert refused > 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("index", "x"), ("index", None), ("index", 1e30), ("ordinal", "x"), ("ordinal", 1e30), ("identity", None),
     ("identity", 7), ("seed", "x"), ("attempts", [7])],
)  # fmt: skip
@pytest.mark.parametrize("command", ["diff", "replay"])
def test_a_command_names_file_and_line_and_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, field: str, value: Any
) -> None:
    one, other = request("s", 0, digest="ab"), request("t", 0, digest="cd")
    other[field == "attempts"][field] = value
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", one, other)
    arguments = [str(a), str(b)] if command == "diff" else ["plans", str(b)]
    assert main([command, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"detgate: {b}/1-1.jsonl, line {4 if field == 'attempts' else 3}, is no sound record: {field} "
    )


def test_a_digest_that_is_none_ends_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "r", request("s", 0, digest="xy"))
    assert main(["replay", "plans", str(run)]) == 2
    assert "line 1, is no sound record: digest cannot be 'xy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("deciding", "why"),
    [
        ("x", "deciding is of another type"),
        ({"seed": "x"}, "seed cannot be 'x'"),
        ({"pools": {"p": 1}}, "pools cannot be"),
    ],
)
@pytest.mark.parametrize("command", [["diff", "r", "r"], ["replay", "plans", "r"]])
def test_odd_settings_of_a_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], deciding: Any, why: str
) -> None:
    run = write(tmp_path / "r", request("s", 0))
    (run / "run.json").write_text(json.dumps({"run": "r", "deciding": deciding}))
    assert main([*command, "--ledger", str(tmp_path)]) == 2
    assert f"r/run.json: {why}" in capsys.readouterr().err


ODD_FILES = {"empty": b"", "half-written": b'{"run": "r", "deci', "no UTF-8": b'{"run": "\xff"}', "no object": b"[]"}


@pytest.mark.parametrize("content", ODD_FILES.values(), ids=ODD_FILES)
@pytest.mark.parametrize(
    "command",
    [["diff", "r", "r"], ["replay", "plans", "r"], ["replay", "requests", "r", "--url", "http://127.0.0.1:9"]],
)
def test_a_broken_file_beside_the_records_is_not_taken_for_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], content: bytes
) -> None:
    run = write(tmp_path / "r", request("s", 0))
    (run / "run.json").write_bytes(content)
    assert main([*command, "--ledger", str(tmp_path)]) == 2
    why = "it is no JSON object" if content == b"[]" else "it is no JSON"
    assert f"r/run.json: {why}. " in capsys.readouterr().err


@pytest.mark.parametrize("content", [*ODD_FILES.values(), b'{"run": "b"}'], ids=[*ODD_FILES, "other"])
def test_broken_notes_of_a_replay_are_not_taken_for_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ledger" / "r", request("s", 0, request_body="{}", request_bytes=2))
    (tmp_path / "b.replay.json").write_bytes(content)
    assert main(["replay", "requests", "r", "--run", "b", "--url", "http://127.0.0.1:9"]) == 2
    assert "b.replay.json: it " in capsys.readouterr().err
