"""Verdicts of canaries: whose they are, and which one counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.passes import Passes
from gateway.settings import Pool, Settings
from tests.harness import pool

ONE_EACH = {"scope": "replica", "limit": 1}


def made(name: str = "policy", **settings: Any) -> Pool:
    return Settings.load(None, {}, {"pools": [pool(name, "http://a:1", **settings)]}).pools[0]


def note(passes: Passes, passed: bool = True, apart: bool = False, fingerprint: str = "f") -> None:
    passes.note(made(), "policy-0", fingerprint, apart=apart, passed=passed, at=1.0)


def test_a_pass_belongs_to_pool_replica_and_fingerprint(tmp_path: Path) -> None:
    passes = Passes(tmp_path / "ledger")
    assert not passes.verdict(made(), "policy-0", "f")
    note(passes)
    assert passes.verdict(made(), "policy-0", "f")
    assert not passes.verdict(made(), "policy-0", "g")
    assert not passes.verdict(made(), "policy-1", "f")
    assert not passes.verdict(made(name="other"), "policy-0", "f")


def test_nobody_passes_who_was_not_asked(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    note(passes, fingerprint="")
    assert not passes.verdict(made(), "policy-0", "")


@pytest.mark.parametrize(
    ("verdicts", "in_company", "one_at_a_time"),
    [
        ([(True, "apart")], None, True),
        ([(False, "apart")], False, False),
        ([(True, "crowd")], True, True),
        ([(False, "crowd")], False, None),
        ([(True, "apart"), (False, "crowd")], False, True),
        ([(True, "crowd"), (False, "apart")], False, False),
        ([(False, "apart"), (True, "crowd")], True, True),
        ([(False, "apart"), (True, "apart")], False, True),
    ],
)
def test_what_passes_in_company_passes_alone_and_what_fails_alone_fails_in_company(
    tmp_path: Path, verdicts: list[tuple[bool, str]], in_company: bool | None, one_at_a_time: bool | None
) -> None:
    passes = Passes(tmp_path)
    for passed, how in verdicts:
        note(passes, passed=passed, apart=how == "apart")
    assert passes.verdict(made(), "policy-0", "f") is in_company
    assert passes.verdict(made(lane=ONE_EACH), "policy-0", "f") is one_at_a_time


def test_the_last_verdict_counts_whoever_wrote_it(tmp_path: Path) -> None:
    reader, writer = Passes(tmp_path), Passes(tmp_path)
    for passed in (True, False, True):
        note(writer, passed=passed)
        assert reader.verdict(made(), "policy-0", "f") is passed
    (tmp_path / "verified.jsonl").unlink()
    assert reader.verdict(made(), "policy-0", "f") is None


@pytest.mark.parametrize("line", ["", "{", "[]", "5", '{"pool": "policy"}', '{"passed": true}'])
def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path, line: str) -> None:
    passes = Passes(tmp_path)
    note(passes)
    with (tmp_path / "verified.jsonl").open("a") as file:
        file.write(line + "\n")
    assert passes.verdict(made(), "policy-0", "f")
