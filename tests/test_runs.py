"""Runs: what a restarted gateway knows, and what it refuses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway import demo, runs
from gateway.core.canonical import raw
from gateway.core.errors import Busy
from gateway.core.types import Request
from gateway.ledger.reader import Segments
from gateway.ledger.shapes import Unreadable
from gateway.runs import Run, RunBusy, Runs, Told
from gateway.sessions import Sessions
from gateway.settings import InvalidSettings, Settings
from gateway.stores import memory
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
        broken = tmp_path / "x" / "1-1.jsonl"
        broken.write_text('{"event":"fleet"}\n{"event":"opened","session":"s","identity":"s","index":0}\n')
        for _ in range(2):
            answer = await ask(gate, "a", **{"x-detgate-run": "x"})
            assert error_of(answer) == (503, "run_unreadable")
            assert answer.json()["error"]["message"].startswith(
                f"{broken}, line 2 is no sound record: order is missing"
            )
        assert runs._free(tmp_path / "x")
        assert sorted(files(tmp_path / "x")) == ["1-1.jsonl", "lock"]
        assert len(os.listdir("/proc/self/fd")) < before + 10
        with pytest.raises(InvalidSettings, match=r"ledger.path: .*1-1\.jsonl, line 2 is no sound record"):
            async with gateway(pool("policy", worker.url), run="x", ledger={"path": str(tmp_path)}):
                pass
        broken.write_text('{"event":"fleet"}\n\n')
        assert "epoch" in (await ask(gate, "a", **{"x-detgate-run": "x"})).headers["x-detgate-guarantee"]


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


async def test_a_name_and_a_new_run_exclude_each_other(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    with pytest.raises(InvalidSettings, match=r"^run: r names the run, and --new-run begins one .* another name"):
        Runs(settings, MemoryStore(), Sessions(settings, MemoryStore()), lambda: None, new=True)
    assert runs._free(tmp_path / "r")


async def test_what_is_advised_where_settings_differ_helps(tmp_path: Path) -> None:
    given: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "pools": [POOL]}

    def opened(*, new: bool = False, **more: Any) -> Runs:
        settings = Settings.load(None, {}, given | more)
        return Runs(settings, MemoryStore(), Sessions(settings, MemoryStore()), lambda: None, new=new)

    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"run": "r"}, "give it another name", {"run": "r2"}),
        ({}, "start with --new-run", {"new": True}),
    ]
    for first, advice, then in cases:
        begun = opened(**first)
        os.close(begun.own._lock)  # type: ignore[arg-type]  # as a process that is killed
        differing = opened(**first, seed=7)
        assert differing.own.name == begun.own.name
        with pytest.raises(Busy, match=advice):
            differing.find(differing.own.name)
        os.close(differing.own._lock)  # type: ignore[arg-type]
        helped = opened(**then, seed=7)
        assert helped.find(helped.own.name).differs == []
        helped.close()


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
        ("pools[policy].engine", [POOL | {"engine": "sglang"}]),
        ("pools[policy].role", [POOL | {"role": "reward"}]),
        ("pools[policy].models", [POOL | {"models": ["other"]}]),
        ("pools[policy].routing.key", [POOL | {"routing": {"key": "session"}}]),
        ("pools[policy].routing.slack", [POOL | {"routing": {"slack": 2}}]),
        ("pools[policy].routing.on_home_down", [POOL | {"routing": {"slack": 0, "on_home_down": "fail"}}]),
        ("pools[policy].lane.limit, pools[policy].lane.scope", [POOL | {"lane": {"scope": "pool", "limit": 4}}]),
    ],
)
async def test_a_key_that_differs_is_named(tmp_path: Path, key: str, other: Any) -> None:
    settings = begun(tmp_path)
    same = Run(settings, "r", MemoryStore(), Sessions(settings, MemoryStore()), lambda: None, named=True)
    assert same.differs == []
    same.close()
    theirs = Settings.load(None, {}, settings.model_dump() | {key.partition("[")[0]: other})
    differing = Run(theirs, "r", MemoryStore(), Sessions(theirs, MemoryStore()), lambda: None, named=True)
    assert ", ".join(differing.differs) == key
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
        known["deciding"] = Settings.load(None, {}, demo._pools(["http://127.0.0.1:9"] * 3)).deciding()
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
                indices: list[str] = []
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
        self.response_complete = True

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


# --- runs that requests name


async def of_run(gate: Gate, run: str, text: str = "hi", session: str = "s", **headers: str) -> httpx.Response:
    return await gate.http.post(f"/runs/{run}/sessions/{session}/v1/chat/completions", json=chat(text), headers=headers)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def about(tmp_path: Path, run: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((tmp_path / run / "run.json").read_text())
    return told


async def test_the_run_that_was_idle_for_longest_makes_room_and_goes_on_when_it_is_named_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "own", "limits": {"runs": 3}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        indices: list[str] = []
        for run in ("a", "b", "a", "c", "d", "b", "a"):
            answer = await of_run(gate, run, f"{len(indices)}")
            assert answer.status_code == 200, answer.text
            indices.append(answer.headers["x-detgate-index"])
            assert len(gate.gateway.runs._open) <= 3
            if run == "c":
                assert (about(tmp_path, "b")["state"], about(tmp_path, "a")["state"]) == ("ended", "open")
        assert indices == ["0", "0", "1", "0", "0", "1", "2"]
        assert (await ask(gate, "own")).status_code == 200


async def test_many_names_use_up_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "limits": {"runs": 4}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        answers = [await of_run(gate, f"r{number}") for number in range(12)]
        assert {(answer.status_code, answer.headers["x-detgate-index"]) for answer in answers} == {(200, "0")}
        assert len(gate.gateway.sessions._ledgers) == len(gate.gateway.runs._open) == 4


async def test_a_run_with_an_open_request_or_session_is_not_closed(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if b"slow" in seen.body:
            await go.wait()
        reply.json(completion())

    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "own", "limits": {"runs": 3}}
    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), **settings) as gate:
        made = (await gate.http.post("/sessions", json={"identity": "a", "run": "held"})).json()
        slow = asyncio.create_task(of_run(gate, "asked", "slow"))
        await gate.until(lambda: len(worker.seen) == 1)
        refused = await of_run(gate, "new")
        assert error_of(refused) == (503, "too_many_runs")
        assert not (tmp_path / "new").exists()
        go.set()
        assert (await slow).headers["x-detgate-index"] == "0"
        assert (await of_run(gate, "new")).status_code == 200
        assert error_of(await gate.http.delete("/runs/asked/sessions/none")) == (404, "session_not_found")
        key = {"authorization": f"Bearer {made['api_key']}"}
        assert (await gate.http.delete("/runs/held/sessions/a", headers=key)).json()["state"] == "ended"
        assert (await of_run(gate, "newer")).status_code == 200
        assert (await of_run(gate, "newest")).status_code == 200
        assert about(tmp_path, "held")["state"] == "ended"


async def test_a_run_without_a_name_stays_so_when_it_is_named_by_a_request(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **folder) as gate:
            unnamed = gate.gateway.run
            await ask(gate, "1")
        async with gateway(pool("policy", worker.url), run="other", **folder) as gate:
            assert (await of_run(gate, unnamed, "2")).headers["x-detgate-index"] == "1"
        assert (about(tmp_path, unnamed)["named"], about(tmp_path, "other")["named"]) == (False, True)
        async with gateway(pool("policy", worker.url), resume=True, **folder) as gate:
            assert gate.gateway.run == unnamed
            assert (await ask(gate, "3")).headers["x-detgate-index"] == "2"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_who_reads_a_run_that_has_ended_opens_nothing_and_reads_what_was_there(tmp_path: Path) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "auth": {"admin_key": "admin"}}
    admin = {"authorization": "Bearer admin"}
    paths = ["used", "a", "a-1", "g:0", "held:1", "numbered", "sorted", "b"]
    groups = ["g", "held", "g%2F2"]

    async def read(gate: Gate) -> list[Any]:
        together = [(await gate.http.get(f"/runs/old/groups/{name}", headers=admin)).json() for name in groups]
        states = [(await gate.http.get(f"/runs/old/sessions/{name}", headers=admin)).json() for name in paths]
        lines = [(await gate.http.get(f"/runs/old/sessions/{name}/requests", headers=admin)).text for name in paths]
        return [*states, *lines, *together]

    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(completion() | {"metadata": {"weight_version": "v1"}})

    async with FakeWorker(script) as worker:
        async with gateway(pool("policy", worker.url), run="old", **ledger) as gate:
            made = {}
            for name, more in (("a", {}), ("b", {"index_order": "content"}), ("a", {"seed": 3})):
                answer = await gate.http.post("/sessions", json={"identity": name, **more}, headers=admin)
                made[answer.json()["session_id"]] = answer.json()["api_key"]
            for group, weights in (("g", "any"), ("held", "hold")):
                body = {"identity": group, "group_size": 2, "weights": weights}
                group_made = (await gate.http.post("/sessions", json=body, headers=admin)).json()
            held = group_made["sessions"][0]["api_key"]
            await gate.http.post("/sessions", json={"identity": "g/2", "group_size": 3}, headers=admin)
            await gate.http.delete("/sessions/g%2F2:1?failed=bad", headers=admin)
            for text in ("1", "2"):
                await of_run(gate, "old", text, "used")
                await of_run(gate, "old", text, "a", authorization=f"Bearer {made['a']}")
                await of_run(gate, "old", text, "numbered", **{"x-request-index": text})
                await of_run(gate, "old", text, "sorted", **{"x-index-order": "content"})
                await of_run(gate, "old", text, "held:0", authorization=f"Bearer {held}")
            own = {"authorization": f"Bearer {made['a']}"}
            await gate.http.post("/rl/set_reward", json={"reward": 0.5}, headers=own)
            ended = await gate.http.delete("/sessions/a-1?failed=bad", headers=admin)
            assert ended.json()["state"] == "failed"
            before = await read(gate)
            assert [state["next_index"] for state in before[:3]] == [2, 2, 0]
            assert before[1]["reward"] == 0.5
            assert before[4]["weights"] == {"policy": "v1"}
            assert before[5]["next_index"] is None
            assert [member["next_index"] for member in before[-2]["sessions"]] == [2, 0]
            assert [member["weights"] for member in before[-2]["sessions"]] == [{"policy": "v1"}] * 2
            assert (before[-1]["rejected"], before[-1]["why"]) == (True, "member 1 failed: bad")
        as_it_was = files(tmp_path / "old")
        async with gateway(pool("policy", worker.url), run="new", **ledger) as gate:
            assert await read(gate) == before
            assert (await gate.http.get("/runs/old/sessions/a", headers=own)).json() == before[1]
            for key in (made["a-1"], "dgs-wrong"):
                wrong = await gate.http.get("/runs/old/sessions/a", headers={"authorization": f"Bearer {key}"})
                assert error_of(wrong) == (401, "invalid_api_key")
            assert (await gate.http.get("/runs/old/sessions/a")).status_code == 401
            nobody = await gate.http.get("/runs/old/sessions/nobody", headers=admin)
            assert error_of(nobody) == (404, "session_not_found")
            for key, refusal in (("admin", 404), (made["a"], 404), ("dgs-wrong", 404), ("wrong", 401)):
                no_group = await gate.http.get("/runs/old/groups/a", headers={"authorization": f"Bearer {key}"})
                assert no_group.status_code == refusal
            no_group = await gate.http.get("/runs/old/groups/g", headers=own)
            assert error_of(no_group) == (404, "group_not_found")
            assert list(gate.gateway.runs._open) == ["new"]
            assert files(tmp_path / "old") == as_it_was


async def opened(gate: Gate, run: str, text: str, session: str = "s", **headers: str) -> httpx.Response:
    """The answer of a run, once it is open."""
    while (answer := await of_run(gate, run, text, session, **headers)).status_code == 503:
        assert error_of(answer) == (503, "run_opening"), answer.text
        assert int(answer.headers["retry-after"]) >= 1
        await asyncio.sleep(0.01)
    return answer


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every ledger is long; what is read of one is known when this is set."""
    monkeypatch.setattr(runs, "LARGE", 0)
    go = threading.Event()
    real = Told.read

    def read(self: Told) -> None:
        real(self)
        assert go.wait(10)

    monkeypatch.setattr(Told, "read", read)
    return go


