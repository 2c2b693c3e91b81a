"""What AReaL's deterministic rollouts do (its pull requests 1524, 1593, 1607, 1611 and 1625), done by the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool

CHAT = "/v1/chat/completions"
GOLDEN = {("17:3", 0): 1152644103, ("17:3", 1): 817236710, ("17", 0): 422241094, ("0", 0): 745682570}
"""Identity and index to seed, as AReaL derives them."""


async def ask(gate: Gate, session: str, text: str = "a", **fields: Any) -> httpx.Response:
    answer = await gate.http.post(CHAT, json=chat(text, **fields), headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return answer


async def created(gate: Gate, **wanted: Any) -> Any:
    answer = await gate.http.post("/sessions", json=wanted)
    assert answer.status_code == 201, answer.text
    return answer.json()


def bearer(session: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {session['api_key']}"}


async def test_golden_seeds_reach_the_engine() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), scheme="areal") as gate:
        for identity, _ in GOLDEN:
            await ask(gate, identity)
        assert [seen.json["seed"] for seen in worker.seen] == list(GOLDEN.values())


async def test_an_explicit_seed_wins_and_takes_an_index() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), scheme="areal") as gate:
        await ask(gate, "17:3", seed=5)
        after = await ask(gate, "17:3", "b")
        assert [seen.json["seed"] for seen in worker.seen] == [5, GOLDEN["17:3", 1]]
        assert after.headers["x-detgate-index"] == "1"


async def test_a_session_whose_name_is_taken_gets_a_suffix_and_the_seeds_of_its_identity() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), scheme="areal") as gate:
        sessions = [await created(gate, identity="17:3") for _ in range(3)]
        assert [each["session_id"] for each in sessions] == ["17:3", "17:3-1", "17:3-2"]
        for session in sessions:
            await gate.http.post(CHAT, json=chat(), headers=bearer(session))
        assert [seen.json["seed"] for seen in worker.seen] == [GOLDEN["17:3", 0]] * 3


async def test_32_reservations_at_once_share_no_name_and_no_index() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), scheme="areal") as gate:
        sessions = await asyncio.gather(*(created(gate, identity="17") for _ in range(32)))
        assert {each["session_id"] for each in sessions} == {"17", *(f"17-{number}" for number in range(1, 32))}
        assert len({each["api_key"] for each in sessions}) == 32
        answers = await asyncio.gather(*(ask(gate, "one", str(number)) for number in range(32)))
        assert sorted(int(each.headers["x-detgate-index"]) for each in answers) == list(range(32))
        assert len({seen.json["seed"] for seen in worker.seen}) == 32


async def test_a_group_is_listed_by_member_whatever_ended_first() -> None:
    turns = {str(member): asyncio.Event() for member in range(4)}

    async def in_turn(seen: Seen, reply: Reply) -> None:
        await turns[seen.json["messages"][0]["content"]].wait()
        reply.json(completion())

    async with FakeWorker(in_turn) as worker, gateway(pool("policy", worker.url), run="r") as gate:
        group = await created(gate, identity="12", group_size=4)
        tasks = [
            asyncio.ensure_future(gate.http.post(CHAT, json=chat(str(member)), headers=bearer(session)))
            for member, session in enumerate(group["sessions"])
        ]
        for member in (2, 3, 0, 1):
            turns[str(member)].set()
            await tasks[member]
        for session in group["sessions"]:
            await gate.http.delete(f"/sessions/{session['session_id']}", headers=bearer(session))
        listed = (await gate.http.get("/admin/runs/r/requests")).text.splitlines()
        assert [f'"identity":"12:{member}"' in line.replace(" ", "") for member, line in enumerate(listed)] == [
            True
        ] * 4


async def test_one_seed_for_a_whole_group_is_refused() -> None:
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url), guards={"shared_seed": "refuse"}) as gate,
    ):
        group = await created(gate, identity="12", group_size=4)
        answers = [
            await gate.http.post(CHAT, json=chat(seed=1), headers=bearer(session)) for session in group["sessions"]
        ]
        assert [each.status_code for each in answers] == [200, 400, 400, 400]
        assert answers[1].json()["error"]["code"] == "shared_seed"


@pytest.mark.parametrize(("backend", "doubted"), [("torch_native", True), ("fa3", False), ("flashinfer", False)])
async def test_a_backend_that_its_mode_does_not_cover_is_warned_of(backend: str, doubted: bool) -> None:
    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": "test-model", "object": "model"}]})
        elif seen.target.startswith("/server_info"):
            reply.json({"enable_deterministic_inference": True, "attention_backend": backend, "version": "0.5.23"})
        else:
            reply.json({})

    async with FakeWorker(probes=probes) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        found = {each.id: each.severity for each in gate.gateway.fleet.pools["policy"].findings}
        assert (found.get("attention-backend") == "warning") is doubted
        assert ("engine-doubted" in (await ask(gate, "s")).headers["x-detgate-guarantee"]) is doubted


@pytest.mark.parametrize(("engine", "path"), [("sglang", ("sampling_params", "sampling_seed")), ("vllm", ("seed",))])
async def test_a_seed_is_never_passed_over_in_silence(engine: str, path: tuple[str, ...]) -> None:
    """AReaL sends SGLang's name of the field, and gives up on vLLM, which would ignore it."""
    route = "/generate" if engine == "sglang" else CHAT
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        body = {"text": "a"} if engine == "sglang" else chat()
        await gate.http.post(route, json=body | {"sampling_seed": 9}, headers={"x-session-id": "s"})
        value = worker.seen[0].json
        for name in path:
            value = value[name]
        assert value == 9
