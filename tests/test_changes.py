"""Reloading: the replicas become those of the new settings; what cannot change while it serves is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.changes import Change, Changes, standing
from gateway.evidence import ledgers
from gateway.evidence.replay_plans import replay
from gateway.settings import InvalidSettings, Settings
from gateway.settings import Replica as ReplicaSettings
from tests.harness import FakeWorker, Gate, chat, gateway, pool

A, B, C = (f"http://{host}:1" for host in "abc")


def settings(*replicas: dict[str, Any], **more: Any) -> Settings:
    return Settings.load(None, {}, {"pools": [pool("policy", A) | {"replicas": list(replicas)}]} | more)


def replica(name: str, url: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "url": url, **more}


def reload(gate: Gate, then: Settings) -> list[str]:
    changes: Changes = gate.gateway.changes
    return changes.reload(gate.gateway.settings, then)


async def test_what_is_the_same_is_left_alone_and_the_rest_comes_or_goes() -> None:
    async with gateway(pool("policy", A, B, C), health={"interval": 3600, "timeout": 0.1}) as gate:
        replicas = gate.gateway.fleet.pools["policy"].replicas
        before = dict(replicas)
        now = settings(
            replica("policy-0", A), replica("policy-1", C), replica("policy-2", C, dp_rank=1), replica("x", B)
        )
        assert "pools" not in reload(gate, now)
        assert list(replicas) == ["policy-0", "policy-1", "policy-2", "x"]
        assert replicas["policy-0"] is before["policy-0"]
        assert replicas["policy-1"].url == C
        assert b"x-data-parallel-rank: 1" in replicas["policy-2"].head
        told = [(each["change"], each["replica"]) for each in gate.records() if each["event"] == "fleet"]
        removed, added = [("removed", "policy-1"), ("removed", "policy-2")], ["policy-1", "policy-2", "x"]
        assert told == removed + [("added", name) for name in added]
        reload(gate, now)
        assert len([each for each in gate.records() if each["event"] == "fleet"]) == len(told)


@pytest.mark.parametrize(
    ("more", "key"), [({"seed": 7}, "seed"), ({"limits": {"queue": 1}}, "limits"), ({"profile": "off"}, "profile")]
)
async def test_settings_that_need_a_restart_are_named_and_change_nothing(more: dict[str, Any], key: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        before = (await gate.http.post("/sessions/s/v1/chat/completions", json=chat())).headers["x-detgate-seed"]
        assert key in reload(gate, settings(replica("policy-0", worker.url), **more))
        answer = await gate.http.post("/runs/other/sessions/s/v1/chat/completions", json=chat())
        assert answer.headers["x-detgate-seed"] == before


async def test_a_pool_that_comes_or_goes_needs_a_restart() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        then = Settings.load(None, {}, {"pools": [pool("policy", worker.url), pool("other", A)]})
        assert "pools" in reload(gate, then)
        assert list(gate.gateway.fleet.pools) == ["policy"]


# --- after a restart


def test_of_what_was_done_with_a_replica_nothing_stands_from_before_it_was_removed() -> None:
    x = ReplicaSettings(name="x", url=A)
    removed, added = Change("remove", "p", "x"), Change("add", "p", "x", x)
    drained, accepted = Change("drain", "p", "x"), Change("accept", "p", "x", engine="e")
    assert standing([accepted, drained, removed, None, added]) == [added]
    assert standing([added, drained, accepted, drained]) == [added, accepted, drained]
    assert standing([added, drained, removed]) == [removed]


def names(gate: Gate) -> dict[str, tuple[str, bool]]:
    return {each.name: (each.url, each.draining) for each in gate.gateway.fleet.pools["policy"].replicas.values()}


async def admin(gate: Gate, method: str, path: str = "", **body: Any) -> None:
    answer = await gate.http.request(method, f"/admin/pools/policy/replicas{path}", json=body or None)
    assert answer.status_code < 300, answer.text


async def test_what_was_asked_of_admin_is_so_after_a_restart_and_keys_stay_where_they_were(
    tmp_path: Path,
) -> None:
    more: dict[str, Any] = {
        "profile": "strict",
        "routing": {"key": "session"},
        "run": "r",
        "ledger": {"path": str(tmp_path)},
    }

    async def served(gate: Gate) -> list[str]:
        asked = [gate.http.post(f"/sessions/{number}/v1/chat/completions", json=chat()) for number in range(16)]
        return [answer.headers["x-detgate-replica"] for answer in await asyncio.gather(*asked)]

    async with FakeWorker() as worker:
        policy = pool("policy", *[worker.url] * 4)
        async with gateway(policy, **more) as gate:
            before = await served(gate)
            await admin(gate, "POST", name="x", url=worker.url)
            await admin(gate, "POST", "/x/drain")
            await admin(gate, "POST", name="x", url=worker.url)
            await admin(gate, "POST", "/policy-0/drain")
            await admin(gate, "DELETE", "/policy-1")
            await admin(gate, "POST", "/policy-2/drain")
            await admin(gate, "POST", name="policy-2", url=worker.url)
            await gate.until(lambda: all(replica.state == "up" for replica in gate.gateway.fleet.replicas))
            after = await served(gate)
            left = names(gate)
        assert {name: draining for name, (_, draining) in left.items()} == {
            "policy-0": True, "policy-3": False, "x": False, "policy-2": False,
        }  # fmt: skip
        assert before != after
        for _ in range(2):
            async with gateway(policy, resume=True, **more) as gate:
                assert names(gate) == left
                assert await served(gate) == after
        found = [each for each in gate.records() if each["event"] == "fleet"]
        assert sum(each["asked"] for each in found if "asked" in each) == 7, "made again, it is not asked for again"
        async with gateway(policy, **(more | {"run": "another"})) as gate:
            assert list(names(gate)) == [f"policy-{number}" for number in range(4)]
    again = replay(ledgers.find("r", tmp_path))
    assert (again.different, again.checked["replica"]) == (0, 64)


async def test_what_the_file_says_now_yields_to_what_was_asked_of_admin(tmp_path: Path) -> None:
    more: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}, "health": {"interval": 3600, "timeout": 0.1}}
    async with gateway(pool("policy", A, B), **more) as gate:
        await admin(gate, "POST", name="x", url=C)
        reload(gate, settings(replica("policy-0", A), replica("policy-1", B)))
        assert list(names(gate)) == ["policy-0", "policy-1"]
    replicas = [replica("policy-0", C), replica("policy-1", B)]
    async with gateway(pool("policy", A) | {"replicas": replicas}, resume=True, **more) as gate:
        assert names(gate) == {"policy-0": (C, False), "policy-1": (B, False), "x": (C, False)}


async def test_an_engine_that_was_accepted_is_so_after_a_restart(tmp_path: Path) -> None:
    more: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **more) as gate:
            await admin(gate, "POST", "/policy-0/accept")
            (accepted,) = [each.accepted for each in gate.gateway.fleet.replicas]
        for file in (tmp_path / "r").glob("*.jsonl"):
            file.write_text(file.read_text().replace(accepted, "another"))
        async with gateway(pool("policy", worker.url), resume=True, **more) as gate:
            (now,) = gate.gateway.fleet.replicas
            assert (now.fingerprint, now.accepted, now.replaced) == (accepted, "another", True)


async def test_names_that_were_reloaded_are_accepted_by_a_restart_and_those_of_before_are_not(tmp_path: Path) -> None:
    more: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}, "profile": "strict"}
    async with FakeWorker() as worker:
        one, other = ([replica("policy-0", worker.url), replica(name, worker.url)] for name in ("policy-1", "policy-9"))
        old, new = (pool("policy", worker.url) | {"replicas": replicas} for replicas in (one, other))
        async with gateway(old, **more) as gate:
            reload(gate, Settings.load(None, {}, {"pools": [new], **more}))
        for configured, differs in ((new, []), (old, ["pools"]), (new, [])):
            async with gateway(configured, resume=True, **more) as gate:
                assert gate.gateway.runs.own.differs == differs
                if not differs:
                    for number in range(8):
                        answer = await gate.http.post(f"/sessions/{number}/v1/chat/completions", json=chat())
                        assert answer.status_code == 200
    assert replay(ledgers.find("r", tmp_path)).different == 0


async def test_a_replica_that_cannot_be_made_again_ends_the_start(tmp_path: Path) -> None:
    more: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **more) as gate:
            await admin(gate, "POST", name="x", url=C)
        for file in (tmp_path / "r").glob("*.jsonl"):
            file.write_text(file.read_text().replace(C, "ftp://c"))
        with pytest.raises(InvalidSettings, match="by which x was added to pool policy is no sound record"):
            async with gateway(pool("policy", worker.url), resume=True, **more):
                pass
