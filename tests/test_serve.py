"""What the server does by the clock."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from gateway import serve
from gateway.assembly import Gateway
from gateway.settings import Settings
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


def test_a_sighup_while_the_ledger_is_read_is_heeded_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heeded, missed = asyncio.Event(), []

    class Read(Gateway):
        def __init__(self, *given: object, **more: bool) -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            super().__init__(*given, **more)  # type: ignore[arg-type]

    async def served(gateway: Gateway, server: object) -> None:
        with closing(gateway.runs):
            await asyncio.wait_for(heeded.wait(), 10)

    monkeypatch.setattr(serve, "Gateway", Read)
    monkeypatch.setattr(serve, "serve", served)
    monkeypatch.setattr(serve, "_reload", lambda gateway, load: heeded.set())
    settings = Settings.load(None, {}, {"port": 0, "ledger": {"path": str(tmp_path)}, "worker_urls": ["http://h"]})
    before = signal.signal(signal.SIGHUP, lambda *_: missed.append("it would have ended"))
    try:
        serve.run(settings, lambda: settings)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert missed == []
