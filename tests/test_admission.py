"""What is in an engine's batch at the same time, through cancels, breaks, time-outs and retries."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway import departures
from gateway.settings import InvalidSettings, Settings
from gateway.sim import SimServer, SimSettings
from tests.batches import Engine, EngineName
from tests.harness import MODEL, Gate, Reply, Seen, Wire, chat, completion, gateway, pool

CHAT = "/v1/chat/completions"
ONE = {"scope": "replica", "limit": 1}

both_engines = pytest.mark.parametrize("name", ["vllm", "sglang"])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(departures, "LOOK_SECONDS", 0.02)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is held for as long as the engine has not left it."""
    monkeypatch.setattr(departures, "LEAVE_SECONDS", 30.0)


def score(gate: Gate, engine: Engine, text: str | list[str], **headers: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(gate.http.post("/classify", json=engine.text(text), headers=headers))


def ask(gate: Gate, text: str, path: str = "", **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(gate.http.post(f"{path}{CHAT}", json=chat(text, **fields)))


def guarantee(answer: httpx.Response) -> list[str]:
    """The level, then the reasons."""
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-detgate-guarantee"]).split("; ")


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def nothing_more(engine: Engine, count: int, seconds: float = 0.1) -> None:
    """For this long, no more requests than these reach the engine."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await engine.has_seen(count + 1)


def waiting(gate: Gate, count: int) -> Callable[[], bool]:
    return lambda: sum(each.lanes.waiting for each in gate.gateway.fleet) == count


# --- reward pools: one at a time


@both_engines
async def test_a_reward_replica_has_never_two_requests_in_its_batch(name: EngineName) -> None:
    async with Engine(name) as one, Engine(name) as two:
        async with gateway(pool("reward", one.url, two.url, engine=name, role="reward")) as gate:
            answers = await asyncio.gather(*(score(gate, one, f"text {number}") for number in range(50)))
            assert [guarantee(answer) for answer in answers] == [["balanced"]] * 50
            assert (one.most, two.most) == (1, 1)
            assert len(one.seen) + len(two.seen) == 50
            assert min(len(one.seen), len(two.seen)) > 10


@both_engines
async def test_a_client_that_leaves_a_reward_request_does_not_disturb_the_engine(name: EngineName) -> None:
    async with Engine(name, held=True) as engine, gateway(engine.pool()) as gate:
        async with Wire(gate.port) as wire:
            wire.post("/classify", engine.text("first"))
            await engine.has_seen(1)
        second = score(gate, engine, "second")
        await nothing_more(engine, 1)
        assert engine.inside == 1
        engine.go.set()
        assert guarantee(await second) == ["balanced"]
        assert (engine.most, engine.abandoned, engine.aborted) == (1, 0, [])


@both_engines
async def test_an_answer_that_nobody_waits_for_is_drained_for_a_bounded_time_only(name: EngineName) -> None:
    async with Engine(name, held=True) as engine, gateway(engine.pool(), timeouts={"settle": 0.2}) as gate:
        async with Wire(gate.port) as wire:
            wire.post("/classify", engine.text("first"))
            await engine.has_seen(1)
        second = score(gate, engine, "second")
        await gate.until(lambda: engine.abandoned == 1)
        await engine.has_seen(2)
        engine.go.set()
        assert guarantee(await second) == ["balanced"]
        assert engine.most == 1
        assert len(engine.aborted) == (name == "sglang")


@both_engines
@pytest.mark.usefixtures("patient")
async def test_after_that_time_the_place_is_held_until_the_engine_has_dropped_the_request(name: EngineName) -> None:
    async with Engine(name, held=True) as engine, gateway(engine.pool(), timeouts={"settle": 0.1}) as gate:
        engine.drop.clear()
        async with Wire(gate.port) as wire:
            wire.post("/classify", engine.text("first"))
            await engine.has_seen(1)
        second = score(gate, engine, "second")
        await gate.until(lambda: engine.abandoned == 1)
        await nothing_more(engine, 1)
        engine.go.set()
        await nothing_more(engine, 1)
        engine.drop.set()
        assert guarantee(await second) == ["balanced"]
        assert engine.most == 1


async def test_a_reward_answer_frees_its_place_before_a_slow_client_reads_it() -> None:
    async with Engine() as engine, gateway(engine.pool()) as gate:
        large = {"object": "list", "data": [{"index": 0, "data": "x" * 2**24}]}

        def finish(seen: Seen, reply: Reply) -> None:
            reply.json(large if "large" in str(seen.json) else {"object": "list", "data": []})

        engine.finish = finish
        async with Wire(gate.port, receive_buffer=4096) as slow:
            slow.post("/pooling", {"model": MODEL, "input": "large"})
            await engine.has_seen(1)
            answers = [await gate.http.post("/pooling", json={"model": MODEL, "input": str(n)}) for n in range(3)]
            assert [answer.status_code for answer in answers] == [200] * 3
            assert gate.in_flight("reward-0") == 0
            assert await slow.head() == 200
            assert json.loads(await slow.body()) == large


async def test_requests_that_compute_nothing_pass_a_lane_by() -> None:
    async with Engine(held=True) as engine, gateway(engine.pool()) as gate:
        running = score(gate, engine, "held")
        await engine.has_seen(1)
        answer = await gate.http.post("/tokenize", json={"model": MODEL, "prompt": "a"})
        assert answer.json() == {"tokens": [1]}
        engine.go.set()
        await running


# --- lanes of one on a generate pool: aborts, breaks, time-outs


async def leave(gate: Gate, engine: Engine) -> None:
    """A client asks and leaves in mid-answer."""
    async with Wire(gate.port) as wire:
        wire.post(CHAT, chat("first"))
        await engine.has_seen(1)
    await gate.until(lambda: engine.abandoned == 1)


async def leave_stream(gate: Gate, engine: Engine) -> None:
    """A client leaves a stream that it has begun to read."""
    engine.stream()
    async with Wire(gate.port) as wire:
        wire.post(CHAT, chat("first", stream=True))
        assert await wire.head() == 200


async def reset(gate: Gate, engine: Engine) -> None:
    """The replica resets the connection before its answer, and is not asked again."""
    engine.resets = True
    asking = ask(gate, "first")
    await engine.has_seen(1)
    engine.go.set()
    assert code(await asking) == (502, "upstream_unavailable")


async def reset_stream(gate: Gate, engine: Engine) -> None:
    """The replica resets the connection in mid-stream."""
    engine.stream()
    engine.resets = True
    async with Wire(gate.port) as wire:
        wire.post(CHAT, chat("first", stream=True))
        assert await wire.head() == 200
        engine.go.set()
        assert b"broke in mid-stream" in await wire.broken_body()


async def time_out(gate: Gate, engine: Engine) -> None:
    """No first byte comes in time."""
    assert code(await ask(gate, "first")) == (504, "upstream_timeout")


async def time_out_in_stream(gate: Gate, engine: Engine) -> None:
    """A stream goes silent."""
    engine.stream()
    async with Wire(gate.port) as wire:
        wire.post(CHAT, chat("first", stream=True))
        assert await wire.head() == 200
        assert b"nothing came for 0.2 s" in await wire.broken_body()


async def named_abort(gate: Gate, engine: Engine) -> None:
    """A client has its running request aborted by its id."""
    asking = ask(gate, "first", request_id="mine")
    await engine.has_seen(1)
    assert (await gate.http.post("/abort_request", json={"rid": "mine"})).status_code == 200
    if engine.name == "vllm":
        assert code(await asking) == (400, "aborted")
    else:
        asking.cancel()


GIVEN_UP = [leave, leave_stream, reset, reset_stream, time_out, time_out_in_stream, named_abort]


def lone(engine: Engine) -> dict[str, Any]:
    """A generate pool whose replica takes one request at a time, each sent once."""
    return engine.pool("policy", role="generate", lane=ONE, routing={"retry_sent": False})


@both_engines
@pytest.mark.parametrize("give_up", GIVEN_UP)
@pytest.mark.usefixtures("patient")
async def test_a_place_is_held_until_the_engine_has_dropped_what_was_given_up(
    name: EngineName, give_up: Callable[[Gate, Engine], Any]
) -> None:
    async with Engine(name, held=True) as engine:
        async with gateway(lone(engine), timeouts={"idle": 0.2, "first_byte": 0.2}) as gate:
            engine.drop.clear()
            await give_up(gate, engine)
            engine.resets = False
            engine.go.clear()
            second = ask(gate, "second")
            await gate.until(waiting(gate, 1))
            await nothing_more(engine, 1)
            engine.go.set()
            engine.drop.set()
            assert "lane-uncertain" not in guarantee(await second)
            assert engine.most == 1
            await gate.until(lambda: gate.in_flight("policy-0") == 0)


@both_engines
async def test_a_place_is_given_back_in_doubt_when_the_engine_does_not_drop_the_request(name: EngineName) -> None:
    """Each answer says so until the engine was seen without it."""
    async with Engine(name, held=True) as engine, gateway(lone(engine)) as gate:
        engine.drop.clear()
        await leave(gate, engine)
        engine.go.set()
        assert "lane-uncertain" in guarantee(await ask(gate, "second"))
        assert guarantee(await ask(gate, "third"))[0] != "strict"
        assert "lane-uncertain" in guarantee(await ask(gate, "fourth"))
        engine.drop.set()
        await gate.until(lambda: engine.inside == 0)
        assert "lane-uncertain" not in guarantee(await ask(gate, "fifth"))


async def test_an_engine_that_does_not_tell_what_is_in_it_is_doubted_once() -> None:
    async with Engine(held=True) as engine:
        settings = pool("policy", engine.url, engine="openai", lane=ONE)
        async with gateway(settings) as gate:
            await leave(gate, engine)
            engine.go.set()
            assert "lane-uncertain" in guarantee(await ask(gate, "second"))
            assert "lane-uncertain" not in guarantee(await ask(gate, "third"))


@pytest.mark.usefixtures("patient")
async def test_a_server_that_is_gone_holds_nothing() -> None:
    """The connection to a replica that has died is refused: the next request need not wait to be sent elsewhere."""
    async with Engine(held=True) as engine:
        async with gateway(lone(engine), health={"interval": 3600}) as gate:
            first = ask(gate, "first")
            await engine.has_seen(1)
            second = ask(gate, "second")
            await gate.until(waiting(gate, 1))
            await engine.stop()
            assert code(await first) == (502, "upstream_unavailable")
            async with asyncio.timeout(5):
                assert code(await second) in ((502, "upstream_unavailable"), (503, "no_healthy_replica"))


@pytest.mark.usefixtures("patient")
async def test_a_lane_over_a_pool_holds_its_place_while_any_replica_has_what_was_given_up() -> None:
    async with Engine(held=True) as one, Engine(held=True) as two:
        settings = pool("policy", one.url, two.url, lane={"scope": "pool", "limit": 1})
        async with gateway(settings, routing={"retry_sent": False}) as gate:
            one.drop.clear()
            two.drop.clear()
            async with Wire(gate.port) as wire:
                wire.post(CHAT, chat("first"))
                await gate.until(lambda: one.inside + two.inside == 1)
            others = [ask(gate, str(number)) for number in range(4)]
            await gate.until(lambda: one.abandoned + two.abandoned == 1)
            await gate.until(waiting(gate, 4))
            assert len(one.seen) + len(two.seen) == 1
            for engine in (one, two):
                engine.go.set()
                engine.drop.set()
            assert {answer.status_code for answer in await asyncio.gather(*others)} == {200}
            assert (one.most, two.most) == (1, 1)


@pytest.mark.parametrize("scope", ["replica", "pool"])
@pytest.mark.usefixtures("patient")
async def test_two_requests_are_never_in_one_batch_through_cancels_retries_and_time_outs(scope: str) -> None:
    """Clients leave, engines reset, hang and are slow to drop, at random; what breaks is sent again."""
    chance = random.Random(0)
    fates: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    together = 0
    async with Engine() as one, Engine() as two:
        engines = (one, two)

        async def hold(seen: Seen) -> None:
            nonlocal together
            together = max(together, one.inside + two.inside)
            fate = chance.choices(["quick", "hang", "reset"], [0.8, 0.1, 0.1])[0]
            fates[fate] += 1
            for engine in engines:
                engine.resets = fate == "reset"
            await asyncio.sleep(0.15 if fate == "hang" else 0.002)

        async def client(gate: Gate, number: int) -> None:
            async with Wire(gate.port) as wire:
                wire.post(f"/sessions/s{number}{CHAT}", chat(str(number)))
                if number % 4:
                    statuses[await wire.head()] += 1
                else:
                    await asyncio.sleep(chance.random() * 0.2)

        async def drop_late() -> None:
            while True:
                for engine in engines:
                    (engine.drop.clear if chance.random() < 0.5 else engine.drop.set)()
                await asyncio.sleep(0.02)

        for engine in engines:
            engine.hold = hold
        settings = pool("policy", one.url, two.url, lane={"scope": scope, "limit": 1})
        async with gateway(settings, timeouts={"first_byte": 0.05}, health={"breaks": 1000}) as gate:
            dropping = asyncio.create_task(drop_late())
            await asyncio.gather(*(client(gate, number) for number in range(60)))
            dropping.cancel()
            for engine in engines:
                engine.drop.set()
            await gate.until(lambda: not gate.gateway.fleet.pools["policy"].lanes)
            assert gate.in_flight("policy-0") + gate.in_flight("policy-1") == 0
    assert (one.most, two.most) == (1, 1)
    assert together == (1 if scope == "pool" else 2)
    assert min(fates["hang"], fates["reset"]) > 0
    assert one.abandoned + two.abandoned > 0
    assert statuses[200] > 30


@pytest.mark.usefixtures("patient")
async def test_what_computes_nothing_does_not_pass_for_what_was_given_up() -> None:
    """While a request for tokens is on its way, the engine's count is still that of the abandoned one."""
    asked, release = asyncio.Event(), asyncio.Event()
    async with Engine(held=True) as engine, gateway(lone(engine)) as gate:
        run = engine.script

        async def script(seen: Seen, reply: Reply) -> None:
            if seen.target == "/tokenize":
                asked.set()
                await release.wait()
            await run(seen, reply)

        engine.script = script
        engine.drop.clear()
        await leave(gate, engine)
        tokens = asyncio.create_task(gate.http.post("/tokenize", json={"model": MODEL, "prompt": "a"}))
        second = ask(gate, "second")
        await gate.until(waiting(gate, 1))
        await asked.wait()
        await nothing_more(engine, 2)
        engine.drop.set()
        engine.go.set()
        assert (await second).status_code == 200
        release.set()
        assert (await tokens).json() == {"tokens": [1]}


# --- several inputs in one call


@both_engines
async def test_a_list_of_inputs_is_scored_one_by_one_and_answered_as_the_engine_would(name: EngineName) -> None:
    texts = ["a good answer", "a bad one", "no answer at all", "a good answer"]
    settings = SimSettings(engine=name, role="reward", batch_dependent=True, prefix_cache=False)
    async with SimServer(settings) as sim, httpx.AsyncClient(base_url=sim.url, verify=False) as engine:

        def body(value: str | list[str]) -> dict[str, Any]:
            return {"model": "sim-model", "input": value} if name == "vllm" else {"text": value}

        async with gateway(pool("reward", sim.url, engine=name, role="reward", models=["sim-model"])) as gate:
            alone = [(await engine.post("/classify", json=body(text))).json() for text in texts]
            batched = (await engine.post("/classify", json=body(texts))).json()
            sim.engine.counters.peak_running = 0
            calls = [gate.http.post("/classify", json=body(texts)) for _ in range(5)]
            answers = [answer.json() for answer in await asyncio.gather(*calls)]
            assert sim.engine.counters.peak_running == 1
    for answer in answers:
        if name == "vllm":
            assert answer.keys() == batched.keys()
            assert answer["data"] == [each["data"][0] | {"index": place} for place, each in enumerate(alone)]
            assert answer["data"] != batched["data"], "the engine's batch changes scores"
            assert answer["usage"] == batched["usage"]
        else:
            assert [each["embedding"] for each in answer] == [each["embedding"] for each in alone]
            assert [each["embedding"] for each in answer] != [each["embedding"] for each in batched]
            assert [each.keys() for each in answer] == [each.keys() for each in batched]
            assert len({each["meta_info"]["id"] for each in answer}) == len(texts)


async def test_a_fan_out_takes_its_places_in_the_queue_all_or_none() -> None:
    async with Engine(held=True) as engine, gateway(engine.pool(), limits={"queue": 3}) as gate:
        running = score(gate, engine, "running")
        await engine.has_seen(1)
        taken = score(gate, engine, ["1", "2", "3"])
        await gate.until(waiting(gate, 3))
        refused = await score(gate, engine, ["4", "5"])
        assert code(refused) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert waiting(gate, 3)()
        assert gate.in_flight("reward-0") == 4
        engine.go.set()
        assert (await running).status_code == (await taken).status_code == 200
        assert [seen.json["input"] for seen in engine.seen] == ["running", "1", "2", "3"]


@pytest.mark.parametrize("queue", [1, 3])
async def test_a_fan_out_is_taken_however_large_it_is(queue: int) -> None:
    """Else it could be asked again for ever."""
    async with Engine() as engine, gateway(engine.pool(), limits={"queue": queue}) as gate:
        assert (await score(gate, engine, [f"{number}" for number in range(12)])).status_code == 200
        assert len(engine.seen) == 12


async def test_of_two_fan_outs_that_come_at_once_one_is_served_whole() -> None:
    async with Engine(held=True) as engine, gateway(engine.pool(), limits={"queue": 2}) as gate:
        both = [score(gate, engine, [f"{number}a", f"{number}b", f"{number}c"]) for number in range(2)]
        await gate.until(lambda: any(each.done() for each in both))
        engine.go.set()
        answers = await asyncio.gather(*both)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        assert len(engine.seen) == 3


async def test_a_fan_out_that_loses_one_call_gives_the_places_of_all_back() -> None:
    async with Engine(held=True) as engine, gateway(engine.pool()) as gate:
        engine.finish = lambda seen, reply: reply.json({"error": {"message": "no"}}, status=400)
        asking = score(gate, engine, ["1", "2", "3"])
        await gate.until(waiting(gate, 2))
        engine.go.set()
        assert (await asking).status_code == 400
        await gate.until(lambda: not gate.gateway.fleet.pools["reward"].lanes)
        assert gate.in_flight("reward-0") == 0
        assert len(engine.seen) == 1


# --- who goes first


async def test_who_waits_goes_by_index_then_identity_not_by_arrival() -> None:
    async with Engine(held=True) as engine, gateway(lone(engine)) as gate:
        running = ask(gate, "running")
        await engine.has_seen(1)
        order = [("17:2", 0), ("17:10", 0), ("a", 0), ("17:2", 1), ("17:10", 1)]
        asking = []
        for place, (identity, index) in enumerate(reversed(order)):
            headers = {"x-session-id": f"s{place}", "x-detgate-identity": identity, "x-request-index": str(index)}
            body = chat(f"{identity} {index}")
            asking.append(asyncio.create_task(gate.http.post(CHAT, json=body, headers=headers)))
            await gate.until(waiting(gate, place + 1))
        assert await gate.gauge("detgate_lane_waiting", pool="policy") == 5
        engine.go.set()
        await asyncio.gather(running, *asking)
        served = [seen.json["messages"][0]["content"] for seen in engine.seen]
        assert served == ["running", *(f"{identity} {index}" for identity, index in order)]


@both_engines
async def test_a_priority_in_the_body_goes_before_as_its_engine_counts_it(name: EngineName) -> None:
    async with Engine(name, held=True) as engine, gateway(lone(engine)) as gate:
        asking = [ask(gate, "running")]
        await engine.has_seen(1)
        for place, priority in enumerate([3, -1, None, 7, True, "9"]):
            fields = {} if priority is None else {"priority": priority}
            asking.append(ask(gate, str(priority), path=f"/sessions/{place}", **fields))
            await gate.until(waiting(gate, place + 1))
        engine.go.set()
        await asyncio.gather(*asking)
        served = [seen.json["messages"][0]["content"] for seen in engine.seen[1:]]
        numbers = ["-1", "None", "True", "9", "3", "7"]
        assert served == (numbers if name == "vllm" else ["7", "3", "None", "True", "9", "-1"])
        assert engine.seen[1].json["priority"] == int(served[0])


async def test_a_turn_is_waited_for_as_long_as_is_set() -> None:
    async with Engine(held=True) as engine, gateway(lone(engine), timeouts={"lane": 0.1}) as gate:
        running = ask(gate, "running")
        await engine.has_seen(1)
        late = await ask(gate, "late")
        assert code(late) == (503, "lane_timeout")
        assert late.headers["retry-after"] == "1"
        assert waiting(gate, 0)()
        engine.go.set()
        assert (await running).status_code == 200
        assert len(engine.seen) == 1


async def test_a_full_queue_refuses_and_tells_when_to_come_again() -> None:
    async with Engine(held=True) as engine, gateway(lone(engine), limits={"queue": 1}) as gate:
        accepted = [ask(gate, "1")]
        await engine.has_seen(1)
        accepted.append(ask(gate, "2"))
        await gate.until(waiting(gate, 1))
        refused = await ask(gate, "3")
        assert code(refused) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        engine.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200, 200]


async def test_who_waits_on_a_replica_that_goes_down_is_served_by_another() -> None:
    async with Engine(held=True) as one, Engine() as two:
        settings = pool("policy", one.url, two.url, lane=ONE, routing={"slack": "inf", "on_home_down": "next"})
        async with gateway(settings) as gate:
            await gate.http.post("/admin/pools/policy/replicas/policy-1/drain")
            asking = [ask(gate, str(number)) for number in range(5)]
            await gate.until(waiting(gate, 4))
            gate.gateway.fleet.pools["policy"].replicas["policy-1"].draining = False
            await one.stop()
            answers = await asyncio.gather(*asking)
            assert [answer.headers["x-detgate-replica"] for answer in answers] == ["policy-1"] * 5
            assert sorted(answer.headers["x-detgate-attempts"] for answer in answers) == ["1", "1", "1", "1", "2"]


async def test_a_request_that_waits_is_aborted_by_its_id_without_reaching_the_engine() -> None:
    async with Engine(held=True) as engine, gateway(lone(engine)) as gate:
        running = ask(gate, "running")
        await engine.has_seen(1)
        queued = ask(gate, "queued", request_id="mine")
        await gate.until(waiting(gate, 1))
        await gate.http.post("/abort_request", json={"rid": "mine"})
        assert code(await queued) == (400, "aborted")
        engine.go.set()
        assert (await running).status_code == 200
        assert len(engine.seen) == 1


async def test_a_request_that_its_client_aborts_is_not_sent_again_and_counts_against_nobody() -> None:
    async with Engine(held=True) as one, Engine(held=True) as two:
        async with gateway(pool("policy", one.url, two.url), health={"breaks": 1}) as gate:
            asking = ask(gate, "hi", request_id="mine")
            await gate.until(lambda: one.inside + two.inside == 1)
            await gate.http.post("/abort_request", json={"rid": "mine"})
            assert code(await asking) == (400, "aborted")
            await gate.until(lambda: one.abandoned + two.abandoned == 1)
            assert len(one.seen) + len(two.seen) == 1
            assert all(replica.usable for replica in gate.gateway.fleet.replicas)


# --- what answers and settings say


@pytest.mark.parametrize("lane", [{"scope": "replica", "limit": 2}, {"scope": "none"}])
async def test_a_reward_lane_that_shares_batches_is_told_of_in_answers(lane: dict[str, Any]) -> None:
    async with Engine(held=True) as engine, gateway(engine.pool(lane=lane)) as gate:
        asking = [score(gate, engine, str(number)) for number in range(2)]
        await engine.has_seen(2)
        engine.go.set()
        assert [guarantee(await each) for each in asking] == [["none", "reward-batched"]] * 2


def test_a_reward_lane_of_two_is_warned_of_once_with_its_value_and_refused_in_strict() -> None:
    shared = pool("reward", "http://a:1", role="reward", lane={"scope": "replica", "limit": 2})
    (warning,) = Settings.load(None, {}, {"pools": [shared]}).warnings()
    assert warning.startswith("pools[0].lane.limit: 2 ")
    with pytest.raises(InvalidSettings) as refused:
        Settings.load(None, {}, {"pools": [shared], "profile": "strict"})
    assert any(line.startswith("pools[0].lane.limit: 2 ") for line in refused.value.lines)


@both_engines
async def test_a_prefix_cache_on_a_reward_replica_is_warned_of_once_and_told_of(name: EngineName) -> None:
    async with Engine(name) as engine:
        engine.prefix_cache = True
        with capture_logs() as logs:
            async with gateway(engine.pool(), health={"interval": 0.02}) as gate:
                assert guarantee(await score(gate, engine, "a")) == ["none", "reward-batched"]
                probed = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
                for _ in range(3):
                    await probes(gate)
                assert probed.facts.prefix_cache is True
        assert [log["replica"] for log in logs if "prefix cache" in log["event"]] == ["reward-0"]
        async with gateway(engine.pool(), profile="strict") as gate:
            assert code(await score(gate, engine, "a", **{"x-session-id": "s"})) == (503, "not_deterministic")


async def probes(gate: Gate) -> None:
    """Wait for a probe that begins after now."""
    replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
    told = asyncio.Event()
    before = replica.probed

    def probed(outcome: Any, reason: str) -> bool:
        told.set()
        return before(outcome, reason)

    for _ in range(2):
        replica.probed = probed  # type: ignore[method-assign]
        await told.wait()
        told.clear()
    replica.probed = before  # type: ignore[method-assign]


# --- strangers


@both_engines
@pytest.mark.parametrize("busy", [False, True])
async def test_foreign_traffic_is_told_of_while_it_lasts(name: EngineName, busy: bool) -> None:
    """Also when more of ours wait than there are strangers."""
    async with Engine(name, held=busy) as engine, gateway(engine.pool()) as gate:
        replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
        asking = [score(gate, engine, str(number)) for number in range(5 if busy else 0)]
        await gate.until(waiting(gate, 4 if busy else 0))
        await probes(gate)
        assert not replica.foreign
        engine.strangers = 1
        await gate.until(lambda: replica.foreign)
        assert (await gate.http.get("/readyz")).json()["pools"]["reward"]["replicas"]["reward-0"]["foreign_traffic"]
        engine.go.set()
        for answer in [*asking, score(gate, engine, "one more")]:
            assert guarantee(await answer) == ["none", "foreign-traffic"]
        engine.strangers = 0
        await gate.until(lambda: not replica.foreign)
        assert guarantee(await score(gate, engine, "alone")) == ["balanced"]


@both_engines
async def test_a_look_that_proves_nothing_changes_nothing(name: EngineName) -> None:
    """One of ours that is sent while the engine tells its count may be in it or not: strangers may have left or not."""
    async with Engine(name, held=True) as engine, gateway(engine.pool(), health={"interval": 0.02}) as gate:
        replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
        looked, tells = asyncio.Event(), asyncio.Event()

        async def slow(probe: Seen, reply: Reply) -> None:
            if probe.target in ("/metrics", "/v1/loads"):
                looked.set()
                await tells.wait()
            await truth(probe, reply)

        engine.strangers = 1
        await gate.until(lambda: replica.foreign)
        truth, engine.probes = engine.probe, slow
        await looked.wait()
        asking = score(gate, engine, "ours")
        await engine.has_seen(1)
        engine.strangers = 0
        looked.clear()
        tells.set()
        await looked.wait()
        assert replica.foreign
        await gate.until(lambda: not replica.foreign)
        engine.go.set()
        assert guarantee(await asking) == ["balanced"]


async def test_strict_refuses_while_there_is_foreign_traffic() -> None:
    async with Engine() as engine, gateway(engine.pool(), profile="strict") as gate:
        replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
        engine.strangers = 1
        await gate.until(lambda: replica.foreign)
        assert code(await score(gate, engine, "a", **{"x-session-id": "s"})) == (503, "not_deterministic")
        assert (await gate.http.get("/readyz?pool=reward")).status_code == 503
        engine.strangers = 0
        await gate.until(lambda: not replica.foreign)
        assert guarantee(await score(gate, engine, "a", **{"x-session-id": "s"})) == ["strict"]


@both_engines
@pytest.mark.usefixtures("patient")
async def test_what_a_client_gave_up_is_no_foreign_traffic(name: EngineName) -> None:
    async with Engine(name, held=True) as engine, gateway(engine.pool(), timeouts={"settle": 0.05}) as gate:
        replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
        engine.drop.clear()
        async with Wire(gate.port) as wire:
            wire.post("/classify", engine.text("first"))
            await engine.has_seen(1)
        await gate.until(lambda: engine.abandoned == 1)
        for _ in range(3):
            await probes(gate)
            assert not replica.foreign
        engine.drop.set()
        await gate.until(lambda: not gate.gateway.fleet.pools["reward"].lanes)


async def test_an_answer_that_has_just_ended_is_no_foreign_traffic() -> None:
    """An engine may count a request for a moment after its answer: it is asked again before it is believed."""
    async with Engine() as engine, gateway(engine.pool(), health={"interval": 0.02}) as gate:
        replica = gate.gateway.fleet.pools["reward"].replicas["reward-0"]
        seen, flagged = 0, False

        async def stale(probe: Seen, reply: Reply) -> None:
            nonlocal seen, flagged
            flagged |= replica.foreign
            if probe.target == "/metrics":
                seen += 1
                engine.strangers = seen % 2
            await truth(probe, reply)

        truth = engine.probe
        engine.probes = stale
        for _ in range(3):
            await probes(gate)
        assert not flagged
        assert seen > 4


# --- sessions


async def test_a_lane_per_session_has_one_request_of_each_and_is_gone_afterwards() -> None:
    async with Engine(held=True) as engine:
        settings = pool("policy", engine.url, lane={"scope": "session", "limit": 1})
        async with gateway(settings, sessions={"required": True}) as gate:
            lanes = gate.gateway.fleet.pools["policy"].lanes
            asking = [ask(gate, f"{n} {turn}", path=f"/sessions/s{n}") for n in range(3) for turn in range(3)]
            await engine.has_seen(3)
            await gate.until(waiting(gate, 6))
            assert sorted(seen.json["messages"][0]["content"] for seen in engine.seen) == ["0 0", "1 0", "2 0"]
            assert len(lanes) == 3
            engine.go.set()
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
            assert len(lanes) == 0
            assert engine.most == 3


async def test_lane_waits_are_counted_and_recorded() -> None:
    async with Engine(held=True) as engine, gateway(lone(engine)) as gate:
        engine.finish = lambda seen, reply: reply.json(completion())
        asking = [ask(gate, str(number), path=f"/sessions/s{number}") for number in range(2)]
        await gate.until(waiting(gate, 1))
        engine.go.set()
        await asyncio.gather(*asking)
        assert await gate.gauge("detgate_lane_wait_seconds_count", pool="policy") == 1
        waits = sorted(record["lane_wait"] for record in gate.records() if record["event"] == "closed")
        assert waits[0] == 0 < waits[1]
