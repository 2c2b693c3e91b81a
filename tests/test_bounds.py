"""What clients send makes no new series, and what is logged of it does not grow with their number."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from httpx import Response
from prometheus_client.parser import text_string_to_metric_families

from tests.field.routes import CHAT, CLASSIFY, MESSAGES, Route, assert_shape, over
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


@pytest.mark.parametrize("how", ["whole", "chunked", "gzip"])
@pytest.mark.parametrize(("n", "calls"), [(1, 1), (2, 2)])
async def test_an_answer_is_held_up_to_a_bound_and_not_asked_for_again(how: str, n: int, calls: int) -> None:
    body = json.dumps(completion("word " * 20_000)).encode()

    async def script(seen: Seen, reply: Reply) -> None:
        if how == "gzip":
            packed = gzip.compress(body)
            reply.head(200, ("content-type", "application/json"), ("content-encoding", "gzip"), length=len(packed))
            reply.writer.write(packed)
        elif how == "whole":
            reply.head(200, ("content-type", "application/json"), length=len(body))
            reply.writer.write(body)
        else:
            reply.head(200, ("content-type", "application/json"))
            for at in range(0, len(body), 1000):
                reply.chunk(body[at : at + 1000])
            reply.end()

    async with FakeWorker(script) as one, FakeWorker(script) as two:
        pools = pool("policy", one.url, two.url)
        for bound, status in ((len(body), 200), (len(body) - 1, 502)):
            async with gateway(pools, limits={"answer_bytes": bound}, health={"breaks": 1}) as gate:
                before = len(one.seen) + len(two.seen)
                answer = await gate.http.post("/v1/chat/completions", json=chat(n=n))
                assert answer.status_code == status, answer.text
                assert len(one.seen) + len(two.seen) <= before + calls
                assert all(replica.usable for replica in gate.gateway.fleet.replicas)
        assert answer.json()["error"]["code"] == "answer_too_large"
        assert answer.headers["x-should-retry"] == "false"


async def test_a_stream_may_be_longer_than_an_answer_that_is_held() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(b"".join([*CHAT.events[:1] * 500, *CHAT.events]))  # all in one read, or few
        reply.end()

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), limits={"answer_bytes": 4_000}) as gate:
        answer = await gate.http.post(CHAT.path, json=CHAT.body(stream=True))
        assert len(answer.content) > 80_000
        assert answer.content.endswith(CHAT.events[-1])


DENSE = {
    "members": "{" + ",".join(f'"a{number}":1' for number in range(200)) + "}",
    "one name": "{" + '"seed":1,' * 300 + '"model":"m"}',
    "strings": '{"stop":[' + '"",' * 400 + '""]}',
    "escapes": '{"stop":[' + r'"\\",' * 400 + '""]}',
    "lists": '{"stop":[' + "[]," * 400 + "[]]}",
    "objects": ' \n{"stop":[' + "{}," * 400 + "{}]}",
}


@pytest.mark.parametrize("body", DENSE.values(), ids=DENSE.keys())
@over((CHAT, MESSAGES, CLASSIFY))
async def test_a_large_body_of_tiny_values_is_refused_before_it_is_read(route: Route, body: str) -> None:
    limits = {"body_values": 100}
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url), limits=limits) as gate:
        answer = await gate.http.post(route.path, content=body)
        assert answer.status_code == 413
        assert_shape(route, answer.json(), "too_many_values")
        assert worker.seen == []
        sparse = json.dumps(route.body(padding='x [1] {2} "3" ' * 10 + "x" * 2000)).encode()
        first = await gate.http.post(route.path, content=sparse)
        assert (first.status_code, first.headers["x-detgate-index"]) == (200, "0")
        small = await gate.http.post(route.path, json=route.body(padding=[[]] * 300))
        assert small.status_code == 413


async def test_a_plain_proxy_counts_no_values_in_what_is_no_json() -> None:
    body = b"\x89PNG" + b'"[{' * 1000
    limits = {"body_values": 100}

    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(completion())

    async with FakeWorker(script) as worker, gateway(pool("p", worker.url), profile="off", limits=limits) as gate:
        assert (await gate.http.post("/v1/chat/completions", content=body)).status_code == 200
        assert worker.seen[0].body == body


async def test_whoever_has_no_key_learns_nothing_of_a_body() -> None:
    auth = {"api_keys": ["sk-good-enough"]}
    async with FakeWorker() as worker, gateway(pool("p", worker.url), limits={"body_values": 100}, auth=auth) as gate:
        for headers in ({}, {"content-encoding": "gzip"}):
            answer = await gate.http.post("/v1/chat/completions", content=DENSE["lists"], headers=headers)
            assert answer.status_code == 401
