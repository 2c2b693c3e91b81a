"""What a request costs with many in flight, many replicas, many streams, several workers.

    python -m tests.bench.scale [in-flight] [replicas] [streams] [workers]

CPU time is the operating system's, of the gateway's processes, while the load is steady.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests import ports
from tests.bench import machine, parts
from tests.bench.parts import Bench, Target, spent

IN_FLIGHT = (1, 64, 512, 2000, 5000)
A_SECOND = 500
"""Requests, however many are in flight: the engine takes so long that no more come."""
REPLICAS = (1, 4, 16, 64, 256)
STREAMS = 9000
GAP, CHUNKS = 5, 16
"""Seconds between two chunks of a stream, and how many it has: long enough that all are open before the first ends."""
ALLOWED_KB = 30.0
"""Of memory that a stream may take, in kB."""


def steady(bench: Bench, target: Target, seconds: float) -> tuple[float, float]:
    """CPU µs a request, and requests a second, of a load that is under way."""
    since, requests, cpu = time.monotonic(), bench.told()["answered"], spent(target)
    time.sleep(seconds)
    requests = bench.told()["answered"] - requests
    return (spent(target) - cpu) * 1e6 / requests, requests / (time.monotonic() - since)


def inside(bench: Bench, most: int, seconds: float = 120) -> None:
    """Wait until so many are in the engine at once. Raises `TimeoutError`."""
    until = time.monotonic() + seconds
    while bench.told()["inside"] < most:
        if time.monotonic() > until:
            raise TimeoutError(f"{bench.told()} and not {most} in flight")
        time.sleep(0.1)


def in_flight() -> None:
    """The cost by how many are in flight, at one rate."""
    print("\n| in flight | CPU µs a request | requests a second |\n|---|---|---|")
    with parts.bench() as bench:
        for number in IN_FLIGHT:
            with parts.gateway(bench) as target:
                bench.set(hold_us=0)
                bench.loaded(target, "small", connections=16, requests=2000)
                bench.set(hold_us=number * 1_000_000 // A_SECOND)
                with bench.load(target, "small", connections=number, ramp=A_SECOND, seconds=3600) as load:
                    inside(bench, int(number * 0.9))
                    time.sleep(1)
                    us, rate = steady(bench, target, 8)
                    load.kill()
                print(f"| {number} | {us:.0f} | {rate:.0f} |", flush=True)


def replicas() -> None:
    """The cost by how many replicas there are, 64 in flight; and what their probes cost."""
    print("\n| replicas | CPU µs a request | probes, CPU ms a second |\n|---|---|---|")
    for number in REPLICAS:
        with parts.bench([ports.free() for _ in range(number)]) as bench, parts.gateway(bench) as target:
            bench.loaded(target, "small", connections=64, requests=4000)
            before = spent(target)
            time.sleep(4)
            idle = (spent(target) - before) / 4
            since, before = time.monotonic(), spent(target)
            told = bench.loaded(target, "small", connections=64, seconds=4)
            used = spent(target) - before - idle * (time.monotonic() - since)
            print(f"| {number} | {used * 1e6 / told['requests']:.0f} | {idle * 1e3:.1f} |", flush=True)


def streams(number: int = STREAMS) -> None:
    """Many streams at once in one process. Raises `AssertionError` where one fails or takes too much memory."""
    with parts.bench([ports.free() for _ in range(4)]) as bench, parts.gateway(bench) as target:
        assert target.pid is not None
        bench.set(gap_us=1_000_000, chunks=2, hold_us=0)
        bench.loaded(target, "small-stream", connections=100, requests=200)
        before = machine.resident_kib(target.pid)
        bench.set(gap_us=GAP * 1_000_000, chunks=CHUNKS, hold_us=0)
        with bench.load(target, "small-stream", connections=number, requests=number, ramp=600) as load:
            inside(bench, number)
            since, cpu = time.monotonic(), spent(target)
            most = 0
            for _ in range(16):
                time.sleep(0.5)
                most = max(most, machine.resident_kib(target.pid))
            share = (spent(target) - cpu) / (time.monotonic() - since)
            told = parts.result(load)
        each = (most - before) * 1.024 / number
        print(
            f"\n{number} streams at once, a chunk each {GAP} s: {each:.1f} kB of memory a stream "
            f"({before / 1024:.0f} MiB before, {most / 1024:.0f} MiB with them), {share:.0%} of a core, "
            f"{share * GAP / number * 1e6:.0f} CPU µs a chunk; {told['streams']} ended well, "
            f"{told['refused'] + told['broken']} did not"
        )
        assert told["streams"] == number, told
        assert told["events"] == number * (CHUNKS + 3), told
        assert each <= ALLOWED_KB, each


@contextmanager
def redis() -> Iterator[str]:
    """A Redis server of its own; its address."""
    program, port = shutil.which("redis-server"), ports.free()
    if program is None:
        raise FileNotFoundError("redis-server is not installed (apt-get install redis-server)")
    with parts.started([program, "--port", str(port), "--save", "", "--bind", "127.0.0.1"]):
        yield f"redis://127.0.0.1:{port}/0"


def workers() -> None:
    """The cost by the number of workers on one port, and how the requests are spread over them."""
    print("\n| state, workers | CPU µs a request, all of them | requests a second | the busiest one's share |")
    print("|---|---|---|---|")
    for number in (0, 1, 2, 4):
        with ExitStack() as stack:
            bench = stack.enter_context(parts.bench())
            given: dict[str, Any] = {}
            if number:
                given = {"state": stack.enter_context(redis()), "run": "bench", "workers": number}
            target = stack.enter_context(parts.gateway(bench, cores=set(parts.CORES), **given))
            assert target.pid is not None
            bench.loaded(target, "small", connections=64, requests=4000)
            each = {pid: machine.alone_seconds(pid) for pid in machine.tree(target.pid)}
            told = bench.loaded(target, "small", connections=128, seconds=5)
            used = [machine.alone_seconds(pid) - before for pid, before in each.items()]
            name = f"redis, {number}" if number else "memory, 1"
            us, rate = sum(used) * 1e6 / told["requests"], told["requests"] / told["seconds"]
            print(f"| {name} | {us:.0f} | {rate:.0f} | {max(used) / sum(used):.0%} |", flush=True)


PARTS = {"in-flight": in_flight, "replicas": replicas, "streams": streams, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    for part in parser.parse_args().parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
