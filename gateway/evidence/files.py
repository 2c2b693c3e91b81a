"""Files that commands read and write, and why one cannot be."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def because(error: OSError) -> str:
    """Why the system refused, in words."""
    return (error.strerror or str(error) or type(error).__name__).lower()


def unwritable(files: Iterable[Path]) -> str | None:
    """The first file that cannot be written, and why; None: all can. Asked before the work whose result they hold."""
    for file in files:
        try:
            _try(file)
        except OSError as error:
            return _cannot(file, error)
    return None


def write(file: Path, data: bytes) -> bool:
    """Write a result. False: it cannot be, as standard error says."""
    try:
        file.write_bytes(data)
    except OSError as error:
        print(f"detgate: {_cannot(file, error)}", file=sys.stderr)
        return False
    return True


def _try(file: Path) -> None:
    """Leaves a file as it is, and none where there was none. What is no file, as a pipe, is not opened twice."""
    if file.exists() and not file.is_file() and not file.is_dir():
        if not os.access(file, os.W_OK):
            raise PermissionError(0, "permission denied")
        return
    new = not file.exists()
    with file.open("ab"):
        pass
    if new:
        file.unlink()


def _cannot(file: Path, error: OSError) -> str:
    return f"{file}: cannot be written: {because(error)}"
