"""Weights that change between requests, and sessions that are held to one version, through a whole gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import FakeWorker, Gate, Reply, Seen, Wire, chat, completion, delta, gateway, pool
from tests.redis_server import RedisServer
from tests.test_groups import Line, keys, lane, send
from tests.test_sessions import CHAT, ask, bearer, create, left_behind, lines, refused, said
from tests.test_workers import config, ready

SGLANG: dict[str, Any] = {"engine": "sglang", "deterministic": "declared"}


class Engine:
    """A replica that tells its weights as SGLang does, and may change them in mid-answer."""

    def __init__(self, *spans: str) -> None:
        self.spans = list(spans)
        self.go = asyncio.Event()
        """Set when a stream may end."""

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        metadata: dict[str, Any] = {"weight_version": self.spans[-1]} if self.spans else {}
        if len(self.spans) > 1:
            metadata["weight_versions"] = [
                {"version": span, "start": n, "end": n + 1} for n, span in enumerate(self.spans)
            ]
        if seen.json.get("stream"):
            meta = {"id": "x", "finish_reason": {"type": "stop"}, "completion_tokens": 1, **metadata}
            reply.sse()
            if not seen.json.get("at_once"):
                reply.chunk('data: {"text": "h", "meta_info": {"id": "x"}}\n\n')
                await self.go.wait()
            reply.chunk(f"data: {json.dumps({'text': 'hi', 'meta_info': meta})}\n\ndata: [DONE]\n\n")
            reply.end()
            return
        reply.json(completion(metadata=metadata))


async def post(gate: Gate, what: str = "", key: str | None = None, **body: Any) -> httpx.Response:
    return await gate.http.post(f"/admin/weights{what}", json=body, headers=bearer(key))


def closed(gate: Gate) -> list[dict[str, Any]]:
    return [record for record in gate.records() if record["event"] == "closed"]


# --- a change


async def test_a_change_lets_what_is_in_flight_end_and_holds_back_what_comes() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url)) as gate:
        first = send(gate, "k", "first", x_session_id="a")
        await gate.until(lambda: line.running == 1)
        change = asyncio.create_task(post(gate, version="step-2"))
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.shut)
        second = send(gate, "k", "second", x_session_id="b")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        assert (line.came, change.done()) == (["first"], False)
        assert await gate.gauge("detgate_paused", pool="policy") == 1
        assert await gate.gauge("detgate_paused_waiting", pool="policy") == 1
        assert await gate.gauge("detgate_inside", pool="policy") == 1
        tokens = await gate.http.post("/tokenize", json={"model": "test-model", "prompt": "x"})
        assert tokens.status_code == 200
        line.let(2)
        told = (await change).json()["policy"]
        assert (told["version"], told["named"], told["told"], told["paused"]) == ("step-2", "step-2", None, False)
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        ends = {record["session"]: record for record in closed(gate)}
        assert [ends[name]["weight_version"] for name in "ab"] == [None, "step-2"]
        assert ends["b"]["lane_wait"] > 0
        recorded = [record for record in gate.records() if record["event"] == "weights"]
        assert [(each["change"], each["version"], each["paused"]) for each in recorded] == [
            ("pause", None, True),
            ("weights", "step-2", True),
            ("resume", "step-2", False),
        ]


async def test_pause_and_resume_are_steps_of_their_own() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url)) as gate:
        assert (await post(gate, "/pause")).json()["policy"]["paused"] is True
        waiting = send(gate, "k", "x")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        assert (await post(gate, "/pause")).status_code == 200
        assert line.came == []
        line.let(2)
        assert (await post(gate, version="2")).json()["policy"]["paused"] is False
        assert (await waiting).status_code == 200
        await post(gate, "/pause", pools=["policy"])
        again = send(gate, "k", "y")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        assert (await gate.http.post("/admin/weights/resume")).json()["policy"]["paused"] is False
        assert (await again).status_code == 200
        assert [record["weight_version"] for record in closed(gate)] == ["2", "2"]


async def test_only_the_pools_that_are_named_are_paused_and_reward_pools_only_then() -> None:
    async with FakeWorker() as worker:
        pools = [pool(name, worker.url, models=[name]) for name in ("one", "two")]
        pools.append(pool("reward", worker.url, role="reward", models=["three"]))
        async with gateway(*pools) as gate:
            cases: tuple[tuple[dict[str, Any], list[bool]], ...] = (
                ({}, [True, True, False]),
                ({"pools": ["two", "reward"]}, [False, True, True]),
            )
            for given, expected in cases:
                shown = (await post(gate, "/pause", **given)).json()
                assert [shown[name]["paused"] for name in ("one", "two", "reward")] == expected
                await post(gate, "/resume", pools=["one", "two", "reward"])
            shown = (await post(gate, version="v", pools=["two"])).json()
            assert [shown[name]["version"] for name in ("one", "two", "reward")] == [None, "v", None]
            assert (await gate.http.get("/admin/weights")).json() == shown


async def test_what_does_not_end_in_time_leaves_everything_as_it_was() -> None:
    line = Line()
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url), timeouts={"weights": 0.2}) as gate:
        first = send(gate, "k", "first")
        await gate.until(lambda: line.running == 1)
        for what, body in (("", {"version": "2"}), ("/pause", {})):
            late = await post(gate, what, **body)
            assert refused(late) == (503, "weights_in_flight")
        shown = (await gate.http.get("/admin/weights")).json()["policy"]
        assert (shown["version"], shown["paused"], shown["in_flight"]) == (None, False, 1)
        line.let(2)
        assert (await first).status_code == 200
        assert (await ask(gate, text="second")).status_code == 200


async def test_who_waits_for_new_weights_waits_for_a_bounded_time_and_not_with_too_many_others() -> None:
    settings: dict[str, Any] = {"timeouts": {"weights": 0.5}, "limits": {"queue": 1}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        await post(gate, "/pause")
        waiting = send(gate, "k", "x", x_session_id="a")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        assert refused(await ask(gate, text="y", x_session_id="b")) == (503, "queue_full")
        assert refused(await waiting) == (503, "weights_paused")
        leaving = send(gate, "k", "x", x_session_id="a")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        leaving.cancel()
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 0)
        await post(gate, "/resume")
        answer = await ask(gate, text="x", x_session_id="a")
        assert answer.headers["x-detgate-index"] == "0"
        assert (await gate.http.get("/admin/weights")).json()["policy"]["in_flight"] == 0


async def test_a_request_of_several_calls_is_not_parted_by_a_change_nor_kept_from_its_lane() -> None:
    """One at a time in the replica: the second call of the first request needs the place that another waits for."""
    line = Line()
    async with FakeWorker(line) as worker:
        settings = pool("policy", worker.url, engine="openai", lane={"scope": "pool", "limit": 1})
        async with gateway(settings) as gate:
            lanes = gate.gateway.fleet.pools["policy"].lanes
            body = chat("both", n=2)
            both = asyncio.create_task(gate.http.post(CHAT, json=body, headers={"x-session-id": "b"}))
            await gate.until(lambda: line.running == 1)
            other = send(gate, "k", "other", x_session_id="a")
            await gate.until(lambda: lanes.waiting == 2)
            change = asyncio.create_task(post(gate, version="2"))
            await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.shut)
            line.let(2)
            assert (await both).status_code == 200
            assert (await change).status_code == 200
            line.let()
            assert (await other).status_code == 200
            assert line.came == ["both", "both", "other"]
            assert [(record["session"], record["weight_version"]) for record in closed(gate)] == [
                ("b", None),
                ("a", "2"),
            ]


async def test_after_a_crash_the_version_and_a_pause_are_known(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            await post(gate, version="1")
            await post(gate, version="2")
            await post(gate, "/pause")
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            shown = (await gate.http.get("/admin/weights")).json()["policy"]
            assert (shown["version"], shown["paused"]) == ("2", True)


async def test_who_may_change_weights_and_what_a_version_is() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": "boss"}) as gate:
        for what in ("", "/pause", "/resume"):
            assert refused(await post(gate, what, version="1")) == (401, "invalid_api_key")
            unknown = {"version": "1"} if not what else {}
            assert refused(await post(gate, what, "boss", pools=["never"], **unknown)) == (404, "not_found")
            assert refused(await post(gate, what, "boss", pools=[], **unknown))[0] == 400
        for version in ("", "a,b", "a\n", 3, None, "x" * 129):
            assert refused(await post(gate, "", "boss", version=version))[0] == 400
        assert (await gate.http.get("/admin/weights")).status_code == 401


# --- sessions that are held to one version


@pytest.mark.parametrize("by", ["field", "setting"])
async def test_a_session_that_is_held_says_when_its_weights_have_changed(by: str) -> None:
    settings: dict[str, Any] = {"sessions": {"weights": "hold"}} if by == "setting" else {}
    field = {"weights": "hold"} if by == "field" else {}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **settings) as gate:
        key = (await create(gate, "a", **field))["api_key"]
        free = (await create(gate, "b", weights="any"))["api_key"]
        for version in ("1", "2"):
            await post(gate, version=version)
            held, other = await ask(gate, key, version), await ask(gate, free, version)
            assert ("weights-changed" in held.headers["x-detgate-guarantee"]) is (version == "2")
            assert "weights-changed" not in other.headers["x-detgate-guarantee"]
        states = [(await gate.http.get(f"/sessions/{name}")).json()["weights"] for name in "ab"]
        assert states == [{"policy": "1"}, None]
        flags = [record["flags"] for record in closed(gate) if record["session"] == "a"]
        assert ["weights-changed" in each for each in flags] == [False, True]


async def test_in_strict_a_held_group_is_refused_under_other_weights_and_takes_no_index(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"profile": "strict", "ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **settings) as gate:
            told = await create(gate, "17", group_size=2, weights="hold")
            await post(gate, version="1")
            assert (await ask(gate, keys(told)[1])).status_code == 200
            file, content = left_behind(gate.gateway.runs.own)
        file.write_bytes(content)
        async with gateway(pool("policy", worker.url), **settings) as gate:
            await post(gate, version="2")
            answer = await ask(gate, keys(told)[0])
            assert refused(answer) == (409, "weight_version")
            assert answer.headers["x-should-retry"] == "false"
            assert "weights 2" in answer.json()["error"]["message"]
            assert (await gate.http.get("/sessions/17:0")).json()["next_index"] == 0
            await post(gate, version="1")
            assert said(await ask(gate, keys(told)[0]))[0] == "17:0:0"


async def test_in_strict_weights_that_change_while_a_held_request_waits_refuse_it_and_its_index_is_free() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), profile="strict") as gate:
        key = (await create(gate, "a", weights="hold"))["api_key"]
        await post(gate, version="1")
        await ask(gate, key, "x")
        await post(gate, "/pause")
        waiting = send(gate, key, "y")
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].gate.waiting == 1)
        await post(gate, version="2")
        assert refused(await waiting) == (409, "weight_version")
        assert len(worker.seen) == 1
        await post(gate, version="1")
        assert said(await ask(gate, key, "y"))[0] == "a:1"


# --- what the engine tells


async def test_what_the_engine_tells_counts_more_than_a_name() -> None:
    engine = Engine("default")
    async with FakeWorker(engine) as worker, gateway(pool("policy", worker.url, **SGLANG)) as gate:
        key = (await create(gate, "a", weights="hold"))["api_key"]
        await post(gate, version="named")
        assert "weights-changed" not in (await ask(gate, key, "x")).headers["x-detgate-guarantee"]
        engine.spans = ["7"]
        answer = await ask(gate, key, "y")
        assert "weights-changed" in answer.headers["x-detgate-guarantee"]
        shown = (await gate.http.get("/admin/weights")).json()["policy"]
        assert (shown["version"], shown["named"], shown["told"]) == ("7", "named", "7")
        assert [record["weight_version"] for record in closed(gate)] == ["named", "7"]
        await post(gate, version="8")
        assert (await gate.http.get("/admin/weights")).json()["policy"]["version"] == "8"


async def test_an_answer_under_two_versions_says_so_and_in_strict_is_refused_and_keeps_its_index() -> None:
    engine = Engine("1", "2")
    async with FakeWorker(engine) as worker:
        async with gateway(pool("policy", worker.url, **SGLANG)) as gate:
            answer = await ask(gate, text="x")
            assert answer.headers["x-detgate-guarantee"] == "none; weights-mixed"
            [record] = closed(gate)
            assert (record["weight_version"], record["flags"]) == ("1,2", ["weights-mixed"])
        async with gateway(pool("policy", worker.url, **SGLANG), profile="strict") as gate:
            mixed = await ask(gate, text="x", x_session_id="a")
            assert refused(mixed) == (503, "weights_mixed")
            engine.spans = ["2", "2"]
            again = await ask(gate, text="x", x_session_id="a")
            assert (again.status_code, again.headers["x-detgate-index"]) == (200, "0")
            assert again.headers["x-detgate-seed"] == mixed.headers["x-detgate-seed"]


@pytest.mark.parametrize("route", [CHAT, "/generate"])
async def test_samples_that_were_drawn_apart_are_compared_by_their_weights(route: str) -> None:
    versions = iter(["1", "1", "1", "2"])

    async def script(seen: Seen, reply: Reply) -> None:
        told = {"weight_version": next(versions)}
        if seen.target == "/generate":
            reply.json({"text": "hi", "meta_info": {"id": "x", "finish_reason": {"type": "stop"}, **told}})
        else:
            reply.json(completion('say "weight_version": "9"', metadata=told))

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url, **SGLANG)) as gate:
        body = chat(n=2) if route == CHAT else {"text": "x", "sampling_params": {"n": 2}}
        answers = [await gate.http.post(route, json=body) for _ in range(2)]
        mixed = ["weights-mixed" in answer.headers["x-detgate-guarantee"] for answer in answers]
        assert mixed == [False, True], [answer.text for answer in answers]
        assert [record["weight_version"] for record in closed(gate)] == ["1", "1,2"]


async def test_a_stream_that_has_begun_goes_on_and_the_ledger_says_so() -> None:
    engine = Engine("1", "2")
    async with FakeWorker(engine) as worker:
        async with gateway(pool("policy", worker.url, **SGLANG), profile="strict") as gate:
            async with Wire(gate.port) as wire:
                wire.post("/generate", {"text": "x", "stream": True}, ("x-session-id", "a"))
                assert await wire.head() == 200
                await wire.chunk()
                engine.go.set()
                assert (await wire.body()).endswith(b"data: [DONE]\n\n")
            await gate.until(lambda: len(closed(gate)) == 1)
            [record] = closed(gate)
            assert (record["outcome"], record["flags"]) == ("delivered", ["weights-mixed"])
            engine.go.set()
            early = await gate.http.post("/generate", json={"text": "y", "stream": True, "at_once": True})
            assert refused(early) == (503, "weights_mixed")


async def test_a_stream_during_which_others_were_told_of_new_weights_is_marked() -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if not seen.json.get("stream"):
            reply.json(completion(metadata={"weight_version": seen.json["messages"][0]["content"]}))
            return
        reply.sse()
        reply.chunk(delta("h"))
        await go.wait()
        reply.chunk(delta("i", "stop") + "data: [DONE]\n\n")
        reply.end()

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url, **SGLANG)) as gate:
        await ask(gate, text="1", x_session_id="a")
        async with Wire(gate.port) as wire:
            wire.post(CHAT, chat(stream=True), ("x-session-id", "b"))
            await wire.head()
            await wire.chunk()
            await ask(gate, text="2", x_session_id="c")
            go.set()
            await wire.body()
        await gate.until(lambda: len(closed(gate)) == 3)
        flags = {record["session"]: record["flags"] for record in closed(gate)}
        assert ["weights-mixed" in flags[name] for name in "abc"] == [False, True, False]


async def test_a_pause_does_not_end_the_turns_of_a_group() -> None:
    line = Line()
    settings: dict[str, Any] = {"sessions": {"required": True}}
    async with FakeWorker(line) as worker, gateway(pool("policy", worker.url, **lane()), **settings) as gate:
        told = await create(gate, "17", group_size=3)
        await post(gate, "/pause")
        gate_of_pool = gate.gateway.fleet.pools["policy"].gate
        waiting = []
        for member in (2, 0, 1):
            waiting.append(send(gate, keys(told)[member], str(member)))
            await gate.until(lambda: gate_of_pool.waiting == len(waiting))
        await post(gate, "/resume")
        line.let(3)
        assert [(await task).status_code for task in waiting] == [200] * 3
        assert line.most == 1
        exported = lines(await gate.http.get(f"/admin/runs/{gate.gateway.run}/requests"))
        assert len(exported) == 3


async def test_workers_change_weights_together(tmp_path: Path) -> None:
    """Whichever of them is asked, it waits for what is in flight in the other, and both hold back what comes."""
    line = Line()
    async with RedisServer() as server, FakeWorker(line) as worker:
        async with ready(tmp_path, config(server, pool("policy", worker.url))) as (_, fresh):

            async def told(name: str) -> float:
                return (await fresh.numbers())[f"detgate_{name}[('pool', 'policy')]"]

            for number in range(3):

                def send_one(name: str, of: int = number) -> asyncio.Task[httpx.Response]:
                    path = f"/sessions/{of}{name}{CHAT}"
                    return asyncio.create_task(fresh.ask("POST", path, json=chat(name)))

                async with asyncio.timeout(30):
                    inside = [send_one(str(n)) for n in range(8)]
                    while line.running < len(inside):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    new = {"version": str(number)}
                    change = asyncio.create_task(fresh.ask("POST", "/admin/weights", json=new))
                    while not await told("paused"):
                        pass
                    outside = [send_one(f"{n} later") for n in range(8)]
                    while await told("paused_waiting") < len(outside):
                        pass
                    for left in range(len(inside) - 1, 0, -1):
                        line.let()
                        while await told("inside") > left:
                            pass
                        for _ in range(4):
                            assert await told("paused")
                        assert (line.running, change.done()) == (left, False)
                    line.let(1 + len(outside))
                    assert (await change).status_code == 200
                    assert {(await task).status_code for task in inside + outside} == {200}
                for _ in range(6):
                    shown = (await fresh.ask("GET", "/admin/weights")).json()["policy"]
                    assert (shown["version"], shown["paused"]) == (str(number), False)
