"""Changing the fleet while it serves."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness import FakeWorker, Reply, Seen, chat, completion, gateway, polite, pool


async def test_a_replica_that_is_added_gets_requests_and_one_that_is_removed_gets_none() -> None:
    async with FakeWorker() as first, FakeWorker() as second, gateway(pool("policy", first.url)) as gate:
        added = await gate.http.post("/admin/pools/policy/replicas", json={"name": "policy-1", "url": second.url})
        assert added.status_code == 201
        replicas = gate.gateway.fleet.pools["policy"].replicas
        await gate.until(lambda: replicas["policy-1"].usable)
        removed = await gate.http.delete("/admin/pools/policy/replicas/policy-0")
        assert removed.json()["draining"] is True
        answers = [await gate.http.post("/v1/chat/completions", json=chat(str(n))) for n in range(5)]
        assert {answer.headers["x-detgate-replica"] for answer in answers} == {"policy-1"}
        records = [record for record in gate.records() if record["event"] == "fleet"]
        changes = [(record["change"], record["replica"]) for record in records if record["change"] != "introduced"]
        assert changes == [("added", "policy-1"), ("removed", "policy-0")]


async def test_a_draining_replica_ends_what_it_has_and_gets_nothing_more() -> None:
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    async with FakeWorker(held) as slow, FakeWorker() as other, gateway(pool("policy", slow.url)) as gate:
        running = asyncio.create_task(gate.http.post("/v1/chat/completions", json=chat()))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        await gate.http.post("/admin/pools/policy/replicas", json={"name": "policy-1", "url": other.url})
        await gate.until(lambda: gate.gateway.fleet.pools["policy"].replicas["policy-1"].usable)
        await gate.http.post("/admin/pools/policy/replicas/policy-0/drain")
        for n in range(3):
            answer = await gate.http.post("/v1/chat/completions", json=chat(str(n)))
            assert answer.headers["x-detgate-replica"] == "policy-1"
        release.set()
        assert (await running).headers["x-detgate-replica"] == "policy-0"
        assert gate.in_flight("policy-0") == 0


@pytest.mark.parametrize("how", ["added", "reloaded"])
async def test_a_replica_that_was_drained_is_taken_back(how: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        replicas = gate.gateway.fleet.pools["policy"].replicas
        await gate.http.post("/admin/pools/policy/replicas/policy-0/drain")
        assert (await gate.http.post("/v1/chat/completions", json=chat())).status_code == 503
        if how == "added":
            own = {"name": "policy-0", "url": worker.url}
            assert (await gate.http.post("/admin/pools/policy/replicas", json=own)).status_code == 201
            assert (await gate.http.post("/admin/pools/policy/replicas", json=own)).status_code == 409
        else:
            gate.gateway.changes.reload(gate.gateway.settings, gate.gateway.settings)
        await gate.until(lambda: replicas["policy-0"].usable)
        assert (await gate.http.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_a_body_that_is_not_said_to_be_json_is_refused_with_what_to_do() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
            answer = await gate.http.post("/admin/weights", content=b'{"version":"v2"}', headers=headers)
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]


async def test_admin_routes_need_the_admin_key_when_there_is_one() -> None:
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), auth={"admin_key": "secret"}) as gate:
            refused = await gate.http.get("/admin/replicas")
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            allowed = await gate.http.get("/admin/replicas", headers={"authorization": "Bearer secret"})
            assert allowed.json()["policy"][0]["name"] == "policy-0"


async def test_unknown_pools_and_replicas_and_names_that_are_taken_are_told_in_the_one_error_shape() -> None:
    async with FakeWorker(polite) as worker, gateway(pool("policy", worker.url)) as gate:
        unknown = await gate.http.post("/admin/pools/nope/replicas", json={"name": "x", "url": worker.url})
        missing = await gate.http.post("/admin/pools/policy/replicas/nope/drain")
        taken = await gate.http.post("/admin/pools/policy/replicas", json={"name": "policy-0", "url": worker.url})
        bad = await gate.http.post("/admin/pools/policy/replicas", json={"name": "x", "url": "nonsense"})
        assert [answer.status_code for answer in (unknown, missing, taken, bad)] == [404, 404, 409, 400]
        for answer in (unknown, missing, taken, bad):
            assert set(answer.json()) == {"error"}
            assert answer.json()["error"]["message"]


async def test_data_plane_keys_are_needed_when_there_are_some_and_never_go_upstream() -> None:
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), auth={"api_keys": ["one", "two"]}) as gate:
            for headers in ({}, {"authorization": "Bearer three"}):
                refused = await gate.http.post("/v1/chat/completions", json=chat(), headers=headers)
                assert refused.status_code == 401
            for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
                answer = await gate.http.post("/v1/chat/completions", json=chat(), headers=headers)
                assert answer.status_code == 200
            assert not any(b in str(seen.headers) for seen in worker.seen for b in ("one", "two"))
            assert (await gate.http.get("/livez")).status_code == 200
