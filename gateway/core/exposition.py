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


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """The sums of a series' samples by the value of one label; empty where there is none."""
    sums: dict[str, float] = {}
    for value, count in re.findall(
        rf'^{re.escape(name)}\{{[^\n]*\b{re.escape(label)}="([^"]*)"[^\n]*\}} (\S+)', text, re.M
    ):
        try:
            sums[value] = sums.get(value, 0.0) + float(count)
        except ValueError:
            return {}
    return sums


def label(text: str, name: str, label: str) -> str | None:
    """The value of a label of the first sample of a series."""
    match = re.search(rf'^{re.escape(name)}\{{[^\n]*\b{re.escape(label)}="([^"]*)"', text, re.MULTILINE)
    return match[1] if match else None
