"""Suites that are programs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


async def output(*command: str | Path, folder: Path | None = None) -> tuple[int, str]:
    """The exit status of a program, and all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    written, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, _COLOURS.sub("", written.decode(errors="replace")).replace("\r", "\n")
