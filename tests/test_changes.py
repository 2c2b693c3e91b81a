"""Reloading: the replicas become those of the new settings; what cannot change while it serves is named."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.changes import Changes
from gateway.settings import Settings
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
