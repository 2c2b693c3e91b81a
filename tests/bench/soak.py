"""A million requests of a hundred thousand sessions through `detgate serve`, while its memory stays flat.

    python -m tests.bench.soak [REQUESTS]

The sessions take turns, so that each leaves memory and comes back. What the gateway has after the first tenth is what
it may have at the end, and 2 MB more.
"""

from __future__ import annotations

import sys
import time

from tests.bench import machine, parts
from tests.bench.parts import Bench

ALLOWED_KB = 2000.0


def reached(bench: Bench, requests: int) -> None:
    """Wait until the engine has answered so many."""
    while bench.told()["answered"] < requests:
        time.sleep(0.2)


def main(requests: int = 1_000_000) -> int:
    with parts.bench() as bench, parts.gateway(bench) as target:
        assert target.pid is not None
        bench.set(hold_us=0)
        since, cpu = time.monotonic(), parts.spent(target)
        found: list[int] = []
        with bench.load(target, "small", connections=64, requests=requests, sessions=max(1, requests // 10)) as load:
            for tenth in range(1, 11):
                reached(bench, requests * tenth // 10)
                found.append(machine.resident_kib(target.pid))
                print(f"{requests * tenth // 10} requests: {found[-1] / 1024:.1f} MiB", flush=True)
            told = parts.result(load)
        cpu = (parts.spent(target) - cpu) * 1e6 / requests
        grown = (found[-1] - found[0]) * 1.024
        print(
            f"{told['ok']} answers in {time.monotonic() - since:.0f} s, {told['refused'] + told['broken']} faults, "
            f"{cpu:.0f} CPU µs a request; {grown:.0f} kB more at the end than after a tenth"
        )
        return 0 if grown <= ALLOWED_KB else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
