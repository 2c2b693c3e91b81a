"""Both sides of a comparison read at once, where they are large: the second by a process of its own.

What it has sorted comes back as a file, so nothing but places and counts goes between the two.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from gateway.evidence.ledgers import Place, Source, Unusable
from gateway.evidence.requests import Requests, Watch
from gateway.evidence.sorting import Runs, Sorter

LARGE = 64 << 20
"""Bytes of the smaller side from which on a process of its own is worth its start."""


class _Read(NamedTuple):
    """What was read, but for what is in the file."""

    runs: set[str]
    seeds: dict[str, int]
    fenced: set[str]
    waited: set[tuple[str, str]]
    torn: int
    last: Place | None
    claims: int
    sorted: Runs


def both(a: Source, b: Source, watch: Watch) -> tuple[Requests, Requests]:
    """Read two sources. `watch` is told how many bytes of both have been read. Raises `Unusable` as `Requests.read`."""
    if min(a.bytes, b.bytes) < LARGE or len(os.sched_getaffinity(0)) < 2:
        mine = Requests.read(a, watch)
        return mine, Requests.read(b, lambda done: watch(a.bytes + done))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="detgate-") as folder:
        file = Path(folder) / "sorted"
        other = context.Process(target=_read, args=(b, file, theirs), daemon=True)
        other.start()
        theirs.close()
        try:
            return _together(a, b, file, ours, watch)
        finally:
            other.kill()
            other.join()
            ours.close()


def _together(a: Source, b: Source, file: Path, line: Connection, watch: Watch) -> tuple[Requests, Requests]:
    """Read one side, and hear of the other."""
    come = [0, 0]
    told: _Read | Unusable | None = None

    def hear() -> None:
        nonlocal told
        try:
            news = line.recv()
        except EOFError:
            told = Unusable(f"{b.name}: the process that read it has ended")
            return
        if isinstance(news, int):
            come[1] = news
        else:
            told = news

    def read(done: int) -> None:
        come[0] = done
        while told is None and line.poll():
            hear()
        watch(sum(come))

    mine = Requests.read(a, read)
    try:
        while told is None:
            hear()
            watch(sum(come))
        if isinstance(told, Unusable):
            raise told
        runs, seeds, fenced, waited, torn, last, claims, placed = told
        return mine, Requests(b, Sorter.of(file, placed, claims), runs, seeds, fenced, waited, torn, last)
    except BaseException:
        mine.sorter.close()
        raise


def _read(source: Source, file: Path, line: Connection) -> None:
    """What the other process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send: Callable[[int | _Read | Unusable], None] = line.send
    try:
        found = Requests.read(source, send, Sorter(file=file))
    except Unusable as unusable:
        send(unusable)
    else:
        sorted = found.sorter.put_aside()
        told = (found.runs, found.seeds, found.fenced, found.waited, found.torn, found.last)
        send(_Read(*told, len(found), sorted))
