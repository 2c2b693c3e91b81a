"""A rollout that is broken off and goes on: the same tokens on SGLang, on vLLM a seed of its own, and what is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core import seeds
from gateway.evidence import ledgers
from gateway.evidence.replay_plans import replay
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool
from tests.sim.serving import serving

MODEL = "sim-model"
TOKENS = [1, 2, 3, 4, 5]
SESSION = {"x-session-id": "17:3"}


def native(tokens: list[int], length: int, **fields: Any) -> dict[str, Any]:
    """A request to SGLang's own route by token ids."""
    return {"input_ids": tokens, "sampling_params": {"max_new_tokens": length, "temperature": 1}} | fields


async def post(gate: Gate, path: str, body: Any, **headers: str) -> httpx.Response:
    answer = await gate.http.post(
        path, json=body, headers=SESSION | {k.replace("_", "-"): v for k, v in headers.items()}
    )
    assert answer.status_code == 200, answer.text
    return answer


async def test_on_sglang_what_goes_on_is_what_would_have_come() -> None:
    async with (
        serving("sglang") as (server, _),
        gateway(pool("policy", server.url, engine="sglang", models=[MODEL])) as gate,
    ):
        whole = await post(gate, "/generate", native(TOKENS, 24), x_request_index="0")
        drawn = whole.json()["output_ids"]
        named = whole.headers["x-detgate-request-id"]
        said = drawn[:5]
        for number, name in enumerate((named, named + ".0", "{last}"), start=1):
            name = name.format(last=f"{named.removesuffix(':0')}/0.0:{number - 2}")
            part = await post(gate, "/generate", native(TOKENS + said, 6), x_detgate_resume=name)
            said = said + part.json()["output_ids"]
            assert part.headers["x-detgate-segment"] == str(number)
            assert part.headers["x-detgate-request-id"] == f"17:3/0.0:{number - 1}"
            assert part.headers["x-detgate-seed"] == whole.headers["x-detgate-seed"]
        assert said == drawn[:23]
        assert "x-detgate-segment" not in whole.headers


async def test_of_several_samples_each_goes_on_with_its_own_seed() -> None:
    async with (
        serving("sglang") as (server, _),
        gateway(pool("policy", server.url, engine="sglang", models=[MODEL])) as gate,
    ):
        body = native(TOKENS, 12)
        body["sampling_params"]["n"] = 3
        whole = await post(gate, "/generate", body)
        first = int(whole.headers["x-detgate-seed"])
        for sample, row in enumerate(whole.json()):
            drawn = row["output_ids"]
            name = f"{whole.headers['x-detgate-request-id']}.{sample}"
            part = await post(gate, "/generate", native(TOKENS + drawn[:4], 8), x_detgate_resume=name)
            assert part.json()["output_ids"] == drawn[4:]
            assert int(part.headers["x-detgate-seed"]) == seeds.samples(first, 3)[sample]


async def test_on_vllm_each_segment_has_a_seed_of_its_own_and_another_run_has_the_same() -> None:
    runs = []
    for _ in range(2):
        async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
            whole = await post(gate, "/v1/chat/completions", chat("a"))
            base, name = int(whole.headers["x-detgate-seed"]), whole.headers["x-detgate-request-id"]
            parts = [
                await post(gate, "/v1/chat/completions", chat("a" + so_far), x_detgate_resume=name)
                for so_far in ("b", "bc")
            ]
            told = [int(part.headers["x-detgate-seed"]) for part in parts]
            assert told == [seeds.segment(base, 0, number, positional=False) for number in (1, 2)]
            assert [seen.json["seed"] for seen in worker.seen] == [base, *told]
            following = await post(gate, "/v1/chat/completions", chat("next"))
            assert following.headers["x-detgate-index"] == "1"
            runs.append([base, *told])
    assert runs[0] == runs[1]


