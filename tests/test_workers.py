"""`detgate serve --workers N` as real processes on a real store: one port, one fleet, one set of numbers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.cli import main
from gateway.settings import Settings
from gateway.siblings import Count
from gateway.telemetry import Telemetry
from gateway.workers import Post, Workers
from tests.harness import MODEL, FakeWorker, Reply, Seen, chat, completion, pool
from tests.processes import Process, serving
from tests.redis_server import RedisServer

pytestmark = pytest.mark.first

CHAT = "/v1/chat/completions"


def config(server: RedisServer, *pools: dict[str, Any], **settings: Any) -> str:
    timeouts = {"gateway": 1.5} | settings.pop("timeouts", {})
    given = {"state": server.url, "run": "r", "workers": 2, "timeouts": timeouts, "health": {"interval": 0.2}}
    return yaml.safe_dump({"pools": list(pools)} | given | settings)


class Fresh:
    """A client of whose requests each has a connection of its own: the workers take turns."""

    def __init__(self, gate: Process) -> None:
        self._url = f"http://127.0.0.1:{gate.port}"

    async def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=30, verify=False) as http:
            return await http.request(method, path, **given)

    async def numbers(self) -> dict[str, float]:
        """The series that `/metrics` tells, but for the buckets."""
        text = (await self.ask("GET", "/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for sample in samples
            if not sample.name.endswith("_bucket")
        }


@asynccontextmanager
async def ready(folder: Path, text: str, workers: int = 2) -> AsyncIterator[tuple[Process, Fresh]]:
    """The workers, all of which serve."""
    async with serving(folder, text) as gate:
        await gate.logged("worker ready", workers)
        fresh = Fresh(gate)
        for _ in range(8 * workers):
            while (await fresh.ask("GET", "/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield gate, fresh


async def pids(gate: Process, times: int) -> list[int]:
    """Those of the workers that became ready, in that order."""
    return [int(json.loads(line)["pid"]) for line in await gate.logged("worker ready", times)]


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "ledger").rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


async def test_workers_are_one_gateway(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker, FakeWorker() as other:
        async with ready(tmp_path, config(server, pool("policy", worker.url))) as (gate, fresh):
            # One counter, by several segments of one ledger.
            answers = [await fresh.ask("POST", f"/sessions/s{CHAT}", json=chat(str(n))) for n in range(24)]
            assert [int(answer.headers["x-detgate-index"]) for answer in answers] == list(range(24))
            writers = {record["gateway"] for record in records(tmp_path) if record["event"] == "opened"}
            assert len(writers) == 2

            # The same numbers, whichever is asked.
            told = [await fresh.numbers() for _ in range(12)]
            name = f"detgate_requests_total[('pool', 'policy'), ('route', '{CHAT}'), ('status', '200')]"
            assert {numbers[name] for numbers in told} == {24}
            assert {numbers["detgate_replica_up[('pool', 'policy'), ('replica', 'policy-0')]"] for numbers in told} == {
                1
            }

            # A session that one creates all know.
            made = [(await fresh.ask("POST", "/sessions", json={"identity": "17"})).json() for _ in range(6)]
            assert [each["session_id"] for each in made] == ["17", "17-1", "17-2", "17-3", "17-4", "17-5"]
            key = {"authorization": f"Bearer {made[3]['api_key']}"}
            for n in range(8):
                answer = await fresh.ask("POST", CHAT, json=chat(str(n)), headers=key)
                assert (answer.headers["x-detgate-session"], answer.headers["x-detgate-index"]) == ("17-3", str(n))
            assert (await fresh.ask("DELETE", "/sessions/17-3", headers=key)).json()["state"] == "ended"
            for _ in range(8):
                assert (await fresh.ask("POST", CHAT, json=chat(), headers=key)).status_code == 410

            # What one ledger has of it, from all segments.
            lines = (await fresh.ask("GET", "/sessions/s/requests")).text.splitlines()
            assert [json.loads(line)["index"] for line in lines] == list(range(24))

            # A change of the fleet reaches all, before its answer does.
            added = await fresh.ask("POST", "/admin/pools/policy/replicas", json={"name": "new", "url": other.url})
            assert added.status_code == 201, added.text
            for _ in range(12):
                shown = (await fresh.ask("GET", "/admin/replicas")).json()["policy"]
                assert [replica["name"] for replica in shown] == ["policy-0", "new"]
            await fresh.ask("POST", "/admin/pools/policy/replicas/policy-0/drain")
            before = len(worker.seen)
            for n in range(12):
                await fresh.ask("POST", CHAT, json=chat(f"drained {n}"))
            assert len(worker.seen) == before

            # A reload too: the file names the first alone, undrained or not.
            gate.signal(signal.SIGHUP)
            await gate.logged("reloaded")
            for _ in range(8):
                shown = (await fresh.ask("GET", "/admin/replicas")).json()["policy"]
                assert [replica["name"] for replica in shown] == ["policy-0"]

            gate.signal(signal.SIGTERM)
            assert await gate.ended(15) == 0
        assert not [line for line in gate.lines if '"level": "error"' in line]
        for event in ("draining", "ended"):
            told = [json.loads(line) for line in gate.lines if f'"event": "{event}"' in line]
            assert sorted(line.get("worker", -1) for line in told) == [-1, 0, 1], "each process says it once"


async def test_one_that_dies_is_replaced_and_what_it_had_is_lost_by_nobody(tmp_path: Path) -> None:
    holding, held, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if holding.is_set():
            held.set()
            await go.wait()
        reply.json(completion())

    async with RedisServer() as server, FakeWorker(script) as worker, FakeWorker() as other:
        async with ready(tmp_path, config(server, pool("policy", worker.url))) as (gate, fresh):
            for n in range(10):
                await fresh.ask("POST", f"/sessions/s{CHAT}", json=chat(str(n)))
            await fresh.ask("POST", "/admin/pools/policy/replicas", json={"name": "new", "url": other.url})
            await fresh.ask("POST", "/admin/pools/policy/replicas/new/drain")
            before = await fresh.numbers()
            holding.set()
            lost = asyncio.create_task(fresh.ask("POST", f"/sessions/t{CHAT}", json=chat("lost")))
            await held.wait()
            owner = next(r["gateway"] for r in records(tmp_path) if r["event"] == "opened" and r["session"] == "t")
            pid = next(pid for pid in await pids(gate, 2) if f"-{pid}-" in owner)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
            for _ in range(6):
                now = await fresh.numbers()
                assert {n: v for n, v in before.items() if "_total" in n and now[n] < v} == {}
            await gate.logged("worker ready", 3)
            go.set()
            # It knows the fleet as it was changed.
            for _ in range(8):
                shown = (await fresh.ask("GET", "/admin/replicas")).json()["policy"]
                assert [(replica["name"], replica["draining"]) for replica in shown] == [
                    ("policy-0", False),
                    ("new", True),
                ]
            # Its claim is closed by another, and its index goes to whoever sends the same.
            async with asyncio.timeout(15):
                while not (gone := [r for r in records(tmp_path) if r.get("error") == "gateway-lost"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert [(r["session"], r["index"], r["used"]) for r in gone] == [("t", 0, False)]
            again = await fresh.ask("POST", f"/sessions/t{CHAT}", json=chat("lost"))
            assert again.headers["x-detgate-index"] == "0"
            assert (await fresh.numbers())["detgate_worker_restarts_total[]"] == 1

            # CTRL-C waits for nothing that is under way.
            held.clear()
            go.clear()
            asked = asyncio.create_task(fresh.ask("POST", CHAT, json=chat("held")))
            await held.wait()
            gate.signal(signal.SIGINT)
            assert await gate.ended(10) == 130
            await asyncio.gather(asked, return_exceptions=True)
            assert not any(map(_alive, (await pids(gate, 3))[1:]))


async def test_a_worker_that_is_replaced_has_what_the_last_reload_left_and_what_was_changed_since(
    tmp_path: Path,
) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with ready(tmp_path, config(server, pool("policy", worker.url))) as (gate, fresh):

            async def replicas() -> set[tuple[str, ...]]:
                told = [(await fresh.ask("GET", "/admin/replicas")).json()["policy"] for _ in range(8)]
                return {tuple(replica["name"] for replica in each) for each in told}

            async def add(name: str) -> None:
                new = {"name": name, "url": worker.url}
                assert (await fresh.ask("POST", "/admin/pools/policy/replicas", json=new)).status_code == 201

            await add("before")
            await fresh.ask("POST", "/admin/weights", json={"version": "1"})
            gate.signal(signal.SIGHUP)
            await gate.logged("reloaded")
            await add("since")
            os.kill((await pids(gate, 2))[0], signal.SIGKILL)
            await pids(gate, 3)
            assert await replicas() == {("policy-0", "since")}
            shown = [(await fresh.ask("GET", "/admin/weights")).json()["policy"]["version"] for _ in range(8)]
            assert set(shown) == {"1"}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_cannot_be_served_ends_at_once_and_says_why_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump({"pools": [pool("policy", "http://127.0.0.1:1")], "workers": 3, "run": "r"}))
    command = ["serve", "--config", str(file), "--ledger", str(tmp_path / "ledger")]
    assert main(command) == 2
    line = "detgate: workers: 3 cannot share state: memory; set state: redis://…, or workers: 1\n"
    assert capsys.readouterr().err == line

    def told(*more: str) -> tuple[int, str]:
        whole = [sys.executable, "-m", "gateway", *command, *more]
        ended = subprocess.run(whole, capture_output=True, text=True, timeout=30, check=False)
        return ended.returncode, ended.stderr

    status, text = told("--state", "redis://127.0.0.1:1/0?nonsense=1", "--port", "0")
    assert (status, text.count("nonsense is no option")) == (2, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = told("--state", "redis://127.0.0.1:1/0", "--port", str(taken.getsockname()[1]))
        assert (status, text.count("cannot listen")) == (2, 1)


class Spawns:
    """Takes the place of `asyncio.create_subprocess_exec`: the system lets no process begin, but for some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, let: int = 0) -> None:
        self.asked = 0
        self.let = let
        self._real = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self)

    async def __call__(self, *command: str, **given: Any) -> asyncio.subprocess.Process:
        self.asked += 1
        if self.asked > self.let:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await self._real(*command, **given)


