"""Files are tried, and stay as they are."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.evidence.files import unwritable


def test_a_trial_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    assert unwritable([tmp_path / "old", tmp_path / "new"]) is None
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old", "old")]


def test_a_pipe_is_not_opened_before_it_is_needed(tmp_path: Path) -> None:
    """Whoever reads would take its end for that of the report."""
    os.mkfifo(tmp_path / "pipe")
    assert unwritable([tmp_path / "pipe", Path("/dev/null")]) is None


def test_the_first_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert unwritable([tmp_path / "new", tmp_path]) == f"{tmp_path}: cannot be written: is a directory"