async def test_a_seed_of_the_client_is_the_samples_on_sglang_and_not_drawn_anew_on_vllm() -> None:
    for engine, kept in (("sglang", True), ("vllm", False)):
        async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
            await post(gate, "/v1/chat/completions", chat("a", seed=7))
            part = await post(gate, "/v1/chat/completions", chat("ab", seed=7), x_detgate_resume="17:3:0")
            seed = 7 if kept else seeds.segment(7, 0, 1, positional=False)
            assert worker.seen[1].json["seed"] == seed
            assert part.headers["x-detgate-seed-source"] == ("client" if kept else "derived")


async def test_a_retry_of_a_segment_is_the_same_segment() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        await post(gate, "/v1/chat/completions", chat("a"))
        asked = {"x_detgate_resume": "17:3:0", "idempotency_key": "k"}
        first = await post(gate, "/v1/chat/completions", chat("ab"), **asked)
        again = await post(gate, "/v1/chat/completions", chat("ab"), **asked)
        assert first.headers["x-detgate-segment"] == again.headers["x-detgate-segment"] == "1"
        assert first.headers["x-detgate-seed"] == again.headers["x-detgate-seed"]


@pytest.mark.parametrize("order", ["content", "arrival"])
async def test_segments_are_counted_whatever_the_order_of_the_session(order: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        whole = await post(gate, "/v1/chat/completions", chat("a"), x_index_order=order)
        name = whole.headers["x-detgate-request-id"]
        told = [
            (await post(gate, "/v1/chat/completions", chat(text), x_index_order=order, x_detgate_resume=name)).headers
            for text in ("ab", "abc")
        ]
        assert [each["x-detgate-segment"] for each in told] == ["1", "2"]
        assert len({each["x-detgate-seed"] for each in told}) == 2


async def test_two_segments_of_a_sample_at_once_race_and_say_so() -> None:
    both = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        if len(worker.seen) == 3:
            both.set()
        if len(worker.seen) > 1:
            await both.wait()
        reply.json(completion())

    async with FakeWorker(held) as worker, gateway(pool("policy", worker.url)) as gate:
        await post(gate, "/v1/chat/completions", chat("a"))
        answers = await asyncio.gather(
            *(post(gate, "/v1/chat/completions", chat(text), x_detgate_resume="17:3:0") for text in ("ab", "abc"))
        )
        assert {answer.headers["x-detgate-segment"] for answer in answers} == {"1", "2"}
        assert all("racing" in answer.headers["x-detgate-guarantee"] for answer in answers)


async def test_it_goes_to_the_replica_of_its_sample() -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        async with gateway(pool("policy", first.url, second.url), profile="strict", guards={"clones": "warn"}) as gate:
            for number in range(8):
                whole = await post(gate, "/v1/chat/completions", chat(f"{number}"))
                part = await post(
                    gate,
                    "/v1/chat/completions",
                    chat(f"{number}."),
                    x_detgate_resume=whole.headers["x-detgate-request-id"],
                )
                assert part.headers["x-detgate-replica"] == whole.headers["x-detgate-replica"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("17:4:0", {}),
        ("0", {}),
        ("17:3:0.5000", {}),
        ("17:3/0.0:0.1", {}),
        ("17:3:0", {"n": 2}),
        ("17:3:0", {"prompt": ["a", "b"]}),
    ],
)
async def test_what_goes_on_with_nothing_known_is_refused_and_takes_no_index(name: str, fields: dict[str, Any]) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        path, body = "/v1/completions", {"model": "test-model", "prompt": "a"} | fields
        answer = await gate.http.post(path, json=body, headers=SESSION | {"x-detgate-resume": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_resume")
        assert not worker.seen
        assert not gate.records()


async def resumed(gate: Gate, name: str, **headers: str) -> tuple[int, str | None]:
    """What becomes of a request that goes on with this one: its status, and the code of its error."""
    sent = SESSION | {"x-detgate-resume": name} | {key.replace("_", "-"): value for key, value in headers.items()}
    answer = await gate.http.post("/v1/chat/completions", json=chat("ab"), headers=sent)
    return answer.status_code, None if answer.status_code == 200 else answer.json()["error"]["code"]


UNKNOWN = (400, "unknown_resume")


async def test_what_this_run_never_asked_is_refused_and_takes_no_index() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        assert await resumed(gate, "17:3:0") == UNKNOWN
        await post(gate, "/v1/chat/completions", chat("a"))
        assert await resumed(gate, "17:3:1") == UNKNOWN
        assert await resumed(gate, "17:3/0.0:0") == UNKNOWN
        assert len(worker.seen) == len([each for each in gate.records() if each["event"] == "opened"]) == 1
        assert await resumed(gate, "17:3:0") == (200, None)
        assert await resumed(gate, "17:3/0.0:0") == (200, None)


async def test_a_number_of_the_client_is_known_and_none_between() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        await post(gate, "/v1/chat/completions", chat("a"), x_request_index="7")
        assert await resumed(gate, "17:3:0") == UNKNOWN
        assert await resumed(gate, "17:3:7") == (200, None)


async def test_another_session_of_the_identity_and_another_run_have_not_asked() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        await post(gate, "/v1/chat/completions", chat("a"))
        other = {"x_session_id": "other", "x_detgate_identity": "17:3"}
        assert await resumed(gate, "17:3:0", **other) == UNKNOWN
        assert await resumed(gate, "17:3:0", x_detgate_run="elsewhere") == UNKNOWN
        assert await resumed(gate, "17:3:0") == (200, None)


async def test_what_was_not_delivered_was_asked() -> None:
    async def breaks_once(seen: Seen, reply: Reply) -> None:
        reply.json(completion(), status=500 if len(worker.seen) == 1 else 200)

    async with FakeWorker(breaks_once) as worker, gateway(pool("policy", worker.url)) as gate:
        failed = await gate.http.post("/v1/chat/completions", json=chat("a"), headers=SESSION)
        assert failed.status_code == 500
        assert await resumed(gate, "17:3:0") == (200, None)


async def test_what_has_left_memory_and_what_a_run_asked_before_a_restart_is_known(tmp_path: Path) -> None:
    given: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "one", "limits": {"scopes": 1}}
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), **given) as gate:
            await post(gate, "/v1/chat/completions", chat("a"))
            for number in range(8):
                await gate.http.post("/v1/chat/completions", json=chat("a"), headers={"x-session-id": f"{number}"})
            assert gate.gateway.pipeline.store.scopes < 9
            assert await resumed(gate, "17:3:0") == (200, None)
        async with gateway(pool("policy", worker.url), resume=True, **given) as gate:
            assert await resumed(gate, "17:3:0") == (200, None)
            assert await resumed(gate, "17:3:1") == UNKNOWN


async def test_the_ledger_tells_of_it_and_its_decisions_come_out_the_same() -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        async with gateway(pool("policy", first.url, second.url), profile="strict", guards={"clones": "warn"}) as gate:
            whole = await post(gate, "/v1/chat/completions", chat("a"), x_request_index="3")
            name = whole.headers["x-detgate-request-id"]
            for text in ("ab", "abc"):
                await post(gate, "/v1/chat/completions", chat(text), x_detgate_resume=name)
            opened = [record for record in gate.records() if record["event"] == "opened"]
            assert [record["resumes"] for record in opened] == [None, "17:3:3.0", "17:3:3.0"]
            assert [record["identity"] for record in opened] == ["17:3", "17:3/3.0", "17:3/3.0"]
            assert [record["index"] for record in opened] == [3, 0, 1]
            found = replay(ledgers.find(str(gate.gateway.runs.own.folder), gate.ledger))
            assert (found.requests, found.different) == (3, 0)
            assert found.checked["seed"] == found.checked["replica"] == 3
