"""Appends records to the ledger of a run.

*opened* is handed to the kernel before the request goes on, so that it survives the process; *closed* in the same turn
of the event loop, with all others of that turn. A write happens whole or not at all. Each process writes segments of
its own, whose names sort as they were begun; what is full is followed by another.

Where the disk is full, the segment was taken away, or it cannot be written for another reason, `ledger.on_error` says
what becomes of requests. With `fail` none goes on, and nothing is missing afterwards. With `continue` they go on
unrecorded: a *gap* record says how many, once it can be written, and until then a file whose name ends in `.gap` says
that there is one. There is such a file beside a segment's empty place too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import structlog

from gateway.core.errors import StoreFault

log = structlog.get_logger("detgate.ledger")

SEGMENT_BYTES = 268_435_456

_LEVELS = 32
"""Levels of lists and objects that are kept of a record that cannot be written as it is."""


class LedgerFault(StoreFault):
    code = "ledger_unwritable"


class Mark(NamedTuple):
    """A place in the ledger of a run."""

    segment: str
    """The name of the file."""
    offset: int


class Ledger:
    """The segments that this process appends to, in the folder of a run. `failed` is called when a write fails."""

    def __init__(
        self,
        folder: Path,
        run: str = "",
        *,
        segment_bytes: int = SEGMENT_BYTES,
        on_error: Literal["fail", "continue"] = "fail",
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._run = run
        self._segment_bytes = segment_bytes
        self._lenient = on_error == "continue"
        self._failed = failed
        self._due = False
        self._held = bytearray()
        self._begun = False
        """A part was written."""
        self._torn = False
        """A line was begun that could not be taken back."""
        self._lost = False
        """The segment is not in its place any more: what is written to it nobody would find."""
        self._why = ""
        self.broken = False
        """The last write failed."""
        self.missing = 0
        """Records that went unwritten since then."""
        self._begin()
        self.spare = self.file.with_suffix(".spare")
        """Becomes the mark of a gap, since a full disk takes no new file."""
        self.spare.touch()

    @property
    def mark(self) -> Mark:
        """Where the next record will stand."""
        return Mark(self.file.name, self._size + len(self._held))

    # --- what happened
    def claimed(self, record: dict[str, Any]) -> bool:
        """Write a claim. False: it could not be written, and its request goes on without a record.

        Raises `LedgerFault`: then its request must not go on. The record is kept, and stands before that of its end.
        """
        held = len(self._held)
        self._held += _line(record)
        if self._flushed():
            return True
        if self._lenient:
            self._miss(held)
            return False
        raise self._fault()

    def opened(self, *records: dict[str, Any]) -> None:
        """Write what must be known before anything follows from it.

        Raises `LedgerFault`: then nothing may follow from any of the records, and none of them is kept.
        """
        held = len(self._held)
        for record in records:
            self._held += _line(record)
        if self._flushed():
            return
        if self._lenient:
            self._miss(held)
            return
        del self._held[held:]
        raise self._fault()

    def complete(self, record: dict[str, Any]) -> None:
        """Write that an answer is whole, before its last byte leaves."""
        self._held += _line(record)
        self._flushed()

    def closed(self, record: dict[str, Any]) -> None:
        """Write an end before this turn of the loop is over, or as soon as it can be written."""
        self._held += _line(record)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def check(self) -> None:
        """Try again to write what could not be written. Raises `LedgerFault` where no request may go on without."""
        if not (self._flushed() or self._lenient):
            raise self._fault()

    def unwritable(self) -> str | None:
        """Why no request may go on, if so: the ledger cannot be written now either."""
        if not self.broken or self._lenient or self._flushed():
            return None
        return self._fault().message

    def look(self) -> None:
        """Notice whether the segment was taken away, or is back. Meanwhile nothing is written, and there is a gap."""
        lost = self._is_lost()
        if lost == self._lost:
            return
        self._lost = lost
        if lost:
            self._mark()
            self._flushed()
        elif not self.missing:
            self._unmark()

    def flush(self) -> None:
        """Hand all that is held to the kernel. Raises `LedgerFault`."""
        if not self._flushed():
            raise self._fault()

    def close(self) -> bool:
        """Write no more. Whether all was written, and can be found."""
        self.look()
        whole = self._flushed() and not self.missing
        os.close(self._fd)
        if whole:
            self.spare.unlink(missing_ok=True)
        return whole

    def abandon(self) -> None:
        """Write no more, and leave no file in which nothing stands."""
        self.close()
        for file in (self.file, self.spare):
            with suppress(OSError):
                if not file.stat().st_size:
                    file.unlink()

    # --- the file
    def _begin(self) -> None:
        """A new segment. Its name is greater than all there are, whatever the clock says."""
        last = max((_number(file) for file in self._folder.glob("*.jsonl")), default=0)
        file = self._folder / f"{max(time.time_ns(), last + 1)}-{os.getpid()}.jsonl"
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.file, self._size, self._inode = file, 0, _inode(os.fstat(self._fd))

    def _is_lost(self) -> bool:
        try:
            return _inode(self.file.stat()) != self._inode
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return self._lost

    def _rotate(self) -> None:
        """Go on in a new segment; in the old one where there can be no other, or that was taken away."""
        self.look()
        if self._lost:
            return
        full = self._fd
        with suppress(OSError):
            self._begin()
            os.close(full)

    def _flush_due(self) -> None:
        self._due = False
        self._flushed()

    def _flushed(self) -> bool:
        """Whether all that was held is with the kernel now."""
        if not (self._held or self.missing or self._lost):
            return True
        try:
            self._write()
        except OSError as error:
            self._break(error)
            return False
        if self._size >= self._segment_bytes:
            self._rotate()
        return True

    def _write(self) -> None:
        if self._lost:
            raise OSError(errno.ENOENT, "its segment was removed or renamed")
        data = self._told() + self._held if self.broken else self._held
        size = os.write(self._fd, data)
        while size < len(data):
            self._begun = True
            size += os.write(self._fd, bytes(data[size:]))
        self._begun = False
        self._held.clear()
        self._size += size
        if self.broken:
            self._mended()

    def _break(self, error: OSError) -> None:
        """Take back what was begun."""
        self._failed()
        if self._begun:
            self._begun = False
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                self._torn = True
        self._why = error.strerror or str(error)
        if not self.broken:
            self.broken = True
            log.error("the ledger cannot be written", run=self._run, file=str(self.file), why=self._why)

    def _fault(self) -> LedgerFault:
        return LedgerFault(f"The ledger cannot be written: {self._why}.", retry_after=5)

    def _miss(self, held: int) -> None:
        """Do without what was added last, and let it be known that there is a gap."""
        del self._held[held:]
        self.missing += 1
        if self.missing == 1:
            self._mark()

    def _mark(self) -> None:
        """Let it be known that there is a gap. Where the whole folder was taken away nobody can be told."""
        mark = self.spare.with_suffix(".gap")
        try:
            self.spare.rename(mark)
        except FileNotFoundError:
            with suppress(OSError):
                mark.touch()
        except OSError as error:
            log.error("a gap in the ledger cannot be marked", run=self._run, why=error.strerror)

    def _unmark(self) -> None:
        with suppress(OSError):
            self.spare.with_suffix(".gap").rename(self.spare)

    def _told(self) -> bytes:
        """What is written before all else after a time when nothing could be written."""
        told = b"\n" if self._torn else b""
        if self.missing:
            gap = {"event": "gap", "run": self._run, "time": time.time(), "missing": self.missing}
            told += orjson.dumps(gap, option=orjson.OPT_APPEND_NEWLINE)
        return told

    def _mended(self) -> None:
        log.warning("the ledger can be written again", run=self._run, missing=self.missing)
        if self.missing:
            self._unmark()
        self.broken, self._torn, self.missing = False, False, 0


def _line(record: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return orjson.dumps(_writable(record), option=orjson.OPT_APPEND_NEWLINE)


def _writable(value: Any, levels: int = _LEVELS) -> Any:
    """What comes nearest of what can be written: lone surrogates are spelled out, other things are null."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else None
    if isinstance(value, float):
        return value
    if levels and isinstance(value, Mapping):
        return {_writable(str(name)): _writable(inner, levels - 1) for name, inner in value.items()}
    if levels and isinstance(value, list | tuple):
        return [_writable(inner, levels - 1) for inner in value]
    return None


def _inode(told: os.stat_result) -> tuple[int, int]:
    return told.st_dev, told.st_ino


def _number(file: Path) -> int:
    """The number that a segment's name begins with."""
    number = file.stem.partition("-")[0]
    return int(number) if number.isdecimal() else 0
