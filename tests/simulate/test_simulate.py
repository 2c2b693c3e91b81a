"""The simulator itself: a seed is always the same, the code as it is passes, and each planted bug is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulate.__main__ import play
from tests.simulate.bugs import BUGS, CAUGHT

SEEDS = range(int(os.environ.get("SEEDS", "3")))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_must_hold_holds(seed: int) -> None:
    assert play(seed).found == []


def test_a_seed_is_played_again_by_any_process() -> None:
    """Its digest stands for every message, fault and answer, in their order. Python's own hashes differ."""
    command = [sys.executable, "-m", "tests.simulate", "--seed", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split()[2] == play(3).digest


def test_every_planted_bug_has_a_seed() -> None:
    assert CAUGHT.keys() == BUGS.keys()


@pytest.mark.parametrize("bug", sorted(CAUGHT))
def test_a_planted_bug_is_found(bug: str) -> None:
    seed, small = CAUGHT[bug]
    assert play(seed, bug, small=small).found != []
