"""The routes of AReaL's clients over real HTTP: sessions begun and ended, answers rewarded, as its SDK shapes do it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway import schemes
from gateway.session import RECENT
from tests.harness import DONE, MODEL, FakeWorker, Gate, Reply, Seen, chat, completion, delta, gateway, pool
from tests.redis_server import RedisServer
from tests.test_sessions import CHAT, ask, bearer, create, gate_of, left_behind, lines, refused, said

BOSS: dict[str, Any] = {"auth": {"admin_key": "boss"}}
V1 = schemes.load("v1").seed


class Numbered:
    """A replica whose answers have ids of their own, one after the other."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        if seen.target == "/v1/messages":
            told: dict[str, Any] = {"type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
            usage = {"input_tokens": 1, "output_tokens": 1}
            content = [{"type": "text", "text": "hi"}]
            told |= {"id": f"msg_{next(self._numbers)}", "content": content, "stop_reason": "end_turn", "usage": usage}
            reply.json(told)
        elif seen.json["messages"][0]["content"] == "broken":
            reply.reset()
        else:
            reply.json(completion(id=f"chatcmpl-{next(self._numbers)}"))


async def post(gate: Gate, path: str, key: str | None = None, **body: Any) -> httpx.Response:
    return await gate.http.post(path, json=body, headers=bearer(key))


async def start(gate: Gate, task: str = "17:3", key: str | None = None, **more: Any) -> dict[str, Any]:
    answer = await post(gate, "/rl/start_session", key, task_id=task, **more)
    assert answer.status_code in (200, 201), answer.text
    told: dict[str, Any] = answer.json()
    return told


async def rewards(gate: Gate, session: str) -> list[tuple[int, float | None, float | None]]:
    """Index, reward and the session's reward of each of its requests."""
    answer = await gate.http.get(f"/sessions/{session}/requests")
    return [(each["index"], each["reward"], each["session_reward"]) for each in lines(answer)]


# --- an episode


async def test_an_episode_as_areal_runs_it_with_the_sdk_and_no_v1_in_its_base_url() -> None:
    async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url), **BOSS) as gate:
        begun = await post(gate, "/rl/start_session", "boss", task_id="17:3", api_key=None)
        assert begun.status_code == 200
        assert set(begun.json()) == {"session_id", "api_key"}
        assert begun.json()["session_id"] == "17:3"
        key = begun.json()["api_key"]
        async with openai.AsyncOpenAI(base_url=gate.url, api_key=key, max_retries=0) as client:
            answers = [
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])
                for text in ("one", "two", "three")
            ]
        assert [answer.id for answer in answers] == ["chatcmpl-0", "chatcmpl-1", "chatcmpl-2"]
        assert [seen.json["seed"] for seen in worker.seen] == [V1(42, "17:3", index, None) for index in range(3)]
        assert {seen.target for seen in worker.seen} == {CHAT}
        for body in ({"interaction_id": answers[0].id, "reward": 0.25}, {"interaction_id": None, "reward": 1}):
            answer = await post(gate, "/rl/set_reward", key, **body)
            assert answer.status_code == 200
            assert answer.json() == {"message": "success", "session_id": "17:3", "interaction_count": 3}
        ended = await post(gate, "/rl/end_session", key)
        assert (ended.status_code, ended.json()) == (200, {"message": "success", "interaction_count": 3})
        state = (await gate.http.get("/sessions/17:3", headers=bearer("boss"))).json()
        assert (state["state"], state["reward"]) == ("ended", 1.25)
        exported = lines(await gate.http.get("/sessions/17:3/requests", headers=bearer("boss")))
        told = [(each["answer_id"], each["reward"], each["session_reward"]) for each in exported]
        assert told == [("chatcmpl-0", 0.25, 1.25), ("chatcmpl-1", None, 1.25), ("chatcmpl-2", 1, 1.25)]
        recorded = [record for record in gate.records() if record["event"] == "reward"]
        assert [(each["index"], each["reward"], each["session_reward"]) for each in recorded] == [
            (0, 0.25, 0.25),
            (2, 1, 1.25),
        ]


