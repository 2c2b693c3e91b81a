"""Sessions through a whole gateway: created, used by base URL or key alone, read, ended, known again after a crash."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import schemes
from gateway.ledger import requests
from gateway.ledger.reader import Segments
from gateway.session import Wanted
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.stores.memory import MemoryStore
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, chat, completion, gateway, polite, pool
from tests.processes import serving
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"
UUID = "2f1b3c4d-5e6f-4a1b-8c2d-9e0f1a2b3c4d"


@asynccontextmanager
async def gate_of(**settings: Any) -> AsyncIterator[tuple[FakeWorker, Gate]]:
    """A gateway with one polite replica."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        yield worker, gate


async def test_exports_are_read_and_sorted_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: set[bool] = set()
    sort = requests._sorted

    def seen(keys: Any, rank: Any) -> Any:
        where.add(threading.current_thread() is threading.main_thread())
        return sort(keys, rank)

    monkeypatch.setattr(requests, "_sorted", seen)
    async with gate_of() as (_, gate):
        await gate.http.post("/sessions/s" + CHAT, json=chat())
        for path in (f"/admin/runs/{gate.gateway.run}/requests", "/sessions/s/requests"):
            assert len((await gate.http.get(path)).text.splitlines()) == 1
            assert where == {False}
            where.clear()


async def create(gate: Gate, identity: str = "17:3", key: str | None = None, **wanted: Any) -> dict[str, Any]:
    answer = await gate.http.post("/sessions", json={"identity": identity, **wanted}, headers=bearer(key))
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def ask(
    gate: Gate, key: str | None = None, text: str = "hello", path: str = CHAT, **headers: str
) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()} | bearer(key)
    return await gate.http.post(path, json=chat(text), headers=given)


