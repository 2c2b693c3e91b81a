"""What clients send makes no new series, and what is logged of it does not grow with their number."""

from __future__ import annotations

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