async def test_the_other_shape_begins_a_group_whose_members_have_seeds_of_their_own() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await post(gate, "/rl/start_session", "unused", task_id="17", group_size=2)
        assert answer.status_code == 201
        told = answer.json()
        assert told["group_id"] == "17"
        assert [set(each) for each in told["sessions"]] == [{"session_id", "session_api_key"}] * 2
        for member, each in enumerate(told["sessions"]):
            key = each["session_api_key"]
            assert said(await ask(gate, key, path="/chat/completions"))[1] == V1(42, f"17:{member}", 0, None)
            await post(gate, "/rl/set_reward", key, interaction_id=None, reward=float(member))
        group = (await gate.http.get("/groups/17")).json()
        assert [each["reward"] for each in group["sessions"]] == [0.0, 1.0]
        for number, size in enumerate((1, 0)):
            alone = await start(gate, "18", group_size=size)
            [session] = alone["sessions"]
            assert alone["group_id"] == session["session_id"] == ("18", "18-1")[number]
            assert said(await ask(gate, session["session_api_key"]))[1] == V1(42, "18", 0, None)


@pytest.mark.parametrize("base", ["/v1", "/runs/exp", "/runs/exp/v1"])
async def test_the_routes_stand_where_clients_append_them(base: str) -> None:
    async with gate_of() as (_, gate):
        begun = await post(gate, f"{base}/rl/start_session", task_id="a")
        key = begun.json()["api_key"]
        assert said(await ask(gate, key))[0] == "a:0"
        run = base.removesuffix("/v1")
        for path in (f"{base}/rl/set_reward", f"{run}/sessions/a/v1/rl/set_reward", f"{run}/sessions/a/rl/set_reward"):
            assert (await post(gate, path, key, reward=1)).status_code == 200
        assert (await post(gate, f"{run}/sessions/a/v1/rl/end_session", key)).status_code == 200
        assert gate.gateway.sessions.live == 0


async def test_an_answer_of_anthropic_is_rewarded_by_its_id_and_with_its_header() -> None:
    async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url), **BOSS) as gate:
        key = (await start(gate, key="boss"))["api_key"]
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key=key, max_retries=0) as client:
            answers = [
                await client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "x"}])
                for _ in range(2)
            ]
        given = await gate.http.post(
            "/rl/set_reward", json={"interaction_id": answers[0].id, "reward": 2}, headers={"x-api-key": key}
        )
        assert given.status_code == 200
        recorded = [(record["index"], record["reward"]) for record in gate.records() if record["event"] == "reward"]
        assert recorded == [(0, 2)]


@pytest.mark.parametrize("api", ["chat", "generate", "responses", "messages"])
async def test_the_id_of_a_streamed_answer_is_known(api: str) -> None:
    events = {
        "chat": ({"id": "i", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]},),
        "generate": ({"text": "x", "meta_info": {"id": "i", "finish_reason": {"type": "stop"}}},),
        "responses": (
            {"type": "response.created", "response": {"id": "i"}, "sequence_number": 0},
            {"type": "response.completed", "response": {"id": "i", "status": "completed"}, "sequence_number": 1},
        ),
        "messages": (
            {"type": "message_start", "message": {"id": "i", "usage": {}}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
            {"type": "message_stop"},
        ),
    }[api]
    path = {"generate": "/generate", "messages": "/v1/messages", "responses": "/v1/responses", "chat": CHAT}[api]

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in events:
            reply.chunk(f"data: {httpx.Request('POST', 'http://x', json=event).content.decode()}\n\n")
        if api in ("chat", "generate"):
            reply.chunk("data: [DONE]\n\n")
        reply.end()

    async with FakeWorker(script) as worker:
        async with gateway(pool("policy", worker.url, engine="sglang" if api == "generate" else "vllm")) as gate:
            key = (await start(gate))["api_key"]
            body = chat("x", stream=True) if api != "generate" else {"text": "x", "stream": True}
            await gate.http.post(path, json=body, headers=bearer(key))
            assert (await post(gate, "/rl/set_reward", key, interaction_id="i", reward=1)).status_code == 200


# --- statuses


