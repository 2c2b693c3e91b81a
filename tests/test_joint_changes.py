"""What is changed at one gateway of a run takes effect at all of them, in one order."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway import joint_changes
from gateway.shared import series
from gateway.tasks import stop
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, pool
from tests.processes import serving
from tests.redis_server import Front, RedisServer
from tests.shared.test_gateways import ready
from tests.test_joint_lanes import gateways
from tests.test_sessions import ask, refused
from tests.test_verdicts import fingerprint, guarantee, report, told
from tests.test_weights import SGLANG, closed, post
from tests.waiting import until

CHAT = "/v1/chat/completions"


class Held:
    """A replica that answers each text when it is let."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.let: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        text = seen.json["messages"][0]["content"]
        self.came.append(text)
        await self.let[text].wait()
        reply.json(completion())


def send(gate: Gate, text: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(ask(gate, text=text))


def gate_of(gate: Gate) -> Any:
    return gate.gateway.fleet.pools["policy"].gate


def waiting(*gates: Gate) -> list[int]:
    return [gate_of(gate).waiting for gate in gates]


async def shown(*gates: Gate) -> list[tuple[str | None, bool]]:
    """Version, and whether requests are held back."""
    told = [(await gate.http.get("/admin/weights")).json()["policy"] for gate in gates]
    return [(each["version"], each["paused"]) for each in told]


async def replicas(gate: Gate) -> dict[str, bool]:
    told = (await gate.http.get("/admin/replicas")).json()["policy"]
    return {each["name"]: each["draining"] for each in told}


# --- weights


async def test_a_change_waits_for_what_is_in_the_engines_at_any_gateway_and_holds_back_what_comes_to_any() -> None:
    held = Held()
    async with RedisServer() as server, FakeWorker(held) as worker:
        async with gateways(2, server.url, pool("policy", worker.url)) as (one, two):
            old = [send(gate, f"old {n}") for n, gate in enumerate((one, two))]
            await until(lambda: len(held.came) == 2)
            change = asyncio.create_task(post(one, version="2"))
            await until(lambda: gate_of(one).shut and gate_of(two).shut)
            new = [send(gate, f"new {n}") for n, gate in enumerate((one, two))]
            await until(lambda: waiting(one, two) == [1, 1])
            held.let["old 0"].set()
            assert (await old[0]).status_code == 200
            # The store knows that nothing is left here, and what is left there.
            asked = one.gateway.siblings.inside
            for _ in range(20):
                assert await asked({"policy"}) == 1
            assert (change.done(), len(held.came)) == (False, 2)
            held.let["old 1"].set()
            assert (await change).json()["policy"]["version"] == "2"
            for text in ("new 0", "new 1"):
                held.let[text].set()
            assert {(await task).status_code for task in (*old, *new)} == {200}
            for gate in (one, two):
                assert [record["weight_version"] for record in closed(gate)] == [None, "2"]
            assert await shown(one, two) == [("2", False)] * 2


async def test_under_load_no_answer_of_any_gateway_is_of_two_versions_nor_of_the_old_one_after_the_new() -> None:
    """The engine's weights are changed as a trainer does it: at once, when it is told that nothing is in flight."""
    weights, inside = 0, 0
    mixed: list[str] = []

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal inside
        inside, before = inside + 1, weights
        await asyncio.sleep(0.002)
        inside -= 1
        if before != weights:
            mixed.append(seen.json["messages"][0]["content"])
        reply.json(completion(metadata={"weight_version": str(weights)}))

    async with RedisServer() as server, FakeWorker(script) as worker:
        async with gateways(2, server.url, pool("policy", worker.url, **SGLANG)) as gates:
            over = False
            met: list[tuple[int, str]] = []

            async def client(number: int) -> None:
                while not over:
                    answer = await ask(gates[number % 2], text=f"{number} {len(met)}", x_session_id=str(number))
                    assert answer.status_code == 200, answer.text
                    met.append((number % 2, answer.json()["metadata"]["weight_version"]))

            async def all_answer() -> set[str]:
                """Wait until each gateway has; the versions that were met."""
                since = len(met)
                await until(lambda: {at for at, _ in met[since:]} == {0, 1})
                return {version for _, version in met[since:]}

            clients = [asyncio.create_task(client(number)) for number in range(6)]
            for step in range(1, 5):
                asked, other = gates[step % 2], gates[1 - step % 2]
                await all_answer()
                assert (await post(asked, "/pause")).status_code == 200
                assert inside == 0
                weights = step
                named = await post(other, version=str(step))
                assert named.status_code == 200, named.text
                assert await all_answer() == {str(step)}
            over = True
            await asyncio.gather(*clients)
            assert mixed == []
            for gate in gates:
                versions = [record["weight_version"] for record in closed(gate)]
                assert versions == sorted(versions)
                assert set(versions) == set("01234")
                assert not any("weights-mixed" in record["flags"] for record in closed(gate))


async def test_a_gateway_that_starts_while_weights_are_changed_holds_back_too_and_whoever_is_asked_goes_on() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        policy = pool("policy", worker.url)
        async with gateways(2, server.url, policy) as (one, two):
            await post(one, version="1")
            paused = (await post(two, "/pause")).json()["policy"]
            async with gateways(1, server.url, policy) as (three,):
                assert await shown(one, two, three) == [("1", True)] * 3
                for gate in (one, two, three):
                    assert await gate.gauge("detgate_paused_since_seconds", pool="policy") == paused["since"]
                    state = (await gate.http.get("/readyz")).json()["pools"]["policy"]
                    assert state["paused_since"] == paused["since"] > 1e9
                # To pause again is no other pause, but for who may name the weights.
                assert (await post(one, "/pause")).json()["policy"]["since"] == paused["since"]
                held = send(three, "x")
                await until(lambda: waiting(three) == [1])
                assert worker.seen == []
                assert (await post(two, "/resume")).json()["policy"]["since"] is None
                assert (await held).status_code == 200
                assert await shown(one, two, three) == [("1", False)] * 3
                assert await three.gauge("detgate_paused_since_seconds", pool="policy") == 0


async def test_who_takes_over_a_pause_is_not_opened_by_whoever_had_it_before() -> None:
    held = Held()
    async with RedisServer() as server, FakeWorker(held) as worker:
        async with gateways(2, server.url, pool("policy", worker.url), timeouts={"weights": 2.0}) as (one, two):
            inside = send(two, "x")
            await until(lambda: len(held.came) == 1)
            first = asyncio.create_task(post(one, version="1"))
            await until(lambda: gate_of(one).shut and gate_of(two).shut)
            number = gate_of(one).number
            second = asyncio.create_task(post(two, "/pause"))
            await until(lambda: gate_of(one).number > number)
            held.let["x"].set()
            assert refused(await first) == (503, "weights_contended")
            assert (await second).status_code == 200
            assert (await inside).status_code == 200
            assert await shown(one, two) == [(None, True)] * 2
            # And at once: one of them at least, and all agree which.
            named = await asyncio.gather(post(one, version="a"), post(two, version="b"))
            assert 200 in [answer.status_code for answer in named]
            assert {answer.status_code for answer in named} <= {200, 503}
            states = await shown(one, two)
            assert states[0] == states[1]
            assert states[0][0] in ("a", "b")


async def test_what_does_not_end_in_time_at_another_gateway_leaves_everything_as_it_was() -> None:
    held = Held()
    async with RedisServer() as server, FakeWorker(held) as worker:
        async with gateways(2, server.url, pool("policy", worker.url), timeouts={"weights": 0.2}) as (one, two):
            inside = send(two, "x")
            await until(lambda: len(held.came) == 1)
            assert refused(await post(one, version="1")) == (503, "weights_in_flight")
            assert await shown(one, two) == [(None, False)] * 2
            held.let["x"].set()
            assert (await inside).status_code == 200


async def test_a_gateway_that_lives_and_does_not_make_a_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "HEAR_SECONDS", 0.0)
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(2, server.url, pool("policy", worker.url)) as (one, two):
            await stop(two.gateway.siblings._series._following)  # type: ignore[attr-defined]
            late = await post(one, "/pause")
            assert refused(late) == (503, "gateways_busy")
            assert two.gateway.siblings._gateway in late.json()["error"]["message"]  # type: ignore[attr-defined]
            # What it could not wait for is undone.
            assert await shown(one, two) == [(None, False)] * 2


