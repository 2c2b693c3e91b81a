"""Runs: what a restarted gateway knows, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.canonical import raw
from gateway.core.types import Request
from gateway.runs import Run
from gateway.sessions import Sessions
from gateway.settings import InvalidSettings, Settings
from gateway.stores.memory import MemoryStore
from tests import killing, ports
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool

ROOT = Path(__file__).parent.parent


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


async def test_a_run_that_could_not_be_opened_is_opened_as_it_was_when_it_can(tmp_path: Path) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        made = (await gate.http.post("/sessions", json={"identity": "a", "run": "r"})).json()
    async with gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        in_the_way = tmp_path / "r" / f"run.json.{os.getpid()}"
        in_the_way.mkdir()
        refused = await gate.http.post("/sessions", json={"identity": "a", "run": "r"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ledger_unwritable")
        assert gate.gateway.sessions.session("r", "a") is None
        in_the_way.rmdir()
        other = (await gate.http.post("/sessions", json={"identity": "a", "run": "r"})).json()
        assert (made["session_id"], other["session_id"]) == ("a", "a-1")


async def test_a_run_that_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, data: bytes) -> int:
        if file.name.startswith("run.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        write = Path.write_bytes
        monkeypatch.setattr(Path, "write_bytes", full)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert (await ask(gate, "a", **{"x-detgate-run": "x"})).status_code == 503
        assert sorted(file.name for file in (tmp_path / "x").iterdir() if file.suffix != ".db") == ["lock"]
        assert len(os.listdir("/proc/self/fd")) < before + 10
        monkeypatch.undo()
        (tmp_path / "x" / "1-1.jsonl").write_text('{"event":"opened","session":"s","identity":"s","index":0}\n')
        for _ in range(2):
            answer = await ask(gate, "a", **{"x-detgate-run": "x"})
            assert answer.json()["error"]["code"] == "internal_error"


async def test_what_was_in_flight_is_closed_as_lost_and_its_index_taken_again_by_its_bytes(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    opened = {
        "event": "opened", "run": "r", "epoch": 0, "session": "s", "identity": "s", "index": 0, "order": "arrival",
        "digest": "", "content": None, "key": None, "repeat": 0, "flags": [],
    }  # fmt: skip
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


def begun(folder: Path, **settings: Any) -> Settings:
    """Settings in a file, of which the run `r` began."""
    made = Settings.load(None, {}, {"run": "r", "ledger": {"path": str(folder)}, "pools": [POOL], **settings})
    (folder / "r").mkdir()
    about = {"run": "r", "named": True, "state": "open", "started": 1, "deciding": made.deciding()}
    (folder / "r" / "run.json").write_text(json.dumps(about))
    return made


POOL = {"name": "policy", "engine": "vllm", "models": ["m"], "replicas": [{"name": "a", "url": "http://127.0.0.1:9"}]}


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("seed", 7),
        ("scheme", "areal"),
        ("index_order", "content"),
        ("client_seed", "mix"),
        ("profile", "strict"),
        ("pools", [POOL | {"replicas": [{"name": "b", "url": "http://127.0.0.1:9"}]}]),
        ("pools", [POOL | {"name": "other"}]),
    ],
)
async def test_a_key_that_differs_is_named(tmp_path: Path, key: str, other: Any) -> None:
    settings = begun(tmp_path)
    same = Run(settings, "r", MemoryStore(), Sessions(settings, MemoryStore()), lambda: None, named=True)
    assert same.differs == []
    same.close()
    theirs = Settings.load(None, {}, settings.model_dump() | {key: other})
    differing = Run(theirs, "r", MemoryStore(), Sessions(theirs, MemoryStore()), lambda: None, named=True)
    assert differing.differs == [key]
    differing.close()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["deciding"] == settings.deciding()


@pytest.mark.parametrize(
    ("command", "environment", "flags", "key"),
    [
        ("serve", {}, ["--seed", "7"], "seed"),
        ("serve", {"DETGATE_SCHEME": "areal"}, [], "scheme"),
        ("serve", {}, ["--config", "other.yaml"], "client_seed"),
        ("demo", {"DETGATE_INDEX_ORDER": "content"}, ["--run", "r"], "index_order"),
    ],
)
async def test_however_a_setting_is_given_a_process_that_differs_is_not_ready_and_names_it(
    tmp_path: Path, command: str, environment: dict[str, str], flags: list[str], key: str
) -> None:
    begun(tmp_path)
    if command == "demo":
        known = json.loads((tmp_path / "r" / "run.json").read_text())
        known["deciding"] |= {"pools": {"policy": ["policy-0", "policy-1"], "reward": ["reward-0"]}}
        (tmp_path / "r" / "run.json").write_text(json.dumps(known))
    else:
        file = {"run": "r", "ledger": {"path": str(tmp_path)}, "pools": [POOL]}
        (tmp_path / "gateway.yaml").write_text(json.dumps(file))
        (tmp_path / "other.yaml").write_text(json.dumps(file | {"client_seed": "reject"}))
        if "--config" not in flags:
            flags = ["--config", "gateway.yaml", *flags]
    port = ports.free()
    env = {name: value for name, value in os.environ.items() if not name.startswith("DETGATE_")} | environment
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", command, *flags, "--port", str(port), "--ledger", str(tmp_path)),
        env=env | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, stderr=asyncio.subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            while b"not ready" not in await process.stderr.readline():
                assert process.returncode is None
            while True:
                with suppress(httpx.TransportError):
                    unready = await http.get("/readyz")
                    break
                await asyncio.sleep(0.02)
        assert unready.status_code == 503
        assert f"run r began with other settings: {key}" in unready.json()["why"]
    finally:
        process.kill()
        await process.wait()


async def test_two_processes_cannot_have_one_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings):
        with pytest.raises(InvalidSettings, match="run: Another process has run r"):
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


@pytest.mark.timeout(300)
async def test_kill_9_under_load_issues_no_index_twice_loses_none_and_a_retry_keeps_its_own(tmp_path: Path) -> None:
    told = await killing.lives(tmp_path, kills=3, seconds=0.05)
    assert told.lost
    killing.check(told, tmp_path)


@dataclass
class Witness:
    """A client that notes what the ledger has when the last byte of its answer comes."""

    folder: Path
    started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None
    seen: list[list[str]] = field(default_factory=list)
    got: bytes = b""

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        self.write(body)

    def start(self, status: int, headers: bytes, length: int | None = None) -> None:
        self.started = True

    def write(self, data: bytes) -> None:
        self.got += data
        self.seen.append([json.loads(line)["event"] for line in gate_lines(self.folder)])

    def end(self) -> None:
        self.response_complete = True

    def break_off(self) -> None:
        raise AssertionError("broken")

    async def flushed(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [False, True])
async def test_the_ledger_knows_that_an_answer_is_complete_before_its_last_byte_leaves(
    tmp_path: Path, stream: bool
) -> None:
    body = json.dumps(chat("x", stream=stream)).encode()
    request = Request("POST", "/sessions/s/v1/chat/completions", "", [], {}, body)
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        witness = Witness(tmp_path)
        await gate.gateway.serve(request, witness)
    assert witness.got.endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert witness.seen[-1][-2:] == ["opened", "complete"]
    assert all("closed" not in events for events in witness.seen)


@pytest.mark.parametrize(
    ("answer", "complete"),
    [({"status": 500}, False), ({"status": 400}, True), ({"finish_reason": "abort"}, False), ({}, True)],
)
async def test_only_what_answers_its_request_is_complete(
    tmp_path: Path, answer: dict[str, Any], complete: bool
) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        choice = {"index": 0, "message": {}, "finish_reason": answer.get("finish_reason", "stop")}
        reply.json(completion(choices=[choice]), answer.get("status", 200))

    async with FakeWorker(script) as worker:
        async with gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
            await ask(gate, "x")
    assert (b'"complete"' in b"".join(gate_lines(tmp_path))) is complete


async def test_an_answer_that_was_complete_when_the_process_died_may_have_been_delivered(tmp_path: Path) -> None:
    body = json.dumps(chat("x")).encode()
    opened = {
        "event": "opened", "run": "r", "epoch": 0, "session": "s", "identity": "s", "index": 0, "order": "arrival",
        "digest": raw("/v1/chat/completions", body).hex(), "content": None, "key": None, "repeat": 0, "flags": [],
    }  # fmt: skip
    complete = {"event": "complete", "run": "r", "session": "s", "identity": "s", "index": 0}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "1.jsonl").write_text(json.dumps(opened) + "\n" + json.dumps(complete) + "\n")
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="r", ledger={"path": str(tmp_path)}) as gate:
            [lost] = [record for record in gate.records() if record["event"] == "closed"]
            assert (lost["error"], lost["used"]) == ("gateway-lost", True)
            path = "/sessions/s/v1/chat/completions"
            again = await gate.http.post(path, content=body, headers={"x-stainless-retry-count": "1"})
            new = await gate.http.post(path, content=body)
    assert (again.headers["x-detgate-index"], new.headers["x-detgate-index"]) == ("0", "1")


def gate_lines(folder: Path) -> list[bytes]:
    return [line for file in folder.rglob("*.jsonl") for line in file.read_bytes().splitlines()]
