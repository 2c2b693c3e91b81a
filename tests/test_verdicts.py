"""What canaries found, handed to a gateway that serves: for the engine that it meets, kept, recorded, in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import FakeWorker, Gate, chat, gateway, pool

CHAT = "/v1/chat/completions"


def report(fingerprint: str | None, *, passed: bool = True, apart: bool = False, **canaries: str) -> dict[str, Any]:
    """What `detgate verify --json` says of one replica."""
    tried = [{"endpoint": CHAT, "canary": name, "outcome": outcome} for name, outcome in canaries.items()]
    found = {"passed": passed, "fingerprint": fingerprint, "canaries": tried}
    of_pool = {"one_at_a_time": apart, "replicas": {"policy-0": found}, "across": []}
    return {"passed": passed, "pools": {"policy": of_pool}, "cannot_tell": ["much"]}


async def told(gate: Gate, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await gate.http.post("/admin/verdicts", json=body, headers=headers)


async def guarantee(gate: Gate) -> str:
    return str((await gate.http.post(CHAT, json=chat())).headers["x-detgate-guarantee"])


def recorded(gate: Gate) -> list[dict[str, Any]]:
    """What the run's ledger has of verdicts."""
    gate.gateway.runs.own.ledger.flush()
    lines = [line for file in gate.gateway.runs.own.folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record.get("change") == "verdict"]


def fingerprint(gate: Gate) -> str:
    return gate.gateway.fleet.pools["policy"].replicas["policy-0"].fingerprint


async def test_a_verdict_is_in_force_at_once_recorded_and_known_after_a_restart(tmp_path: Path) -> None:
    # So long that no probe comes between.
    given: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "health": {"interval": 600}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **given) as gate:
            assert await guarantee(gate) == "balanced; unverified"
            answer = await told(gate, report(fingerprint(gate)))
            assert (answer.status_code, answer.json()) == (
                200,
                {"taken": {"policy": {"policy-0": "passed"}}, "refused": {}},
            )
            assert await guarantee(gate) == "balanced"
            [record] = recorded(gate)
            assert (record["replica"], record["fingerprint"], record["passed"]) == ("policy-0", fingerprint(gate), True)
        async with gateway(pool("policy", worker.url), **given) as gate:
            assert await guarantee(gate) == "balanced"
            failed = report(fingerprint(gate), passed=False, crowded="failed", across="passed")
            assert (await told(gate, failed)).json()["taken"] == {"policy": {"policy-0": "failed"}}
            assert await guarantee(gate) == "none; engine-not-deterministic"


async def test_what_stands_already_is_not_written_again(tmp_path: Path) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        for _ in range(3):
            await told(gate, report(fingerprint(gate)))
        assert len((tmp_path / "verified.jsonl").read_text().splitlines()) == 1


async def test_company_that_was_kept_apart_says_nothing_of_company() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        assert (await told(gate, report(fingerprint(gate), apart=True))).json()["taken"]
        assert await guarantee(gate) == "balanced; unverified"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"fingerprint": "another"}, "another engine was asked"),
        ({"fingerprint": None}, "another engine was asked"),
        ({"passed": False}, "nothing was seen of it"),
    ],
)
async def test_what_is_not_of_this_engine_or_says_nothing_is_not_taken(changed: dict[str, Any], why: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        body = report(**{"fingerprint": fingerprint(gate), "crowded": "skipped"} | changed)
        outcome = (await told(gate, body)).json()
        assert outcome["taken"] == {}
        assert outcome["refused"]["policy"]["policy-0"].startswith(why)
        assert await guarantee(gate) == "balanced; unverified"
        assert not recorded(gate)


async def test_what_is_not_here_is_not_taken() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        body = report(fingerprint(gate))
        body["pools"]["other"] = body["pools"]["policy"]
        body["pools"]["policy"] = {"one_at_a_time": False, "replicas": {"gone": {"passed": True, "fingerprint": "x"}}}
        outcome = (await told(gate, body)).json()
        missing = "there is no such replica"
        assert outcome == {"taken": {}, "refused": {"other": {"policy-0": missing}, "policy": {"gone": missing}}}


async def test_it_needs_the_admin_key_and_a_report(tmp_path: Path) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": "boss"}) as gate:
        assert (await told(gate, report(fingerprint(gate)))).status_code == 401
        assert (await told(gate, {"pools": {"policy": {}}}, "boss")).status_code == 400
        assert (await told(gate, report(fingerprint(gate)), "boss")).json()["taken"]


async def test_a_verdict_that_cannot_be_kept_is_not_gone_by(tmp_path: Path) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger={"path": str(tmp_path)}) as gate:
        (tmp_path / "verified.jsonl").mkdir()
        answer = await told(gate, report(fingerprint(gate)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_unwritable")
        (tmp_path / "verified.jsonl").rmdir()
        assert await guarantee(gate) == "balanced; unverified"
