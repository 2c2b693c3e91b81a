"""Replicas that are down, slow, refusing or gone: who is asked, how often, and what the client is told."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from tests.field import clock
from tests.field.routes import (
    CHAT,
    CLASSIFY,
    EVERY,
    GENERATE,
    MESSAGES,
    SGLANG_CHAT,
    SGLANG_CLASSIFY,
    Route,
    both_carriers,
    over,
)
from tests.harness import CarrierName, FakeWorker, Reply, Seen, Wire, gateway, is_probe

HEADERS = ("request-id", "index", "seed", "seed-source")
"""What must be the same however often a request is sent."""


def decided(answer: Any) -> list[str | None]:
    """What the gateway says of a request's decision."""
    return [answer.headers.get(f"x-detgate-{name}") for name in HEADERS]


@both_carriers
@pytest.mark.parametrize("when", ["from the start", "later"])
async def test_models_are_told_while_one_replica_is_down(when: str, carrier: CarrierName) -> None:
    """GET /v1/models answers from the replica that is up (vllm-router#135)."""
    async with FakeWorker() as one, FakeWorker() as two:
        if when == "from the start":
            await two.stop()
        async with gateway(CHAT.pool(one.url, two.url, models=()), carrier=carrier) as gate:
            if when == "later":
                await two.stop()
                await gate.until(lambda: [each.up for each in gate.gateway.fleet.replicas] == [True, False])
            answer = await gate.http.get("/v1/models")
            assert answer.status_code == 200
            assert [model["id"] for model in answer.json()["data"]] == ["test-model"]