async def test_while_a_long_ledger_is_read_the_others_go_on(tmp_path: Path, reading: threading.Event) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", **ledger) as gate:
            await ask(gate, "1")
            key = (await gate.http.post("/sessions", json={"identity": "a"})).json()["api_key"]
        async with gateway(pool("policy", worker.url), run="new", **ledger) as gate:
            own = {"authorization": f"Bearer {key}"}
            for _ in range(3):
                refused = await of_run(gate, "old", "2")
                assert error_of(refused) == (503, "run_opening")
                assert refused.headers["retry-after"] == "1"
                assert error_of(await of_run(gate, "old", "2", "a", **own)) == (503, "run_opening")
                assert (await ask(gate, "1")).status_code == 200
            # Nothing of it is known before all of it is.
            assert gate.gateway.sessions.live == 0
            assert (await gate.http.post("/v1/chat/completions", json=chat(), headers=own)).status_code == 401
            assert (await gate.http.get("/admin/runs/old/requests")).headers["x-detgate-order"] == "canonical"
            reading.set()
            assert (await opened(gate, "old", "2")).headers["x-detgate-index"] == "1"
            assert (await of_run(gate, "old", "2", "a", **own)).headers["x-detgate-index"] == "0"
            assert gate.gateway.sessions.live == 1
        assert about(tmp_path, "old")["state"] == "ended"


