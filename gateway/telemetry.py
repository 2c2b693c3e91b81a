"""Counters and histograms, and how a scrape reads them.

The data plane counts with plain additions; prometheus-client turns the numbers into the exposition format when it is
asked. Label values come from configuration and from small fixed sets, never from a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

Labels = tuple[str, ...]

Across = Literal["sum", "min", "max"]
"""What the values that several processes have for one gauge are together."""

Numbers = list[Metric]
"""The series of one process at one moment."""


class Counter:
    """A number that only grows, one for each combination of label values."""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name, self.help, self.labels = name, help, labels
        self.values: dict[Labels, int] = {} if labels else {(): 0}

    def add(self, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + 1

    def collect(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Gauge:
    """A number read when it is scraped."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Labels,
        read: Callable[[], Iterable[tuple[Labels, float]]],
        across: Across = "sum",
    ) -> None:
        self.name, self.help, self.labels, self.read, self.across = name, help, labels, read, across

    def collect(self) -> Metric:
        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self.read():
            family.add_metric(labels, value)
        return family


class Histogram:
    """Seconds, counted into buckets."""

    def __init__(self, name: str, help: str, buckets: tuple[float, ...] = SECONDS, labels: Labels = ()) -> None:
        self.name, self.help, self.labels, self.buckets = name, help, labels, buckets
        self.counts: dict[Labels, list[int]] = {} if labels else {(): [0] * (len(buckets) + 1)}
        self.sums: dict[Labels, float] = {} if labels else {(): 0.0}

    def observe(self, seconds: float, *labels: str) -> None:
        counts = self.counts.get(labels)
        if counts is None:
            counts = self.counts[labels] = [0] * (len(self.buckets) + 1)
            self.sums[labels] = 0.0
        counts[bisect_left(self.buckets, seconds)] += 1
        self.sums[labels] += seconds

    def collect(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, counts in self.counts.items():
            family.add_metric(labels, list(self._cumulative(counts)), self.sums[labels])
        return family

    def _cumulative(self, counts: list[int]) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), counts, strict=True):
            total += count
            yield bound, total


class Telemetry:
    """Every series that the gateway exports."""

    def __init__(self) -> None:
        self.requests = Counter(
            "detgate_requests", "Requests answered, by pool, route and status.", ("pool", "route", "status")
        )
        self.sendings = Counter(
            "detgate_sendings", "Sendings to replicas, by how they ended.", ("pool", "replica", "outcome")
        )
        self.racing = Counter("detgate_racing", "Requests whose index was decided by the network.")
        self.reused = Counter("detgate_index_reused", "Indices taken again by a repeat of their request.")
        self.unseeded = Counter("detgate_unseeded", "Sampled requests that left without a seed.", ("route",))
        self.guard = Counter("detgate_guard", "Guards that saw something suspicious.", ("guard",))
        self.refusals = Counter("detgate_refusals", "Requests that the gateway itself answered by an error.", ("code",))
        self.reasons = Counter(
            "detgate_reasons", "Answers whose promise did not hold whole, by each reason.", ("reason",)
        )
        self.store_errors = Counter("detgate_store_errors", "Calls to the store that failed.")
        self.fenced = Counter("detgate_fenced_sessions", "Sessions of which an index was found to be given twice.")
        self.ledger_errors = Counter("detgate_ledger_errors", "Records that could not be written.")
        self.takeovers = Counter(
            "detgate_lane_takeovers", "Places in lanes that were taken over from a gateway that has gone.", ("pool",)
        )
        self.worker_restarts = Counter("detgate_worker_restarts", "Workers that died and were replaced.")
        self.overhead = Histogram(
            "detgate_overhead_seconds", "Time that the gateway itself added to a request.", OVERHEAD
        )
        self.first_byte = Histogram("detgate_first_byte_seconds", "Time to the first byte of an answer.")
        self.total = Histogram("detgate_request_seconds", "Time of a whole request.")
        self.lane_wait = Histogram("detgate_lane_wait_seconds", "Time spent waiting in lanes.", labels=("pool",))
        self.gauges: list[Gauge] = []

    def gauge(
        self,
        name: str,
        help: str,
        labels: Labels,
        read: Callable[[], Iterable[tuple[Labels, float]]],
        across: Across = "sum",
    ) -> None:
        """Add a gauge whose values are read at each scrape. `across`: what those of several processes are together."""
        self.gauges.append(Gauge(name, help, labels, read, across))

    def collect(self) -> Iterator[Metric]:
        for series in vars(self).values():
            if isinstance(series, Counter | Histogram):
                yield series.collect()
        for gauge in self.gauges:
            yield gauge.collect()

    def numbers(self) -> Numbers:
        """Every series as it is now."""
        return list(self.collect())

    def exposition(self, others: Sequence[Numbers] = ()) -> bytes:
        """The text that Prometheus scrapes: the series of this process, and of `others`, as one."""
        numbers = self.numbers()
        if others:
            numbers = together([numbers, *others], {gauge.name: gauge.across for gauge in self.gauges})
        return generate_latest(_Told(numbers))


class _Told(Collector):
    """Numbers as prometheus-client reads them."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        return self._numbers


def lasting(numbers: Numbers) -> Numbers:
    """What still counts when its process has ended: all but the gauges."""
    return [family for family in numbers if family.type != "gauge"]


def together(parts: Iterable[Numbers], across: Mapping[str, Across]) -> Numbers:
    """The numbers of several processes as one: sums, but for the gauges that `across` says are something else."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for family in chain.from_iterable(parts):
        if family.name not in families:
            families[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
        merge = _MERGE[across.get(family.name, "sum")]
        for sample in family.samples:
            key = (family.name, sample.name, tuple(sample.labels.items()))
            values[key] = merge((values[key], sample.value)) if key in values else sample.value
    for (name, sample_name, labels), value in values.items():
        families[name].add_sample(sample_name, dict(labels), value)
    return list(families.values())


_MERGE: dict[Across, Callable[[tuple[float, float]], float]] = {"sum": sum, "min": min, "max": max}
