"""What comes from an engine with a good status and is no answer: 502, and the index stays for whoever asks again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.routes import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SGLANG_CHAT,
    TOKENS,
    Route,
    both_carriers,
    over,
)
from tests.harness import CarrierName, FakeWorker, Gate, Reply, Seen, chat, gateway, polite, pool

TEXT, JSON, STREAM = "text/html", "application/json", "text/event-stream"
NOTHING = [
    (200, b"", JSON),
    (200, b"<html>busy</html>", TEXT),
    (200, b"\x00\x01", JSON),
    (200, b'{"choices":[{"text":"\xff"}],"data":[],"meta_info":{"a":"\xff"}}', JSON),
    (200, b"null", JSON),
    (200, b"[]", JSON),
    (200, b"{}", JSON),
    (200, b'{"status":"ok"}', JSON),
    (200, b'{"choices":[],"usage":{"total_tokens":1}}', JSON),
    (200, b'"busy"', JSON),
    (204, None, JSON),
    (204, None, STREAM),
    (302, b"", TEXT),
    (304, None, JSON),
    (307, b'{"to":"elsewhere"}', JSON),
    (300, b"data: {}\n\n", STREAM),
]


def answering(status: int, body: bytes | None, form: str) -> FakeWorker:
    async def script(seen: Seen, reply: Reply) -> None:
        length = [] if body is None else [("content-length", str(len(body)))]
        fields = [("content-type", form), ("location", "http://elsewhere/"), *length]
        lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in fields), "", ""]
        reply.writer.write("\r\n".join(lines).encode() + (body or b""))

    return FakeWorker(script)


def closed(gate: Gate) -> list[tuple[str, bool]]:
    return [(each["outcome"], each["used"]) for each in gate.records() if each["event"] == "closed"]


@both_carriers
@pytest.mark.parametrize(("status", "body", "form"), NOTHING)
@over((CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENS, GENERATE, CLASSIFY))
async def test_what_is_no_answer_uses_no_index(
    route: Route, status: int, body: bytes | None, form: str, carrier: CarrierName
) -> None:
    async with answering(status, body, form) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(route.path, json=route.body())
        assert answer.status_code == 502
        if route is not MESSAGES:
            assert answer.json()["error"]["code"] == "no_answer"
        worker.script = route.polite
        again = await gate.http.post(route.path, json=route.body())
        assert again.content == route.answer
        assert again.headers["x-detgate-index"] == answer.headers["x-detgate-index"] == "0"
        first, second = worker.seen  # a replica that is out of step would answer the one before
        assert first.connection != second.connection
        await gate.until(lambda: len(closed(gate)) == 2)
        assert closed(gate) == [("failed", False), ("delivered", True)]


@pytest.mark.parametrize(("status", "body", "form"), NOTHING)
@over((SGLANG_CHAT, GENERATE))
async def test_nor_does_one_of_several_samples(route: Route, status: int, body: bytes | None, form: str) -> None:
    two: dict[str, Any] = {"sampling_params": {"n": 2}} if route is GENERATE else {"n": 2, "temperature": 1}
    async with answering(status, body, form) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body(**two))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_answer")
        await gate.until(lambda: closed(gate) == [("failed", False)])


@over((CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENS, GENERATE, CLASSIFY))
async def test_an_error_with_a_good_status_passes_and_uses_no_index(route: Route) -> None:
    body = b'{"error":{"message":"busy"}}'
    async with answering(200, body, JSON) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body())
        assert (answer.status_code, answer.content) == (200, body)
        await gate.until(lambda: closed(gate) == [("failed", False)])


async def test_scores_may_come_as_bytes() -> None:
    async with (
        answering(200, b"\x00\x01", "application/octet-stream") as worker,
        gateway(CLASSIFY.pool(worker.url)) as gate,
    ):
        answer = await gate.http.post(CLASSIFY.path, json=CLASSIFY.body())
        assert (answer.status_code, answer.content) == (200, b"\x00\x01")


async def test_a_plain_proxy_passes_everything_on() -> None:
    async with answering(302, b"moved", TEXT) as worker, gateway(pool("p", worker.url), profile="off") as gate:
        answer = await gate.http.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.content) == (302, b"moved")
        assert answer.headers["location"] == "http://elsewhere/"
        worker.script = polite
        assert (await gate.http.post("/v1/chat/completions", json=chat())).status_code == 200