@pytest.mark.parametrize("long", [False, True])
async def test_a_run_is_the_same_however_long_its_ledger_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    if long:
        monkeypatch.setattr(runs, "LARGE", 0)
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "limits": {"scopes": 8, "sessions": 3}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", **settings) as gate:
            for number in range(60):
                await of_run(gate, "old", "1", f"s{number}", **{"idempotency-key": "k"})
            keys = {}
            for number in range(5):
                made = (await gate.http.post("/sessions", json={"identity": f"a{number}"})).json()
                keys[number] = {"authorization": f"Bearer {made['api_key']}"}
                if number < 4:
                    await gate.http.delete(f"/sessions/a{number}?failed=bad")
            group = (await gate.http.post("/sessions", json={"identity": "g", "group_size": 2})).json()["group_id"]
        (tmp_path / "old" / "x.gap").touch()
        async with gateway(pool("policy", worker.url), run="new", **settings) as gate:
            mine = (await gate.http.post("/sessions", json={"identity": "mine"})).json()["api_key"]
            await gate.http.delete("/sessions/mine")
            for number in range(30):
                await ask(gate, f"{number}")
            again = await opened(gate, "old", "1", "s7", **{"idempotency-key": "k"})
            assert (again.headers["x-detgate-index"], "epoch" in again.headers["x-detgate-guarantee"]) == ("0", True)
            for number in range(60):
                assert (await of_run(gate, "old", "2", f"s{number}")).headers["x-detgate-index"] == "1"
            assert (await ask(gate, "30")).headers["x-detgate-index"] == "30"
            for number in (2, 3):
                assert error_of(await of_run(gate, "old", "1", f"a{number}", **keys[number])) == (410, "session_ended")
            assert (await of_run(gate, "old", "1", "a4", **keys[4])).headers["x-detgate-index"] == "0"
            members = (await gate.http.get(f"/runs/old/groups/{group}")).json()["sessions"]
            assert [member["state"] for member in members] == ["open", "open"]
            full = await gate.http.post("/sessions", json={"identity": "b", "run": "old"})
            assert error_of(full) == (503, "too_many_sessions")
            assert (await gate.http.delete("/runs/old/sessions/a4")).json()["state"] == "ended"
            more = (await gate.http.post("/sessions", json={"identity": "a0", "run": "old"})).json()
            assert more["session_id"] == "a0-1"
            assert mine
            store = gate.gateway._store
            assert isinstance(store, MemoryStore)
            assert store._weight == sum(map(memory._weight, store._scopes.values()))
            assert len(gate.gateway.sessions._ended) <= 3
        lost = [
            json.loads(line) for file in (tmp_path / "old").glob("*.jsonl") for line in file.read_text().splitlines()
        ]
        assert [record["missing"] for record in lost if record["event"] == "gap"] == [None]