@over((CHAT, MESSAGES, GENERATE, CLASSIFY))
async def test_refusals_of_an_engine_say_nothing_of_its_health(route: Route) -> None:
    """Twenty answers of 400, then a good call: it goes to the same replica and is answered (sglang#25811)."""
    refusing = True

    async def script(seen: Seen, reply: Reply) -> None:
        if refusing:
            reply.json({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, 400)
        else:
            await route.polite(seen, reply)

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        for _ in range(20):
            assert (await gate.http.post(route.path, json=route.body())).status_code == 400
        refusing = False
        assert (await gate.http.post(route.path, json=route.body())).status_code == 200
        assert [each.state for each in gate.gateway.fleet.replicas] == ["up"]
        assert len(worker.seen) == 21


@pytest.mark.parametrize("up", [1, 0])
async def test_a_start_while_replicas_are_down(up: int) -> None:
    """With one of three up, and with none, the gateway starts; liveness is 200, readiness says why (sglang#3802)."""
    workers = [FakeWorker() for _ in range(3)]
    for number, worker in enumerate(workers):
        await worker.__aenter__()
        if number >= up:
            await worker.stop()
    async with gateway(CHAT.pool(*(worker.url for worker in workers))) as gate:
        assert (await gate.http.get("/livez")).status_code == 200
        ready = await gate.http.get("/readyz")
        assert ready.status_code == (200 if up else 503)
        told = ready.json()["pools"]["generate"]["replicas"]
        assert [each["state"] for each in told.values()] == ["up"] * up + ["down"] * (3 - up)
        assert all("cannot connect" in each["reason"] for each in told.values() if each["state"] == "down")
        answer = await gate.http.post(CHAT.path, json=CHAT.body())
        assert answer.status_code == (200 if up else 503)
        if not up:
            assert int(answer.headers["retry-after"]) > 0
            assert "generate-2" in answer.json()["error"]["message"]
    await workers[0].stop()


def test_a_replica_that_comes_up_late_joins() -> None:
    """A replica that becomes healthy after 400 s is found and used (sglang#2778)."""

    async def main() -> None:
        async with FakeWorker() as one, FakeWorker() as two:
            await two.stop()
            async with gateway(CHAT.pool(one.url, two.url), health={}) as gate:
                await asyncio.sleep(400)
                assert [each.state for each in gate.gateway.fleet.replicas] == ["up", "down"]
                await two.__aenter__()
                await gate.until(lambda: all(each.up for each in gate.gateway.fleet.replicas), 30)
                for number in range(20):
                    await gate.http.post(f"/sessions/s{number}{CHAT.path}", json=CHAT.body())
                assert one.seen
                assert two.seen

    clock.run(main())


def test_a_slow_health_route_costs_no_replica_its_place() -> None:
    """/health takes 25 s while a request runs; that one ends, and others are served there (sglang#22511)."""
    slow = False

    async def probes(seen: Seen, reply: Reply) -> None:
        if slow:
            await asyncio.sleep(25)
        reply.json({})

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json.get("long"):
            await asyncio.sleep(40)
        await CHAT.polite(seen, reply)

    async def main() -> None:
        nonlocal slow
        async with (
            FakeWorker(script, probes=probes) as worker,
            gateway(CHAT.pool(worker.url), health={}) as gate,
        ):
            slow = True
            long = asyncio.create_task(gate.http.post(CHAT.path, json=CHAT.body(long=True), timeout=None))
            for _ in range(25):
                await asyncio.sleep(1)
                assert gate.gateway.fleet.pools["generate"].replicas["generate-0"].up
            assert (await gate.http.post(CHAT.path, json=CHAT.body())).status_code == 200
            slow = False
            assert (await long).status_code == 200

    clock.run(main())


def plain(text: str | bytes) -> str:
    """Without the mark that parts an engine's id from an equal one that may still run."""
    return re.sub(r"-\d+!", "!", text if isinstance(text, str) else text.decode())


async def resetting(seen: Seen, reply: Reply) -> None:
    """Takes the whole request, then resets."""
    reply.reset()


@pytest.mark.parametrize("stream", [False, True])
@over((*EVERY, SGLANG_CHAT))
async def test_a_reset_before_the_head_is_sent_elsewhere_unchanged(route: Route, stream: bool) -> None:
    """A replica takes the body and resets; another gets the same index, seed and bytes (miles#1334)."""
    stream = stream and route.stream is not None
    async with FakeWorker(resetting) as one, FakeWorker(route.polite) as two:
        async with gateway(route.pool(one.url, two.url)) as gate:
            for number in range(50):
                path = f"/sessions/s{number}{route.path}"
                answer = await gate.http.post(path, json=route.body(stream=stream))
                assert answer.status_code == 200
                assert answer.headers["x-detgate-replica"] == f"{route.role}-1"
                if one.seen:
                    break
            assert answer.headers["x-detgate-attempts"] == "2"
            assert plain(one.seen[0].body) == plain(two.seen[-1].body)
            names = [plain(engine_id(route, worker.seen[-1]) or "") for worker in (one, two)]
            assert names[0] == names[1]
            await gate.until(lambda: gate.records()[-1]["event"] == "closed")
            assert gate.records()[-1]["replicas"] == [f"{route.role}-0", f"{route.role}-1"]


@over((CHAT, MESSAGES, GENERATE, CLASSIFY))
async def test_a_reset_with_nowhere_else_to_go(route: Route) -> None:
    """The only replica resets: 502, and asking again gets the same index and seed (miles#1334)."""
    async with FakeWorker(resetting) as worker, gateway(route.pool(worker.url)) as gate:
        broken = await gate.http.post(f"/sessions/s{route.path}", json=route.body())
        assert broken.status_code == 502
        assert len(worker.seen) == 1
        worker.script = route.polite
        again = await gate.http.post(f"/sessions/s{route.path}", json=route.body())
        assert again.status_code == 200
        assert decided(again) == decided(broken)
        assert again.headers["x-detgate-index"] == "0"


@pytest.mark.parametrize("profile", ["balanced", "strict"])
@both_carriers
async def test_what_breaks_two_replicas_or_its_home_twice_is_sent_to_no_third(
    profile: str, carrier: CarrierName
) -> None:
    async with FakeWorker(resetting) as one, FakeWorker(resetting) as two, FakeWorker(resetting) as three:
        workers = (one, two, three)
        pool = CHAT.pool(*(worker.url for worker in workers))
        async with gateway(pool, carrier=carrier, profile=profile) as gate:
            broken = await gate.http.post(f"/sessions/s{CHAT.path}", json=CHAT.body())
            assert (broken.status_code, broken.json()["error"]["code"]) == (502, "suspected_poison")
            assert sorted(len(worker.seen) for worker in workers) == ([0, 1, 1] if profile == "balanced" else [0, 0, 2])
            for worker in workers:
                worker.script = CHAT.polite
            again = await gate.http.post(f"/sessions/s{CHAT.path}", json=CHAT.body())
            assert (again.status_code, again.headers["x-detgate-index"]) == (200, "0")


@pytest.mark.parametrize("stream", [False, True])
@both_carriers
async def test_a_replica_cannot_speak_for_the_gateway(stream: bool, carrier: CarrierName) -> None:
    """A gateway behind this one, or a replica that says what it likes: its X-Detgate headers reach no client."""
    false = [("X-Detgate-Guarantee", "strict"), ("x-detgate-seed", "1"), ("x-detgate-made-up", "1")]

    async def boastful(seen: Seen, reply: Reply) -> None:
        if stream:
            reply.head(200, ("content-type", "text/event-stream"), *false)
            for event in CHAT.events:
                reply.chunk(event)
            reply.end()
        else:
            reply.head(200, ("content-type", "application/json"), *false, length=len(CHAT.answer))
            reply.writer.write(CHAT.answer)

    async with FakeWorker(boastful) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(CHAT.path, json=CHAT.body(stream=stream))
        assert answer.headers.get_list("x-detgate-guarantee") == ["balanced; unverified"]
        assert answer.headers.get_list("x-detgate-seed") == [str(gate.records()[0]["seed"])]
        assert "x-detgate-made-up" not in answer.headers
        counted = await gate.http.post("/tokenize", json=CHAT.body())
        assert not {"x-detgate-seed", "x-detgate-made-up"} & set(counted.headers)


async def test_a_request_that_was_sent_is_not_sent_again_where_that_is_set() -> None:
    """With routing.retry_sent off, a reset after the request was sent is the client's to judge (miles#1334)."""
    routing = {"retry_sent": False, "slack": "inf"}
    async with FakeWorker(resetting) as one, FakeWorker(resetting) as two:
        async with gateway(CHAT.pool(one.url, two.url), routing=routing) as gate:
            assert (await gate.http.post(CHAT.path, json=CHAT.body())).status_code == 502
            assert len(one.seen) + len(two.seen) == 1


def engine_id(route: Route, seen: Seen) -> str | None:
    """The id by which the engine knows a request."""
    return seen.json.get("rid") if route.engine == "sglang" else seen.header("x-request-id")


@pytest.mark.parametrize("same_index", [False, True])
@over((CHAT, MESSAGES, GENERATE, SGLANG_CHAT, CLASSIFY, SGLANG_CLASSIFY))
async def test_a_running_id_is_never_sent_twice(route: Route, same_index: bool) -> None:
    """The same X-Request-ID, even the same index, while the first runs: the engine sees two ids (rllm#330)."""
    running: set[str | None] = set()
    both = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        name = engine_id(route, seen)
        if name in running:
            reply.json({"error": f"Duplicate request ID detected: {name}"}, 400)
            both.set()
            return
        running.add(name)
        if len(running) == 2:
            both.set()
        await both.wait()
        await route.polite(seen, reply)

    lane = {"lane": {"scope": "none"}} if route.role == "reward" else {}
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url, **lane)) as gate:
        headers = {"x-request-id": "mine", "x-session-id": "s"} | ({"x-request-index": "4"} if same_index else {})
        answers = await asyncio.gather(
            *(gate.http.post(route.path, json=route.body(), headers=headers) for _ in range(2))
        )
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
        assert "mine" not in running
        if same_index and route.role == "generate":
            assert {answer.headers["x-detgate-index"] for answer in answers} == {"4"}


