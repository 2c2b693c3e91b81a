"""Reads the records of a run back: what a restarted gateway must know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(slots=True)
class Segments:
    """The segments of one run, oldest first. `gap` is set while reading: a line in the middle cannot be read."""

    folder: Path
    gap: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every record. A torn last line of a segment is what a killed process leaves, and is passed over."""
        for file in sorted(self.folder.glob("*.jsonl")):
            lines = file.read_bytes().split(b"\n")
            torn = lines.pop()
            for line in lines:
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    self.gap = True
                    continue
                if isinstance(record, dict):
                    yield record
            if torn:
                _mend(file, torn)


def _mend(file: Path, torn: bytes) -> None:
    """Cut a torn last line off, so that readers of JSON lines do not trip over it."""
    with file.open("r+b") as segment:
        segment.truncate(file.stat().st_size - len(torn))
