"""Groups through a whole gateway: their members' states, the lanes that keep them in order, seeds by member."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import schemes
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool
from tests.test_sessions import CHAT, ask, base, bearer, create, left_behind, refused, said

NEEDED: dict[str, Any] = {"sessions": {"required": True}}


class Line:
    """A replica that answers one after the other, when it is told to, and notes what came."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.running = 0
        self.most = 0
        self._gate = asyncio.Semaphore(0)

    def let(self, count: int = 1) -> None:
        """Let so many more be answered."""
        for _ in range(count):
            self._gate.release()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        if seen.target == "/tokenize":
            reply.json({"tokens": []})
            return
        self.came.append(seen.json["messages"][0]["content"])
        self.running += 1
        self.most = max(self.most, self.running)
        await self._gate.acquire()
        self.running -= 1
        reply.json(completion())


def keys(told: dict[str, Any]) -> list[str]:
    return [session["api_key"] for session in told["sessions"]]


def send(gate: Gate, key: str, text: str, **headers: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(ask(gate, key, text, **headers))


def lane(members: str = "present", **more: Any) -> dict[str, Any]:
    return {"lane": {"scope": "group", "members": members, **more}}


# --- what a group is


async def test_a_group_is_made_of_sessions_with_a_member_each() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        told = await create(gate, "17", group_size=3, seed=5)
        assert set(told) == {"group_id", "sessions"}
        assert told["group_id"] == "17"
        assert set(told["sessions"][0]) == {"session_id", "identity", "member", "api_key", "base_url"}
        members = [(each["session_id"], each["identity"], each["member"]) for each in told["sessions"]]
        assert members == [("17:0", "17:0", 0), ("17:1", "17:1", 1), ("17:2", "17:2", 2)]
        v1 = schemes.load("v1").seed
        for member, key in enumerate(keys(told)):
            assert said(await ask(gate, key)) == (f"17:{member}:0", v1(5, f"17:{member}", 0, None))
        opened = [record for record in gate.records() if record["event"] == "opened"]
        assert [(record["group"], record["member"]) for record in opened] == [("17", 0), ("17", 1), ("17", 2)]
        again = await create(gate, "17", group_size=3)
        assert again["group_id"] == "17-1"
        assert [each["session_id"] for each in again["sessions"]] == ["17:0-1", "17:1-1", "17:2-1"]
        await create(gate, "a-1", group_size=1)
        assert [(await create(gate, "a", group_size=1))["group_id"] for _ in range(2)] == ["a", "a-2"]


async def test_a_group_tells_how_its_members_stand_and_why_it_is_rejected() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        told = await create(gate, "17", group_size=3)
        await gate.http.delete("/sessions/17:0", headers=bearer(keys(told)[0]))
        group = (await gate.http.get("/groups/17")).json()
        assert [each["state"] for each in group["sessions"]] == ["ended", "open", "open"]
        assert (group["size"], group["rejected"], group["why"]) == (3, False, None)
        await gate.http.delete("/sessions/17:2?failed=timeout", headers=bearer(keys(told)[2]))
        group = (await gate.http.get("/groups/17")).json()
        assert [each["state"] for each in group["sessions"]] == ["ended", "open", "failed"]
        assert (group["rejected"], group["why"]) == (True, "member 2 failed: timeout")
        for method in ("GET", "DELETE"):
            by_member = await gate.http.request(method, "/groups/17", headers=bearer(keys(told)[1]))
            assert refused(by_member) == (404, "group_not_found")
        ended = (await gate.http.delete("/groups/17")).json()
        assert [each["state"] for each in ended["sessions"]] == ["ended", "ended", "failed"]
        for key in keys(told):
            assert refused(await ask(gate, key)) == (410, "session_ended")
        assert (await gate.http.get("/groups/17")).json() == ended
        assert await gate.gauge("detgate_sessions") == 0
        for method in ("GET", "DELETE"):
            assert refused(await gate.http.request(method, "/groups/never")) == (404, "group_not_found")


async def test_a_member_that_is_left_alone_has_failed_and_so_has_its_group() -> None:
    settings: dict[str, Any] = {"sessions": {"idle_seconds": 0.3}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        await create(gate, "17", group_size=2)
        await gate.until(lambda: gate.gateway.sessions.live == 0)
        group = (await gate.http.get("/groups/17")).json()
        assert (group["rejected"], group["why"]) == (True, "member 0 failed: idle for 0.3 s")


async def test_after_a_crash_a_group_stands_as_it_did(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            told = await create(gate, "17", group_size=12)
            await gate.http.delete("/sessions/17:1?failed=x")
            before = (await gate.http.get("/groups/17")).json()
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert (await gate.http.get("/groups/17")).json() == before
            answer = await ask(gate, keys(told)[11], path=f"{base(told['sessions'][11])}/chat/completions")
            assert said(answer)[0] == "17:11:0"
            assert (await create(gate, "17", group_size=2))["group_id"] == "17-1"


async def test_a_group_that_was_not_written_whole_was_never_there(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            await create(gate, "17", group_size=3)
            await create(gate, "18", group_size=2)
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        [segment] = file.parent.glob("*.jsonl")
        segment.write_bytes(b"".join(line for line in segment.read_bytes().splitlines(True) if b'"17:2"' not in line))
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert refused(await gate.http.get("/groups/17")) == (404, "group_not_found")
            assert (await gate.http.get("/groups/18")).status_code == 200
            assert (await create(gate, "17", group_size=3))["group_id"] == "17"


# --- seeds by member


async def test_with_offset_seeds_a_session_has_its_member_and_a_group_alone_is_refused() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), scheme="offset", seed=100) as gate:
        told = await create(gate, "17", group_size=3)
        assert [said(await ask(gate, key))[1] for key in keys(told)] == [100, 101, 102]
        for given in ({"path": f"/sessions/17{CHAT}"}, {"x_session_id": "own", "x_detgate_identity": "17"}):
            refusal = await ask(gate, **given)
            assert refused(refusal) == (400, "member_required")
            assert refusal.json()["error"]["param"] == "X-Member-Index"
        assert said(await ask(gate, x_session_id="17", x_member_index="2"))[1] == 102
        assert said(await ask(gate, x_session_id="alone"))[1] == 100
        other = await ask(gate, keys(told)[1], x_member_index="2")
        assert refused(other) == (409, "session_conflict")
        single = await create(gate, "18", group_size=1)
        assert said(await ask(gate, keys(single)[0]))[1] == 100
        assert said(await ask(gate, x_session_id="18"))[1] == 100
        tokens = await gate.http.post("/sessions/17/tokenize", json={"model": "test-model", "prompt": "x"})
        assert tokens.status_code == 200


# --- lanes of groups


async def test_one_of_a_group_at_a_time_by_index_then_member() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane()), **NEEDED) as gate:
        told = await create(gate, "17", group_size=11)
        other = await create(gate, "18", group_size=1)
        first = send(gate, keys(told)[5], "first")
        await gate.until(lambda: line.running == 1)
        waiting = []
        for member, number in ((10, 1), (2, 1), (10, 0), (9, 0), (2, 0)):
            waiting.append(send(gate, keys(told)[member], f"{number}:{member}", x_request_index=str(number)))
            await gate.until(lambda: gate.gateway.fleet.pools["policy"].lanes.waiting == len(waiting))
        beside = send(gate, keys(other)[0], "another group")
        await gate.until(lambda: line.running == 2)
        line.let(7)
        await asyncio.gather(first, beside, *waiting)
        assert line.came == ["first", "another group", "0:2", "0:9", "0:10", "1:2", "1:10"]
        assert line.most == 2
        assert len(gate.gateway.fleet.pools["policy"].lanes) == 0


