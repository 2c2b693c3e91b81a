"""Reads the records of a run back: what a restarted gateway must know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.ledger.shapes import foreign, unsound, wrong
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


def changes(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of what became of the fleet and of weights, oldest segment first. Raises `Unreadable`."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as segment:
            for number, line in enumerate(segment, 1):
                if (b'"event":"weights"' in line or b'"event":"fleet"' in line) and line.endswith(b"\n"):
                    with suppress(orjson.JSONDecodeError):
                        record = orjson.loads(line)
                        if isinstance(record, dict) and record.get("event") in ("weights", "fleet"):
                            if (why := wrong(record)) is not None:
                                raise unsound(f"{file}, line {number}", why)
                            yield record


def own(folder: Path, run: str) -> None:
    """Raises `Unreadable` where a segment begins with a record of another run."""
    for file in folder.glob("*.jsonl"):
        with file.open("rb") as segment, suppress(orjson.JSONDecodeError):
            record = orjson.loads(segment.readline())
            if isinstance(record, dict) and (why := foreign(record, run)) is not None:
                raise unsound(f"{file}, line 1", why)


def asked(folder: Path) -> Iterator[bytes]:
    """The records of claims, as they stand."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as segment:
            yield from (line for line in segment if line.startswith(b'{"event":"opened"'))


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
