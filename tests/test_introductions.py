"""What a replica is: asked when it comes up, and again when it comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway import engines
from gateway.introductions import Introduction, introduce
from gateway.questions import Answered
from gateway.sim import SimServer, SimSettings
from gateway.upstream import Broken
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, chat, gateway, pool

CHAT = "/v1/chat/completions"
QUICK = {"interval": 0.02, "timeout": 2.0}


async def introduced(told: dict[str, Answered | Broken], engine: str = "sglang") -> Introduction:
    """What comes of these answers."""

    async def ask(path: str) -> Answered:
        answer = told.get(path, Answered(404, b""))
        if isinstance(answer, Broken):
            raise answer
        return answer

    return await introduce(ask, engines.load(engine))


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (Answered(200, b'{"version": "0.5.23"}'), True),
        (Answered(404, b""), True),
        (Answered(401, b""), True),
        (Answered(500, b""), False),
        (Answered(503, b""), False),
        (Broken("no answer", "send", timeout=True), False),
        (Broken("refused", "connect", blame="refused"), False),
    ],
)
async def test_who_could_not_answer_may_know_more_than_it_said(answer: Answered | Broken, whole: bool) -> None:
    said = await introduced(
        {
            "/v1/models": Answered(200, b'{"data": [{"id": "m"}]}'),
            "/model_info": Answered(200, b'{"is_generation": true}'),
            "/server_info": answer,
        }
    )
    assert said.whole is whole
    assert said.facts.is_generation is True
    assert said.models == [{"id": "m"}]


@pytest.mark.parametrize("engine", engines.names())
@pytest.mark.parametrize("text", ["not json", "[]", "5", "null", '{"data": 5}', '{"vllm_config": 5}'])
async def test_nonsense_tells_nothing(engine: str, text: str) -> None:
    routes = ("/v1/models", *engines.load(engine).ASKS)
    said = await introduced(dict.fromkeys(routes, Answered(200, text.encode())), engine)
    assert said.facts.known() == {}
    assert said.whole


@pytest.mark.parametrize(("status", "generates"), [(405, True), (404, False), (401, None), (200, None), (500, None)])
async def test_who_has_no_route_to_generate_does_not_generate(status: int, generates: bool | None) -> None:
    """vLLM tells its kind in its development mode alone; but a route that is there refuses GET in another way."""
    said = await introduced({"/v1/chat/completions": Answered(status, b"{}")}, "vllm")
    assert said.facts.is_generation is generates


# --- a replica that comes back


def sglang(**settings: Any) -> SimServer:
    return SimServer(SimSettings(engine="sglang", model=MODEL, token_seconds=0.0, **settings))


async def replaced(gate: Gate, server: SimServer, **settings: Any) -> None:
    """Another engine at the same address, once its probes pass."""
    replica = next(each for each in gate.gateway.fleet.replicas if each.url == server.url)
    await server.stop()
    await gate.until(lambda: replica.state == "down")
    server.engine.settings = dataclasses.replace(server.engine.settings, **settings)
    await server.start()
    await gate.until(lambda: replica.state == "up")


async def guarantee(gate: Gate) -> str:
    answer = await gate.http.post(CHAT, json=chat("hi", max_tokens=2))
    return str(answer.headers["x-detgate-guarantee"])


def told(gate: Gate) -> list[dict[str, Any]]:
    """All that the ledger has of the fleet."""
    gate.gateway.runs.own.ledger.flush()
    files = sorted(gate.ledger.rglob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [record for record in records if record["event"] == "fleet"]


def changes(gate: Gate) -> list[tuple[str, str]]:
    return [(record["change"], record["replica"]) for record in told(gate)]


async def test_another_engine_taints_until_the_former_is_back(tmp_path: Any) -> None:
    async with sglang() as one:
        async with gateway(pool("policy", one.url, engine="sglang"), health=QUICK) as gate:
            assert await guarantee(gate) == "balanced"
            with capture_logs() as logs:
                await replaced(gate, one, told={"dtype": "bfloat16"})
                assert await guarantee(gate) == "none; fingerprint-changed"
                await replaced(gate, one, told={})
            assert await guarantee(gate) == "balanced"
            assert changes(gate) == [
                ("introduced", "policy-0"),
                ("fingerprint", "policy-0"),
                ("fingerprint", "policy-0"),
            ]
            first, second, third = told(gate)
            assert first["fingerprint"] == second["before"] == third["fingerprint"] != second["fingerprint"]
            assert (first["facts"]["dtype"], second["facts"]["dtype"]) == ("float32", "bfloat16")
            assert sum(log["event"] == "fingerprint changed" for log in logs) == 2


async def test_a_restart_of_the_same_engine_taints_nothing() -> None:
    async with sglang() as one:
        async with gateway(pool("policy", one.url, engine="sglang"), health=QUICK) as gate:
            await replaced(gate, one, weight_version="step-2")
            assert await guarantee(gate) == "balanced"
            assert changes(gate) == [("introduced", "policy-0")]


async def test_an_operator_accepts_another_engine() -> None:
    async with sglang() as one:
        async with gateway(pool("policy", one.url, engine="sglang"), health=QUICK) as gate:
            await replaced(gate, one, told={"dtype": "bfloat16"})
            assert await guarantee(gate) == "none; fingerprint-changed"
            known = (await gate.http.get("/determinism")).json()["pools"]["policy"]
            assert known["replicas"]["policy-0"]["fingerprint_changed"] is True
            assert "fingerprint-changed" in {finding["id"] for finding in known["findings"]}
            accepted = await gate.http.post("/admin/pools/policy/replicas/policy-0/accept")
            assert accepted.status_code == 200
            assert await guarantee(gate) == "balanced"
            assert changes(gate)[-1] == ("accepted", "policy-0")
            missing = await gate.http.post("/admin/pools/policy/replicas/nobody/accept")
            assert missing.status_code == 404


async def test_a_pool_that_was_changed_as_a_whole_is_as_it_was_meant_to_be() -> None:
    async with sglang() as one, sglang() as two:
        async with gateway(pool("policy", one.url, two.url, engine="sglang"), health=QUICK) as gate:
            replicas = gate.gateway.fleet.pools["policy"].replicas

            def reasons() -> list[list[str]]:
                return [list(replica.reasons) for replica in replicas.values()]

            await replaced(gate, one, told={"dtype": "bfloat16"})
            assert reasons() == [["replicas-differ", "fingerprint-changed"], ["replicas-differ"]]
            await replaced(gate, two, told={"dtype": "bfloat16"})
            assert reasons() == [[], []]
            assert await guarantee(gate) == "balanced"


async def test_who_is_too_busy_to_say_what_it_is_is_not_taken_for_another() -> None:
    """It is asked again at the next probe, and serves meanwhile as what it was."""
    async with sglang() as one:
        async with gateway(pool("policy", one.url, engine="sglang"), health=QUICK) as gate:
            replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
            before = replica.fingerprint
            one.engine.faults.add(route="/server_info", status=503)
            await one.stop()
            await gate.until(lambda: replica.state == "down")
            await one.start()
            await gate.until(lambda: replica.state == "up")
            assert (replica.known, replica.fingerprint, await guarantee(gate)) == (False, before, "balanced")
            one.engine.faults.clear()
            await gate.until(lambda: replica.known)
            assert replica.fingerprint == before


async def test_strict_is_not_ready_while_a_replica_speaks_against_it_and_is_when_it_is_mended() -> None:
    async with sglang(deterministic=False) as one:
        async with gateway(pool("policy", one.url, engine="sglang"), profile="strict", health=QUICK) as gate:
            refused = await gate.http.get("/readyz")
            assert refused.status_code == 503
            assert "it ignores seeds" in refused.text
            assert (await gate.http.get("/determinism")).json()["strict"] is False
            await replaced(gate, one, deterministic=True)
            assert (await gate.http.get("/readyz")).status_code == 200


async def test_balanced_warns_once_and_says_so_in_each_answer() -> None:
    told = {"dp_size": 2, "attention_backend": "torch_native"}
    async with sglang(told=told) as one:
        with capture_logs() as logs:
            async with gateway(pool("policy", one.url, engine="sglang"), health=QUICK) as gate:
                assert await guarantee(gate) == "balanced; dp-unpinned; engine-doubted"
                await replaced(gate, one, told={})
                await replaced(gate, one, told=told)
                assert await guarantee(gate) == "balanced; dp-unpinned; engine-doubted"
        warned = [log["finding"] for log in logs if "finding" in log]
        assert sorted(warned) == ["attention-backend", "dp-unpinned", "prefix-cache"]


async def test_profile_off_asks_and_says_nothing() -> None:
    async with sglang(deterministic=False) as one:
        with capture_logs() as logs:
            async with gateway(pool("policy", one.url, engine="sglang"), profile="off", health=QUICK) as gate:
                assert await guarantee(gate) == "none; off"
                assert changes(gate) == []
        assert not any("finding" in log for log in logs)


# --- preemptions


async def preempted(one: SimServer, gate: Gate) -> None:
    replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
    before = replica.preempted_at
    one.engine.counters.preemptions += 3
    await gate.until(lambda: replica.preempted_at > before)


async def test_answers_that_were_under_way_when_requests_were_preempted_say_so() -> None:
    declared = {"deterministic": "declared"}
    async with SimServer(SimSettings(engine="vllm", model=MODEL, token_seconds=0.0)) as one:
        async with gateway(pool("policy", one.url, **declared), health=QUICK) as gate:
            assert await guarantee(gate) == "balanced"
            one.engine.pause()
            asking = asyncio.create_task(gate.http.post(CHAT, json=chat("under way", max_tokens=2)))
            await one.engine.reached(1)
            await preempted(one, gate)
            one.engine.resume()
            assert (await asking).headers["x-detgate-guarantee"] == "balanced; preempted"
            assert await guarantee(gate) == "balanced", "what came after is none of it"
            closed = [each["flags"] for each in gate.records() if each["event"] == "closed"]
            assert closed == [[], ["preempted"], []]
            (record,) = (each for each in gate.records() if each.get("change") == "preempted")
            assert (record["replica"], record["count"]) == ("policy-0", 3)


async def test_on_sglang_preemptions_change_nothing_and_nobody_asks() -> None:
    asked: list[str] = []

    async def note(seen: Seen, reply: Reply) -> None:
        asked.append(seen.target)
        reply.json({})

    async with FakeWorker(probes=note) as worker:
        async with gateway(pool("policy", worker.url, engine="sglang"), health=QUICK) as gate:
            await gate.until(lambda: len(asked) > 10)
    assert "/metrics" not in asked


async def test_metrics_that_hang_hold_up_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.health.METRICS_SECONDS", 0.05)
    asked: list[str] = []

    async def hang(seen: Seen, reply: Reply) -> None:
        asked.append(seen.target)
        if seen.target == "/metrics" and len(asked) > 20:
            await reply.gone()
        else:
            reply.json({"data": [{"id": MODEL}]})

    async with FakeWorker(probes=hang) as worker:
        async with gateway(pool("policy", worker.url), health=QUICK) as gate:
            await gate.until(lambda: asked[20:].count("/health") > 5)
            assert gate.gateway.fleet.pools["policy"].replicas["policy-0"].state == "up"