async def test_who_may_begin_a_session() -> None:
    async with gate_of(**BOSS) as (_, gate):
        for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}, bearer("dgs-x"), {"authorization": "Basic boss"}):
            answer = await gate.http.post("/rl/start_session", json={"task_id": "a"}, headers=headers)
            assert refused(answer) == (401, "invalid_api_key")
        for headers in (
            {"x-api-key": "boss"},
            {"authorization": "bearer  boss"},
            {"authorization": "Basic x", "x-api-key": "boss"},
        ):
            answer = await gate.http.post("/rl/start_session", json={"task_id": "a"}, headers=headers)
            assert answer.status_code == 200
        assert refused(await post(gate, "/rl/start_session", answer.json()["api_key"], task_id="a"))[0] == 401
    async with gate_of(auth={"api_keys": ["one"]}) as (_, gate):
        assert refused(await post(gate, "/rl/start_session", "two", task_id="a"))[0] == 401
        key = (await start(gate, "a", "one"))["api_key"]
        assert refused(await post(gate, "/rl/start_session", key, task_id="a"))[0] == 401


async def test_rewards_and_ends_need_the_key_of_the_session() -> None:
    async with gate_of(**BOSS) as (_, gate):
        a, b = [(await start(gate, name, "boss"))["api_key"] for name in ("a", "b")]
        await ask(gate, a)
        for route in ("set_reward", "end_session"):
            for key in (None, "wrong", "dgs-wrong", "boss"):
                assert refused(await post(gate, f"/rl/{route}", key, reward=1)) == (401, "invalid_api_key")
            for key in (None, "wrong"):
                named = await post(gate, f"/sessions/a/rl/{route}", key, reward=1)
                assert refused(named) == (401, "invalid_api_key")
            other = await post(gate, f"/sessions/a/rl/{route}", b, reward=1)
            assert refused(other) == (404, "session_not_found")
        assert (await post(gate, "/sessions/a/rl/set_reward", "boss", reward=1)).status_code == 200
        uncreated = await ask(gate, None, path=f"/sessions/plain{CHAT}")
        assert uncreated.status_code == 200
        answer = await post(gate, "/sessions/plain/rl/set_reward", "boss", reward=1)
        assert refused(answer) == (400, "session_not_created")
        assert [record["session"] for record in gate.records() if record["event"] == "reward"] == ["a"]


async def test_a_key_is_used_again_when_its_session_has_ended_and_not_before(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "limits": {"sessions": 2}}
    async with gate_of(**settings) as (_, gate):
        key = (await start(gate, "a"))["api_key"]
        again = await post(gate, "/rl/start_session", task_id="b", api_key=key)
        assert refused(again) == (409, "session_active")
        await post(gate, "/rl/end_session", key)
        assert await start(gate, "b", api_key=key) == {"session_id": "b", "api_key": key}
        assert said(await ask(gate, key))[0] == "b:0"
        assert refused(await ask(gate, key, path=f"/sessions/a{CHAT}"))[0] == 404
        unknown = await start(gate, "c", api_key="chosen")
        assert unknown["api_key"].startswith("dgs-")
        for name in ("b", "c"):
            await gate.http.delete(f"/sessions/{name}")
        assert (await gate.http.get("/sessions/a")).status_code == 404
        both = await start(gate, "d", api_key=key, group_size=2)
        assert [each["session_api_key"] == key for each in both["sessions"]] == [True, False]
        assert said(await ask(gate, key))[0] == "d:0:0"
        await gate.http.delete("/groups/d")
        await start(gate, "e", api_key=key)
        assert said(await ask(gate, key))[0] == "e:0"
        file, content = left_behind(gate.gateway.runs.own)
    file.write_bytes(content)
    async with gate_of(**settings) as (_, gate):
        assert said(await ask(gate, key))[0] == "e:1"
        held = gate.gateway.sessions
        assert all(held._by_key[session.key] is session for session in held._sessions.values() if session.key)


async def test_an_ended_session_takes_no_rewards_and_is_ended_twice_without_harm() -> None:
    async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await start(gate, "a"))["api_key"]
        await ask(gate, key)
        ends = [await post(gate, "/rl/end_session", key) for _ in range(2)]
        assert [(end.status_code, end.json()["interaction_count"]) for end in ends] == [(200, 1)] * 2
        assert refused(await post(gate, "/rl/set_reward", key, reward=1)) == (410, "session_ended")
        assert refused(await ask(gate, key)) == (410, "session_ended")
        await gate.http.delete("/sessions/a?failed=x")
        failed = (await start(gate, "b"))["api_key"]
        await gate.http.delete("/sessions/b?failed=x")
        assert refused(await post(gate, "/rl/end_session", failed)) == (410, "session_ended")
        assert len([record for record in gate.records() if record["event"] == "session_ended"]) == 2


