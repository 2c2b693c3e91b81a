"""Standard output for people: as wide and as coloured as their terminal, and plain text for whatever else reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from rich.console import Console

_WHOLE = 1_000_000
"""Columns in which no line is broken."""


@contextmanager
def output() -> Iterator[Console]:
    """A console whose text goes to standard output; where that is no terminal, when all is said.

    There every line stays whole, whatever the terminal's width, and has no colours and no spaces at its end.
    """
    if sys.stdout.isatty():
        yield Console(emoji=False)
        return
    said = StringIO()
    yield Console(file=said, width=_WHOLE, color_system=None, force_terminal=False, emoji=False)
    sys.stdout.writelines(f"{line.rstrip(' ')}\n" for line in said.getvalue().removesuffix("\n").split("\n"))
