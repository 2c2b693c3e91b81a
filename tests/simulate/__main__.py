"""Play seeds, and say which of them find something: `python -m tests.simulate --seeds 2000`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from tests.simulate.bugs import BUGS, CAUGHT, planted
from tests.simulate.invariants import check
from tests.simulate.world import World

AGAIN = 50
"""Every so many seeds one is played twice, to see that it replays."""


def play(seed: int, bug: str | None = None, lines: list[str] | None = None) -> tuple[int, str, list[str]]:
    """One seed: what stands for all that happened, and what did not hold."""
    with planted(bug) if bug else nullcontext():
        world = World(seed, trace=lines)
        try:
            world.run()
            return seed, world.digest, check(world)
        finally:
            world.close()


def _played(seed: int) -> tuple[int, str, list[str]]:
    seed, digest, found = play(seed)
    if seed % AGAIN == 0 and (again := play(seed)[1]) != digest:
        found = [*found, f"replay: {digest} and then {again}"]
    return seed, digest, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", help="write down all that happens in it")
    parser.add_argument("--bug", choices=BUGS, help="with this bug planted")
    parser.add_argument("--bugs", action="store_true", help="search a seed for each planted bug")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    if given.bugs:
        return _search(given.seeds)
    if given.seed is not None or given.trace:
        lines: list[str] | None = [] if given.trace else None
        _, digest, found = play(given.seed or 0, given.bug, lines)
        if given.trace:
            with open(given.trace, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines or ())
        print(f"seed {given.seed}: {digest}")
        return _tell(given.seed, found, given.bug)
    seeds = range(given.first, given.first + given.seeds)
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(given.jobs) as workers:
        for number, (seed, _, found) in enumerate(workers.map(_played, seeds, chunksize=4), 1):
            failed += _tell(seed, found, None)
            if sys.stderr.isatty() or number % 100 == 0:
                print(f"{number} of {len(seeds)} seeds, {failed} failed", file=sys.stderr)
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s: {failed} failed")
    return failed > 0


def _tell(seed: int, found: list[str], bug: str | None) -> int:
    if not found:
        return 0
    planted_bug = f" --bug {bug}" if bug else ""
    print(f"seed {seed} fails: make simulate ARGS='--seed {seed}{planted_bug}'")
    for line in found[:20]:
        print(f"    {line}")
    return 1


def _search(seeds: int) -> int:
    """For each bug the first seed that finds it, where the code as it is passes. Begins with those that are noted."""
    missed = 0
    for bug in BUGS:
        tried: Iterable[int] = [*([CAUGHT[bug]] if bug in CAUGHT else []), *range(seeds)]
        for number, seed in enumerate(tried, 1):
            _, _, found = play(seed, bug)
            if found and not play(seed)[2]:
                print(f'    "{bug}": {seed},  # after {number}: {found[0][:90]}', flush=True)
                break
        else:
            missed += 1
            print(f"{bug} is not found within {seeds} seeds", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