async def test_without_room_the_status_is_429() -> None:
    async with gate_of(limits={"sessions": 1}) as (_, gate):
        key = (await start(gate, "a"))["api_key"]
        full = await post(gate, "/rl/start_session", task_id="b")
        assert refused(full) == (429, "too_many_sessions")
        assert full.headers["retry-after"]
        await post(gate, "/rl/end_session", key)
        await start(gate, "b")


async def test_what_cannot_be_rewarded_is_refused_and_not_recorded() -> None:
    async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await start(gate, "a"))["api_key"]
        assert refused(await post(gate, "/rl/set_reward", key, reward=1)) == (400, "no_interactions")
        assert (await ask(gate, key, "broken")).status_code == 502
        assert refused(await post(gate, "/rl/set_reward", key, reward=1)) == (400, "no_interactions")
        unknown = await post(gate, "/rl/set_reward", key, reward=1, interaction_id="a:0")
        assert refused(unknown) == (400, "interaction_not_found")
        await ask(gate, key)
        for value in ("1", True, None, [1]):
            assert refused(await post(gate, "/rl/set_reward", key, reward=value))[0] == 400
        for raw in (b'{"reward": NaN}', b'{"reward": 1e999}', b"{}", b"[", b""):
            assert refused(await gate.http.post("/rl/set_reward", content=raw, headers=bearer(key)))[0] == 400
        for body in ({}, {"task_id": 1}, {"task_id": ""}, {"task_id": "a\n"}):
            assert refused(await post(gate, "/rl/start_session", **body))[0] == 400
        assert [record for record in gate.records() if record["event"] == "reward"] == []
        assert (await gate.http.get("/sessions/a")).json()["reward"] is None


async def test_a_ledger_that_cannot_be_written_leaves_the_reward_as_it_was(tmp_path: Path) -> None:
    async with gate_of(ledger={"path": str(tmp_path), "on_error": "fail"}) as (_, gate):
        key = (await start(gate, "a"))["api_key"]
        await ask(gate, key)
        await post(gate, "/rl/set_reward", key, reward=1)
        ledger = gate.gateway.runs.own.ledger
        ledger._fd, good = os.open("/dev/full", os.O_WRONLY), ledger._fd
        try:
            answer = await post(gate, "/rl/set_reward", key, reward=2)
            assert refused(answer) == (503, "ledger_unwritable")
        finally:
            os.close(ledger._fd)
            ledger._fd = good
        assert (await gate.http.get("/sessions/a")).json()["reward"] == 1


# --- which request, and how much


async def test_the_last_request_is_the_one_that_was_asked_last_whatever_ended_last() -> None:
    release = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json["messages"][0]["content"] == "slow":
            await release.wait()
        reply.json(completion())

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await start(gate, "a"))["api_key"]
        slow = asyncio.create_task(ask(gate, key, "slow"))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        await ask(gate, key, "fast")
        release.set()
        assert (await slow).headers["x-detgate-index"] == "0"
        await post(gate, "/rl/set_reward", key, reward=1)
        assert await rewards(gate, "a") == [(0, None, 1), (1, 1, 1)]


async def test_what_follows_the_last_event_of_a_stream_at_once_finds_it_answered() -> None:
    """Engines end their body a moment later; the reward was that of the turn before, and the end missed a turn."""
    ending = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in (delta("h"), delta("", "stop"), DONE):
            reply.chunk(event)
        await reply.writer.drain()
        await ending.wait()
        reply.end()

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await start(gate, "a"))["api_key"]
        for _ in range(2):
            answer = await gate.http.post(CHAT, json=chat(stream=True), headers=bearer(key))
            assert answer.text.endswith(DONE)
        assert (await post(gate, "/rl/set_reward", key, reward=1)).json()["interaction_count"] == 2
        assert await rewards(gate, "a") == [(0, None, 1), (1, 1, 1)]
        assert (await post(gate, "/rl/end_session", key)).json()["interaction_count"] == 2
        ending.set()
        await gate.until(lambda: gate.in_flight("policy-0") == 0)


