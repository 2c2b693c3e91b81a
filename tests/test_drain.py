"""Signals to a real process: it drains, reloads, or ends at once."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.sim import SimServer, SimSettings
from tests.harness import Wire, chat
from tests.processes import Process, serving

CHAT = "/v1/chat/completions"
MODEL = "sim-model"


def config(*urls: str, **settings: Any) -> str:
    replicas = [{"name": f"policy-{number}", "url": url} for number, url in enumerate(urls)]
    return yaml.safe_dump({"pools": [{"name": "policy", "engine": "vllm", "replicas": replicas}], **settings})


@asynccontextmanager
async def replica() -> AsyncIterator[SimServer]:
    async with SimServer(SimSettings(engine="vllm", token_seconds=0.001)) as sim:
        yield sim


def run_line(gate: Process) -> str:
    """What was logged of the run when it began."""
    [line] = [line for line in gate.lines if '"event": "run"' in line]
    return line


def ends(gate: Process) -> list[dict[str, Any]]:
    """What was logged of the end."""
    lines = (json.loads(line) for line in gate.lines if line.startswith("{"))
    return [line for line in lines if line["event"] in ("draining", "ended")]


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
        draining, ended = ends(gate)
        assert (draining["event"], draining["requests"], draining["seconds"]) == ("draining", 1, 30)
        assert (ended["event"], ended["cut"]) == ("ended", 0)
        assert ended["run"] == draining["run"] == json.loads(run_line(gate))["run"]


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
        draining, ended = ends(gate)
        assert (draining["requests"], draining["seconds"], ended["cut"]) == (2, 0.5, 2)


@pytest.mark.parametrize("path", [CHAT, "/sessions"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
async def test_a_request_that_has_not_come_whole_holds_up_no_end(
    tmp_path: Path, path: str, sent: signal.Signals
) -> None:
    async with replica() as sim:
        async with serving(tmp_path, config(sim.url)) as gate, Wire(gate.port) as wire:
            head = b"POST %b HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n{" % path.encode()
            wire.writer.write(head)
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"http://127.0.0.1:{gate.port}/livez")).status_code == 200
            gate.signal(sent)
            assert await gate.ended(3) == (0 if sent == signal.SIGTERM else 130)
            assert (b"shutting_down" in await wire.reader.read()) is (path == CHAT)
        assert not any("error" in line for line in gate.lines)


@pytest.mark.parametrize("busy", [False, True])
async def test_ctrl_c_ends_at_once_with_130_and_the_run_with_it(tmp_path: Path, busy: bool) -> None:
    async with replica() as sim:
        async with serving(tmp_path, config(sim.url)) as gate, Wire(gate.port) as wire:
            if busy:
                await begin(wire, sim)
            gate.signal(signal.SIGINT)
            assert await gate.ended(3) == 130
            if busy:
                assert b"shutting_down" in await wire.broken_body()
            assert not any("Traceback" in line for line in gate.lines)
    draining, ended = ends(gate)
    assert (draining["requests"], draining["seconds"], ended["cut"]) == (int(busy), 0, int(busy))
    (run,) = (tmp_path / "ledger").glob("*/run.json")
    assert json.loads(run.read_text())["state"] == "ended"
