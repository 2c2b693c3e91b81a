"""A server whose rules of access refuse some keys alone: the gateway is not ready, and says what needs them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from gateway.shared.address import parse
from gateway.shared.lanes import Places
from gateway.shared.link import Link
from gateway.tasks import start, stop
from tests.harness import FakeWorker, Gate, gateway, pool
from tests.redis_server import RedisServer
from tests.shared.test_gateways import SHORT, ask, index, ready
from tests.waiting import until

FAMILIES = {
    "counters": "state released claims:* beats gone ends missing awaited over",
    "changes": "changes changes:*",
    "sessions": "sessions:* session:* group:*",
    "guards": "firsts:*",
}
NAMES = [(what, name) for what, names in FAMILIES.items() for name in names.split()]
RUN = "~detgate:{r}:"
LANES = {"policy": "~detgate:{lanes:policy}:*", "reward": "~detgate:{lanes:reward}:*"}


async def allow(server: RedisServer, *patterns: str) -> None:
    """Give the gateway's user these keys alone."""
    await server.ask("ACL", "SETUSER", "default", "resetkeys", "~detgate:server", "~detgate:trial", *patterns)


def bounded(name: str, url: str) -> dict[str, Any]:
    return pool(name, url, models=[name], lane={"scope": "pool", "limit": 1})


async def refused(gate: Gate) -> dict[str, float]:
    text = (await gate.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("detgate_store_refused{")]
    return {line.partition('"')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize(("what", "name"), NAMES)
async def test_a_family_of_which_a_key_is_refused_is_told_and_is_heard_of_when_it_is_not(what: str, name: str) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), **given) as gate:
            await ready(gate)
            assert await refused(gate) == {}
            before = await server.ask("KEYS", "*")
            with structlog.testing.capture_logs() as lines:
                await allow(server, *(f"{RUN}{each}" for _, each in NAMES if each != name))
                gate.gateway._store.link._try_families()  # type: ignore[attr-defined]
                await ready(gate, 503, f"{what} (NOPERM" if what != "counters" else "NOPERM")
                assert await refused(gate) == {what: 1.0}
                await server.ask("ACL", "SETUSER", "default", "allkeys")
                await ready(gate)
            told = [(line["event"], line["of"]) for line in lines if line.get("keys") == what]
            assert told == [("the store refuses keys", "r"), ("the store takes keys again", "r")]
            assert set(await server.ask("KEYS", "*")) == set(before)


async def test_a_pool_whose_lanes_are_refused_is_not_ready_and_another_is() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(bounded("policy", worker.url), bounded("reward", worker.url), **given) as gate:
            await ready(gate)
            await allow(server, f"{RUN}*", LANES["policy"])
            broken = await gate.http.post("/v1/chat/completions", json={"model": "reward", "messages": []})
            assert (broken.status_code, broken.json()["error"]["code"]) == (503, "store_unavailable")
            told = await ready(gate, 200, "reward: the store refuses the keys of its lanes (NOPERM")
            assert len(told["why"]) == 1
            assert (await gate.http.get("/readyz?pool=reward")).status_code == 503
            assert (await gate.http.get("/readyz?pool=policy")).status_code == 200
            assert await refused(gate) == {"lanes": 1.0}
            await allow(server, f"{RUN}*", LANES["reward"])
            gate.gateway._store.link._try_families()  # type: ignore[attr-defined]
            await ready(gate, 200, "policy: the store refuses the keys of its lanes")
            await allow(server, f"{RUN}*")
            await ready(gate, 503, "policy: the store refuses the keys of its lanes")
            await server.ask("ACL", "SETUSER", "default", "allkeys")
            await ready(gate)
            link = gate.gateway._store.link  # type: ignore[attr-defined]
            await until(lambda: not link.refused)
            assert (await ready(gate))["why"] == []


async def test_a_gateway_without_bounded_lanes_needs_no_keys_of_lanes() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        await allow(server, f"{RUN}*")
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), **given) as gate:
            assert (await ready(gate))["why"] == []
            assert index(await ask(gate)) == 0


async def test_what_is_refused_from_the_start_and_by_messages_alone_is_told() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        channels = ("&detgate:trial", "&detgate:{r}:*")
        await server.ask("ACL", "SETUSER", "default", "resetchannels", *channels)
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(bounded("policy", worker.url), **given) as gate:
            await ready(gate, 503, "policy: the store refuses the keys of its lanes (")


async def test_a_trial_that_is_refused_is_no_failed_call_and_ends_with_what_needed_it() -> None:
    failed: list[None] = []
    async with RedisServer() as server:
        await allow(server, f"{RUN}*")
        link = Link(parse(server.url), 1.0, lambda: failed.append(None))
        running = start(link.run(), "link")
        await link.up()
        places = Places(link, "policy", 1, 1, 3600.0, apart=True)
        life = start(places.run(), "places")
        await until(lambda: places.why_down is not None)
        before = len(failed)
        for _ in range(20):
            link._try_families()
            await asyncio.sleep(0.005)
        assert (len(failed), link.generation, link.why_down) == (before, 1, None)
        await stop(life)
        await places.close()
        assert link.refused == {}
        await stop(running)
