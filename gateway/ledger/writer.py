"""Appends records to the ledger of a run.

*opened* is handed to the kernel before the request goes on, so that it survives the process; *closed* may wait for the
next write. Records of one process go into segments of its own: `{path}/{run}/{segment}.jsonl`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from gateway.core.errors import StoreFault

BUFFER_BYTES = 65536


class LedgerFault(StoreFault):
    code = "ledger_unavailable"


class Ledger:
    """The segment that this process appends to. `sync` is owed before `open` returns, never for `close`."""

    def __init__(self, path: Path, run: str, segment: str) -> None:
        self.file = path / run / f"{segment}.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._held = bytearray()

    def opened(self, record: dict[str, Any]) -> None:
        """Write a claim. Raises `LedgerFault`: the request must not go on."""
        self._held += orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        self.flush()

    def closed(self, record: dict[str, Any]) -> None:
        """Keep an end for the next write. Raises `LedgerFault` where the buffer is full and cannot be written."""
        self._held += orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        if len(self._held) > BUFFER_BYTES:
            self.flush()

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
