"""The Dockerfile, read: `make test-image` runs what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.deploy import image

ROOT = image.ROOT
BUILD, RUN = image.stages()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    ended = subprocess.run([hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True)
    assert ended.returncode == 0, ended.stdout.decode()


def test_it_is_slim_pinned_and_runs_as_nobody() -> None:
    for stage in (BUILD, RUN):
        [base] = image.of(stage, "FROM")
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+( AS \w+)?", base), base
    [user] = image.of(RUN, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be checked"
    assert image.of(RUN, "STOPSIGNAL") == ["SIGTERM"]
    assert "pip install" not in " ".join(image.of(RUN, "RUN"))


def test_only_what_the_package_needs_is_sent_to_the_builder() -> None:
    sent = image.context()
    assert {"gateway/cli.py", "requirements/lock.txt", "pyproject.toml", "README.md", "LICENSE"} <= sent
    assert {name.partition("/")[0] for name in sent} == {
        *("gateway", "requirements", "pyproject.toml", "README.md", "LICENSE")
    }
