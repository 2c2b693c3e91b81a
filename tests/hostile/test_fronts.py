"""A front and the gateway agree where every request ends: the short form of `make test-fronts`."""

from __future__ import annotations

import pytest

from tests.hostile.fronts import Report, fuzz, program
from tests.hostile.fuzzed import messages


@pytest.mark.parametrize(
    "front",
    [
        pytest.param(
            "nginx-unbuffered", marks=pytest.mark.skipif(program("nginx") is None, reason="nginx is not there")
        ),
        None,
    ],
)
async def test_what_the_engine_sees_is_what_was_answered(front: str | None) -> None:
    report = await fuzz(front, 300, seed=11)
    assert report.faults == []
    assert report.asked == 300
    assert report.seen.total() > 30
    assert any(mark.startswith("s") for mark in report.seen)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, second = ([message.render() for message in messages(3, 200)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 200


def test_what_goes_astray_is_told() -> None:
    report = Report()
    report.add(1, b'HTTP/1.1 200 OK\r\n\r\n{"mark": "m1"}HTTP/1.1 504 Late\r\n\r\n')
    report.add(2, b'HTTP/1.1 200 OK\r\n\r\n{"mark": "s1"}')
    report.seen.update(["m1", "s1", "m2"])
    assert report.faults == ["s1 to 2", "m2 was not answered", "504 x 1"]