async def test_groups_of_one_name_in_two_runs_do_not_wait_for_each_other() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane()), **NEEDED) as gate:
        told = [await create(gate, "17", group_size=1, run=run) for run in ("one", "two")]
        both = [send(gate, keys(each)[0], "x") for each in told]
        await gate.until(lambda: line.running == 2)
        line.let(2)
        await asyncio.gather(*both)


async def test_a_member_starts_when_those_before_it_have_ended_or_failed() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane("episode")), **NEEDED) as gate:
        told = await create(gate, "17", group_size=4)
        third, second = send(gate, keys(told)[2], "2"), send(gate, keys(told)[1], "1")
        lanes = gate.gateway.fleet.pools["policy"].lanes
        await gate.until(lambda: lanes.held == 2)
        assert await gate.gauge("detgate_lane_waiting", pool="policy") == 2
        line.let(100)
        for text in ("0a", "0b"):
            assert "group-order" not in (await ask(gate, keys(told)[0], text)).headers["x-detgate-guarantee"]
        assert lanes.held == 2
        await gate.http.delete("/sessions/17:0?failed=broke", headers=bearer(keys(told)[0]))
        assert (await second).status_code == 200
        assert not third.done()
        assert lanes.held == 1
        await gate.http.delete("/sessions/17:1", headers=bearer(keys(told)[1]))
        answer = await third
        assert "group-order" not in answer.headers["x-detgate-guarantee"]
        assert line.came == ["0a", "0b", "1", "2"]
        [closed] = [record for record in gate.records() if record["event"] == "closed" and record["identity"] == "17:2"]
        assert closed["lane_wait"] > 0
        tokens = await gate.http.post(
            "/tokenize", json={"model": "test-model", "prompt": "x"}, headers=bearer(keys(told)[3])
        )
        assert tokens.status_code == 200


