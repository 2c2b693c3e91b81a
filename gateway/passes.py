"""On which engines canaries have passed: `verified.jsonl` beside the runs, a line a verdict, of which the last counts.

A verdict belongs to a replica, its fingerprint, and to whether requests were kept apart in it: what passed one at a
time may fail in company, not the other way round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.findings import alone
from gateway.settings import Pool

Key = tuple[str, str, str, bool]


class Passes:
    """The verdicts, as the file has them now. `folder`: where the runs lie."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "verified.jsonl"
        self._read: tuple[int, int] = (-1, -1)
        self._verdicts: dict[Key, bool] = {}

    def has(self, pool: Pool, replica: str, fingerprint: str) -> bool:
        """Whether canaries have passed on this engine, for the lane that the pool has."""
        if not fingerprint:
            return False
        self._refresh()
        passed = self._verdicts.get
        crowded = passed((pool.name, replica, fingerprint, False))
        return bool(crowded or (alone(pool) and passed((pool.name, replica, fingerprint, True))))

    def note(self, pool: Pool, replica: str, fingerprint: str, *, apart: bool, passed: bool, at: float) -> None:
        """Write a verdict down. `apart`: canaries were sent one at a time. `at`: seconds since the epoch.

        Raises `OSError` where it cannot be written.
        """
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
            self._verdicts = dict(filter(None, map(_verdict, self._file.read_text("utf-8").splitlines())))
            self._read = stamp


def _verdict(line: str) -> tuple[Key, bool] | None:
    """A line of the file; None for one that cannot be read."""
    try:
        told: Any = json.loads(line)
        key = (str(told["pool"]), str(told["replica"]), str(told["fingerprint"]), told["apart"] is True)
        return key, told["passed"] is True
    except (ValueError, KeyError, TypeError):
        return None
