"""Signals to a real process: it drains, reloads, or ends at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.sim import SimServer, SimSettings
from tests.harness import Wire, chat

CHAT = "/v1/chat/completions"
MODEL = "sim-model"


def config(*urls: str, **settings: Any) -> str:
    replicas = [{"name": f"policy-{number}", "url": url} for number, url in enumerate(urls)]
    return yaml.safe_dump({"pools": [{"name": "policy", "engine": "vllm", "replicas": replicas}], **settings})


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

    async def logged(self, words: str, times: int = 1) -> list[str]:
        """Wait until there are so many lines with these words; all of them."""
        async with self.news, asyncio.timeout(10):
            await self.news.wait_for(lambda: sum(words in line for line in self.lines) >= times)
        return [line for line in self.lines if words in line]

    async def answers(self, path: str, status: int) -> None:
        """Wait until it answers so."""
        async with asyncio.timeout(30):
            while await self._status(path) != status:
                assert self.process.returncode is None, self.lines
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
async def serving(folder: Path, text: str) -> AsyncIterator[Process]:
    """`detgate serve` as a process, ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = folder / "gateway.yaml"
    file.write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("DETGATE_")}
    arguments = ["serve", "--config", str(file), "--port", str(port), "--ledger", str(folder / "ledger")]
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


@asynccontextmanager
async def replica() -> AsyncIterator[SimServer]:
    async with SimServer(SimSettings(engine="vllm", token_seconds=0.001)) as sim:
        yield sim


async def begin(wire: Wire, sim: SimServer, **fields: Any) -> bytes:
    """Ask for a stream and stop the engine in its middle; what has come of it."""
    wire.post(CHAT, chat(stream=True, max_tokens=60, min_tokens=60, model=MODEL, **fields))
    assert await wire.head() == 200
    got = await wire.chunk()
    sim.engine.pause()
    return got


async def test_sighup_reloads_the_replicas_and_sigterm_drains(tmp_path: Path) -> None:
    async with replica() as one, replica() as two:
        async with serving(tmp_path, config(one.url)) as gate:
            body = chat(model=MODEL, max_tokens=1)

            async def goes_to() -> str:
                answer = await gate.http.post(CHAT, json=body)
                assert answer.status_code == 200, answer.text
                return str(answer.headers["x-detgate-replica"])

            assert await goes_to() == "policy-0"
            async with Wire(gate.port) as wire:
                got = await begin(wire, one)

                # A replica that is taken out ends what it has; the one that is new gets what comes.
                gate.file.write_text(config(two.url).replace("policy-0", "policy-new"))
                gate.signal(signal.SIGHUP)
                await gate.logged("reloaded")
                await gate.answers("/readyz", 200)
                assert await goes_to() == "policy-new"

                # A wrong file changes nothing, and says so in one line.
                gate.file.write_text(config(one.url).replace("vllm", "vlm"))
                gate.signal(signal.SIGHUP)
                [line] = await gate.logged("not reloaded")
                assert "pools[0].engine" in line
                gate.file.unlink()
                gate.signal(signal.SIGHUP)
                await gate.logged("not reloaded", 2)
                assert await goes_to() == "policy-new"

                # Told to end, it takes nothing new, ends what it has, and leaves with 0.
                gate.signal(signal.SIGTERM)
                await gate.answers("/readyz", 503)
                refused = await gate.http.post(CHAT, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert "retry-after" in refused.headers
                assert (await gate.http.get("/livez")).status_code == 200
                one.engine.resume()
                got += await wire.body()
                events = [line for line in got.decode().split("\n\n") if line]
                assert len(events) > 60
                assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
                assert events[-1] == "data: [DONE]"
            assert await gate.ended() == 0
            with pytest.raises(httpx.ConnectError):
                await gate.http.get("/livez")


async def test_what_outlives_the_deadline_of_a_drain_ends_as_an_error(tmp_path: Path) -> None:
    shared = {"name": "reward", "role": "reward", "engine": "vllm", "lane": {"scope": "replica", "limit": 2}}
    async with replica() as sim:
        pools = yaml.safe_load(config(sim.url))["pools"]
        pools.append(shared | {"replicas": [{"name": "reward-0", "url": "http://127.0.0.1:9"}]})
        text = yaml.safe_dump({"pools": pools, "timeouts": {"drain": 0.5}})
        async with serving(tmp_path, text) as gate, Wire(gate.port) as streaming, Wire(gate.port) as whole:
            [warning] = [line for line in gate.lines if "share a batch" in line]
            assert "pools[1].lane.limit: 2 " in warning
            await begin(streaming, sim)
            whole.post(CHAT, chat(model=MODEL, max_tokens=5))
            await sim.engine.reached(2)
            gate.signal(signal.SIGTERM)
            last = (await streaming.broken_body()).decode().strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert await whole.head() == 503
            assert json.loads(await whole.body())["error"]["code"] == "shutting_down"
            assert await gate.ended(5) == 0
            assert len(await gate.logged("outlived timeouts.drain")) == 1


@pytest.mark.parametrize("busy", [False, True])
async def test_ctrl_c_ends_at_once_with_130(tmp_path: Path, busy: bool) -> None:
    async with replica() as sim:
        async with serving(tmp_path, config(sim.url)) as gate, Wire(gate.port) as wire:
            if busy:
                await begin(wire, sim)
            gate.signal(signal.SIGINT)
            assert await gate.ended(3) == 130
            if busy:
                assert b"shutting_down" in await wire.broken_body()
            assert not any("Traceback" in line for line in gate.lines)
