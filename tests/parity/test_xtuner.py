"""What xtuner's deterministic rollouts do (its pull request 1644), done by the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway import engines
from tests.harness import FakeWorker, Gate, Seen, chat, gateway, pool
from tests.sim.serving import serving

CHAT = "/v1/chat/completions"


async def group(gate: Gate, identity: str, size: int = 4, reverse: bool = False) -> list[dict[str, str]]:
    """Ask once for each member; the answers' headers by member."""
    told = (
        await gate.http.post("/sessions", json={"identity": identity, "group_size": size, "order": int(identity)})
    ).json()
    answers: dict[int, Any] = {}
    members = list(enumerate(told["sessions"]))
    for member, session in reversed(members) if reverse else members:
        headers = {"authorization": f"Bearer {session['api_key']}"}
        answers[member] = await gate.http.post(CHAT, json=chat(f"prompt {identity}"), headers=headers)
        await gate.http.delete(f"/sessions/{session['session_id']}", headers=headers)
    return [dict(answers[member].headers) for member in range(size)]


async def test_each_member_has_an_id_and_the_seed_base_plus_member() -> None:
    runs = []
    for reverse in (False, True):
        async with (
            FakeWorker() as worker,
            gateway(pool("policy", worker.url, engine="sglang"), scheme="offset", seed=1000) as gate,
        ):
            answers = await group(gate, "9", reverse=reverse) + await group(gate, "10", reverse=reverse)
            runs.append([(each["x-detgate-request-id"], each["x-detgate-seed"]) for each in answers])
    assert runs[0] == runs[1]
    assert [int(seed) for _, seed in runs[0]] == [1000, 1001, 1002, 1003] * 2
    assert len({name for name, _ in runs[0]}) == 8


@pytest.mark.parametrize("body", [{}, {"seed": None}])
async def test_no_seed_means_one_that_is_derived_and_never_0(body: dict[str, Any]) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine="sglang"), seed=0) as gate:
        for number in range(50):
            await gate.http.post(CHAT, json=chat(**body), headers={"x-session-id": f"{number}:0"})
        seeds = [seen.json["seed"] for seen in worker.seen]
        assert 0 not in seeds
        assert len(set(seeds)) == 50


async def test_outputs_are_listed_in_one_order_whatever_ended_first() -> None:
    listed = []
    for reverse in (False, True):
        async with FakeWorker() as worker, gateway(pool("policy", worker.url), run="r") as gate:
            for identity in ("10", "9") if reverse else ("9", "10"):
                await group(gate, identity, reverse=reverse)
            lines = (await gate.http.get("/admin/runs/r/requests")).text.splitlines()
            listed.append([(each["identity"], each["index"], each["seed"]) for each in map(json.loads, lines)])
    assert listed[0] == listed[1]
    assert [identity for identity, *_ in listed[0]] == [f"{task}:{member}" for task in (9, 10) for member in range(4)]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_probes_do_not_generate(engine: str) -> None:
    probed: list[str] = []

    async def probes(seen: Seen, reply: Any) -> None:
        probed.append(seen.target)
        reply.json({"object": "list", "data": []})

    async with FakeWorker(probes=probes) as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        await gate.until(lambda: probed.count(engines.load(engine).PROBE) > 5)
        assert not worker.seen
        assert not {"/health_generate", "/health" if engine == "sglang" else ""} & set(probed)
    async with (
        serving(engine) as (server, _),
        gateway(pool("policy", server.url, engine=engine, models=["sim-model"])) as gate,
    ):
        replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
        await gate.until(lambda: replica.known)
        assert server.engine.counters.requests == 0


async def test_a_session_keeps_its_replica_when_another_one_goes() -> None:
    """A modulo of the number of replicas would move nearly all."""
    async with FakeWorker() as first, FakeWorker() as second, FakeWorker() as third:
        urls = [worker.url for worker in (first, second, third)]
        async with gateway(pool("policy", *urls), routing={"slack": "inf", "key": "session"}) as gate:

            async def replicas() -> list[str]:
                answers = await asyncio.gather(
                    *(gate.http.post(CHAT, json=chat(), headers={"x-session-id": f"s{n}"}) for n in range(30))
                )
                return [each.headers["x-detgate-replica"] for each in answers]

            before = await replicas()
            await gate.http.post("/admin/pools/policy/replicas/policy-2/drain")
            after = await replicas()
            assert [new for old, new in zip(before, after, strict=True) if old != "policy-2"] == [
                old for old in before if old != "policy-2"
            ]
            assert "policy-2" in before
            assert "policy-2" not in after
