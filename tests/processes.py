"""`detgate serve` as a process of its own, for what only a process has: signals, an exit status, limits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import ports


@dataclass
class Process:
    """A gateway of its own."""

    process: asyncio.subprocess.Process
    port: int
    file: Path
    http: httpx.AsyncClient
    lines: list[str]
    """What it has logged."""
    news: asyncio.Condition

    def signal(self, sent: signal.Signals) -> None:
        self.process.send_signal(sent)

    async def logged(self, words: str, times: int = 1, seconds: float = 10) -> list[str]:
        """Wait until there are so many lines with these words; all of them."""
        async with self.news, asyncio.timeout(seconds):
            await self.news.wait_for(lambda: sum(words in line for line in self.lines) >= times)
        return [line for line in self.lines if words in line]

    async def answers(self, path: str, status: int) -> None:
        """Wait until it answers so."""
        deadline = asyncio.get_running_loop().time() + 60
        while (told := await self._status(path)) != status:
            assert self.process.returncode is None, self.lines
            assert asyncio.get_running_loop().time() < deadline, (path, told, self.lines)
            await asyncio.sleep(0.02)

    async def _status(self, path: str) -> int | None:
        try:
            return (await self.http.get(path)).status_code
        except httpx.TransportError:
            return None

    async def ended(self, seconds: float = 10.0) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self.process.wait(), seconds)


@asynccontextmanager
async def serving(folder: Path, text: str, *flags: str) -> AsyncIterator[Process]:
    """`detgate serve` as a process, ready. `text` is its file; `flags` are added to its command."""
    port = ports.free()
    file = folder / "gateway.yaml"
    file.write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DETGATE_")}
    arguments = ["serve", "--config", str(file), "--port", str(port), "--ledger", str(folder / "ledger"), *flags]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments), stderr=asyncio.subprocess.PIPE, env=env
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as http:
        gate = Process(process, port, file, http, [], asyncio.Condition())
        reading = asyncio.create_task(_read(gate))
        try:
            await gate.answers("/readyz", 200)
            yield gate
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await reading


async def _read(gate: Process) -> None:
    assert gate.process.stderr is not None
    async for line in gate.process.stderr:
        async with gate.news:
            gate.lines.append(line.decode())
            gate.news.notify_all()