async def test_a_reward_that_is_given_again_counts_once_and_sums_are_exact_in_any_order() -> None:
    given = [("a:0", 0.1), ("a:1", 1e16), ("a:2", -1e16), ("a:0", 0.3), ("a:3", 0.2)]
    totals = set()
    for seed in range(3):
        async with gate_of() as (_, gate):
            key = (await start(gate, "a"))["api_key"]
            for text in "wxyz":
                await ask(gate, key, text)
            for name, reward in [given[0], *random.Random(seed).sample(given[1:], 4)]:
                await post(gate, "/rl/set_reward", key, interaction_id=name, reward=reward)
            state = (await gate.http.get("/sessions/a")).json()
            assert [reward for _, reward, _ in await rewards(gate, "a")] == [0.3, 1e16, -1e16, 0.2]
            totals.add(state["reward"])
    assert totals == {0.5}


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_rewards_whose_sum_would_be_no_finite_number_are_refused_and_change_nothing(shared: bool) -> None:
    most = sys.float_info.max
    steps = [
        ("a:0", most),
        ("a:1", 1.0),  # refused: exact, it is more than the largest
        ("a:1", -1.0),
        ("a:2", 1.0),
        ("a:2", 1.5),  # refused
        ("a:2", most),  # refused
        ("a:1", -most),
        ("a:2", most),
        ("a:0", -1.7e308),
        ("a:2", -1.7e308),  # refused
        ("a:1", 0.0),
    ]
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {}
        if shared:
            settings = {"state": (await stack.enter_async_context(RedisServer())).url, "run": "r"}
        worker = await stack.enter_async_context(FakeWorker(Numbered()))
        gate = await stack.enter_async_context(gateway(pool("policy", worker.url), **settings))
        key = (await start(gate, "a"))["api_key"]
        for text in "xyz":
            await ask(gate, key, text)
        given: dict[str, float] = {}
        for name, reward in steps:
            expected = sum(map(Fraction, (given | {name: reward}).values()), Fraction())
            answer = await post(gate, "/rl/set_reward", key, interaction_id=name, reward=reward)
            if abs(expected) > most:
                assert refused(answer) == (400, "reward_too_large")
                assert answer.json()["error"]["param"] == "reward"
            else:
                assert answer.status_code == 200, answer.text
                given[name] = reward
            total = float(sum(map(Fraction, given.values()), Fraction()))
            assert (await gate.http.get("/sessions/a")).json()["reward"] == total
        assert [r for _, r, _ in await rewards(gate, "a")] == [given[f"a:{number}"] for number in range(3)]
        assert (await post(gate, "/rl/end_session", key)).status_code == 200
        records = gate.records()
        assert len([each for each in records if each["event"] == "reward"]) == 7
        assert [each["session_reward"] for each in records if each["event"] == "session_ended"] == [total]
        await start(gate, "b")
        if shared:
            assert await gate.gauge("detgate_store_errors_total") == 0


async def test_a_request_that_is_long_past_is_found_in_the_ledger() -> None:
    async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url)) as gate:
        key = (await start(gate, "a"))["api_key"]
        for number in range(RECENT + 2):
            await ask(gate, key, str(number))
        [session] = gate.gateway.sessions._sessions.values()
        assert len(session._recent) == RECENT
        for name in ("chatcmpl-0", "a:1", "a:0"):
            answer = await post(gate, "/rl/set_reward", key, interaction_id=name, reward=1)
            assert (answer.status_code, answer.json()["interaction_count"]) == (200, RECENT + 2)
        both = [post(gate, "/rl/set_reward", key, interaction_id="a:0", reward=reward) for reward in (5, 5)]
        await asyncio.gather(*both)
        assert (await gate.http.get("/sessions/a")).json()["reward"] == 6
        assert len(session._recent) == RECENT
        await post(gate, "/rl/set_reward", key, reward=1)
        assert (await rewards(gate, "a"))[-1][:2] == (RECENT + 1, 1)
        assert refused(await post(gate, "/rl/set_reward", key, interaction_id="b:0", reward=1))[0] == 400


