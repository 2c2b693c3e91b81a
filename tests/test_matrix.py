"""The table of what holds by route is found by asking; here it is seen that asking finds what does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from gateway import schemes
from tests import matrix


def test_every_route_that_computes_has_a_request() -> None:
    for engine in matrix.ENGINES:
        for path in matrix.routes(engine):
            assert matrix.request(engine, path, "m", streamed=False)


@pytest.mark.parametrize("engine", matrix.ENGINES)
async def test_seeds_that_do_not_repeat_are_found(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Iterator[int] = count(1)
    monkeypatch.setattr(schemes.load("v1"), "seed", lambda *_: next(drawn))
    found = await matrix.simulated(engine)
    seeded = {path for path, each in matrix.routes(engine).items() if each.kind == "sample" and each.seed is not None}
    told = {path for (path, _), words in found.items() if "differs" in words}
    assert told == seeded