# --- gateways that go


def config(server: RedisServer, worker: FakeWorker) -> str:
    timeouts = {"gateway": 1.0, "store": 1.0}
    given = {"state": server.url, "run": "r", "timeouts": timeouts, "health": {"interval": 0.2}}
    return yaml.safe_dump({"pools": [pool("policy", worker.url)]} | given)


async def test_what_a_killed_gateway_left_in_an_engine_is_waited_for_and_its_pause_stays_until_anybody_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that it must be the engine who says that it has ended.
    monkeypatch.setattr(joint_changes, "LEAVE_SECONDS", 60.0)
    held = Held()
    async with RedisServer() as server, FakeWorker(held) as worker, AsyncExitStack() as stack:
        (one,) = await stack.enter_async_context(gateways(1, server.url, pool("policy", worker.url)))
        killed = await stack.enter_async_context(serving(tmp_path, config(server, worker)))
        assert (await killed.http.post("/admin/weights/pause")).status_code == 200
        assert await shown(one) == [(None, True)]
        assert (await post(one, "/resume")).status_code == 200

        left = asyncio.create_task(killed.http.post(CHAT, json=chat("left")))
        await until(lambda: held.came == ["left"])
        pause = asyncio.create_task(killed.http.post("/admin/weights/pause"))
        await until(lambda: gate_of(one).shut)
        killed.signal(signal.SIGKILL)
        await asyncio.gather(left, pause, return_exceptions=True)
        assert (await one.http.get("/readyz")).json()["pools"]["policy"]["paused_since"] is not None
        change = asyncio.create_task(post(one, version="2"))
        async with asyncio.timeout(10):
            while await server.ask("ZCARD", "detgate:{r}:beats") > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        # It has gone, and what it sent has not.
        for _ in range(20):
            assert await one.gateway.siblings.inside({"policy"}) == 1
        assert (change.done(), worker.running) == (False, 1)
        waits = send(one, "new")
        await until(lambda: waiting(one) == [1])
        held.let["left"].set()
        assert (await change).json()["policy"]["version"] == "2"
        held.let["new"].set()
        assert (await waits).status_code == 200
        assert held.came == ["left", "new"]


