"""Appends records to the ledger of a run.

*opened* is handed to the kernel before the request goes on, so that it survives the process; *closed* in the same turn
of the event loop, with all others of that turn. Each process writes segments of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gateway.core.errors import StoreFault


class LedgerFault(StoreFault):
    code = "ledger_unavailable"


class Mark(NamedTuple):
    """A place in the ledger of a run."""

    segment: str
    """The name of the file."""
    offset: int


class Ledger:
    """The segment that this process appends to. `failed` is called when what was closed cannot be written."""

    def __init__(self, file: Path, failed: Callable[[], None] = lambda: None) -> None:
        self.file = file
        self.failed = failed
        self._due = False
        self._fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._held = bytearray()

    @property
    def mark(self) -> Mark:
        """Where the next record will stand."""
        return Mark(self.file.name, os.fstat(self._fd).st_size + len(self._held))

    def opened(self, *records: dict[str, Any]) -> None:
        """Write a claim, or whatever else must be known before anything follows from it.

        Raises `LedgerFault`: then nothing may follow from any of the records, of which a part may be there.
        """
        line = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)
        self._held += line
        try:
            self.flush()
        except LedgerFault:
            left = len(self._held)
            del self._held[max(0, left - len(line)) :]
            if left < len(line):
                self._held += b"\n"  # ends the line that was begun
            raise

    def closed(self, record: dict[str, Any]) -> None:
        """Write an end before this turn of the loop is over."""
        self._held += orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def _flush_due(self) -> None:
        self._due = False
        try:
            self.flush()
        except LedgerFault:
            self.failed()

    def flush(self) -> None:
        """Hand all that is held to the kernel."""
        held = self._held
        try:
            while held:
                del held[: os.write(self._fd, held)]
        except OSError as error:
            raise LedgerFault(f"The ledger cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        self.flush()
        os.close(self._fd)
