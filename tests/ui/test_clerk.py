"""Ledgers are read apart from the gateway, a few at a time, for a bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from gateway.core.errors import Busy, CallerFault, NotFound
from gateway.settings import Settings
from gateway.ui.clerk import Clerk
from tests.evidence.ledger import request, write
from tests.harness import pool


def clerk(tmp_path: Path, **settings: object) -> Clerk:
    given = {"pools": [pool("policy", "http://127.0.0.1:1")], "ledger": {"path": str(tmp_path)}} | settings
    return Clerk(Settings.load(None, {}, given))


async def test_what_is_asked_is_answered_by_another_process_that_knows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETGATE_AUTH__ADMIN_KEY", "hunter2")
    seen: list[dict[str, str]] = []
    real = asyncio.create_subprocess_exec

    async def watched(*command: str, **given: object) -> asyncio.subprocess.Process:
        seen.append(given["env"])  # type: ignore[arg-type]
        return await real(*command, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    folder = str(write(tmp_path / "run", request("s", 0)))
    reader = clerk(tmp_path)
    told = await reader.ask("requests", folder=folder, session=None, after=None)
    assert [each["request_id"] for each in told["requests"]] == ["s:0"]
    assert "hunter2" not in str(seen)
    with pytest.raises(CallerFault, match="does not begin"):
        await reader.ask("requests", folder=folder, session=None, after="!")
    with pytest.raises(NotFound, match="no such file"):
        await reader.ask("difference", a=folder, b=str(tmp_path / "none"), answers_only=False, start=0)
    assert reader.reading == 0


async def test_more_than_the_limit_are_refused_and_one_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    fifo = tmp_path / "run" / "1-1.jsonl"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    reader = clerk(tmp_path, limits={"readings": 1})
    waiting = asyncio.create_task(reader.ask("requests", folder=str(fifo.parent), session=None, after=None))
    held = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)  # waits until it is read
    with pytest.raises(Busy) as refused:
        await reader.ask("sessions", folder=str(fifo.parent), racing=False, after=None)
    assert refused.value.code == "readings_full"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await waiting
    assert reader.reading == 0
    with pytest.raises(OSError, match="No such device"):
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)  # nobody reads it any more
    os.close(held)


async def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    fifo = tmp_path / "run" / "1-1.jsonl"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    reader = clerk(tmp_path, timeouts={"reading": 0.5})
    with pytest.raises(Busy) as late:
        await reader.ask("requests", folder=str(fifo.parent), session=None, after=None)
    assert late.value.code == "reading_late"
    assert reader.reading == 0


def test_a_process_whose_gateway_has_died_ends_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-1.jsonl")
    question = orjson.dumps(["requests", {"folder": str(tmp_path), "session": None, "after": None}, 0.2])
    ran = subprocess.run([sys.executable, "-m", "gateway.ui.reading"], input=question, timeout=60)
    assert ran.returncode == -signal.SIGALRM