async def test_what_was_open_when_a_process_died_is_closed_as_lost_in_a_long_ledger_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LARGE", 0)
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", ledger={"path": str(tmp_path)}) as gate:
            await ask(gate, "1")
            await ask(gate, "2")
        [file] = (tmp_path / "old").glob("*.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [each for each in records if each["event"] == "opened" or each.get("index") == 0]
        file.write_text("".join(json.dumps(each) + "\n" for each in kept))
        async with gateway(pool("policy", worker.url), run="new", ledger={"path": str(tmp_path)}) as gate:
            assert (await opened(gate, "old", "2")).headers["x-detgate-index"] == "1"
        ends = [
            json.loads(line)
            for file in sorted((tmp_path / "old").glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        assert [each["error"] for each in ends if each["event"] == "closed"] == [None, "gateway-lost", None]


async def test_a_long_ledger_that_cannot_be_read_is_told_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LARGE", 0)
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", **ledger) as gate:
            await ask(gate, "1")
        async with gateway(pool("policy", worker.url), run="new", **ledger) as gate:
            with monkeypatch.context() as patch:

                def broken(self: Any) -> Any:
                    raise OSError(errno.EIO, "Input/output error")

                patch.setattr(Segments, "__iter__", broken)
                assert error_of(await of_run(gate, "old", "2")) == (503, "run_opening")
                await gate.until(lambda: gate.gateway.runs._opening["old"].done())
                assert error_of(await of_run(gate, "old", "2")) == (503, "ledger_unwritable")
            os.close(runs._locked(tmp_path / "old"))
            assert (await opened(gate, "old", "2")).headers["x-detgate-index"] == "1"


async def test_who_ends_while_a_long_ledger_is_read_leaves_its_run_to_others(
    tmp_path: Path, reading: threading.Event
) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", **ledger) as gate:
            await ask(gate, "1")
        before = about(tmp_path, "old")
        async with gateway(pool("policy", worker.url), run="new", **ledger) as gate:
            assert error_of(await of_run(gate, "old", "2")) == (503, "run_opening")
            with pytest.raises(RunBusy):
                runs._locked(tmp_path / "old")
        reading.set()
        while not runs._free(tmp_path / "old"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert about(tmp_path, "old") == before
        assert not list((tmp_path / "old").glob("*.db"))


async def test_runs_that_are_being_opened_count_too(tmp_path: Path, reading: threading.Event) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        for run in ("a", "b"):
            async with gateway(pool("policy", worker.url), run=run, **ledger) as gate:
                await ask(gate, "1")
        async with gateway(pool("policy", worker.url), run="new", limits={"runs": 2}, **ledger) as gate:
            assert error_of(await of_run(gate, "a", "2")) == (503, "run_opening")
            assert error_of(await of_run(gate, "b", "2")) == (503, "too_many_runs")
            reading.set()
            assert (await opened(gate, "a", "2")).headers["x-detgate-index"] == "1"
            assert (await opened(gate, "b", "2")).headers["x-detgate-index"] == "1"


# --- what cannot be made out


BROKEN_ABOUT = {
    "empty": b"",
    "cut": b'{"run": "r", "named": true, "state": "op',
    "no object": b"[]",
    "no settings": b'{"run": "r", "named": true, "state": "open", "started": 1}',
    "settings of another type": b'{"run": "r", "named": true, "state": "open", "started": 1, "deciding": []}',
    "another state": b'{"run": "r", "named": true, "state": "ajar", "started": 1, "deciding": {}}',
}


@pytest.mark.parametrize("content", BROKEN_ABOUT.values(), ids=BROKEN_ABOUT)
async def test_a_run_whose_settings_cannot_be_made_out_is_refused(tmp_path: Path, content: bytes) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="r", **ledger) as gate:
            await ask(gate, "1")
        whole = (tmp_path / "r" / "run.json").read_bytes()
        (tmp_path / "r" / "run.json").write_bytes(content)
        as_it_was = files(tmp_path / "r")
        for given in ({"run": "r"}, {"run": "r", "resume": True}, {}):
            with pytest.raises(InvalidSettings, match=r"r/run\.json does not say .* Put it back"):
                async with gateway(pool("policy", worker.url), **ledger, **given):
                    pass
        async with gateway(pool("policy", worker.url), run="other", **ledger) as gate:
            for path in ("/runs/r/sessions/s", "/admin/runs/r/requests"):
                assert error_of(await gate.http.get(path)) == (503, "run_unreadable")
            refused = await of_run(gate, "r", "2")
            assert error_of(refused) == (503, "run_unreadable")
            assert f"{tmp_path}/r/run.json" in refused.json()["error"]["message"]
            assert files(tmp_path / "r") == as_it_was
            (tmp_path / "r" / "run.json").write_bytes(whole)
            assert (await of_run(gate, "r", "2")).headers["x-detgate-index"] == "1"


@pytest.mark.parametrize("line", [0, 1])
async def test_a_segment_of_another_run_is_refused(tmp_path: Path, line: int) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        for run in ("other", "r"):
            async with gateway(pool("policy", worker.url), run=run, **ledger) as gate:
                await ask(gate, "1")
        (segment,) = (tmp_path / "other").glob("*.jsonl")
        lines = segment.read_text().splitlines(keepends=True)
        copied = tmp_path / "r" / segment.name
        copied.write_text("".join(lines[line:]))
        with pytest.raises(InvalidSettings, match=rf"{copied}, line 1 is no sound record: run is 'other', and not r"):
            async with gateway(pool("policy", worker.url), run="r", resume=True, **ledger):
                pass
        copied.unlink()
        async with gateway(pool("policy", worker.url), run="r", resume=True, **ledger) as gate:
            assert (await ask(gate, "2")).headers["x-detgate-index"] == "1"


async def told_of_everything(folder: Path) -> list[dict[str, Any]]:
    """The records of a run in which most things happened."""
    ledger: dict[str, Any] = {"ledger": {"path": str(folder)}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), run="r", **ledger) as gate:
        await gate.http.post("/admin/weights", json={"version": "v1"})
        for body in ({"identity": "a"}, {"identity": "g", "group_size": 2, "weights": "hold"}):
            made = (await gate.http.post("/sessions", json=body)).json()
        for member in made["sessions"]:
            key = {"authorization": f"Bearer {member['api_key']}"}
            await gate.http.post("/v1/chat/completions", json=chat(), headers=key)
            await gate.http.post("/rl/set_reward", json={"reward": 1.0}, headers=key)
        await gate.http.delete("/sessions/g:1?failed=bad")
        for headers in ({"idempotency-key": "k"}, {"x-session-id": "n", "x-request-index": "3"}):
            await gate.http.post("/v1/chat/completions", json=chat(), headers=headers)
        gate.gateway.runs.own.ledger.flush()
        return [json.loads(line) for line in gate_lines(folder)]


async def test_whatever_is_wrong_with_a_record_the_run_is_refused_with_its_place_or_goes_on(tmp_path: Path) -> None:
    """Nothing else comes of it, and nothing is left behind."""
    records = await told_of_everything(tmp_path / "whole")
    events = {"opened", "complete", "closed", "session", "session_ended", "session_weights", "reward", "weights"}
    assert events <= {record["event"] for record in records}
    settings = Settings.load(None, {}, {"ledger": {"path": str(tmp_path)}, "pools": [POOL]})
    folder = tmp_path / "r"
    folder.mkdir()
    seen: set[str] = set()
    refusals: list[tuple[int, str]] = []
    for number, record in enumerate(records):
        kind = record["event"] + str(record.get("group")) + str(record.get("key"))
        if kind in seen:
            continue
        seen.add(kind)
        for name in record:
            for value in (..., None, -1, "x", ["x"]):
                broken = {key: each for key, each in record.items() if key != name or value is not ...}
                if value is not ...:
                    broken[name] = value
                lines = [*records[:number], broken, *records[number + 1 :]]
                (folder / "1-1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
                store = MemoryStore()
                sessions = Sessions(settings, store)
                try:
                    Run(settings, "r", store, sessions, lambda: None, named=True).close()
                except Unreadable as fault:
                    refusals.append((number + 1, fault.message))
                assert runs._free(folder)
                assert (store.scopes, sessions.live, sessions._past, store._shelves) == (0, 0, {}, {})
                for file in folder.iterdir():
                    file.unlink()
    assert len(refusals) > 200
    assert all(f"/1-1.jsonl, line {line} is no sound record: " in message for line, message in refusals)


@pytest.mark.parametrize("long", [False, True])
async def test_a_session_of_an_ended_run_with_a_broken_record_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    if long:
        monkeypatch.setattr(runs, "LARGE", 0)
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="r", ledger={"path": str(tmp_path)}) as gate:
            await gate.http.post("/sessions", json={"identity": "a"})
        [file] = (tmp_path / "r").glob("*.jsonl")
        file.write_bytes(file.read_bytes().replace(b'"key_digest":"', b'"key_digest":"x'))
        async with gateway(pool("policy", worker.url), run="other", ledger={"path": str(tmp_path)}) as gate:
            refused = await gate.http.get("/runs/r/sessions/a")
            assert error_of(refused) == (503, "run_unreadable")
            assert str(file) in refused.json()["error"]["message"]
            answers = [await of_run(gate, "r", "1")]
            if long:
                await gate.until(lambda: gate.gateway.runs._opening["r"].done())
                answers = [await of_run(gate, "r", "1")]
            assert error_of(answers[0]) == (503, "run_unreadable")
            assert runs._free(tmp_path / "r")


async def test_what_could_not_be_written_whole_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(file: Path, data: bytes) -> int:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            assert error_of(await of_run(gate, "x", "1")) == (503, "ledger_unwritable")
        assert list(files(tmp_path / "x")) == ["lock"]
        assert (await of_run(gate, "x", "1")).headers["x-detgate-index"] == "0"


@pytest.mark.parametrize("restart", [False, True])
async def test_a_retry_of_who_waited_in_vain_is_not_taken_for_another_request(tmp_path: Path, restart: bool) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if b"slow" in seen.body:
            await go.wait()
        reply.json(completion())

    strict: dict[str, Any] = {"run": "r", "profile": "strict", "timeouts": {"settle": 0.05}}
    strict["ledger"] = {"path": str(tmp_path)}
    retry = {"x-stainless-retry-count": "1"}
    async with FakeWorker(script) as worker:
        async with gateway(pool("policy", worker.url), **strict) as gate:
            slow = asyncio.create_task(ask(gate, "slow"))
            await gate.until(lambda: worker.running == 1)
            assert error_of(await ask(gate, "x")) == (409, "racing_index")
            go.set()
            await slow
            assert (await ask(gate, "x")).headers["x-detgate-index"] == "1"
            answer = None if restart else await ask(gate, "x", **retry)
        if answer is None:
            async with gateway(pool("policy", worker.url), resume=True, **strict) as gate:
                answer = await ask(gate, "x", **retry)
    assert answer.headers["x-detgate-index"] == "2"
    assert "retry-unmatched" in answer.headers["x-detgate-guarantee"]


# --- what is taken away while it is served


@pytest.mark.parametrize("on_error", ["fail", "continue"])
async def test_a_run_whose_folder_is_taken_away_is_noticed(tmp_path: Path, on_error: str) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path), "on_error": on_error}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), run="r", **ledger) as gate:
        await ask(gate, "1")
        await of_run(gate, "other", "1")
        shutil.rmtree(tmp_path / "r")
        with capture_logs() as logs:
            await gate.until(lambda: gate.gateway.runs.own.ledger.broken)
            assert await gate.gauge("detgate_ledger_errors_total") >= 1
            answer = await ask(gate, "2")
            ready = await gate.http.get("/readyz")
        if on_error == "fail":
            assert error_of(answer) == (503, "ledger_unwritable")
            assert ready.json()["why"] == ["The ledger cannot be written: its segment was removed or renamed."]
            assert len(worker.seen) == 2
        else:
            assert "unrecorded" in answer.headers["x-detgate-guarantee"]
            assert ready.status_code == 200
        assert [each["event"] for each in logs if "ledger" in each["event"]] == ["the ledger cannot be written"]
        assert "unrecorded" not in (await of_run(gate, "other", "2")).headers["x-detgate-guarantee"]
    assert not (tmp_path / "r").exists()
    assert about(tmp_path, "other")["state"] == "ended"


async def test_a_run_whose_segment_was_taken_away_goes_on_in_another_epoch(tmp_path: Path) -> None:
    ledger: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "r"}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **ledger) as gate:
            await ask(gate, "1")
            gate.gateway.runs.own.ledger.file.unlink()
            await gate.until(lambda: gate.gateway.runs.own.ledger.broken)
        assert about(tmp_path, "r")["state"] == "open"
        async with gateway(pool("policy", worker.url), **ledger) as gate:
            assert "epoch" in (await ask(gate, "2")).headers["x-detgate-guarantee"]