def said(answer: httpx.Response) -> tuple[str, int]:
    """Request id and seed."""
    assert answer.status_code == 200, answer.text
    return answer.headers["x-detgate-request-id"], int(answer.headers["x-detgate-seed"])


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal in the one shape."""
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, answer.json()["error"]["code"]


def v1(identity: str, index: int, master: int = 42) -> int:
    return schemes.load("v1").seed(master, identity, index, None)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


# --- created


async def test_the_sdk_needs_base_url_and_key_and_nothing_else() -> None:
    async with gate_of() as (worker, gate):
        told = await create(gate, "17:3")
        assert set(told) == {"session_id", "identity", "api_key", "base_url"}
        assert (told["session_id"], told["identity"]) == ("17:3", "17:3")
        assert told["base_url"] == f"{gate.url}/sessions/17:3/v1"
        for base_url in (told["base_url"], f"{gate.url}/v1"):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=told["api_key"]) as client:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": base_url}]
                )
                assert answer.choices[0].message.content == "hi"
                assert [model.id async for model in client.models.list()] == [MODEL]
        opened = [record for record in gate.records() if record["event"] == "opened"]
        assert [record["request_id"] for record in opened] == ["17:3:0", "17:3:1"]
        assert [seen.json["seed"] for seen in worker.seen] == [v1("17:3", 0), v1("17:3", 1)]
        assert not any(told["api_key"] in str(seen.headers) for seen in worker.seen)


async def test_two_runs_of_the_same_sessions_have_equal_seeds_and_ids() -> None:
    async def run() -> list[tuple[str, int]]:
        async with gate_of() as (_, gate):
            keys = [(await create(gate, f"task:{n}"))["api_key"] for n in range(3)]
            return [said(await ask(gate, key, text)) for text in ("a", "b") for key in keys]

    first = await run()
    assert first == await run()
    assert len(set(first)) == 6


async def test_the_next_session_of_an_identity_has_an_id_of_its_own_and_the_same_seeds() -> None:
    async with gate_of() as (_, gate):
        told = [await create(gate, "a") for _ in range(3)]
        assert [each["session_id"] for each in told] == ["a", "a-1", "a-2"]
        assert [each["identity"] for each in told] == ["a", "a", "a"]
        answers = [said(await ask(gate, each["api_key"])) for each in told]
        assert answers == [("a:0", v1("a", 0)), ("a~1:0", v1("a", 0)), ("a~2:0", v1("a", 0))]
        opened = [record for record in gate.records() if record["event"] == "opened"]
        assert [(record["session"], record["ordinal"]) for record in opened] == [("a", 0), ("a-1", 1), ("a-2", 2)]


async def test_an_id_that_is_in_use_is_given_to_no_other_session() -> None:
    async with gate_of() as (_, gate):
        await ask(gate, path=f"/sessions/used{CHAT}")
        assert (await create(gate, "used"))["session_id"] == "used-1"
        assert (await create(gate, "x-1"))["session_id"] == "x-1"
        assert [(await create(gate, "x"))["session_id"] for _ in range(2)] == ["x", "x-2"]


async def test_a_session_has_its_own_master_seed_and_order() -> None:
    async with gate_of() as (_, gate):
        own = await create(gate, "s", seed=0)
        assert said(await ask(gate, own["api_key"])) == ("s:0", v1("s", 0, 0))
        content = await create(gate, "c", index_order="content")
        first, second = await ask(gate, content["api_key"], "x"), await ask(gate, content["api_key"], "y")
        assert [answer.headers["x-detgate-index"] for answer in (first, second)] == ["0", "0"]
        assert said(first)[0].startswith("c/")
        arrival = await ask(gate, content["api_key"], "x", x_index_order="arrival")
        assert said(arrival)[0] == "c:0"


async def test_an_id_with_a_slash_stays_whole_in_every_path() -> None:
    async with gate_of() as (_, gate):
        told = await create(gate, "a/b c%")
        assert told["base_url"] == f"{gate.url}/sessions/a%2Fb%20c%25/v1"
        assert said(await ask(gate, told["api_key"], path=f"{told['base_url']}/chat/completions"))[0] == "a/b%20c%25:0"
        state = await gate.http.get("/sessions/a%2Fb%20c%25")
        assert (state.json()["session_id"], state.json()["next_index"]) == ("a/b c%", 1)
        assert len(lines(await gate.http.get("/sessions/a%2Fb%20c%25/requests"))) == 1


NO_SESSION: list[tuple[Any, str | None]] = [
    ({}, "body.identity"),
    ({"identity": ""}, "body.identity"),
    ({"identity": "a\nb"}, "body.identity"),
    ({"identity": "é" * 129}, "body.identity"),
    ({"identity": "a" * 256, "group_size": 1}, "identity"),
    ({"identity": "a", "group_size": 0}, "body.group_size"),
    ({"identity": "a", "seed": -1}, "body.seed"),
    ({"identity": "a", "seed": 2**63}, "body.seed"),
    ({"identity": "a", "seed": "7"}, "body.seed"),
    ({"identity": "a", "seed": True}, "body.seed"),
    ({"identity": "a", "index_order": "client"}, "body.index_order"),
    ({"identity": "a", "order": 1.5}, "body.order"),
    ({"identity": "a", "run": "../up"}, "run"),
    ({"identity": "a", "groupsize": 3}, "body.groupsize"),
    ([], "body"),
    (b'{"identity": "\\ud800"}', "body"),
    (b"{", "body"),
    (b" " * 70000, None),
]
"""Bodies that describe no session, and what is at fault in them."""


async def test_what_no_session_can_be_is_refused_with_its_name() -> None:
    async with gate_of() as (_, gate):
        for body, param in NO_SESSION:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await gate.http.post("/sessions", content=raw)
            assert refused(answer)[0] == (413 if param is None else 400), body
            assert answer.json()["error"]["param"] == param, body
        assert gate.gateway.sessions.live == 0


async def test_an_identity_that_no_other_run_has_is_said_and_in_strict_refused() -> None:
    async with gate_of() as (_, gate):
        answer = await ask(gate, (await create(gate, UUID))["api_key"])
        assert "random-session" in answer.headers["x-detgate-guarantee"]
    async with gate_of(profile="strict") as (_, gate):
        wanted = {"identity": UUID}
        assert refused(await gate.http.post("/sessions", json=wanted)) == (400, "random_session")
    async with gate_of(profile="strict", sessions={"allow_random": True}) as (_, gate):
        await create(gate, UUID)


async def test_what_a_session_was_created_with_no_header_contradicts() -> None:
    async with gate_of() as (_, gate):
        key = (await create(gate, "a"))["api_key"]
        other = await ask(gate, key, x_detgate_identity="b")
        assert refused(other) == (409, "session_conflict")
        assert said(await ask(gate, key, x_detgate_identity="a"))[0] == "a:0"


async def test_live_sessions_are_bounded_and_ended_ones_make_room() -> None:
    async with gate_of(limits={"sessions": 3}) as (_, gate):
        keys = [(await create(gate, "a"))["api_key"] for _ in range(2)]
        full = await gate.http.post("/sessions", json={"identity": "b", "group_size": 2})
        assert refused(full) == (503, "too_many_sessions")
        assert full.headers["retry-after"]
        assert await gate.gauge("detgate_sessions") == 2
        await gate.http.delete("/sessions/a", headers=bearer(keys[0]))
        assert await gate.gauge("detgate_sessions") == 1
        await create(gate, "b", group_size=2)
        await gate.http.delete("/groups/b")
        for number in range(4):
            name = f"c{number}"
            await create(gate, name)
            await gate.http.delete(f"/sessions/{name}")
        assert refused(await gate.http.get("/groups/b")) == (404, "group_not_found")
        held = gate.gateway.sessions
        assert len(held._ended) <= 3
        assert len(held._sessions) == len(held._by_key) == held.live + len(held._ended)


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_a_group_that_is_too_large_is_refused_before_a_list_of_its_members_is_made(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {}
        if shared:
            settings = {"state": (await stack.enter_async_context(RedisServer())).url, "run": "r"}
        _, gate = await stack.enter_async_context(gate_of(limits={"group": 3, "sessions": 5}, **settings))
        await create(gate, "a", group_size=3)
        monkeypatch.setattr(Wanted, "identities", property(lambda wanted: pytest.fail("it has members")))
        for path, name in (
            ("/sessions", "identity"),
            ("/rl/start_session", "task_id"),
            ("/v1/rl/start_session", "task_id"),
        ):
            for size in (4, 10**15):
                large = await gate.http.post(path, json={name: "b", "group_size": size})
                assert refused(large) == (400, "invalid_request")
                assert large.json()["error"]["param"] == "group_size"
                assert "limits.group, 3" in large.json()["error"]["message"]
    assert Settings.load(None, {}, {"pools": [pool("policy", "http://a")]}).limits.group == 4096


@pytest.mark.parametrize("path", ["/sessions", "/rl/start_session"])
async def test_a_group_that_there_could_never_be_room_for_is_refused_for_good(path: str) -> None:
    async with gate_of(limits={"sessions": 2}) as (_, gate):
        large = await gate.http.post(
            path, json={"identity" if path == "/sessions" else "task_id": "a", "group_size": 3}
        )
        assert refused(large) == (400, "invalid_request")
        assert "limits.sessions, 2" in large.json()["error"]["message"]


async def test_an_id_is_given_once_although_its_session_is_long_forgotten() -> None:
    async with gate_of(limits={"sessions": 2}) as (_, gate):
        for name in ("a", "b", "c", "d"):
            await create(gate, name)
            await gate.http.delete(f"/sessions/{name}")
        assert refused(await gate.http.get("/sessions/a")) == (404, "session_not_found")
        assert (await create(gate, "a"))["session_id"] == "a-1"


async def test_any_request_keeps_a_session_from_being_idle() -> None:
    async with gate_of() as (_, gate):
        keys = [(await create(gate, name))["api_key"] for name in ("a", "b")]
        idle = gate.gateway.sessions._idle
        assert [session.known.session for session in idle] == ["a", "b"]
        await gate.http.get("/v1/models", headers=bearer(keys[0]))
        assert [session.known.session for session in idle] == ["b", "a"]
        await ask(gate, keys[1])
        assert [session.known.session for session in idle] == ["a", "b"]


async def test_what_is_idle_for_too_long_has_failed() -> None:
    async with gate_of(sessions={"idle_seconds": 0.3}) as (_, gate):
        key = (await create(gate, "a"))["api_key"]
        await gate.until(lambda: gate.gateway.sessions.live == 0)
        state = (await gate.http.get("/sessions/a")).json()
        assert (state["state"], state["why"]) == ("failed", "idle for 0.3 s")
        assert refused(await ask(gate, key)) == (410, "session_ended")
        [ended] = [record for record in gate.records() if record["event"] == "session_ended"]
        assert (ended["session"], ended["state"]) == ("a", "failed")


async def test_who_looks_for_the_idle_goes_on_though_one_look_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate_of(sessions={"idle_seconds": 0.2}) as (_, gate):
        sessions = gate.gateway.sessions
        failed = asyncio.Event()

        def fails() -> None:
            failed.set()
            raise OverflowError

        monkeypatch.setattr(sessions, "sweep", fails)
        await failed.wait()
        monkeypatch.undo()
        await create(gate, "a")
        await gate.until(lambda: sessions.live == 0)


async def test_a_session_with_an_open_request_is_not_idle() -> None:
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    async with FakeWorker(held) as worker:
        async with gateway(pool("policy", worker.url), sessions={"idle_seconds": 1.0}) as gate:
            busy = await create(gate, "busy")
            running = asyncio.create_task(ask(gate, busy["api_key"]))
            await gate.until(lambda: gate.in_flight("policy-0") == 1)
            idle = await create(gate, "idle")
            await gate.until(lambda: gate.gateway.sessions.live == 1)
            states = [(await gate.http.get(f"/sessions/{name}")).json() for name in ("busy", "idle")]
            assert [(state["state"], state["open_requests"]) for state in states] == [("open", 1), ("failed", 0)]
            assert refused(await ask(gate, idle["api_key"])) == (410, "session_ended")
            release.set()
            assert (await running).status_code == 200


async def test_a_ledger_that_cannot_be_written_creates_nothing(tmp_path: Path) -> None:
    async with gate_of(ledger={"path": str(tmp_path), "on_error": "fail"}) as (_, gate):
        ledger = gate.gateway.runs.own.ledger
        ledger._fd, good = os.open("/dev/full", os.O_WRONLY), ledger._fd
        try:
            answer = await gate.http.post("/sessions", json={"identity": "a", "group_size": 2})
            assert refused(answer) == (503, "ledger_unwritable")
            assert gate.gateway.sessions.live == 0
            assert refused(await gate.http.get("/groups/a")) == (404, "group_not_found")
        finally:
            os.close(ledger._fd)
            ledger._fd = good
        assert (await create(gate, "a", group_size=2))["group_id"] == "a"


# --- keys


async def test_a_created_session_needs_its_key() -> None:
    async with gate_of() as (_, gate):
        told = await create(gate, "a")
        path = f"/sessions/a{CHAT}"
        for key in (None, "unused"):
            assert refused(await ask(gate, key, path=path)) == (401, "invalid_api_key")
        assert said(await ask(gate, told["api_key"], path=path))[0] == "a:0"
        assert said(await ask(gate, None, path=path, x_api_key=told["api_key"]))[0] == "a:1"
        assert refused(await ask(gate, None, x_session_id="a")) == (401, "invalid_api_key")


async def test_a_key_opens_its_session_and_no_other() -> None:
    async with gate_of() as (_, gate):
        a, b = await create(gate, "a"), await create(gate, "b")
        for path in (f"/sessions/b{CHAT}", f"/sessions/uncreated{CHAT}", f"/runs/other{CHAT}", "/sessions/b/v1/models"):
            assert refused(await ask(gate, a["api_key"], path=path)) == (404, "session_not_found")
        assert refused(await ask(gate, a["api_key"], x_session_id="b")) == (404, "session_not_found")
        assert refused(await ask(gate, a["api_key"], x_detgate_run="other")) == (404, "session_not_found")
        for method, path in (("GET", ""), ("GET", "/requests"), ("DELETE", "")):
            answer = await gate.http.request(method, f"/sessions/b{path}", headers=bearer(a["api_key"]))
            assert refused(answer) == (404, "session_not_found")
        for method in ("GET", "DELETE"):
            answer = await gate.http.request(method, "/groups/a", headers=bearer(a["api_key"]))
            assert refused(answer) == (404, "group_not_found")
        assert said(await ask(gate, b["api_key"]))[0] == "b:0"


async def test_a_session_key_that_nobody_has_is_refused_and_not_taken_for_none() -> None:
    async with gate_of() as (_, gate):
        assert refused(await ask(gate, "dgs-nobody")) == (401, "invalid_api_key")
        assert refused(await gate.http.get("/sessions/a", headers=bearer("dgs-nobody"))) == (401, "invalid_api_key")
        assert (await ask(gate, "unused")).status_code == 200


async def test_the_keys_of_the_configuration_open_every_session_and_create_them() -> None:
    async with gate_of(auth={"api_keys": ["one"], "admin_key": "boss"}) as (_, gate):
        for key in (None, "two", "dgs-x"):
            answer = await gate.http.post("/sessions", json={"identity": "a"}, headers=bearer(key))
            assert refused(answer) == (401, "invalid_api_key")
        told = await create(gate, "a", key="one")
        await create(gate, "b", key="boss")
        assert said(await ask(gate, "one", path=f"/sessions/a{CHAT}"))[0] == "a:0"
        assert said(await ask(gate, told["api_key"]))[0] == "a:1"
        assert refused(await ask(gate, None)) == (401, "invalid_api_key")


@pytest.mark.parametrize("settings", [{}, {"auth": {"api_keys": ["one"]}}])
async def test_the_key_of_a_session_creates_none(settings: dict[str, Any]) -> None:
    async with gate_of(**settings) as (_, gate):
        told = await create(gate, "a", key="one")
        answer = await gate.http.post("/sessions", json={"identity": "b"}, headers=bearer(told["api_key"]))
        assert refused(answer) == (401, "invalid_api_key")
        assert refused(await gate.http.get("/sessions/b"))[0] in (401, 404)


async def test_who_may_look_at_a_session() -> None:
    for settings, nobody in (
        ({"auth": {"admin_key": "boss", "api_keys": ["one"]}}, (401, "invalid_api_key")),
        ({"host": "0.0.0.0", "auth": {"api_keys": ["one"]}}, (403, "admin_closed")),
    ):
        async with gate_of(**settings) as (_, gate):
            told = await create(gate, "a", key="one", group_size=1)
            session = told["sessions"][0]
            for path in ("/sessions/a:0", "/sessions/a:0/requests", "/sessions/nobody", "/groups/a", "/groups/b"):
                assert refused(await gate.http.get(path, headers=bearer("one"))) == nobody
            run = f"/admin/runs/{gate.gateway.run}/requests"
            assert refused(await gate.http.get(run, headers=bearer(None if nobody[0] == 403 else "one"))) == nobody
            own = await gate.http.get("/sessions/a:0", headers=bearer(session["api_key"]))
            assert own.json()["state"] == "open"
            if nobody[0] == 401:
                for path in ("/sessions/a:0", "/sessions/a:0/requests", "/groups/a", run):
                    assert (await gate.http.get(path, headers=bearer("boss"))).status_code == 200


async def test_the_ledger_and_the_log_have_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    async with gate_of(log={"level": "debug"}) as (_, gate):
        told = await create(gate, "a")
        await ask(gate, told["api_key"])
        await gate.http.get("/sessions/a", headers=bearer(told["api_key"]))
        await gate.http.delete("/sessions/a", headers=bearer(told["api_key"]))
        written = json.dumps(gate.records())
    printed = capsys.readouterr()
    secret = told["api_key"].removeprefix("dgs-")
    assert secret not in written + printed.out + printed.err
    assert told["session_id"] in written


async def test_a_session_aborts_its_own_requests_alone() -> None:
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    async with FakeWorker(held) as worker, gateway(pool("policy", worker.url)) as gate:
        a, b = await create(gate, "a"), await create(gate, "b")
        running = asyncio.create_task(ask(gate, a["api_key"]))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        await gate.http.post("/abort_request", json={"rid": "a:0"}, headers=bearer(b["api_key"]))
        assert gate.in_flight("policy-0") == 1
        await gate.http.post("/abort_request", json={"rid": "a:0"}, headers=bearer(a["api_key"]))
        assert refused(await running) == (400, "aborted")


# --- read and ended


async def test_the_requests_of_a_session_stand_in_index_order_however_they_ended() -> None:
    release = asyncio.Event()
    failures = iter([503])

    async def script(seen: Seen, reply: Reply) -> None:
        text = seen.json["messages"][0]["content"]
        if text == "slow":
            await release.wait()
        if text == "fails once" and next(failures, None):
            reply.json({"error": {"message": "busy"}}, 503)
            return
        reply.json(completion(text))

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await create(gate, "a"))["api_key"]
        slow = asyncio.create_task(ask(gate, key, "slow", x_request_index="0"))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        assert (await ask(gate, key, "fails once", x_request_index="2")).status_code == 503
        assert (await ask(gate, key, "fails once", x_request_index="2")).status_code == 200
        assert (await ask(gate, key, "ten", x_request_index="10")).status_code == 200
        await ask(gate, None, "another session's")
        state = (await gate.http.get("/sessions/a", headers=bearer(key))).json()
        assert (state["open_requests"], state["state"], state["next_index"]) == (1, "open", None)
        early = lines(await gate.http.get("/sessions/a/requests", headers=bearer(key)))
        release.set()
        await slow
        late = lines(await gate.http.get("/sessions/a/requests", headers=bearer(key)))
    assert [(each["index"], each["outcome"], each["claims"]) for each in early] == [
        (0, None, 1), (2, "delivered", 2), (10, "delivered", 1),
    ]  # fmt: skip
    assert [(each["index"], each["outcome"]) for each in late] == [
        (0, "delivered"),
        (2, "delivered"),
        (10, "delivered"),
    ]
    assert late[1]["seed"] == v1("a", 2)
    assert {"event", "key_digest"}.isdisjoint(late[1])
    assert {"request_id", "digest", "replica", "usage", "finish_reasons"} <= late[1].keys()


async def test_a_session_that_has_ended_takes_nothing_more_and_is_still_read() -> None:
    async with gate_of() as (_, gate):
        told = await create(gate, "a")
        await ask(gate, told["api_key"])
        for _ in range(2):
            ended = await gate.http.delete("/sessions/a", headers=bearer(told["api_key"]))
            assert (ended.status_code, ended.json()["state"]) == (200, "ended")
        for answer in (
            await ask(gate, told["api_key"]),
            await ask(gate, told["api_key"], path=f"/sessions/a{CHAT}"),
            await gate.http.get("/sessions/a/v1/models", headers=bearer(told["api_key"])),
        ):
            assert refused(answer) == (410, "session_ended")
            assert answer.headers["x-should-retry"] == "false"
        assert (await gate.http.get("/sessions/a")).json()["state"] == "ended"
        assert len(lines(await gate.http.get("/sessions/a/requests", headers=bearer(told["api_key"])))) == 1
        assert (await create(gate, "a"))["session_id"] == "a-1"


async def test_a_session_whose_last_request_was_not_delivered_has_failed() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json["messages"][0]["content"] == "bad":
            reply.reset()
        else:
            reply.json(completion())

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        outcomes = []
        for name, texts in (("a", ["good", "bad"]), ("b", ["bad", "good"]), ("c", [])):
            key = (await create(gate, name))["api_key"]
            for text in texts:
                await ask(gate, key, text)
            state = (await gate.http.delete(f"/sessions/{name}", headers=bearer(key))).json()
            outcomes.append((state["state"], state["why"]))
        said_so = await create(gate, "d")
        state = (await gate.http.delete("/sessions/d?failed=tool%20broke", headers=bearer(said_so["api_key"]))).json()
    assert outcomes[0][0] == "failed"
    assert "not delivered" in str(outcomes[0][1])
    assert outcomes[1:] == [("ended", None), ("ended", None)]
    assert (state["state"], state["why"]) == ("failed", "tool broke")


async def test_after_a_crash_it_is_known_what_the_last_request_came_to(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        match seen.json["messages"][0]["content"]:
            case "bad":
                reply.json({"error": {"message": "no"}}, 500)
            case "slow":
                asked.set()
                await asyncio.Event().wait()
            case _:
                reply.json(completion())

    sessions = {"a": ("good", "bad"), "b": ("bad", "good"), "c": ("good", "slow"), "d": ()}
    async with FakeWorker(script) as worker:
        alone = pool("policy", worker.url)
        async with gateway(alone, ledger={"path": str(tmp_path / "live")}, run="r", limits={"attempts": 1}) as gate:
            for name, texts in sessions.items():
                key = (await create(gate, name))["api_key"]
                for text in texts:
                    asking = asyncio.create_task(ask(gate, key, text))
                    await (asked.wait() if text == "slow" else asking)
            gate.gateway.runs.own.ledger.flush()
            for number in range(2):
                shutil.copytree(tmp_path / "live", tmp_path / str(number))
            live = (await gate.http.delete("/sessions/a")).json()
            asking.cancel()
        for number in range(2):
            ledger = {"path": str(tmp_path / str(number))}
            if number:  # once more: the ends are in the ledger now
                async with gateway(alone, ledger=ledger, run="r") as gate:
                    pass
            async with gateway(alone, ledger=ledger, run="r", resume=True) as gate:
                told = {name: (await gate.http.delete(f"/sessions/{name}")).json() for name in sessions}
                assert (told["a"]["state"], told["a"]["why"]) == (live["state"], live["why"])
                assert live["state"] == "failed"
                assert (told["c"]["state"], told["c"]["why"]) == (
                    "failed",
                    "its last request was not delivered: gateway-lost",
                )
                assert told["b"]["state"] == told["d"]["state"] == "ended"


async def test_a_session_that_nobody_created_is_read_and_ended_all_the_same() -> None:
    async with gate_of() as (_, gate):
        for text in ("x", "y"):
            await ask(gate, path=f"/sessions/plain{CHAT}", text=text)
        state = (await gate.http.get("/sessions/plain")).json()
        assert (state["identity"], state["state"], state["open_requests"], state["next_index"]) == (
            "plain",
            "open",
            0,
            2,
        )
        assert [each["index"] for each in lines(await gate.http.get("/sessions/plain/requests"))] == [0, 1]
        assert (await gate.http.delete("/sessions/plain")).json()["state"] == "ended"
        assert refused(await ask(gate, path=f"/sessions/plain{CHAT}")) == (410, "session_ended")
        assert len(lines(await gate.http.get("/sessions/plain/requests"))) == 2
        for method, path in (("GET", ""), ("GET", "/requests"), ("DELETE", "")):
            assert refused(await gate.http.request(method, f"/sessions/never{path}")) == (404, "session_not_found")


# --- runs


async def test_sessions_of_another_run_are_apart_and_lead_there_by_key_and_by_base_url(tmp_path: Path) -> None:
    async with gate_of(ledger={"path": str(tmp_path)}) as (_, gate):
        here, there = await create(gate, "a"), await create(gate, "a", run="exp")
        assert there["session_id"] == "a"
        assert there["base_url"] == f"{gate.url}/runs/exp/sessions/a/v1"
        for told in (here, there):
            await ask(gate, told["api_key"])
        answer = await ask(gate, there["api_key"], path=f"{there['base_url']}/chat/completions")
        assert said(answer) == ("a:1", v1("a", 1))
        state = (await gate.http.get("/runs/exp/sessions/a")).json()
        assert (state["run"], state["next_index"]) == ("exp", 2)
        by_header = await gate.http.get("/sessions/a", headers={"x-detgate-run": "exp"})
        assert by_header.json() == state
        assert (await gate.http.get("/sessions/a")).json()["next_index"] == 1
        assert refused(await gate.http.get("/runs/never/sessions/a")) == (404, "run_not_found")
        assert not (tmp_path / "never").exists()


async def test_after_a_crash_sessions_keys_and_ordinals_are_known(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            told = await create(gate, "a", seed=7, index_order="content")
            over, elsewhere = await create(gate, "b"), await create(gate, "a", run="exp")
            await gate.http.delete("/sessions/b")
            await ask(gate, path=f"/sessions/plain{CHAT}")
            await gate.http.delete("/sessions/plain")
            before = said(await ask(gate, told["api_key"], "x"))
            await ask(gate, elsewhere["api_key"])
            leftovers = [left_behind(run) for run in gate.gateway.runs._open.values()]
        for file, content in leftovers:
            file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert gate.gateway.runs.own.resumed
            again = said(await ask(gate, told["api_key"], "x"))
            assert (again[0][:-1], again[0][-1]) == (before[0][:-1], "1")
            assert again[1] == v1(before[0].rpartition(":")[0], 1, 7)
            assert refused(await ask(gate, None, path=f"/sessions/a{CHAT}")) == (401, "invalid_api_key")
            assert refused(await ask(gate, over["api_key"])) == (410, "session_ended")
            assert refused(await ask(gate, path=f"/sessions/plain{CHAT}")) == (410, "session_ended")
            state = await gate.http.get("/runs/exp/sessions/a", headers=bearer(elsewhere["api_key"]))
            assert (state.json()["run"], state.json()["next_index"]) == ("exp", 1)
            answer = await ask(gate, elsewhere["api_key"])
            assert said(answer)[0] == "a:1"
            assert [(await create(gate, name))["session_id"] for name in ("a", "b")] == ["a-1", "b-1"]
            assert len(lines(await gate.http.get("/sessions/a/requests", headers=bearer(told["api_key"])))) == 2


def left_behind(run: Any) -> tuple[Path, bytes]:
    """What a killed process leaves of a run's description: it has not ended."""
    file = run.folder / "run.json"
    return file, file.read_bytes()