async def test_a_process_that_stood_still_sends_nothing_until_it_knows_what_was_changed_meanwhile(
    tmp_path: Path,
) -> None:
    async with RedisServer() as server, FakeWorker() as worker, AsyncExitStack() as stack:
        (one,) = await stack.enter_async_context(gateways(1, server.url, pool("policy", worker.url)))
        still = await stack.enter_async_context(serving(tmp_path, config(server, worker)))
        still.signal(signal.SIGSTOP)
        asked = asyncio.create_task(still.http.post(CHAT, json=chat("x")))
        # It counts as gone after its lease.
        assert (await post(one, "/pause")).status_code == 200
        still.signal(signal.SIGCONT)
        await still.answers("/readyz", 200)
        state = (await still.http.get("/readyz")).json()["pools"]["policy"]
        assert state["paused_since"] is not None
        assert (worker.seen, asked.done()) == ([], False)
        assert (await post(one, version="2")).status_code == 200
        assert (await asked).status_code == 200
        assert (await still.http.get("/admin/weights")).json()["policy"]["version"] == "2"


# --- a store that goes


async def test_while_the_store_is_away_nothing_is_changed_and_all_keep_what_they_know() -> None:
    async with RedisServer() as server, Front(server.port) as front, FakeWorker() as worker:
        async with gateways(2, front.url, pool("policy", worker.url), timeouts={"store": 0.3}) as (one, two):
            await post(one, version="1")
            await post(one, "/pause")
            front.lead(1)
            for gate in (one, two):
                assert refused(await post(gate, "/resume")) == (503, "store_unavailable")
                added = {"name": "new", "url": worker.url}
                answer = await gate.http.post("/admin/pools/policy/replicas", json=added)
                assert refused(answer) == (503, "store_unavailable")
                assert await replicas(gate) == {"policy-0": False}
            assert await shown(one, two) == [("1", True)] * 2
            front.lead(server.port)
            await asyncio.gather(ready(one), ready(two))
            assert (await post(two, "/resume")).status_code == 200
            assert await shown(one, two) == [("1", False)] * 2


@pytest.mark.parametrize("how", ["restarted", "flushed"])
async def test_a_store_that_has_forgotten_is_told_again_what_stands(how: str) -> None:
    async with RedisServer() as server, FakeWorker() as worker, FakeWorker() as other:
        policy = pool("policy", worker.url, other.url)
        async with gateways(2, server.url, policy) as (one, two):
            await post(one, version="1")
            await one.http.post("/admin/pools/policy/replicas", json={"name": "new", "url": other.url})
            await two.http.post("/admin/pools/policy/replicas/new/drain")
            await two.http.delete("/admin/pools/policy/replicas/policy-1")
            await post(two, "/pause")
            if how == "flushed":
                await server.ask("FLUSHALL")
            else:
                server.kill()
                await server.start()
            async with gateways(1, server.url, policy) as (three,):
                await asyncio.gather(ready(one), ready(two))
                stands = {"policy-0": False, "new": True}
                assert [await replicas(gate) for gate in (one, two, three)] == [stands] * 3
                assert await shown(one, two, three) == [("1", True)] * 3
                held = [send(gate, "x") for gate in (one, two, three)]
                await until(lambda: waiting(one, two, three) == [1, 1, 1])
                assert (await post(three, version="2")).status_code == 200
                assert {(await task).status_code for task in held} == {200}
                assert await shown(one, two, three) == [("2", False)] * 3