@both_carriers
@over((CHAT, MESSAGES, GENERATE))
async def test_a_shutdown_refuses_what_is_new_and_ends_what_runs(route: Route, carrier: CarrierName) -> None:
    """SIGTERM at the third of twenty chunks: new requests are refused, the stream ends whole (litellm#14334)."""
    events = [route.events[0]] * 20 + route.events[1:]
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for number, event in enumerate(events):
            reply.chunk(event)
            if number == 2:
                await go.wait()
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        async with Wire(gate.port) as idle, Wire(gate.port) as wire, Wire(gate.port) as new:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            got = await wire.received(len(b"".join(events[:3])))
            gate.server.should_exit = True
            await gate.until(lambda: gate.gateway.pipeline.draining)
            for connection in (idle, new):
                connection.post(route.path, route.body())
                assert await connection.head() == 503
                assert int(connection.header("retry-after") or "") > 0
                assert ("type" in json.loads(await connection.body())) is (route is MESSAGES)
            go.set()
            assert got + await wire.body() == b"".join(events)
            async with asyncio.timeout(2):
                await gate.serving
        with pytest.raises(ConnectionRefusedError):
            await Wire(gate.port).__aenter__()
        assert len(worker.seen) == 1
        assert [r["outcome"] for r in gate.records() if r["event"] == "closed"] == ["delivered"]


