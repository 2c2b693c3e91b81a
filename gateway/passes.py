"""Where canaries passed and where they failed: `verified.jsonl` beside the runs, a line a verdict; the last counts.

A verdict belongs to a replica, its fingerprint, and to whether requests were kept apart in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gateway.findings import alone
from gateway.settings import Pool

Key = tuple[str, str, str, bool]


class Verdict(NamedTuple):
    """What canaries found."""

    engine: str
    """The fingerprint of the engine that was asked."""
    apart: bool
    """They were sent one at a time."""
    passed: bool
    at: float
    """Seconds since the epoch."""


class Passes:
    """The verdicts, as the file has them now. `folder`: where the runs lie."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "verified.jsonl"
        self._read: tuple[int, int] = (-1, -1)
        self._verdicts: dict[Key, bool] = {}

    def verdict(self, pool: Pool, replica: str, fingerprint: str) -> bool | None:
        """Whether canaries passed on this engine, for the lane that the pool has; None where that was not tried."""
        if not fingerprint:
            return None
        self._refresh()
        return self._verdicts.get((pool.name, replica, fingerprint, alone(pool)))

    def note(self, pool: Pool, replica: str, fingerprint: str, *, apart: bool, passed: bool, at: float) -> None:
        """Write a verdict down, unless it stands already.

        `apart`: canaries were sent one at a time. `at`: seconds since the epoch. Raises `OSError` where it cannot be
        written.
        """
        self._refresh()
        if self._verdicts.get((pool.name, replica, fingerprint, apart)) is passed:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        verdict = {
            "pool": pool.name,
            "replica": replica,
            "fingerprint": fingerprint,
            "apart": apart,
            "passed": passed,
            "at": at,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict) + "\n")

    def _refresh(self) -> None:
        try:
            state = self._file.stat()
        except OSError:
            self._read, self._verdicts = (-1, -1), {}
            return
        if (stamp := (state.st_mtime_ns, state.st_size)) != self._read:
            self._verdicts = {}
            for line in self._file.read_text("utf-8", "replace").splitlines():
                if (told := _verdict(line)) is not None:
                    self._take(*told)
            self._read = stamp

    def _take(self, key: Key, passed: bool) -> None:
        """What passes in company passes one at a time; what fails one at a time fails in company."""
        self._verdicts[key] = passed
        *engine, apart = key
        if passed != apart:
            pool, replica, fingerprint = engine
            self._verdicts[pool, replica, fingerprint, not apart] = passed


def _verdict(line: str) -> tuple[Key, bool] | None:
    """A line of the file; None for one that cannot be read."""
    try:
        told: Any = json.loads(line)
        key = (str(told["pool"]), str(told["replica"]), str(told["fingerprint"]), told["apart"] is True)
        return key, told["passed"] is True
    except (ValueError, KeyError, TypeError):
        return None