async def test_when_store_and_gateways_have_gone_the_ledger_tells_of_weights(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        policy = pool("policy", worker.url)
        async with gateways(1, server.url, policy, ledger={"path": str(tmp_path)}) as (gate,):
            await post(gate, version="1")
            await post(gate, version="2")
            await post(gate, "/pause")
        await server.ask("FLUSHALL")
        async with gateways(1, server.url, policy, ledger={"path": str(tmp_path)}) as (gate,):
            async with gateways(1, server.url, policy) as (other,):
                assert await shown(gate, other) == [("2", True)] * 2
                await post(other, "/resume")
                assert await shown(gate, other) == [("2", False)] * 2


# --- the fleet


async def test_a_change_of_the_fleet_is_made_everywhere_before_its_answer_comes() -> None:
    async with RedisServer() as server, FakeWorker() as worker, FakeWorker() as other:
        policy = pool("policy", worker.url)
        async with gateways(2, server.url, policy) as (one, two):
            path = "/admin/pools/policy/replicas"
            new = {"name": "new", "url": other.url, "dp_rank": 1}
            assert (await one.http.post(path, json=new)).status_code == 201
            assert await replicas(two) == {"policy-0": False, "new": False}
            assert two.gateway.fleet.pools["policy"].replicas["new"].settings.dp_rank == 1
            assert (await two.http.post(f"{path}/policy-0/drain")).json()["draining"] is True
            assert await replicas(one) == {"policy-0": True, "new": False}
            before = len(worker.seen)
            await one.until(lambda: all(g.gateway.fleet.pools["policy"].replicas["new"].usable for g in (one, two)))
            for gate in (one, two):
                assert (await ask(gate, text="x")).status_code == 200
            assert (len(worker.seen), len(other.seen)) == (before, 2)
            # Who starts later knows it, and a name that was taken at another gateway is taken.
            async with gateways(1, server.url, policy) as (three,):
                assert await replicas(three) == {"policy-0": True, "new": False}
                assert (await three.http.delete(f"{path}/policy-0")).status_code == 200
                both = await asyncio.gather(*(gate.http.post(path, json=new | {"name": "b"}) for gate in (one, two)))
                assert sorted(answer.status_code for answer in both) == [201, 409]
                taken = next(answer for answer in both if answer.status_code == 409)
                assert refused(taken) == (409, "replica_exists")
                back = {"name": "policy-0", "url": other.url}
                assert (await one.http.post(path, json=back)).status_code == 201
            async with gateways(1, server.url, policy) as (four,):
                assert await replicas(four) == {"policy-0": False, "new": False, "b": False}
                assert four.gateway.fleet.pools["policy"].replicas["policy-0"].url == other.url
            for gate in (one, two):
                told = [(each["change"], each["replica"]) for each in gate.records() if each["event"] == "fleet"]
                assert told == [
                    ("added", "new"),
                    ("draining", "policy-0"),
                    ("removed", "policy-0"),
                    ("added", "b"),
                    ("added", "policy-0"),
                ]


async def test_an_engine_that_is_accepted_and_a_verdict_on_it_count_everywhere() -> None:
    models = [{"id": "test-model", "object": "model"}]

    async def probes(seen: Seen, reply: Reply) -> None:
        reply.json({"object": "list", "data": models} if seen.target == "/v1/models" else {})

    async with RedisServer() as server, FakeWorker(probes=probes) as worker:
        policy = pool("policy", worker.url)
        async with gateways(2, server.url, policy, health={"interval": 0.02, "failures": 1}) as (one, two):
            before = fingerprint(one)
            models.append({"id": "another", "object": "model"})
            port = worker.port
            await worker.stop()
            both = [gate.gateway.fleet.pools["policy"].replicas["policy-0"] for gate in (one, two)]
            await until(lambda: all(not replica.up for replica in both))
            again = FakeWorker(probes=probes, port=port)
            async with again:
                await until(lambda: all(replica.up and replica.replaced for replica in both))
                assert fingerprint(one) != before
                assert "fingerprint-changed" in await guarantee(two)
                path = "/admin/pools/policy/replicas/policy-0/accept"
                assert (await one.http.post(path)).status_code == 200
                assert [replica.replaced for replica in both] == [False, False]
                assert "fingerprint-changed" not in await guarantee(two)
                assert "unverified" in await guarantee(two)
                taken = await told(one, report(fingerprint(one), alone="same"))
                assert taken.json()["taken"] == {"policy": {"policy-0": "passed"}}
                assert "unverified" not in await guarantee(two)
                # Each keeps it beside its own runs.
                kept = [json.loads((gate.ledger / "verified.jsonl").read_text()) for gate in (one, two)]
                assert kept[0] == kept[1]
                async with gateways(1, server.url, policy) as (three,):
                    assert "unverified" not in await guarantee(three)