def base(told: dict[str, Any]) -> str:
    """The path of a base URL: the next gateway has another port."""
    return httpx.URL(told["base_url"]).path


async def test_a_run_that_is_live_is_read_up_to_its_frontier_in_the_order_of_submission() -> None:
    holds: dict[str, asyncio.Event] = {}

    async def script(seen: Seen, reply: Reply) -> None:
        text = seen.json["messages"][0]["content"]
        if text in holds:
            await holds[text].wait()
        if text == "rejected":
            reply.json({"error": {"message": "too long"}}, 400)
        elif text == "broken":
            reply.reset()
        else:
            reply.json(completion(text))

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        names = [f"s{n}" for n in range(6)]
        keys = {}
        for number, name in reversed(list(enumerate(names))):
            keys[name] = (await create(gate, name, order=number))["api_key"]
        holds |= {"s1": asyncio.Event(), "s3": asyncio.Event()}
        texts = {"s2": "rejected", "s4": "broken"}
        many = {name: asyncio.create_task(ask(gate, keys[name], texts.get(name, name))) for name in names}
        await asyncio.wait([task for name, task in many.items() if name not in holds])
        await gate.until(lambda: gate.in_flight("policy-0") == 2)

        async def more(after: str | None, **given: Any) -> tuple[list[str], str | None]:
            params = given | ({} if after is None else {"after": after})
            answer = await gate.http.get(f"/admin/runs/{gate.gateway.run}/requests", params=params)
            assert answer.headers["x-detgate-order"] == "submission"
            return [each["session"] for each in lines(answer)], answer.headers.get("x-detgate-next")

        first, mark = await more(None)
        assert first == ["s0"]
        assert await more(mark) == ([], mark)
        holds["s3"].set()
        await many["s3"]
        assert (await more(mark))[0] == []
        holds["s1"].set()
        await many["s1"]
        page, mark = await more(mark, limit=2)
        assert page == ["s1", "s2"]
        assert (await more(mark))[0] == ["s3", "s4", "s5"]
        await ask(gate, None, "after all", path=f"/sessions/unordered{CHAT}")
        assert (await more(None))[0] == [*names, "unordered"]
        outcomes = [each["outcome"] for each in lines(await gate.http.get(f"/admin/runs/{gate.gateway.run}/requests"))]
        assert outcomes == ["delivered", "delivered", "delivered", "delivered", "failed", "delivered", "delivered"]


