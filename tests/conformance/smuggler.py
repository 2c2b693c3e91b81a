"""smuggler's lists of bent Transfer-Encodings, straight at the gateway and behind the fronts that are installed."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import AsyncExitStack

from tests.conformance import sources
from tests.conformance.outcome import Outcome
from tests.conformance.processes import output
from tests.harness import FakeWorker, gateway, pool
from tests.hostile.fronts import FRONTS, before, program

LISTS = ("default.py", "doubles.py", "exhaustive.py")


async def scan(port: int, payloads: str) -> tuple[int, list[str]]:
    """How many payloads were tried, and what was found by them."""
    folder = sources.tree("smuggler")
    (folder / "payloads").mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    command = (sys.executable, "smuggler.py", "-u", url, "-c", payloads, "-t", "2", "--no-color")
    status, text = await output(*command, folder=folder)
    tried = re.findall(
        r"^\s*\[([^\]]+)\]\s*: (OK|DISCONNECTED|SOCKET ERROR|CLTE TIMEOUT|TECL TIMEOUT|Potential)", text, re.M
    )
    found = re.findall(r"Potential (?:CLTE|TECL) Issue Found.*", text)
    assert status == 0, text[-500:]
    assert len(tried) > 10, text[-500:]
    return len(tried), found


async def run() -> Outcome:
    """Every list through every front. Raises `sources.Missing`."""
    sources.tree("smuggler")
    outcome = Outcome(f"smuggler ({sources.version('smuggler')})")
    fronts = [None, *(front for front in FRONTS if program(front) is not None)]
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(FakeWorker())
        gate = await stack.enter_async_context(gateway(pool("policy", worker.url), timeouts={"body": 1, "head": 1}))
        ports = [
            gate.port if front is None else await stack.enter_async_context(before(gate.port, front))
            for front in fronts
        ]
        jobs = [
            (front, payloads, scan(port, payloads))
            for front, port in zip(fronts, ports, strict=True)
            for payloads in LISTS
        ]
        for (front, payloads, _), (tried, found) in zip(
            jobs, await asyncio.gather(*(job[2] for job in jobs)), strict=True
        ):
            outcome.passed += tried - len(found)
            outcome.failed += [f"{front or 'straight'}, {payloads}: {line}" for line in found]
        outcome.notes.append(f"lists {', '.join(LISTS)}; {', '.join(front or 'straight' for front in fronts)}")
        assert worker.seen == []
    return outcome
