"""What is measured, each beside the others in the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.parts import Bench, Target, spent


@dataclass(frozen=True)
class Case:
    """A load. `latency`: what counts is the median of the answers' times on top of a direct call, not CPU time.
    `chunks`: of each stream, one every `gap_us`."""

    name: str
    title: str
    body: str
    connections: int
    chunks: int = 0
    gap_us: int = 10_000
    latency: bool = False

    @property
    def streams(self) -> int:
        """How many in all."""
        return self.connections * (2 if self.chunks > 100 else 1)


CASES = (
    Case("whole", "CPU µs a request, 64 connections", "small", 64),
    Case("one", "added p50 µs, one connection", "small", 1, latency=True),
    Case("stream", "CPU µs a chunk, 200 streams", "small-stream", 200, chunks=200),
    Case("64k", "64 KiB body, CPU µs", "64k", 8),
    Case("1m", "1 MiB body, CPU µs", "1m", 4),
)
CHECKED = (
    CASES[0],
    CASES[3],
    # So slow that no chunk meets the next one, which would be cheaper, however busy the machine is.
    Case("slow stream", "CPU µs a chunk, 200 slow streams", "small-stream", 200, chunks=40, gap_us=100_000),
)
"""What the check looks at."""


@dataclass
class Figures:
    """Of one case, the figures of each target, a round each."""

    case: Case
    of: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.of[name])

    def ratio(self, name: str, to: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.of[name], self.of[to], strict=True))


def measured(bench: Bench, case: Case, target: Target, seconds: float) -> float:
    """One figure: µs."""
    if case.chunks:
        before = spent(target)
        told = bench.loaded(target, case.body, connections=case.connections, requests=case.streams)
        assert told["streams"] == case.streams, told
        return (spent(target) - before) * 1e6 / float(told["events"])
    before = spent(target)
    told = bench.loaded(target, case.body, connections=case.connections, seconds=seconds)
    if case.latency:
        return float(told["p50_us"])
    return (spent(target) - before) * 1e6 / float(told["requests"])


def rounds(bench: Bench, case: Case, targets: Sequence[Target], times: int, seconds: float) -> Figures:
    """Measure a case as often as is said, the targets in turn."""
    figures = Figures(case, {target.name: [] for target in targets})
    bench.set(hold_us=0, gap_us=case.gap_us, chunks=2 if case.chunks else 1)
    for target in targets:
        warm = 2 * case.connections if case.chunks else 20 * case.connections
        bench.loaded(target, case.body, connections=case.connections, requests=warm)
    bench.set(hold_us=0, gap_us=case.gap_us, chunks=case.chunks or 1)
    for _ in range(times):
        direct = 0.0
        for target in targets:
            figure = measured(bench, case, target, seconds)
            if case.latency:
                # What the engine itself takes comes first, and is in all others.
                direct, figure = (figure, figure) if target.pid is None else (direct, figure - direct)
            figures.of[target.name].append(figure)
    return figures
