"""What the way of a request costs, counted in calls of functions: the same on every machine, however busy.

The bounds are far above what is counted now, so that they catch a doubling and no honest feature.
"""

from __future__ import annotations

import pytest
import uvloop

from tests.bench.path import EVENTS, calls


@pytest.mark.parametrize(("mode", "most"), [("plain", 650), ("session", 650), ("64k", 650)])
def test_a_request_takes_a_bounded_number_of_steps(mode: str, most: int) -> None:
    assert uvloop.run(calls(mode, 100)) < most  # type: ignore[arg-type]


def test_an_event_takes_a_bounded_number_of_steps() -> None:
    assert uvloop.run(calls("stream", 16)) / EVENTS < 48


def test_a_request_costs_the_same_however_many_are_in_flight() -> None:
    assert uvloop.run(calls("plain", 1000, clients=500)) == pytest.approx(uvloop.run(calls("plain", 100)), rel=0.03)


def test_a_replica_more_costs_a_request_next_to_nothing() -> None:
    few, many = uvloop.run(calls("plain", 100)), uvloop.run(calls("plain", 100, replicas=66))
    assert (many - few) / 64 < 4