def several(tmp_path: Path) -> Workers:
    given = {"ledger": {"path": str(tmp_path)}, "port": 0, "state": "redis://127.0.0.1:1/0", "run": "r", "workers": 2}
    settings = Settings.load(None, {}, {"pools": [pool("policy", "http://127.0.0.1:1")]} | given)
    return Workers(settings, lambda: settings, resume=False, new_run=False)


async def test_where_no_worker_can_begin_the_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawns = Spawns(monkeypatch)
    assert await asyncio.wait_for(several(tmp_path).run(), 10) == 1
    assert spawns.asked == 1


async def test_a_worker_that_cannot_begin_later_is_tried_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.workers.SHORTEST_PAUSE", 0.01)
    spawns = Spawns(monkeypatch)
    workers = several(tmp_path)
    workers._up.set()
    running = asyncio.create_task(workers.run())
    while spawns.asked < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not running.done()
    workers._stop(None)
    assert await asyncio.wait_for(running, 10) == 0


async def test_what_a_worker_has_shown_counts_on_when_it_dies_right_after() -> None:
    settings = Settings.load(None, {}, {"pools": [pool("policy", "http://127.0.0.1:1")]})
    workers = Workers(settings, lambda: settings, resume=False, new_run=False)
    first, second = workers._posts = [Post(0, []), Post(1, [])]
    shown = Telemetry()
    shown.racing.add()
    await workers._answer_to(first)(Count(shown.numbers()))
    workers._bury(first)
    others = await workers._answer_to(second)(Count(Telemetry().numbers()))
    assert "detgate_racing_total 1.0" in Telemetry().exposition(others).decode()