async def test_of_many_submitted_and_few_waited_for_the_records_are_the_same_whatever_ended_first() -> None:
    """Some are answered, some rejected, some time out, some clients leave; the order in which they do is drawn."""
    texts = {f"17:{n}": ("good", "rejected", "mute", "left", "good", "broken")[n % 6] for n in range(18)}
    told = []
    for seed in range(2):
        order = random.Random(seed).sample(list(texts), len(texts))
        turns = {name: asyncio.Event() for name in texts}

        async def script(seen: Seen, reply: Reply, turns: dict[str, asyncio.Event] = turns) -> None:
            name, text = seen.json["messages"][0]["content"].split(" ")
            await turns[name].wait()
            if text == "rejected":
                reply.json({"error": {"message": "too long"}}, 400)
            elif text == "broken":
                reply.reset()
            elif text == "good":
                reply.json(completion())
            else:
                await reply.gone()

        settings: dict[str, Any] = {"timeouts": {"first_byte": 2.0}, "limits": {"attempts": 1}}
        async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), **settings) as gate:
            keys = {name: (await create(gate, name))["api_key"] for name in order}
            many = {name: asyncio.create_task(ask(gate, keys[name], f"{name} {texts[name]}")) for name in texts}
            await gate.until(lambda: worker.running == len(texts))
            for name in reversed(order):
                turns[name].set()
                if texts[name] == "left":
                    many[name].cancel()
            few = [name for name in order if texts[name] == "good"][:2]
            await asyncio.gather(*(many[name] for name in few))
            await asyncio.wait(many.values())
            await gate.until(lambda: not gate.gateway.pipeline.serving)
            run = lines(await gate.http.get(f"/admin/runs/{gate.gateway.run}/requests"))
            assert [each["session"] for each in run] == order
            found = {each["session"]: (each["index"], each["seed"], each["outcome"], each["error"]) for each in run}
            for name in order:
                [own] = lines(await gate.http.get(f"/sessions/{name}/requests"))
                assert (own["index"], own["seed"], own["outcome"], own["error"]) == found[name]
            told.append([found[name] for name in texts])
    assert told[0] == told[1]
    outcomes = [outcome for _, _, outcome, _ in told[0]]
    assert outcomes == ["delivered", "delivered", "failed", "abandoned", "delivered", "failed"] * 3
    assert {told[0][number][3] for number in (2, 8, 14)} == {"upstream_timeout"}