async def test_scores_are_not_rewarded() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.json({"data": [{"index": 0, "probs": [1.0]}]} if seen.target == "/classify" else completion())

    async with FakeWorker(script) as worker:
        both = pool("policy", worker.url), pool("reward", worker.url, role="reward")
        async with gateway(*both) as gate:
            key = (await start(gate, "a"))["api_key"]
            await ask(gate, key)
            scored = await gate.http.post("/classify", json={"model": MODEL, "input": "x"}, headers=bearer(key))
            assert scored.status_code == 200
            answer = await post(gate, "/rl/set_reward", key, reward=1)
            assert answer.json()["interaction_count"] == 1
            [recorded] = [record for record in gate.records() if record["event"] == "reward"]
            assert (recorded["identity"], recorded["index"]) == ("a", 0)


async def test_after_a_crash_rewards_and_what_they_are_given_for_are_known(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker(Numbered()) as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            key = (await start(gate, "a"))["api_key"]
            for text in ("x", "y", "broken"):
                await ask(gate, key, text)
            await post(gate, "/rl/set_reward", key, interaction_id="chatcmpl-0", reward=0.5)
            before = (await gate.http.get("/sessions/a")).json()
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert (await gate.http.get("/sessions/a")).json() == before
            assert before["reward"] == 0.5
            for name, reward in (("chatcmpl-0", 2), (None, 3)):
                answer = await post(gate, "/rl/set_reward", key, interaction_id=name, reward=reward)
                assert answer.json()["interaction_count"] == 2
            assert await rewards(gate, "a") == [(0, 2, 5), (1, 3, 5), (2, None, 5)]


# --- those that fail


async def test_who_fails_without_a_reward_has_the_one_for_that_case(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "sessions": {"failed_reward": -1}}
    async with FakeWorker(Numbered()) as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            told = await create(gate, "17", group_size=4)
            own = await create(gate, "18", group_size=1, failed_reward=-7.5)
            for member, (text, end) in enumerate((("x", ""), ("broken", ""), ("x", "?failed=x"), ("x", "?failed=x"))):
                key = told["sessions"][member]["api_key"]
                await ask(gate, key, text)
                if member == 3:
                    await post(gate, "/rl/set_reward", key, reward=0.5)
                await gate.http.delete(f"/sessions/17:{member}{end}", headers=bearer(key))
            await ask(gate, own["sessions"][0]["api_key"])
            await gate.http.delete("/groups/18?failed=x")
            group = (await gate.http.get("/groups/17")).json()
            assert [each["reward"] for each in group["sessions"]] == [None, -1, -1, 0.5]
            assert group["rejected"] is True
            assert [total for *_, total in await rewards(gate, "17:2")] == [-1]
            assert [total for *_, total in await rewards(gate, "18:0")] == [-7.5]
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            assert (await gate.http.get("/groups/17")).json() == group
            assert (await gate.http.get("/sessions/18:0")).json()["reward"] == -7.5


# --- the trainer takes what sessions did


@asynccontextmanager
async def training(**settings: Any) -> AsyncIterator[tuple[FakeWorker, Gate]]:
    """A gateway that keeps bodies, before a replica whose answers have ids."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {"ledger": {"path": folder, "bodies": True}} | BOSS | settings
        async with FakeWorker(Numbered()) as worker, gateway(pool("policy", worker.url), **kept) as gate:
            yield worker, gate


async def export(gate: Gate, key: str | None = "boss", path: str = "/export_trajectories", **body: Any) -> Any:
    answer = await post(gate, path, key, **body)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"interactions"}
    return answer.json()["interactions"]


async def test_an_episode_as_areals_trainer_runs_it() -> None:
    async with training() as (_, gate):
        granted = await gate.http.post("/grant_capacity", headers=bearer("boss"))
        assert granted.status_code == 200
        assert granted.json()["capacity"] > 0
        key = (await start(gate, "17:3", "boss"))["api_key"]
        for text in ("one", "two", "three"):
            await ask(gate, key, text)
        await post(gate, "/rl/set_reward", key, interaction_id="chatcmpl-1", reward=0.5)
        await post(gate, "/rl/set_reward", key, interaction_id=None, reward=1.0)
        await post(gate, "/rl/end_session", key)
        told = await export(gate, session_id="17:3", discount=0.5, style="individual")
        assert list(told) == ["chatcmpl-0", "chatcmpl-1", "chatcmpl-2"]
        assert [each["reward"] for each in told.values()] == [0.5, 1.0, 1.0]
        assert told["chatcmpl-1"] == {
            "messages": [{"role": "user", "content": "two"}],
            "output_message_list": [{"role": "assistant", "content": "hi"}],
            "reward": 1.0,
            "interaction_id": "chatcmpl-1",
        }
        assert await export(gate, session_id="17:3", discount=0.5) == told


async def test_it_waits_for_a_session_to_end_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(timeouts={"group": 0.3}) as (_, gate):
        key = (await start(gate, "17:3", "boss"))["api_key"]
        await ask(gate, key)
        late = await post(gate, "/export_trajectories", "boss", session_id="17:3")
        assert refused(late) == (503, "session_open")
        assert late.headers["retry-after"]
    async with training() as (_, gate):
        key = (await start(gate, "17:3", "boss"))["api_key"]
        await ask(gate, key)
        sessions, looked = gate.gateway.sessions, asyncio.Event()
        refresh = sessions.refresh

        async def seen(session: Any) -> None:
            looked.set()
            await refresh(session)

        monkeypatch.setattr(sessions, "refresh", seen)
        waiting = asyncio.create_task(export(gate, session_id="17:3"))
        await looked.wait()
        monkeypatch.undo()
        await post(gate, "/rl/end_session", key)
        assert list(await waiting) == ["chatcmpl-0"]


async def test_the_other_shape_takes_several_as_they_stand_and_ends_them() -> None:
    async with training() as (_, gate):
        group = await start(gate, "17", "boss", group_size=2)
        for each in group["sessions"]:
            await ask(gate, each["session_api_key"])
        await post(gate, "/rl/set_reward", group["sessions"][1]["session_api_key"], reward=2.0)
        names = [each["session_id"] for each in group["sessions"]]
        wanted: dict[str, Any] = {
            "session_ids": [*names, "unknown"],
            "group_id": "17",
            "trajectory_id": None,
            "discount": 1.0,
        }
        told = await export(gate, **wanted, style="individual", remove_session=False)
        assert {name: each["reward"] for name, each in told.items()} == {"chatcmpl-0": 0.0, "chatcmpl-1": 2.0}
        assert gate.gateway.sessions.live == 2
        assert await export(gate, **wanted, path="/v1/export_trajectories", remove_session=True) == told
        assert gate.gateway.sessions.live == 0


async def test_where_clients_asked_for_token_ids_and_logprobs_there_are_tensors_of_all_or_none() -> None:
    logprobs = {"content": [{"logprob": -0.5}]}

    async def tells_tokens(seen: Seen, reply: Reply) -> None:
        told = completion(id=f"a-{len(worker.seen)}", prompt_token_ids=[7, 8])
        if seen.json.get("return_token_ids"):
            told["choices"][0] |= {"token_ids": [3], "logprobs": logprobs}
        reply.json(told)

    with tempfile.TemporaryDirectory() as folder:
        kept = {"ledger": {"path": folder, "bodies": True}} | BOSS
        async with FakeWorker(tells_tokens) as worker, gateway(pool("policy", worker.url), **kept) as gate:
            for task, texts in (("all", ("a", "b")), ("some", ("", "a"))):
                key = (await start(gate, task, "boss"))["api_key"]
                for text in texts:
                    body = chat(text) | ({"return_token_ids": True, "logprobs": True} if text else {})
                    await gate.http.post(CHAT, json=body, headers=bearer(key))
                await post(gate, "/rl/end_session", key)
            told = await export(gate, session_id="all")
            assert [set(each) for each in told.values()] == [{"tensor_dict", "reward", "interaction_id"}] * 2
            assert told["a-1"]["tensor_dict"]["input_ids"]["shape"] == [1, 3]
            assert all("messages" in each for each in (await export(gate, session_id="some")).values())
            assert all("messages" in each for each in (await export(gate, session_ids=["all", "some"])).values())


async def test_what_cannot_be_given_is_refused() -> None:
    async with training() as (_, gate):
        assert refused(await post(gate, "/export_trajectories", session_id="a")) == (401, "invalid_api_key")
        assert refused(await post(gate, "/grant_capacity")) == (401, "invalid_api_key")
        key = (await start(gate, "a", "boss"))["api_key"]
        assert refused(await post(gate, "/export_trajectories", key, session_id="a")) == (401, "invalid_api_key")
        for body, expected in (
            ({}, (400, "invalid_request")),
            ({"session_ids": []}, (400, "invalid_request")),
            ({"session_id": "a", "style": "concat"}, (400, "invalid_request")),
            ({"session_id": "b"}, (404, "session_not_found")),
        ):
            assert refused(await post(gate, "/export_trajectories", "boss", **body)) == expected
    async with gate_of(**BOSS) as (_, gate):
        key = (await start(gate, "a", "boss"))["api_key"]
        await ask(gate, key)
        await post(gate, "/rl/end_session", key)
        assert refused(await post(gate, "/export_trajectories", "boss", session_id="a")) == (409, "bodies_not_kept")


async def test_a_session_that_cannot_be_given_is_left_out_of_those_that_can() -> None:
    async with training() as (_, gate):
        keys = {name: (await start(gate, name, "boss"))["api_key"] for name in ("plain", "nan", "half", "beside")}
        bodies = {
            "nan": rb'{"model":"test-model","messages":[{"role":"user","content":"hi","x":NaN}]}',
            "half": rb'{"model":"test-model","messages":[{"role":"user","content":"\ud800"}]}',
            "beside": rb'{"model":"test-model","messages":[{"role":"user","content":"hi"}],"x":NaN,"y":"\ud800"}',
        }
        await ask(gate, keys["plain"])
        for name, body in bodies.items():
            assert (await gate.http.post(CHAT, content=body, headers=bearer(keys[name]))).status_code == 200
        answer = await post(gate, "/export_trajectories", "boss", session_ids=list(keys))
        assert answer.status_code == 200
        assert list(answer.json()["interactions"]) == ["chatcmpl-0", "chatcmpl-3"]
        assert set(answer.json()["left_out"]) == {"nan", "half"}
        assert answer.json()["left_out"]["nan"].startswith("nan:0: ")
        assert gate.gateway.sessions.live == 0
        assert list(await export(gate, session_id="beside")) == ["chatcmpl-3"]
        alone = await post(gate, "/export_trajectories", "boss", session_id="nan")
        assert refused(alone) == (409, "turn_unreadable")
        assert "nan:0" in alone.json()["error"]["message"]


async def test_a_reward_that_a_tensor_cannot_hold_leaves_its_session_out() -> None:
    async def tells_tokens(seen: Seen, reply: Reply) -> None:
        told = completion(id=f"a-{len(worker.seen)}", prompt_token_ids=[7, 8])
        told["choices"][0] |= {"token_ids": [3], "logprobs": {"content": [{"logprob": -0.5}]}}
        reply.json(told)

    with tempfile.TemporaryDirectory() as folder:
        kept = {"ledger": {"path": folder, "bodies": True}} | BOSS
        async with FakeWorker(tells_tokens) as worker, gateway(pool("policy", worker.url), **kept) as gate:
            for name, reward in (("a", 1.0), ("b", 1e39)):
                key = (await start(gate, name, "boss"))["api_key"]
                await ask(gate, key)
                await post(gate, "/rl/set_reward", key, reward=reward)
            answer = await post(gate, "/export_trajectories", "boss", session_ids=["a", "b"])
            [given] = answer.json()["interactions"].values()
            assert "tensor_dict" in given
            assert set(answer.json()["left_out"]) == {"b"}


async def test_ids_that_come_twice_lose_no_turn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = {"ledger": {"path": folder, "bodies": True}} | BOSS
        async with FakeWorker() as worker, gateway(pool("policy", worker.url), **kept) as gate:
            key = (await start(gate, "17:3", "boss"))["api_key"]
            for text in ("one", "two"):
                await ask(gate, key, text)
            await post(gate, "/rl/end_session", key)
            told = await export(gate, session_id="17:3")
            assert list(told) == ["chatcmpl-1", "17:3:1"]
            assert [name for name in told if told[name]["interaction_id"] != name] == []
