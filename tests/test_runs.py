"""Runs: what a restarted gateway knows, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.settings import InvalidSettings
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool


@asynccontextmanager
async def crashed(gate: Gate) -> AsyncIterator[None]:
    """What a killed process leaves: the folder as it is, the run not ended, its lock free."""
    run = gate.gateway.runs.own
    run.ledger.flush()
    before = (run.folder / "run.json").read_bytes()
    yield
    (run.folder / "run.json").write_bytes(before)


async def ask(gate: Gate, text: str, **headers: str) -> httpx.Response:
    return await gate.http.post("/sessions/s/v1/chat/completions", json=chat(text), headers=headers)


async def test_after_a_crash_counters_go_on_where_they_were(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **folder) as gate:
            first = [(await ask(gate, str(n))).headers["x-detgate-request-id"] for n in range(3)]
            keyed = (await ask(gate, "k", **{"idempotency-key": "abc"})).headers
            context = crashed(gate)
            await context.__aenter__()
            name = gate.gateway.run
        await context.__aexit__(None, None, None)
        async with gateway(pool("policy", worker.url), **folder) as gate:
            assert gate.gateway.run == name
            assert gate.gateway.runs.own.resumed
            again = (await ask(gate, "k", **{"idempotency-key": "abc"})).headers
            assert again["x-detgate-index"] == keyed["x-detgate-index"] == "3"
            assert again["x-detgate-seed"] == keyed["x-detgate-seed"]
            after = (await ask(gate, "later")).headers["x-detgate-request-id"]
            assert first == ["s:0", "s:1", "s:2"]
            assert after == "s:4"


async def test_what_was_in_flight_is_closed_as_lost_and_its_index_taken_again_by_its_bytes(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    opened = {
        "event": "opened", "run": "r", "epoch": 0, "session": "s", "identity": "s", "index": 0, "order": "arrival",
        "digest": "", "content": None, "key": None, "repeat": 0, "flags": [],
    }  # fmt: skip
    from gateway.core.canonical import raw

    body = json.dumps(chat("lost")).encode()
    (tmp_path / "r").mkdir()
    record = opened | {"digest": raw("/v1/chat/completions", body).hex()}
    (tmp_path / "r" / "1.jsonl").write_bytes(json.dumps(record).encode() + b'\n{"event": "clo')
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), run="r", **folder) as gate:
        lost = [record for record in gate.records() if record.get("error") == "gateway-lost"]
        assert [(record["index"], record["outcome"]) for record in lost] == [(0, "failed")]
        other = await ask(gate, "other")
        same = await gate.http.post("/sessions/s/v1/chat/completions", content=body)
        assert other.headers["x-detgate-index"] == "1"
        assert same.headers["x-detgate-index"] == "0"
        assert gate.gateway.runs.own.epoch == 0


async def test_a_ledger_with_a_gap_goes_on_in_a_new_epoch(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "1.jsonl").write_bytes(b'{"event": "fleet"}\ngarbage\n{"event": "fleet"}\n')
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        assert gate.gateway.runs.own.epoch == 1
        await ask(gate, "x")
        [opened] = [json.loads(line) for line in gate_lines(tmp_path) if b'"opened"' in line]
        assert opened["epoch"] == 1


async def test_a_named_run_that_ended_needs_to_be_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            await ask(gate, "x")
        with pytest.raises(InvalidSettings, match="--resume"):
            async with gateway(pool("policy", worker.url), **settings):
                pass
        async with gateway(pool("policy", worker.url), resume=True, **settings) as gate:
            assert (await ask(gate, "y")).headers["x-detgate-index"] == "1"


async def test_without_a_name_each_start_after_a_clean_end_is_a_new_run_that_repeats_the_last(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    seen: list[tuple[str, str, str]] = []
    async with FakeWorker() as worker:
        for _ in range(2):
            async with gateway(pool("policy", worker.url), **settings) as gate:
                headers = (await ask(gate, "x")).headers
                seen.append((gate.gateway.run, headers["x-detgate-request-id"], headers["x-detgate-seed"]))
    assert seen[0][1:] == seen[1][1:]
    assert seen[0][0] != seen[1][0]


async def test_settings_that_decide_must_be_those_the_run_began_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            await ask(gate, "x")
        async with gateway(pool("policy", worker.url), resume=True, seed=7, **settings) as gate:
            unready = await gate.http.get("/readyz")
            assert unready.status_code == 503
            assert any("seed" in why for why in unready.json()["why"])
            refused = await ask(gate, "y")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "run_differs")


async def test_two_processes_cannot_have_one_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings):
        with pytest.raises(Exception, match="Another process has run r"):
            async with gateway(pool("policy", worker.url), **settings):
                pass


async def test_requests_of_a_run_that_they_name_are_in_its_folder_and_count_for_themselves(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        for expected in (["0", "1"], ["2", "3"]):
            async with gateway(pool("policy", worker.url), **settings) as gate:
                indices = []
                for text in ("a" + expected[0], "b" + expected[1]):
                    answer = await gate.http.post("/runs/exp/sessions/s/v1/chat/completions", json=chat(text))
                    indices.append(answer.headers["x-detgate-index"])
                assert indices == expected
    assert list((tmp_path / "exp").glob("*.jsonl"))


async def test_kill_9_under_load_issues_no_index_twice_and_a_retry_keeps_its_own(tmp_path: Path) -> None:
    answered: list[tuple[str, str]] = []
    hold, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def slowly(seen: Seen, reply: Reply) -> None:
        if "held" in seen.body.decode():
            arrived.release()
            await hold.wait()
        reply.json(completion())

    async with FakeWorker(slowly) as worker:
        for life in range(3):
            hold.clear()
            process, url = await serving(tmp_path, worker.url)
            async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                bodies = [json.dumps(chat(f"{life}-{n}")).encode() for n in range(20)]
                for body in bodies:
                    done = await http.post("/sessions/s/v1/chat/completions", content=body)
                    answered.append((done.headers["x-detgate-index"], done.headers["x-detgate-seed"]))
                held = [
                    asyncio.create_task(http.post("/sessions/h/v1/chat/completions", json=chat(f"held-{n}")))
                    for n in range(4)
                ]
                for _ in held:
                    await arrived.acquire()
                process.send_signal(signal.SIGKILL)
                await process.wait()
                lost = await asyncio.gather(*held, return_exceptions=True)
                assert all(isinstance(each, httpx.HTTPError) for each in lost)
            hold.set()
        process, url = await serving(tmp_path, worker.url)
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            again = [
                (await http.post("/sessions/h/v1/chat/completions", json=chat(f"held-{n}"))).headers["x-detgate-index"]
                for n in range(4)
            ]
        process.terminate()
        assert await process.wait() == 0
    assert [int(index) for index, _ in answered] == list(range(60))
    assert sorted(again) == ["0", "1", "2", "3"]


async def serving(folder: Path, worker: str) -> tuple[asyncio.subprocess.Process, str]:
    """A gateway in a process of its own, ready."""
    config = folder / "gateway.yaml"
    config.write_text(
        json.dumps({"ledger": {"path": str(folder / "ledger")}, "run": "r", "pools": [pool("policy", worker)]})
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DETGATE_")}
    port = await free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "serve", "--config", str(config), "--port", str(port),
        env=environment, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url) as http, asyncio.timeout(30):
        while True:
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return process, url
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)


def gate_lines(folder: Path) -> list[bytes]:
    return [line for file in folder.rglob("*.jsonl") for line in file.read_bytes().splitlines()]


async def free_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
