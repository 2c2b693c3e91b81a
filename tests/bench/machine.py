"""What the operating system says of processes: CPU time and memory of a process and all that it started."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
_ALL_THREADS = 2
"""What Linux adds to a process's number for the clock of its CPU time, in nanoseconds: clock_getcpuclockid(3)."""


def tree(pid: int) -> list[int]:
    """A process and those below it, as they are now."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        try:
            tasks = list(Path(f"/proc/{one}/task").iterdir())
            left += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
        found.append(one)
    return found


def alone_seconds(pid: int) -> float:
    """User and system time that one process has taken so far; 0 where it has ended."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | _ALL_THREADS)
    return 0.0


def cpu_seconds(pid: int) -> float:
    """The same of a process and those below it."""
    return sum(map(alone_seconds, tree(pid)))


def resident_kib(pid: int) -> int:
    """Resident memory of a process and those below it."""
    found = 0
    for one in tree(pid):
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found += int(line.split()[1])
    return found


def busy_seconds() -> float:
    """CPU time that the whole machine has spent so far, on whatever."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return sum(fields[at] for at in (0, 1, 2, 5, 6)) / TICKS