@pytest.mark.parametrize("profile", ["balanced", "strict"])
@over((CHAT, GENERATE))
async def test_a_killed_replica_loses_its_keys_to_another(route: Route, profile: str) -> None:
    """The replica that a key maps to is killed: the next try is answered elsewhere (NeMo RL#3613)."""
    async with FakeWorker(route.polite) as one, FakeWorker(route.polite) as two:
        pool = route.pool(one.url, two.url, deterministic="declared")
        async with gateway(pool, profile=profile, routing={"on_home_down": "next"}) as gate:
            before = await gate.http.post(f"/runs/a/sessions/s{route.path}", json=route.body())
            home = before.headers["x-detgate-replica"]
            await (one if home == "generate-0" else two).stop()
            after = await gate.http.post(f"/runs/b/sessions/s{route.path}", json=route.body())
            assert after.status_code == 200
            assert after.headers["x-detgate-replica"] != home
            assert decided(after) == decided(before)
            if profile == "strict":
                assert before.headers["x-detgate-guarantee"] == "strict"
                assert after.headers["x-detgate-guarantee"] == "balanced; home-down"


@pytest.mark.parametrize("probed", [True, False])
async def test_a_replica_that_never_answers_holds_up_nobody_else(probed: bool) -> None:
    """One replica accepts and is silent, to probes too or not; calls to the other are normal (production-stack#749)."""

    async def silent(seen: Seen, reply: Reply) -> None:
        if is_probe(seen) and probed:
            reply.json({})
        else:
            await reply.gone()

    async with (
        FakeWorker(silent, probes=silent) as dead,
        FakeWorker() as alive,
        gateway(CHAT.pool(dead.url, alive.url), health={"interval": 0.05, "timeout": 0.2}) as gate,
    ):
        asked = [asyncio.create_task(gate.http.post(f"/sessions/s{n}{CHAT.path}", json=CHAT.body())) for n in range(40)]
        await gate.until(lambda: sum(task.done() for task in asked) + len(dead.seen) == 40)
        answers = [task.result() for task in asked if task.done()]
        assert len(answers) >= (20 if probed else 40)
        assert {answer.headers["x-detgate-replica"] for answer in answers} == {"generate-1"}
        for task in asked:
            task.cancel()


@over((CHAT, GENERATE))
async def test_probes_carry_the_replicas_key(route: Route) -> None:
    """A replica that wants a key on its health route gets it (production-stack#631)."""
    keys = []

    async def probes(seen: Seen, reply: Reply) -> None:
        keys.append(seen.header("authorization"))
        if keys[-1] == "Bearer theirs":
            reply.json({"data": [{"id": "tiny-llm"}]})
        else:
            reply.json({"error": "Unauthorized"}, 401)

    async with (
        FakeWorker(route.polite, probes=probes) as worker,
        gateway(route.pool(worker.url, api_key="theirs", models=())) as gate,
    ):
        assert [each.state for each in gate.gateway.fleet.replicas] == ["up"]
        assert set(keys) == {"Bearer theirs"}
        assert (await gate.http.post(route.path, json=route.body())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("replicas", "attempts", "sent"), [(1, 3, 1), (3, 3, 3), (3, 2, 2), (5, 3, 3)])
async def test_attempts_are_bounded(replicas: int, attempts: int, sent: int, stream: bool) -> None:
    """503 for ever: the SDK tries three times, each try is sent `limits.attempts` times (litellm#2620)."""
    seen = 0

    async def script(_: Seen, reply: Reply) -> None:
        nonlocal seen
        seen += 1
        reply.json({"error": {"message": "full"}}, 503, ("retry-after-ms", "1"))

    workers = [await FakeWorker(script).__aenter__() for _ in range(replicas)]
    urls = [worker.url for worker in workers]
    async with gateway(CHAT.pool(*urls), limits={"attempts": attempts}) as gate:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="k", max_retries=2, http_client=http) as sdk:
            with pytest.raises(openai.InternalServerError) as raised:
                await sdk.chat.completions.create(
                    model="tiny-llm", messages=[{"role": "user", "content": "hi"}], stream=stream
                )
        assert seen == 3 * sent
        assert raised.value.response.headers["x-detgate-attempts"] == str(sent)
        claims = {r["index"] for r in gate.records() if r["event"] == "opened"}
        assert claims == {0}
    for worker in workers:
        await worker.stop()
