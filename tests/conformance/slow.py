"""slowhttptest: many connections that are slow in every way; others are answered meanwhile, and none is left."""

from __future__ import annotations

import asyncio
import re
import shutil

from tests.conformance.outcome import Outcome
from tests.conformance.processes import output
from tests.conformance.sources import Missing
from tests.harness import FakeWorker, Gate, gateway, pool

CONNECTIONS = 500
SECONDS = 15
TIMEOUTS = {"head": 3, "body": 5, "client_write": 5, "keep_alive": 5}
ATTACKS = {
    "slow heads": ("-H", "/livez"),
    "slow bodies": ("-B", "/v1/chat/completions"),
    "slow bodies, control plane": ("-B", "/sessions"),
    "slow readers": ("-X", "/openapi.json"),
    "ranges": ("-R", "/livez"),
}


async def attack(gate: Gate, flag: str, path: str) -> tuple[str, float, bool]:
    """How the program ended, the longest that `/livez` took meanwhile, and whether it found the server there."""
    slowest = 0.0

    async def asked() -> None:
        nonlocal slowest
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            assert (await gate.http.get("/livez")).status_code == 200
            slowest = max(slowest, loop.time() - begin)
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(asked())
    numbers = ("-c", str(CONNECTIONS), "-r", "250", "-i", "1", "-l", str(SECONDS), "-p", "2")
    _, text = await output("slowhttptest", flag, *numbers, "-u", gate.url + path)
    asking.cancel()
    ended = re.findall(r"Exit status:\s*(.*)", text)
    assert ended, text[-500:]
    return ended[-1].strip(), slowest, "service available:   NO" not in text


async def run() -> Outcome:
    """Each attack in turn. Raises `Missing`."""
    if shutil.which("slowhttptest") is None:
        raise Missing("slowhttptest is not installed (apt-get install slowhttptest)")
    outcome = Outcome(f"slowhttptest, {CONNECTIONS} connections")
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), timeouts=TIMEOUTS) as gate:
        await gate.http.get("/livez")
        for name, (flag, path) in ATTACKS.items():
            ended, slowest, there = await attack(gate, flag, path)
            outcome.notes.append(f"{name}: {ended}; /livez within {slowest * 1000:.0f} ms meanwhile")
            if not there or slowest > 2:
                outcome.failed.append(f"{name}: others had to wait")
                continue
            try:
                await gate.until(lambda: len(gate.server.server_state.connections) <= 1, SECONDS)
                outcome.passed += 1
            except AssertionError:
                outcome.failed.append(f"{name}: {len(gate.server.server_state.connections)} connections are left")
        assert worker.seen == []
    return outcome
