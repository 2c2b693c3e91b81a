"""Versions of engines, compared."""

from __future__ import annotations

import re


def before(version: str | None, other: str) -> bool:
    """Whether `version` is older than `other`; False where it is unknown or says no numbers."""
    ours = numbers(version or "")
    return bool(ours) and ours < numbers(other)


def numbers(version: str) -> tuple[int, ...]:
    """The release's numbers without zeros at the end; what stands behind them (`rc1`, `.dev3`) is left out."""
    found = re.match(r"v?(\d+(?:\.\d+)*?)(?:\.0)*(?!\.?\d)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()
