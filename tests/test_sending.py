"""Where calls go through a whole gateway: home, away from home, and where their session went before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest

from gateway.core import routing
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool

ONCE_UP = {"interval": 0.05, "timeout": 1.0, "successes": 1}
"""Health settings with which a replica that is back serves after one probe."""

UNWATCHED = {"interval": 3600.0, "timeout": 1.0}
"""Health settings with which nothing is noticed but by requests."""


def path(session: str) -> str:
    return f"/sessions/{session}/v1/chat/completions"


def session_at_home(*order: str) -> str:
    """A session whose first request prefers these replicas in this order."""
    names = (f"s{number}" for number in count())
    return next(name for name in names if ranked(f"{name}:0", *order) == list(order))


def ranked(key: str, *names: str) -> list[str]:
    return sorted(names, key=lambda name: routing.score(key, name), reverse=True)


async def lose(gate: Gate, worker: FakeWorker, name: str) -> None:
    """Stop a worker and wait until the gateway has noticed."""
    await worker.stop()
    await gate.until(lambda: find(gate, name).state == "down")


def find(gate: Gate, name: str) -> Any:
    return gate.gateway.fleet.pools["policy"].replicas[name]


def closed(gate: Gate, session: str) -> list[dict[str, Any]]:
    return [each for each in gate.records() if each["event"] == "closed" and each["session"] == session]


def claimed(gate: Gate, session: str) -> Callable[[], bool]:
    """Whether a request of the session has its index. From there to its wait for a replica nothing else runs."""
    return lambda: any(each["event"] == "opened" and each["session"] == session for each in gate.records())


def error(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


async def hold(seen: Seen, reply: Reply) -> None:
    """Answers at once, but never where it is asked to hold."""
    if "hold" in str(seen.json["messages"]):
        await reply.gone()
    else:
        reply.json(completion())


# --- slack: inf, on_home_down: next


@pytest.mark.parametrize("profile", ["balanced", "strict"])
@pytest.mark.parametrize("known", [True, False])
async def test_away_from_home_an_answer_says_so(profile: str, known: bool) -> None:
    rule = {"slack": "inf", "on_home_down": "next"}
    away, at_home = session_at_home("policy-0", "policy-1"), session_at_home("policy-1", "policy-0")
    async with FakeWorker() as first, FakeWorker() as second:
        declared = {"deterministic": "declared"} if known else {}
        pools = pool("policy", first.url, second.url, **declared)
        async with gateway(pools, profile=profile, routing=rule) as gate:
            await lose(gate, first, "policy-0")
            answers = [await gate.http.post(path(session), json=chat()) for session in (away, at_home)]
            assert [answer.headers["x-detgate-replica"] for answer in answers] == ["policy-1", "policy-1"]
            unverified = "" if known else "; unverified"
            assert [answer.headers["x-detgate-guarantee"] for answer in answers] == [
                f"balanced; home-down{unverified}",
                f"{profile}{unverified}",
            ]
            assert closed(gate, away)[0]["flags"] == ["home-down"]
            assert closed(gate, at_home)[0]["flags"] == []


async def test_a_home_found_dead_by_a_request_is_a_home_that_is_down() -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url, deterministic="declared")
        async with gateway(pools, routing={"slack": "inf"}, health=UNWATCHED) as gate:
            await first.stop()
            answer = await gate.http.post(path(session), json=chat())
            assert answer.status_code == 200
            assert answer.headers["x-detgate-attempts"] == "2"
            assert answer.headers["x-detgate-guarantee"] == "balanced; home-down"
            assert closed(gate, session)[0]["replicas"] == ["policy-0", "policy-1"]


async def test_failover_follows_the_score_and_the_last_refusal_is_passed_on() -> None:
    order = ("policy-2", "policy-0", "policy-1")
    session = session_at_home(*order)

    async def busy(seen: Seen, reply: Reply) -> None:
        reply.json({"error": {"message": "no room"}}, 503, ("retry-after", "7"))

    async with FakeWorker(busy) as first, FakeWorker(busy) as second, FakeWorker(busy) as third:
        pools = pool("policy", first.url, second.url, third.url)
        async with gateway(pools, routing={"slack": "inf"}, limits={"attempts": 9}) as gate:
            answer = await gate.http.post(path(session), json=chat())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            assert answer.json()["error"]["message"] == "no room"
            assert closed(gate, session)[0]["replicas"] == list(order)


async def test_a_drained_home_is_a_change_of_the_pool() -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url, deterministic="declared")
        async with gateway(pools, profile="strict") as gate:
            await gate.http.post("/admin/pools/policy/replicas/policy-0/drain")
            answer = await gate.http.post(path(session), json=chat())
            assert answer.headers["x-detgate-replica"] == "policy-1"
            assert answer.headers["x-detgate-guarantee"] == "strict"


# --- slack: inf, on_home_down: fail or wait


async def test_where_home_is_all_that_will_do_a_request_is_refused_and_its_index_kept_for_it() -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url)
        rule = {"slack": "inf", "on_home_down": "fail"}
        async with gateway(pools, routing=rule, health=ONCE_UP) as gate:
            await lose(gate, first, "policy-0")
            refused = await gate.http.post(path(session), json=chat())
            assert (refused.status_code, error(refused)) == (503, "home_down")
            assert int(refused.headers["retry-after"]) >= 1
            assert "policy-0" in refused.json()["error"]["message"]
            async with FakeWorker(port=first.port):
                await gate.until(lambda: find(gate, "policy-0").up)
                answer = await gate.http.post(path(session), json=chat())
                assert answer.headers["x-detgate-replica"] == "policy-0"
                assert answer.headers["x-detgate-index"] == "0"
            assert second.seen == []


async def test_who_waits_for_home_is_served_there_when_it_is_back() -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url, deterministic="declared")
        async with gateway(pools, profile="strict", health=ONCE_UP) as gate:
            await lose(gate, first, "policy-0")
            asked = asyncio.create_task(gate.http.post(path(session), json=chat()))
            await gate.until(claimed(gate, session))
            other = await gate.http.post(path(session_at_home("policy-1", "policy-0")), json=chat())
            assert other.headers["x-detgate-replica"] == "policy-1"
            assert not asked.done()
            async with FakeWorker(port=first.port):
                answer = await asked
                assert answer.headers["x-detgate-replica"] == "policy-0"
                assert answer.headers["x-detgate-guarantee"] == "strict"
            assert len(second.seen) == 1


async def test_who_waited_for_home_in_vain_may_ask_again_later() -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url)
        async with gateway(pools, profile="strict", timeouts={"home": 0.1}) as gate:
            await lose(gate, first, "policy-0")
            since = asyncio.get_running_loop().time()
            refused = await gate.http.post(path(session), json=chat())
            assert asyncio.get_running_loop().time() - since >= 0.1
            assert (refused.status_code, error(refused)) == (503, "home_down")
            assert int(refused.headers["retry-after"]) >= 1
            assert second.seen == []


@pytest.mark.parametrize("change", ["drain", "remove"])
async def test_who_waits_for_home_has_another_when_that_leaves_the_pool(change: str) -> None:
    session = session_at_home("policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second:
        pools = pool("policy", first.url, second.url, deterministic="declared")
        async with gateway(pools, profile="strict") as gate:
            await lose(gate, first, "policy-0")
            asked = asyncio.create_task(gate.http.post(path(session), json=chat()))
            await gate.until(claimed(gate, session))
            if change == "drain":
                await gate.http.post("/admin/pools/policy/replicas/policy-0/drain")
            else:
                await gate.http.delete("/admin/pools/policy/replicas/policy-0")
            answer = await asked
            assert answer.headers["x-detgate-replica"] == "policy-1"
            assert answer.headers["x-detgate-guarantee"] == "strict"


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize("change", ["drain", "remove"])
async def test_who_waits_in_a_lane_goes_elsewhere_when_its_replica_is_drained(change: str, left: int) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if seen in first.seen:
            await go.wait()
        reply.json({"data": [{"index": 0, "probs": [1.0]}]})

    async with FakeWorker(script) as first, FakeWorker(script) as second:
        pools = pool("policy", *[first.url, second.url][:left], role="reward")
        async with gateway(pools, health=UNWATCHED) as gate:
            lanes = gate.gateway.fleet.pools["policy"].lanes
            inputs = [{"model": MODEL, "input": f"{number}"} for number in range(6)]
            asked = [asyncio.create_task(gate.http.post("/classify", json=body)) for body in inputs]
            await gate.until(lambda: 0 < lanes.waiting == find(gate, "policy-0").load - 1 and len(first.seen) == 1)
            if change == "drain":
                await gate.http.post("/admin/pools/policy/replicas/policy-0/drain")
            else:
                await gate.http.delete("/admin/pools/policy/replicas/policy-0")
            # The one in the engine ends there, and nobody waits for it.
            await gate.until(lambda: sum(each.done() for each in asked) == 5)
            go.set()
            answers = [await each for each in asked]
            codes = sorted(answer.status_code for answer in answers)
            assert codes == ([200] * 6 if left == 2 else [200] + [503] * 5)
            assert len(first.seen) == 1


async def test_who_waits_for_home_has_another_when_a_better_one_comes() -> None:
    session = session_at_home("policy-2", "policy-0", "policy-1")
    async with FakeWorker() as first, FakeWorker() as second, FakeWorker() as third:
        async with gateway(pool("policy", first.url, second.url), profile="strict") as gate:
            await lose(gate, first, "policy-0")
            asked = asyncio.create_task(gate.http.post(path(session), json=chat()))
            await gate.until(claimed(gate, session))
            added = {"name": "policy-2", "url": third.url}
            assert (await gate.http.post("/admin/pools/policy/replicas", json=added)).status_code == 201
            assert (await asked).headers["x-detgate-replica"] == "policy-2"


# --- key: session


async def test_a_session_with_a_home_is_served_there_whatever_it_carries() -> None:
    async with FakeWorker(hold) as first, FakeWorker(hold) as second:
        pools = pool("policy", first.url, second.url)
        async with gateway(pools, routing={"key": "session", "slack": "inf"}) as gate:
            for session in ("a", "b", "c", "d"):
                answers = [await gate.http.post(path(session), json=chat(str(n))) for n in range(4)]
                (home,) = {answer.headers["x-detgate-replica"] for answer in answers}
                assert home == ranked(session, "policy-0", "policy-1")[0]
                assert not any(record["sticky"] for record in closed(gate, session))


async def test_a_session_stays_where_it_was_first_sent_to_although_another_carries_less() -> None:
    async with FakeWorker(hold) as first, FakeWorker(hold) as second:
        pools = pool("policy", first.url, second.url)
        async with gateway(pools, routing={"key": "session"}) as gate:
            start = await gate.http.post(path("s"), json=chat("turn 1"))
            kept = start.headers["x-detgate-replica"]
            assert kept == ranked("s", "policy-0", "policy-1")[0]
            held = asyncio.create_task(gate.http.post(path("s"), json=chat("hold"), timeout=30))
            await gate.until(lambda: gate.in_flight(kept) == 1)
            stays = await gate.http.post(path("s"), json=chat("turn 2"))
            assert stays.headers["x-detgate-replica"] == kept
            others = [await gate.http.post(path(f"other-{n}"), json=chat()) for n in range(4)]
            assert kept not in {answer.headers["x-detgate-replica"] for answer in others}
            assert {answer.headers["x-detgate-guarantee"] for answer in others} == {"balanced; unverified"}
            assert [(record["index"], record["sticky"]) for record in closed(gate, "s")] == [(0, False), (2, True)]
            held.cancel()


async def test_a_session_whose_replica_is_gone_moves_and_stays_where_it_went() -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        workers = {"policy-0": first, "policy-1": second}
        async with gateway(pool("policy", *(w.url for w in workers.values())), routing={"key": "session"}) as gate:
            old = (await gate.http.post(path("s"), json=chat("turn 1"))).headers["x-detgate-replica"]
            (new,) = workers.keys() - {old}
            await lose(gate, workers[old], old)
            moved = await gate.http.post(path("s"), json=chat("turn 2"))
            assert moved.headers["x-detgate-replica"] == new
            async with FakeWorker(port=workers[old].port):
                await gate.until(lambda: find(gate, old).up)
                later = await gate.http.post(path("s"), json=chat("turn 3"))
                assert later.headers["x-detgate-replica"] == new
            assert [record["sticky"] for record in closed(gate, "s")] == [False, False, True]


async def test_a_replica_that_refuses_once_keeps_its_sessions() -> None:
    async def moody(seen: Seen, reply: Reply) -> None:
        reply.json(completion(), 503 if "refuse" in str(seen.json["messages"]) else 200)

    async with FakeWorker(moody) as first, FakeWorker() as second:
        session = next(f"s{n}" for n in count() if ranked(f"s{n}", "policy-0", "policy-1")[0] == "policy-0")
        async with gateway(pool("policy", first.url, second.url), routing={"key": "session"}) as gate:
            went = [
                (await gate.http.post(path(session), json=chat(text))).headers["x-detgate-replica"]
                for text in ("turn 1", "refuse", "turn 3")
            ]
            assert went == ["policy-0", "policy-1", "policy-0"]
            assert [record["sticky"] for record in closed(gate, session)] == [False, False, True]


async def test_requests_without_a_session_do_not_follow_one_another() -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        async with gateway(pool("policy", first.url, second.url), routing={"key": "session"}) as gate:
            answers = [await gate.http.post("/v1/chat/completions", json=chat(str(n))) for n in range(8)]
            went = [answer.headers["x-detgate-replica"] for answer in answers]
            ids = [answer.headers["x-detgate-request-id"] for answer in answers]
            assert went == [ranked(key, "policy-0", "policy-1")[0] for key in ids]
            assert set(went) == {"policy-0", "policy-1"}
            assert not any(record["sticky"] for record in closed(gate, "anonymous"))


@pytest.mark.parametrize("asked", [True, False])
async def test_an_aborted_answer_uses_its_index_only_if_its_client_asked_for_the_abort(asked: bool) -> None:
    released, arrived = asyncio.Event(), asyncio.Event()

    async def aborting(seen: Seen, reply: Reply) -> None:
        if seen.target == "/abort_request":
            reply.json({})
            released.set()
            return
        if not arrived.is_set():
            arrived.set()
            if not asked:
                released.set()
            await released.wait()
            reply.json({"text": "par", "meta_info": {"id": "x", "finish_reason": {"type": "abort"}}})
            return
        reply.json({"text": "whole", "meta_info": {"id": "x", "finish_reason": {"type": "stop"}}})

    pools = pool("policy", "", engine="sglang")
    async with FakeWorker(aborting) as worker:
        pools["replicas"][0]["url"] = worker.url
        async with gateway(pools) as gate:
            body = {"text": "hi", "rid": "mine"}
            running = asyncio.create_task(gate.http.post("/sessions/s/generate", json=body))
            await arrived.wait()
            if asked:
                await gate.http.post("/abort_request", json={"rid": "mine"})
            assert (await running).headers["x-detgate-index"] == "0"
            again = await gate.http.post("/sessions/s/generate", json=body)
            assert again.headers["x-detgate-index"] == ("1" if asked else "0")