async def test_a_run_that_has_ended_is_read_in_canonical_order(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), run="old", **settings) as gate:
            await ask(gate, path=f"/sessions/17:2{CHAT}")
            live = (await gate.http.get("/admin/runs/old/requests")).headers["x-detgate-next"]
            for identity in ("17:10", "17:2", "17:2"):
                key = (await create(gate, identity))["api_key"]
                for text in ("x", "y"):
                    await ask(gate, key, text)
        async with gateway(pool("policy", worker.url), run="new", **settings) as gate:
            answer = await gate.http.get("/admin/runs/old/requests")
            assert answer.headers["x-detgate-order"] == "canonical"
            ids = [each["request_id"] for each in lines(answer)]
            assert ids == ["17:2:0", "17:2~1:0", "17:2~1:1", "17:2~2:0", "17:2~2:1", "17:10:0", "17:10:1"]
            pages: list[str] = []
            after = ""
            while len(pages) < 7:
                page = await gate.http.get(f"/admin/runs/old/requests?limit=4{after}")
                pages += [each["request_id"] for each in lines(page)]
                after = f"&after={page.headers['x-detgate-next']}"
            assert pages == ids
            assert "old" not in gate.gateway.runs._open
            for cursor in ("x", "e30", "WyJhIiwiYSIsMF0", "W2ZhbHNlLFtdLDIsM10", live, "é"):
                wrong = await gate.http.get("/admin/runs/old/requests", params={"after": cursor})
                assert refused(wrong) == (400, "invalid_cursor")
            for name, expected in (("never", (404, "run_not_found")), ("..", (400, "invalid_header"))):
                assert refused(await gate.http.get(f"/admin/runs/{name.replace('.', '%2E')}/requests")) == expected


