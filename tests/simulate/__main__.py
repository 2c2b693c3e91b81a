"""Play seeds, and say which of them find something: `python -m tests.simulate --seeds 2000`."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

from tests.simulate.bugs import BUGS, CAUGHT, Story, planted
from tests.simulate.clients import FEW, SIZES
from tests.simulate.invariants import check
from tests.simulate.world import World

AGAIN = 50
"""Every so many seeds one is played twice, to see that it replays."""


class Played(NamedTuple):
    """What came of one seed."""

    seed: int
    digest: str
    """Stands for all that happened."""
    found: list[str]
    """What did not hold."""
    lines: list[str]
    """All that happened, if that was asked for."""


def play(seed: int, bug: str | None = None, *, traced: bool = False, small: bool = False) -> Played:
    """One seed, in a process of its own: whatever stood still in it when it was over must never go on.

    `small`: with a third of the sessions.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not matter: nothing of theirs is used
        child = os.fork()
    if not child:
        try:
            os.close(reads)
            gc.disable()
            with os.fdopen(writes, "wb") as answer:
                answer.write(pickle.dumps(_play(seed, bug, traced, small)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(told) if told else Played(seed, "", ["error: it came to no end"], [])


def _play(seed: int, bug: str | None, traced: bool, small: bool) -> Played:
    lines: list[str] = []
    with planted(bug) if bug else nullcontext():
        world = World(seed, sizes=FEW if small else SIZES, trace=lines if traced else None)
        try:
            world.run()
            return Played(seed, world.digest, check(world), lines)
        finally:
            world.close()


def _played(seed: int) -> Played:
    played = play(seed)
    if seed % AGAIN == 0 and (again := play(seed).digest) != played.digest:
        played.found.append(f"replay: {played.digest} and then {again}")
    return played


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", help="write down all that happens in it")
    parser.add_argument("--bug", choices=BUGS, help="with this bug planted")
    parser.add_argument("--small", action="store_true", help="with a third of the sessions")
    parser.add_argument("--bugs", action="store_true", help="search a seed for each planted bug")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    if given.bugs:
        return _search(given.seeds)
    if given.seed is not None or given.trace:
        played = play(given.seed or 0, given.bug, traced=bool(given.trace), small=given.small)
        if given.trace:
            with open(given.trace, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in played.lines)
        print(f"seed {played.seed}: {played.digest}")
        return _tell(played, given.bug)
    seeds = range(given.first, given.first + given.seeds)
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(given.jobs) as workers:
        for number, played in enumerate(workers.map(_played, seeds, chunksize=4), 1):
            failed += _tell(played)
            if sys.stderr.isatty() or number % 100 == 0:
                print(f"{number} of {len(seeds)} seeds, {failed} failed", file=sys.stderr)
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds in {seconds:.0f} s, {seconds / len(seeds):.2f} s each: {failed} failed")
    return failed > 0


def _tell(played: Played, bug: str | None = None) -> bool:
    """Say what did not hold, if anything did not."""
    if played.found:
        planted_bug = f" --bug {bug}" if bug else ""
        print(f"seed {played.seed} fails: make simulate ARGS='--seed {played.seed}{planted_bug}'")
        for line in played.found[:20]:
            print(f"    {line}", flush=True)
    return bool(played.found)


def _search(seeds: int) -> int:
    """For each bug the first seed that finds it, where the code as it is passes.

    Begins with those that are noted, goes on with a dozen small stories, and then plays whole ones.
    """
    missed = 0
    for bug in BUGS:
        noted = [CAUGHT[bug]] if bug in CAUGHT else []
        tried: Iterable[Story] = chain(
            noted, ((seed, True) for seed in range(12)), ((seed, False) for seed in range(seeds))
        )
        for number, (seed, small) in enumerate(tried, 1):
            found = play(seed, bug, small=small).found
            if found and not play(seed, small=small).found:
                print(f'    "{bug}": ({seed}, {small}),  # after {number}: {found[0][:90]}', flush=True)
                break
        else:
            missed += 1
            print(f"{bug} is not found within {seeds} seeds", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
