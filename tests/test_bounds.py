"""What clients send makes no new series, and what is logged of it does not grow with their number."""

from __future__ import annotations

import asyncio

from httpx import Response
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool


async def series(gate: Gate) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    text = (await gate.http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_unknown_routes_models_sessions_and_runs_make_no_new_series() -> None:
    statuses = iter([200, 418, 599, *[200] * 1000])

    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(completion(), next(statuses))

    async def everything(gate: Gate, number: int) -> None:
        http = gate.http
        await http.post(f"/v1/unknown-{number}", json=chat())
        await http.get(f"/nowhere/{number}")
        await http.post("/v1/chat/completions", json=chat(f"{number}", model=f"model-{number}"))
        await http.post("/v1/chat/completions", json=chat(f"{number}"), headers={"X-Detgate-Pool": f"pool-{number}"})
        await http.post(f"/sessions/s{number}/v1/chat/completions", json=chat(f"{number}"))
        await http.post("/v1/chat/completions", content=f"{{{number}".encode())
        await http.post("/v1/chat/completions", json=chat(seed=-number - 1))

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        for number in range(5):
            await everything(gate, number)
        before = await series(gate)
        for number in range(5, 40):
            await everything(gate, number)
        assert await series(gate) == before
        assert len(before) < 400


async def test_requests_that_are_taken_apart_hold_no_more_together_than_held_bytes() -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        await go.wait()
        reply.json(completion())

    async def ask(gate: Gate, session: str) -> Response:
        body = chat("x" * 1000, n=4)
        return await gate.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session})

    limits = {"body_bytes": 5000, "held_bytes": 7000}
    async with (
        FakeWorker(script) as worker,
        gateway(pool("policy", worker.url, engine="sglang"), limits=limits) as gate,
    ):
        first = asyncio.create_task(ask(gate, "a"))
        await gate.until(lambda: len(worker.seen) == 4)
        refused = await ask(gate, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bytes")
        assert refused.headers["retry-after"] == "1"
        go.set()
        assert (await first).status_code == 200
        again = await ask(gate, "b")
        assert (again.status_code, again.headers["x-detgate-index"]) == (200, "0")
