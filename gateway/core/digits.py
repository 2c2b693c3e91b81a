"""Natural order of names: runs of digits compare as numbers, so `17:2` stands before `17:10`."""

from __future__ import annotations

import re

_RUNS = re.compile(r"[0-9]+|[^0-9]+")


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key. Digits stand before other text; equal numbers written differently are told apart by their text."""
    return tuple((0, int(run), run) if run.isdecimal() else (1, 0, run) for run in _RUNS.findall(text))