async def test_a_member_that_waited_in_vain_says_so_and_does_not_wait_again() -> None:
    settings: dict[str, Any] = {"timeouts": {"group": 0.3}, **NEEDED}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, **lane("episode")), **settings) as gate:
        told = await create(gate, "17", group_size=3)
        answer = await ask(gate, keys(told)[1])
        assert answer.headers["x-detgate-guarantee"].startswith("balanced; group-order")
        gate.gateway.pipeline._episodes._seconds = 30.0
        again = await ask(gate, keys(told)[1], "again")
        assert "group-order" in again.headers["x-detgate-guarantee"]
        waiting = send(gate, keys(told)[2], "another member waits all the same")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].lanes.held == 1)
        await gate.http.delete("/groups/17")
        assert "group-order" not in (await waiting).headers["x-detgate-guarantee"]
        flags = [record["flags"] for record in gate.records() if record["event"] == "closed"]
        assert ["group-order" in each for each in flags] == [True, True, False]


async def test_in_strict_a_member_that_waited_in_vain_is_refused_with_whom_it_waited_for() -> None:
    settings: dict[str, Any] = {"timeouts": {"group": 0.2}, "profile": "strict", **NEEDED}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, **lane("episode")), **settings) as gate:
        told = await create(gate, "17", group_size=3)
        await gate.http.delete("/sessions/17:0")
        for _ in range(2):
            since = asyncio.get_running_loop().time()
            refusal = await ask(gate, keys(told)[2])
            assert asyncio.get_running_loop().time() - since >= 0.2
            assert refused(refusal) == (503, "group_waiting")
        assert "waits for member 1 " in refusal.json()["error"]["message"]
        assert refusal.headers["retry-after"]
        assert worker.seen == []
        await gate.http.delete("/sessions/17:1")
        answer = await ask(gate, keys(told)[2])
        assert (answer.headers["x-detgate-index"], said(answer)[0]) == ("0", "17:2:0")
        assert "group-order" not in answer.headers["x-detgate-guarantee"]


async def test_a_client_that_leaves_while_its_member_waits_leaves_nothing_behind() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, **lane("episode")), **NEEDED) as gate:
        told = await create(gate, "17", group_size=2)
        lanes = gate.gateway.fleet.pools["policy"].lanes
        waiting = send(gate, keys(told)[1], "x")
        await gate.until(lambda: lanes.held == 1)
        waiting.cancel()
        await gate.until(lambda: lanes.held == 0)
        await gate.http.delete("/sessions/17:0")
        answer = await ask(gate, keys(told)[1], "x")
        assert answer.headers["x-detgate-index"] == "0"
        assert len(worker.seen) == 1
        assert (await gate.http.get("/sessions/17:1")).json()["open_requests"] == 0


@pytest.mark.parametrize("members", ["present", "episode"])
async def test_too_many_waiting_members_are_refused(members: str) -> None:
    line = Line()
    settings: dict[str, Any] = {"limits": {"queue": 2}, **NEEDED}
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane(members)), **settings) as gate:
        told = await create(gate, "17", group_size=5)
        lanes = gate.gateway.fleet.pools["policy"].lanes
        running = [send(gate, keys(told)[0], "x")]
        await gate.until(lambda: line.running == 1)
        running += [send(gate, key, "x") for key in keys(told)[1:3]]
        await gate.until(lambda: lanes.waiting == 2)
        full = await ask(gate, keys(told)[3])
        assert refused(full) == (503, "queue_full")
        line.let(9)
        for number, task in enumerate(running):
            assert (await task).status_code == 200
            await gate.http.delete(f"/sessions/17:{number}")


async def test_sessions_without_a_group_have_a_lane_each() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane("episode")), **NEEDED) as gate:
        body = chat("x", n=1)
        both = [asyncio.create_task(gate.http.post(f"/sessions/{name}{CHAT}", json=body)) for name in ("a", "b")]
        await gate.until(lambda: line.running == 2)
        second = asyncio.create_task(gate.http.post(f"/sessions/a{CHAT}", json=body))
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].lanes.waiting == 1)
        line.let(3)
        assert [answer.status_code for answer in await asyncio.gather(*both, second)] == [200, 200, 200]