async def test_a_run_that_another_process_serves_is_not_read_here(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker(polite) as worker, gateway(pool("policy", worker.url), run="theirs", **settings):
        async with gateway(pool("policy", worker.url), run="ours", **settings) as gate:
            assert refused(await gate.http.get("/admin/runs/theirs/requests")) == (503, "run_busy")


async def test_the_description_of_the_api_has_these_routes() -> None:
    async with gate_of() as (_, gate):
        described = (await gate.http.get("/openapi.json")).json()["paths"]
        assert {"post"} == set(described["/sessions"])
        assert {"get", "delete"} == set(described["/sessions/{session_id}"]) == set(described["/groups/{group_id}"])
        assert "get" in described["/sessions/{session_id}/requests"]
        body = described["/sessions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["required"] == ["identity"]


async def test_after_a_crash_a_base_url_leads_to_a_run_that_nobody_opened_yet(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            told = await create(gate, "a", run="exp")
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert refused(await ask(gate, told["api_key"])) == (401, "invalid_api_key")
            answer = await ask(gate, told["api_key"], path=f"{base(told)}/chat/completions")
            assert said(answer)[0] == "a:0"


async def test_who_reads_a_run_sees_all_that_has_ended() -> None:
    async with gate_of() as (_, gate):
        runs = gate.gateway.runs
        runs.own.ledger.closed({"event": "last"})
        folder, live = runs.reading(runs.own.name)
        assert live
        assert any(b'"last"' in file.read_bytes() for file in folder.glob("*.jsonl"))


async def test_what_ended_long_ago_is_gone_and_its_ordinal_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sessions.PAST", 2)
    async with gate_of(limits={"sessions": 3}) as (_, gate):
        for number in range(12):
            made = await create(gate, f"a{number}")
            await gate.http.delete(f"/sessions/{made['session_id']}")
        assert len(gate.gateway.sessions._sessions) == 3
        assert len(gate.gateway.sessions._past[gate.gateway.run]) <= 2
        for number in (0, 5, 11):
            answer = await gate.http.post(f"/sessions/a{number}{CHAT}", json=chat(), headers=bearer(None))
            assert answer.status_code in (401, 410)
        assert refused(await gate.http.post(f"/sessions/a0{CHAT}", json=chat())) == (410, "session_ended")
        assert (await gate.http.post(f"/sessions/new{CHAT}", json=chat())).status_code == 200
        assert (await create(gate, "a0"))["session_id"] == "a0-1"


async def test_what_is_remembered_no_more_is_read_as_it_ended(tmp_path: Path) -> None:
    async with gate_of(limits={"sessions": 1}) as (_, gate):
        made = await create(gate, "a", seed=7, order=3)
        await ask(gate, made["api_key"])
        before = (await gate.http.delete("/sessions/a?failed=why")).json()
        for name in ("b", "c"):
            await create(gate, name)
            await gate.http.delete(f"/sessions/{name}")
        assert gate.gateway.sessions.session(gate.gateway.run, "a") is None
        assert (before["state"], before["why"], before["seed"], before["order"]) == ("failed", "why", 7, 3)
        assert (await gate.http.get("/sessions/a")).json() == before
        assert (await gate.http.delete("/sessions/a")).json() == before
        assert sum(record["event"] == "session_ended" for record in gate.records()) == 3


async def test_a_restart_takes_no_more_memory_than_the_run_took(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}, "limits": {"sessions": 3}}
    async with gate_of(**settings) as (_, gate):
        for number in range(12):
            if number % 3:
                made = [await create(gate, f"a{number}")]
            else:
                made = (await create(gate, f"a{number}", group_size=2))["sessions"]
            for session in made:
                await gate.http.delete(f"/sessions/{session['session_id']}")
        await create(gate, "live", group_size=2)
        before = set(gate.gateway.sessions._sessions)
    again = Sessions(
        Settings.load(None, {}, {**settings, "pools": [pool("policy", "http://127.0.0.1:9")]}), MemoryStore()
    )
    most = 0
    for _ in again.restoring("r", tmp_path / "r", Segments(tmp_path / "r")):
        most = max(most, len(again._sessions))
    assert most <= 3 + 2
    assert set(again._sessions) == before
    assert again.live == len(again.group("r", "live").members) == 2  # type: ignore[union-attr]
    again.end_run("r")
    assert not any((again._sessions, again._groups, again._by_key, again._idle, again._ended))


async def test_kill_9_after_the_answer_loses_no_session(tmp_path: Path) -> None:
    async with FakeWorker() as worker:
        config = json.dumps({"run": "r", "pools": [pool("policy", worker.url)]})
        async with serving(tmp_path, config) as gate:
            http = gate.http
            told = (await http.post("/sessions", json={"identity": "a", "seed": 7})).json()
            over = (await http.post("/sessions", json={"identity": "b"})).json()
            await http.delete("/sessions/b")
            gate.process.kill()
            await gate.process.wait()
        async with serving(tmp_path, config) as gate:
            http = gate.http
            answer = await http.post(CHAT, json=chat(), headers=bearer(told["api_key"]))
            assert said(answer) == ("a:0", v1("a", 0, 7))
            assert refused(await http.post(CHAT, json=chat(), headers=bearer(over["api_key"]))) == (
                410,
                "session_ended",
            )
            assert (await http.post("/sessions", json={"identity": "a"})).json()["session_id"] == "a-1"