async def test_one_reward_at_a_time_over_three_gateways_of_which_one_is_killed(tmp_path: Path) -> None:
    """What a dead gateway had sent the engine works on for a while: nothing may come beside it."""
    inside = most = 0

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            gone = asyncio.create_task(reply.gone())
            await asyncio.wait([gone], timeout=0.003)
            if gone.done():
                await asyncio.sleep(0.3)
                return
            gone.cancel()
            await asyncio.wait([gone])
            reply.json({"data": [{"index": 0, "probs": [1.0]}], "model": MODEL})
        finally:
            inside -= 1

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/metrics":
            reply.text(f"vllm:num_requests_running {inside}\n")
        else:
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async with RedisServer() as server, FakeWorker(script, probes=probes) as worker:
        text = config(server, pool("rm", worker.url, role="reward"), workers=3)
        async with ready(tmp_path, text, 3) as (gate, fresh):
            waiting = asyncio.Semaphore(40)

            async def score(number: int) -> int:
                async with waiting:
                    while True:
                        try:
                            body = {"model": MODEL, "input": f"text {number}"}
                            return (await fresh.ask("POST", "/classify", json=body)).status_code
                        except httpx.TransportError:
                            continue

            scores = [asyncio.create_task(score(number)) for number in range(300)]
            async with asyncio.timeout(10):
                while len(worker.seen) < 60:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            # In mid-request, if it can be had: the one that is in the engine now.
            os.kill((await pids(gate, 3))[1], signal.SIGKILL)
            statuses = await asyncio.wait_for(asyncio.gather(*scores), 60)
            assert (set(statuses), most) == ({200}, 1)
            assert (await fresh.numbers()).get("detgate_lane_takeovers_total[('pool', 'rm')]", 0) <= 1

            # Without the process that started them they drain, the one that took the dead one's place too.
            await pids(gate, 4)
            gate.signal(signal.SIGKILL)
            await gate.logged("has gone", 3, seconds=30)
            async with asyncio.timeout(10):
                while any(map(_alive, await pids(gate, 4))):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
