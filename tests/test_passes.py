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
    assert not passes.has(made(), "policy-0", "f")
    note(passes)
    assert passes.has(made(), "policy-0", "f")
    assert not passes.has(made(), "policy-0", "g")
    assert not passes.has(made(), "policy-1", "f")
    assert not passes.has(made(name="other"), "policy-0", "f")


def test_nobody_passes_who_was_not_asked(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    note(passes, fingerprint="")
    assert not passes.has(made(), "policy-0", "")


def test_what_passed_one_at_a_time_need_not_pass_in_company(tmp_path: Path) -> None:
    passes = Passes(tmp_path)
    note(passes, apart=True)
    assert not passes.has(made(), "policy-0", "f")
    assert passes.has(made(lane=ONE_EACH), "policy-0", "f")
    note(passes, passed=False, apart=True)
    note(passes, apart=False)
    assert passes.has(made(), "policy-0", "f")
    assert passes.has(made(lane=ONE_EACH), "policy-0", "f")


def test_the_last_verdict_counts_whoever_wrote_it(tmp_path: Path) -> None:
    reader, writer = Passes(tmp_path), Passes(tmp_path)
    for passed in (True, False, True):
        note(writer, passed=passed)
        assert reader.has(made(), "policy-0", "f") is passed
    (tmp_path / "verified.jsonl").unlink()
    assert not reader.has(made(), "policy-0", "f")


@pytest.mark.parametrize("line", ["", "{", "[]", "5", '{"pool": "policy"}', '{"passed": true}'])
def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path, line: str) -> None:
    passes = Passes(tmp_path)
    note(passes)
    with (tmp_path / "verified.jsonl").open("a") as file:
        file.write(line + "\n")
    assert passes.has(made(), "policy-0", "f")
