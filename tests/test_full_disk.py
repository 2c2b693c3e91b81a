"""A gateway of its own whose files cannot grow: what `ledger.on_error` says becomes of its requests."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import httpx

from tests.harness import FakeWorker, chat, pool
from tests.processes import Process, serving

PATH = "/sessions/s/v1/chat/completions"


def config(worker: FakeWorker, **settings: Any) -> str:
    return json.dumps({"run": "r", "pools": [pool("policy", worker.url)], **settings})


def fill(gate: Process, room: int) -> None:
    """Let no file of the process grow beyond so many bytes: its next write is cut short or fails."""
    _, hard = resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE, (room, hard))


def free(gate: Process) -> None:
    _, hard = resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(gate.process.pid, resource.RLIMIT_FSIZE, (hard, hard))


async def ask(gate: Process, text: str) -> httpx.Response:
    return await gate.http.post(PATH, json=chat(text))


def records(folder: Path) -> list[dict[str, Any]]:
    """What the ledger has of requests, and of gaps."""
    lines = [line for file in sorted(folder.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    return [each for each in map(json.loads, lines) if each["event"] in ("opened", "closed", "gap")]


async def closed(folder: Path, delivered: int = 1) -> None:
    """Wait until the ends of so many requests are written."""
    async with asyncio.timeout(10):
        while [each.get("outcome") for each in records(folder)].count("delivered") < delivered:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def index(answer: httpx.Response) -> int:
    return int(answer.headers["x-detgate-index"])


async def errors(gate: Process) -> float:
    text = (await gate.http.get("/metrics")).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("detgate_ledger_errors_total"))


async def test_fail_refuses_before_anything_goes_upstream_and_loses_no_index(tmp_path: Path) -> None:
    async with FakeWorker() as worker:
        async with serving(tmp_path, config(worker, ledger={"on_error": "fail"})) as gate:
            assert index(await ask(gate, "a")) == 0
            await closed(tmp_path)
            fill(gate, 10)
            for text in ("b", "c", "d"):
                refused = await ask(gate, text)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "ledger_unwritable"
                assert int(refused.headers["retry-after"]) > 0
            assert len(worker.seen) == 1
            assert (await gate.http.get("/livez")).status_code == 200
            unready = await gate.http.get("/readyz")
            assert unready.status_code == 503
            assert unready.json()["why"] == ["The ledger cannot be written: File too large."]
            assert await errors(gate) >= 3
            free(gate)
            assert (await gate.http.get("/readyz")).status_code == 200
            assert [index(await ask(gate, text)) for text in ("c", "b")] == [2, 1]
            assert len(await gate.logged("the ledger cannot be written")) == 1
            assert len(await gate.logged("the ledger can be written again")) == 1
            await closed(tmp_path, 3)
            gate.process.kill()
            await gate.process.wait()
        async with serving(tmp_path, config(worker, ledger={"on_error": "fail"})) as gate:
            assert index(await ask(gate, "e")) == 3
    told = [(each["event"], each["index"], each.get("outcome")) for each in records(tmp_path)]
    assert ("closed", 1, "failed") in told
    assert told.count(("closed", 1, "delivered")) == told.count(("closed", 2, "delivered")) == 1


async def test_continue_serves_says_so_and_a_restart_begins_another_epoch(tmp_path: Path) -> None:
    async with FakeWorker() as worker:
        async with serving(tmp_path, config(worker)) as gate:
            assert "unrecorded" not in (await ask(gate, "a")).headers["x-detgate-guarantee"]
            fill(gate, 10)
            for number in range(30):
                answer = await ask(gate, f"b{number}")
                assert (answer.status_code, index(answer)) == (200, number + 1)
                assert "unrecorded" in answer.headers["x-detgate-guarantee"]
            assert await errors(gate) >= 30
            assert sum("ledger" in line for line in gate.lines) <= 2
            free(gate)
            assert "unrecorded" not in (await ask(gate, "c")).headers["x-detgate-guarantee"]
            [gap] = [each for each in records(tmp_path) if each["event"] == "gap"]
            assert gap["missing"] == 30
            gate.process.kill()
            await gate.process.wait()
        for _ in range(2):
            async with serving(tmp_path, config(worker)) as gate:
                assert "epoch" in (await ask(gate, "d")).headers["x-detgate-guarantee"]
                gate.process.kill()
                await gate.process.wait()
    assert {each["epoch"] for each in records(tmp_path) if each["event"] == "opened"} == {0, 1}


async def test_a_process_that_is_killed_while_nothing_can_be_written_leaves_a_gap_that_is_seen(tmp_path: Path) -> None:
    async with FakeWorker() as worker:
        async with serving(tmp_path, config(worker)) as gate:
            await ask(gate, "a")
            fill(gate, 10)
            assert index(await ask(gate, "b")) == 1
            gate.process.kill()
            await gate.process.wait()
        async with serving(tmp_path, config(worker)) as gate:
            answer = await ask(gate, "c")
            assert (index(answer), answer.headers["x-detgate-guarantee"].split("; ")[1]) == (1, "epoch")


async def test_in_strict_a_run_with_a_gap_is_fenced(tmp_path: Path) -> None:
    (tmp_path / "ledger" / "r").mkdir(parents=True)
    (tmp_path / "ledger" / "r" / "1.jsonl").write_bytes(b'{"event":"gap"}\n')
    async with FakeWorker() as worker, serving(tmp_path, config(worker, profile="strict")) as gate:
        refused = await ask(gate, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_fenced")
    assert refused.headers["x-should-retry"] == "false"
