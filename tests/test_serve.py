"""What the server does by the clock."""

from __future__ import annotations

import gc
import weakref

import pytest

from gateway import serve
from tests.harness import FakeWorker, gateway, pool


class Knot:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_probes_leave_behind_is_freed_without_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "COLLECT_SECONDS", 0.0)
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        gc.disable()
        try:
            left = weakref.ref(Knot())
            assert left() is not None
            await gate.until(lambda: left() is None)
        finally:
            gc.enable()
