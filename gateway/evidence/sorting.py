"""Sorts more than fits into memory: runs of it are sorted, put aside in a temporary file, and merged when read."""

from __future__ import annotations

import heapq
import marshal
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HELD_BYTES = 32 << 20
"""What is kept in memory before it is put aside, not counting Python's own 33 bytes an item."""

BLOCK = 256
"""Items of each run that are in memory at once while the runs are merged."""


Runs = list[list[tuple[int, int]]]
"""For each run, where its blocks stand in the file: offset and length."""


class Sorter:
    """Items go in by `add` in any order and come out sorted, once. `file`: where runs are put aside."""

    def __init__(self, held_bytes: int = HELD_BYTES, file: Path | None = None) -> None:
        self._limit = held_bytes
        self._file = file
        self._held: list[bytes] = []
        self._bytes = 0
        self._count = 0
        self._aside: IO[bytes] | None = None
        self._runs: Runs = []

    @classmethod
    def of(cls, file: Path, runs: Runs, count: int) -> Sorter:
        """What another process has put aside in a file."""
        found = cls()
        found._aside, found._runs, found._count = file.open("rb"), runs, count
        return found

    def __len__(self) -> int:
        return self._count

    def add(self, item: bytes) -> None:
        """Take an item in."""
        self._held.append(item)
        self._count += 1
        self._bytes += len(item)
        if self._bytes >= self._limit:
            self._put_aside()

    def __iter__(self) -> Iterator[bytes]:
        if self._aside is None:
            self._held.sort()
            return iter(self._held)
        if self._held:
            self._put_aside()
        return heapq.merge(*[self._read(self._aside, run) for run in self._runs])

    def put_aside(self) -> Runs:
        """Put everything aside, for whoever opens the file. Where it stands there."""
        self._put_aside()
        return self._runs

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()
        if self._aside is not None:
            self._aside.close()

    def _put_aside(self) -> None:
        if self._aside is None:
            # close() closes it
            self._aside = tempfile.TemporaryFile(prefix="detgate-") if self._file is None else self._file.open("wb")  # noqa: SIM115
        self._held.sort()
        run = []
        for start in range(0, len(self._held), BLOCK):
            block = marshal.dumps(self._held[start : start + BLOCK])
            run.append((self._aside.tell(), len(block)))
            self._aside.write(block)
        self._aside.flush()
        self._runs.append(run)
        self._held = []
        self._bytes = 0

    def _read(self, aside: IO[bytes], run: list[tuple[int, int]]) -> Iterator[bytes]:
        for offset, length in run:
            yield from marshal.loads(os.pread(aside.fileno(), length, offset))
