"""Has runs read by processes of their own, a few at a time and for a bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import orjson

from gateway.core.errors import Busy, CallerFault, NotFound
from gateway.ledger.shapes import Unreadable
from gateway.settings import Settings

GRACE = 2.0
"""Seconds after which a process that has not ended itself is ended."""


class Clerk:
    """Owns the processes that read. `reading` is how many there are."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.limits.readings
        self._seconds = settings.timeouts.reading
        self.reading = 0

    async def ask(self, what: str, **given: Any) -> dict[str, Any]:
        """What `gateway.ui.reading` answers.

        Raises `Busy`, `CallerFault` for a wrong cursor, `NotFound`, `Unreadable`.
        """
        if self.reading >= self._limit:
            raise Busy(
                f"{self.reading} pages are being read from ledgers already. Ask again, or raise limits.readings.",
                code="readings_full",
            )
        self.reading += 1
        try:
            told = await self._answer(orjson.dumps([what, given, self._seconds]))
        finally:
            self.reading -= 1
        if told.get("wrong_cursor"):
            raise CallerFault("The page does not begin where another ended. Begin anew.", code="invalid_cursor")
        if "unreadable" in told:
            raise Unreadable(told["unreadable"])
        if "unusable" in told:
            raise NotFound(told["unusable"], code="run_not_found")
        return told

    async def _answer(self, question: bytes) -> dict[str, Any]:
        """What a new process says. It needs nothing of the gateway's own configuration, so it gets none."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DETGATE_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.ui.reading",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        try:
            async with asyncio.timeout(self._seconds + GRACE):
                said, errors = await process.communicate(question)
        except TimeoutError:
            raise self._late() from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == -signal.SIGALRM:
            raise self._late()
        if process.returncode:
            raise RuntimeError(f"the ledger could not be read: {errors.decode(errors='replace')[-2000:]}")
        told: dict[str, Any] = orjson.loads(said)
        return told

    def _late(self) -> Busy:
        return Busy(
            f"This takes longer to read than {self._seconds:g} s. Raise timeouts.reading, or use detgate diff.",
            code="reading_late",
        )
