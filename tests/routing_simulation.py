"""What `routing.slack` costs and buys: the same requests twice through the gateway's own rule, without a server.

Sessions of a few turns each wait in a queue; so many run at once, one request of each in flight. A request is in its
replica for a log-normal time, the same in both runs but for a jitter. Nothing else differs between the runs: what goes
to another replica the second time does so because requests ended in another order.

    python -m tests.routing_simulation --plot docs/images/routing.svg
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from gateway.core.routing import choose
from tests import charts

SLACKS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
JITTERS = (0.01, 0.1)


@dataclass(frozen=True)
class Traffic:
    """What is sent, and to how many replicas."""

    replicas: int = 4
    in_flight: int = 64
    turns: int = 1
    """Requests of one session, each sent when the one before has ended."""
    requests: int = 4096
    spread: float = 1.0
    """Standard deviation of the logarithm of a request's time; its median is 1."""
    jitter: float = 0.01
    """The same of the factor by which the time differs from run to run."""

    def times(self, run: int) -> list[float]:
        """How long each request takes in a run."""
        plain, jitter = Random("times"), Random(f"run {run}")
        return [
            plain.lognormvariate(0, self.spread) * jitter.lognormvariate(0, self.jitter)
            for _ in range(self.requests)
        ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one run did."""

    went: list[str]
    """The replica of each request."""
    peak: int
    """The most requests that any replica had in flight at once."""

    @property
    def imbalance(self) -> float:
        """Requests of the busiest replica over the mean, all in all."""
        counts = Counter(self.went)
        return max(counts.values()) * len(counts) / len(self.went)


def simulate(traffic: Traffic, slack: float, run: int) -> Outcome:
    """One run of the traffic."""
    times = traffic.times(run)
    loads = dict.fromkeys((f"policy-{number}" for number in range(traffic.replicas)), 0)
    went = [""] * traffic.requests
    peak = 0
    ends: list[tuple[float, int]] = []
    sessions = iter(range(0, traffic.requests, traffic.turns))

    def begin(request: int, now: float) -> None:
        nonlocal peak
        session, turn = divmod(request, traffic.turns)
        went[request] = name = choose(f"{session}:{turn}", loads, slack)
        loads[name] += 1
        peak = max(peak, loads[name])
        heapq.heappush(ends, (now + times[request], request))

    for _, first in zip(range(traffic.in_flight), sessions, strict=False):
        begin(first, 0.0)
    while ends:
        now, request = heapq.heappop(ends)
        loads[went[request]] -= 1
        following = request + 1 if (request + 1) % traffic.turns else next(sessions, None)
        if following is not None and following < traffic.requests:
            begin(following, now)
    return Outcome(went, peak)


@dataclass(frozen=True)
class Row:
    """Two runs compared."""

    slack: float
    moved: float
    """Share of requests on another replica in the second run."""
    peak: int
    imbalance: float


def compare(traffic: Traffic, slack: float) -> Row:
    """Run the traffic twice."""
    first, second = (simulate(traffic, slack, run) for run in (1, 2))
    moved = sum(one != other for one, other in zip(first.went, second.went, strict=True))
    return Row(
        slack,
        moved / traffic.requests,
        max(first.peak, second.peak),
        max(first.imbalance, second.imbalance),
    )


def table(columns: Sequence[Sequence[Row]]) -> str:
    """Markdown, a line for each slack. `columns`: the rows of each jitter; peaks and imbalances are the largest."""
    lines = [
        "| slack | moved, jitter 1 % | moved, jitter 10 % | peak in flight | assigned, max / mean |",
        "|---|---|---|---|---|",
    ]
    for rows in zip(*columns, strict=True):
        cells = [
            f"{rows[0].slack:g}",
            *(f"{100 * row.moved:.1f} %" for row in rows),
            str(max(row.peak for row in rows)),
            f"{max(row.imbalance for row in rows):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for independent requests and one for sessions; draw both."""
    parser = argparse.ArgumentParser(prog="python -m tests.routing_simulation", description="What routing.slack costs.")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=64, help="requests at any time")
    parser.add_argument("--turns", type=int, default=8, help="requests of a session, in the second table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG")
    options = parser.parse_args(arguments)
    moved: list[charts.Line] = []
    peaks: list[charts.Line] = []
    for turns, name in ((1, "independent requests"), (options.turns, f"sessions of {options.turns} requests")):
        traffic = Traffic(options.replicas, options.in_flight, turns)
        columns = [[compare(replace(traffic, jitter=jitter), slack) for slack in SLACKS] for jitter in JITTERS]
        print(f"{name}:\n\n{table(columns)}\n")
        for jitter, rows in zip(JITTERS, columns, strict=True):
            line = charts.Line(f"{name}, jitter {jitter:.0%}", [100 * row.moved for row in rows], len(moved))
            moved.append(line)
        most = [float(max(row.peak for row in rows)) for rows in zip(*columns, strict=True)]
        peaks.append(charts.Line(name, most, 2 * len(peaks)))
    if options.plot is not None:
        even = f"{options.in_flight / options.replicas:g}"
        panels = [
            charts.Panel("Requests on another replica in a second run, %", moved),
            charts.Panel(f"Most in flight on one replica (even: {even})", peaks),
        ]
        options.plot.write_text(charts.draw("slack", [f"{slack:g}" for slack in SLACKS], panels))


if __name__ == "__main__":
    main()
