"""Reads single numbers out of the Prometheus text that engines expose."""

from __future__ import annotations

import re

_SAMPLE = r"^(?:%s)(?:\{[^\n]*\})? (\S+)"


def total(text: str, names: tuple[str, ...]) -> float | None:
    """The sum of all samples of these series; None where there is none."""
    if not names:
        return None
    found = re.findall(_SAMPLE % "|".join(map(re.escape, names)), text, re.MULTILINE)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def label(text: str, name: str, label: str) -> str | None:
    """The value of a label of the first sample of a series."""
    match = re.search(rf'^{re.escape(name)}\{{[^\n]*\b{re.escape(label)}="([^"]*)"', text, re.MULTILINE)
    return match[1] if match else None
