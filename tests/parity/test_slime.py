"""What slime's deterministic rollouts do, done by the gateway: a seed for each sample, and turns that stay together."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.harness import FakeWorker, Gate, gateway, pool
from tests.sim.serving import serving

SAMPLES = 4


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 1}} | fields


@pytest.mark.parametrize("by_header", [True, False])
async def test_sample_i_of_every_prompt_has_the_rollout_seed_plus_i(by_header: bool) -> None:
    async with (
        serving("sglang") as (server, _),
        gateway(pool("policy", server.url, engine="sglang", models=["sim-model"]), scheme="offset", seed=42) as gate,
    ):
        for prompt in range(2):
            if by_header:
                headers = [
                    {"x-session-id": f"{prompt}:{sample}", "x-member-index": str(sample)} for sample in range(SAMPLES)
                ]
            else:
                wanted = {"identity": str(prompt), "group_size": SAMPLES}
                group = (await gate.http.post("/sessions", json=wanted)).json()
                headers = [{"authorization": f"Bearer {each['api_key']}"} for each in group["sessions"]]
            said = []
            for sample, names in enumerate(headers):
                answer = await gate.http.post("/generate", json=body([prompt, 5]), headers=names)
                assert int(answer.headers["x-detgate-seed"]) == 42 + sample
                said.append(answer.json()["output_ids"])
            assert len({str(each) for each in said}) == SAMPLES


async def routed(gate: Gate, session: str) -> set[str]:
    """Where three turns go, each with the routing key of this run, as slime draws one for each sample."""
    names = {"x-session-id": session, "x-smg-routing-key": uuid4().hex}
    answers = [await gate.http.post("/generate", json=body([1, turn]), headers=names) for turn in range(3)]
    return {answer.headers["x-detgate-replica"] for answer in answers}


async def test_turns_stay_on_a_replica_that_a_random_routing_key_does_not_choose() -> None:
    async def script(seen: Any, reply: Any) -> None:
        reply.json({"text": "a", "output_ids": [1], "meta_info": {"id": "x", "finish_reason": {"type": "stop"}}})

    async with FakeWorker(script) as first, FakeWorker(script) as second:
        runs = []
        for _ in range(2):
            async with gateway(
                pool("policy", first.url, second.url, engine="sglang"), routing={"slack": "inf", "key": "session"}
            ) as gate:
                runs.append([await routed(gate, f"{sample}") for sample in range(12)])
        assert runs[0] == runs[1]
        assert all(len(each) == 1 for each in runs[0])
        assert len(set.union(*runs[0])) == 2
