"""Reads the records of a run back: what a restarted gateway must know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.ledger.writer import Ledger

BUFFER = 1 << 20


@dataclass(slots=True)
class Segments:
    """The segments of one run, oldest first. While they are read, `gaps` counts where records are missing.

    That is so at a line in the middle that cannot be read, and where the ledger itself tells of a gap.
    """

    folder: Path
    gaps: int = 0
    file: Path | None = None
    line: int = 0
    """Where the record stands that came last, from line 1."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every record. A torn last line of a segment is what a killed process leaves, and is cut off."""
        for file in sorted(self.folder.glob("*.jsonl")):
            yield from self._read(file)

    def _read(self, file: Path) -> Iterator[dict[str, Any]]:
        with file.open("rb", buffering=BUFFER) as segment:
            for number, line in enumerate(segment, 1):
                if not line.endswith(b"\n"):
                    _mend(file, line)
                    return
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    self.gaps += 1
                    continue
                if isinstance(record, dict):
                    self.gaps += record.get("event") == "gap"
                    self.file, self.line = file, number
                    yield record


def unmarked(folder: Path) -> int:
    """How many gaps there are that no record tells of yet: a process died while it could not write."""
    return sum(1 for _ in folder.glob("*.gap"))


def forget(folder: Path, but: Ledger) -> None:
    """Remove what processes that died have left beside their segments, once it is known to the ledger."""
    for ending in ("*.gap", "*.spare"):
        for file in folder.glob(ending):
            if file != but.spare:
                file.unlink(missing_ok=True)


def _mend(file: Path, torn: bytes) -> None:
    """Cut a torn last line off, so that readers of JSON lines do not trip over it."""
    with file.open("r+b") as segment:
        segment.truncate(file.stat().st_size - len(torn))
