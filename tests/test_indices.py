"""Indices through a whole gateway: who gets which, in every order, over every carrier, through failures and retries."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote

import httpx
import openai
import pytest

from gateway import schemes
from gateway.engines.vllm import ROUTES
from gateway.stores import ScopeKey
from gateway.stores.memory import MemoryStore
from tests.harness import (
    DONE,
    MODEL,
    CarrierName,
    FakeWorker,
    Gate,
    Reply,
    Script,
    Seen,
    Wire,
    chat,
    completion,
    delta,
    gateway,
    polite,
    pool,
)
from tests.stores.memory import waiting as held_back

CHAT = "/v1/chat/completions"
UUID = "2f1b3c4d-5e6f-4a1b-8c2d-9e0f1a2b3c4d"

both_carriers = pytest.mark.parametrize("carrier", ["http1", "asgi"])


@asynccontextmanager
async def gate_of(script: Script = polite, **settings: Any) -> AsyncIterator[tuple[FakeWorker, Gate]]:
    """A gateway with one replica that does what the script says."""
    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), **settings) as gate:
        yield worker, gate


async def ask(gate: Gate, text: str = "hello", session: str | None = "s", **headers: str) -> httpx.Response:
    """A chat request. Headers by their names, `_` for `-`."""
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    if session is not None:
        given[b"X-Session-ID"] = session.encode()
    return await gate.http.post(CHAT, content=raw(chat(text)), headers=given)


def raw(body: Any) -> bytes:
    """The bytes of a request: a `Wire` sends the same."""
    return json.dumps(body).encode()


def index(answer: httpx.Response) -> int:
    assert answer.status_code < 400 or "x-detgate-index" in answer.headers, answer.text
    return int(answer.headers["x-detgate-index"])


def said(answer: httpx.Response) -> tuple[str, str]:
    """Request id and seed."""
    return answer.headers["x-detgate-request-id"], answer.headers["x-detgate-seed"]


def reasons(answer: httpx.Response) -> set[str]:
    """Why the guarantee is no better. A worker of these tests says nothing of its mode."""
    return set(answer.headers["x-detgate-guarantee"].split("; ")[1:]) - {"unverified"}


def refused(answer: httpx.Response, status: int, code: str, param: str | None) -> str:
    """The message of a refusal that must look like this."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert answer.headers.get("x-should-retry") == "false"
    return str(error["message"])


# --- orders


async def test_arrival_order_counts_requests_and_derives_seeds() -> None:
    async with gate_of(seed=7) as (worker, gate):
        answers = [await ask(gate, text, "17:3") for text in ("a", "b", "a")]
    assert [said(answer)[0] for answer in answers] == ["17:3:0", "17:3:1", "17:3:2"]
    derived = [schemes.load("v1").seed(7, "17:3", number, None) for number in range(3)]
    assert [seen.json["seed"] for seen in worker.seen] == derived
    assert [int(answer.headers["x-detgate-seed"]) for answer in answers] == derived
    assert [reasons(answer) for answer in answers] == [set(), set(), set()]


async def test_content_order_numbers_equal_requests_whatever_their_order() -> None:
    async def run(texts: list[str]) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        async with gate_of(index_order="content") as (_, gate):
            for text in texts:
                found.setdefault(text, []).append(said(await ask(gate, text)))
        return found

    first = await run(["a", "b", "a", "c", "a"])
    assert first == await run(["c", "a", "a", "b", "a"])
    assert [request.rsplit(":", 1)[1] for request, _ in first["a"]] == ["0", "1", "2"]
    assert len({seed for asked in first.values() for _, seed in asked}) == 5


async def test_content_order_by_header_for_one_request() -> None:
    async with gate_of() as (_, gate):
        assert said(await ask(gate, "a"))[0] == "s:0"
        by_content = await ask(gate, "a", X_Index_Order="content")
        assert said(by_content)[0].startswith("s/")
        assert index(by_content) == 0
        assert said(await ask(gate, "b"))[0] == "s:1"


async def test_content_order_leaves_out_what_does_not_sample() -> None:
    async with gate_of(index_order="content") as (_, gate):
        whole = await ask(gate, "a")
        body = chat("a", user="me", metadata={"x": "1"}, stream=True)
        again = await gate.http.post(CHAT, json=body, headers={"X-Session-ID": "s"})
        assert said(again)[0] == said(whole)[0].replace(":0", ":1")


async def test_client_order_takes_the_number_that_is_given() -> None:
    async with gate_of() as (worker, gate):
        answers = [await ask(gate, text, X_Request_Index=number) for text, number in (("a", "5"), ("b", "0"))]
        assert [said(answer)[0] for answer in answers] == ["s:5", "s:0"]
        again = await ask(gate, "a", X_Request_Index="5")
        assert said(again) == said(answers[0])
        assert worker.seen[2].json["seed"] == worker.seen[0].json["seed"]
        conflict = await ask(gate, "c", X_Request_Index="5")
        assert "an index of its own" in refused(conflict, 409, "index_conflict", "X-Request-Index")
        mixed = await ask(gate, "d")
        assert "first request fixed" in refused(mixed, 409, "mixed_order", "X-Request-Index")
        assert len(worker.seen) == 3
        assert await gate.gauge("detgate_index_reused_total") == 1


async def test_a_session_that_counts_takes_no_numbers() -> None:
    async with gate_of() as (_, gate):
        await ask(gate, "a")
        refused(await ask(gate, "b", X_Request_Index="1"), 409, "mixed_order", "X-Request-Index")
        assert index(await ask(gate, "c")) == 1


async def test_scores_are_always_in_content_order() -> None:
    async def score(seen: Seen, reply: Reply) -> None:
        reply.json({"data": [], "model": MODEL, "object": "list", "usage": {}})

    async with FakeWorker(score) as worker, gateway(pool("rm", worker.url, role="reward")) as gate:
        for headers in ({}, {"X-Index-Order": "arrival"}, {"X-Request-Index": "7"}):
            body = {"model": MODEL, "input": "a"}
            answer = await gate.http.post("/sessions/s/classify", json=body, headers=headers)
            assert answer.headers["x-detgate-request-id"].startswith("s/")
        assert index(answer) == 2


async def test_what_neither_samples_nor_scores_takes_no_index() -> None:
    async with gate_of() as (_, gate):
        body = {"model": MODEL, "prompt": "a"}
        tokens = await gate.http.post("/sessions/s/tokenize", json=body)
        assert tokens.status_code == 200
        assert "x-detgate-index" not in tokens.headers
        assert index(await ask(gate)) == 0


async def test_a_clients_own_seed_takes_an_index_too() -> None:
    async with gate_of() as (_, gate):
        own = await gate.http.post(CHAT, json=chat(seed=42), headers={"X-Session-ID": "s"})
        assert (index(own), own.headers["x-detgate-seed"], own.headers["x-detgate-seed-source"]) == (0, "42", "client")
        assert index(await ask(gate)) == 1


@pytest.mark.parametrize(("engine", "calls"), [("vllm", 1), ("sglang", 3)])
async def test_one_call_takes_one_index_whatever_its_n(engine: str, calls: int) -> None:
    async def choices(seen: Seen, reply: Reply) -> None:
        one = completion()["choices"][0]
        reply.json(completion(choices=[one | {"index": number} for number in range(seen.json.get("n", 1))]))

    async with (
        FakeWorker(choices) as worker,
        gateway(pool("policy", worker.url, engine=engine)) as gate,
    ):
        answer = await gate.http.post(CHAT, json=chat(n=3), headers={"X-Session-ID": "s"})
        assert (index(answer), len(answer.json()["choices"])) == (0, 3)
        assert len(worker.seen) == calls
        assert index(await ask(gate)) == 1


async def test_one_call_takes_one_index_whatever_its_prompts() -> None:
    async def text(seen: Seen, reply: Reply) -> None:
        choice = {"index": 0, "text": "hi", "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply.json({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})

    async with gate_of(text) as (worker, gate):
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        answer = await gate.http.post("/sessions/s/v1/completions", json=body)
        assert index(answer) == 0
        assert len({seen.json["seed"] for seen in worker.seen}) == 3
        again = await gate.http.post("/sessions/s/v1/completions", json=body)
        assert index(again) == 1


# --- who asks


@pytest.mark.parametrize(
    ("path", "headers", "session", "run"),
    [
        ("/sessions/17:3", {}, "17:3", None),
        ("/sessions/17%3A3", {}, "17:3", None),
        ("/runs/r1/sessions/17:3", {}, "17:3", "r1"),
        ("/runs/r1", {"X-Session-ID": "17:3"}, "17:3", "r1"),
        ("", {"X-Session-ID": "17:3"}, "17:3", None),
        ("", {"X-Session-ID": "17:3", "X-Detgate-Run": "r2"}, "17:3", "r2"),
        ("/runs/r1", {"X-Session-ID": "17:3", "X-Detgate-Run": "r2"}, "17:3", "r2"),
        ("/sessions/17:3", {"X-Session-ID": "other"}, "17:3", None),
        ("/sessions/a%2Fb", {}, "a/b", None),
        ("/sessions/caf%C3%A9", {}, "café", None),
        ("/sessions/a%20b", {}, "a b", None),
        ("/sessions/50%25", {}, "50%", None),
        ("//sessions/a/", {}, "a", None),
        ("/sessions/sessions", {}, "sessions", None),
        ("/sessions/runs", {}, "runs", None),
    ],
)
@both_carriers
async def test_session_and_run_by_path_and_header(
    path: str, headers: dict[str, str], session: str, run: str | None, carrier: CarrierName
) -> None:
    async with gate_of(carrier=carrier, run="r0") as (worker, gate), Wire(gate.port) as wire:
        wire.post(path + CHAT, chat(), *headers.items())
        assert await wire.head() == 200
        await wire.body()
        assert wire.header("x-detgate-request-id") == f"{quote(session, safe=':/')}:0"
        assert unquote(wire.header("x-detgate-session") or "") == session
        await gate.until(lambda: len(gate.records()) == 2)
        opened, closed = gate.records()
        assert {(opened[key], closed[key]) for key in ("session", "identity")} == {(session, session)}
        assert (opened["run"], closed["run"]) == (run or "r0", run or "r0")
        assert worker.seen[0].target == CHAT


async def test_one_session_by_path_and_by_header_has_one_counter() -> None:
    async with gate_of() as (_, gate):
        assert index(await ask(gate, session="17:3")) == 0
        assert index(await gate.http.post(f"/sessions/17%3A3{CHAT}", json=chat())) == 1
        assert index(await gate.http.post(f"/sessions/17:3{CHAT}", json=chat())) == 2


async def test_a_run_has_counters_of_its_own_and_the_same_seeds() -> None:
    async with gate_of() as (_, gate):
        runs = [[said(await ask(gate, text, X_Detgate_Run=run)) for text in "ab"] for run in ("one", "two")]
        assert runs[0] == runs[1]


async def test_the_identity_names_the_seeds_and_the_session_the_counter() -> None:
    async with gate_of() as (_, gate):
        first = await ask(gate, "a", UUID, X_Detgate_Identity="17:3")
        assert said(first)[0] == "17:3:0"
        assert first.headers["x-detgate-session"] == UUID
        assert reasons(first) == set()
        assert said(await ask(gate, "b", UUID, X_Detgate_Identity="17:3"))[0] == "17:3:1"
        again = await ask(gate, "a", UUID.replace("2f", "3f"), X_Detgate_Identity="17:3")
        assert said(again) == said(first)


async def test_requests_without_a_session_are_numbered_by_content() -> None:
    async with gate_of() as (_, gate):
        texts = ["a", "b", "a"]
        random.Random(3).shuffle(texts)
        answers = [await ask(gate, text, session=None) for text in texts]
        assert {answer.headers["x-detgate-session"] for answer in answers} == {"anonymous"}
        assert sorted(index(answer) for answer in answers) == [0, 0, 1]
        assert all(said(answer)[0].startswith("anonymous/") for answer in answers)
        named = await ask(gate, "a", session=None, X_Detgate_Identity="eval")
        assert said(named)[0].startswith("eval/")
        arrival = await ask(gate, "c", session=None, X_Index_Order="arrival")
        assert said(arrival)[0].startswith("anonymous/")


async def test_a_session_can_be_required() -> None:
    async with gate_of(sessions={"required": True}) as (worker, gate):
        answer = await ask(gate, session=None)
        assert "X-Session-ID" in refused(answer, 400, "session_required", "X-Session-ID")
        assert worker.seen == []
        assert index(await ask(gate)) == 0


async def test_a_random_session_is_marked() -> None:
    async with gate_of() as (_, gate):
        answer = await ask(gate, session=UUID)
        assert reasons(answer) == {"random-session"}
        assert answer.headers["x-detgate-guarantee"].startswith("none;")


async def test_so_is_a_random_identity_in_strict() -> None:
    async with gate_of(profile="strict") as (worker, gate):
        for session in ("s", None):
            answer = await ask(gate, session=session, X_Detgate_Identity=UUID)
            refused(answer, 400, "random_session", "X-Detgate-Identity")
        assert worker.seen == []
    async with gate_of(profile="strict", sessions={"allow_random": True}) as (_, gate):
        assert reasons(await ask(gate, X_Detgate_Identity=UUID)) == {"random-session"}


async def test_a_random_session_is_refused_in_strict_unless_it_has_an_identity_or_is_allowed() -> None:
    async with gate_of(profile="strict") as (worker, gate):
        message = refused(await ask(gate, session=UUID), 400, "random_session", "X-Session-ID")
        assert "X-Detgate-Identity" in message
        assert worker.seen == []
        assert (await ask(gate, session=UUID, X_Detgate_Identity="1")).status_code == 200
    async with gate_of(profile="strict", sessions={"allow_random": True}) as (_, gate):
        assert reasons(await ask(gate, session=UUID)) == {"random-session"}


# --- refusals


@pytest.mark.parametrize(
    ("path", "name", "value", "param"),
    [
        ("", "X-Session-ID", b"", "X-Session-ID"),
        ("", "X-Session-ID", b"a\xffb", "X-Session-ID"),
        ("", "X-Session-ID", b"a" * 257, "X-Session-ID"),
        ("", "X-Detgate-Identity", b"", "X-Detgate-Identity"),
        ("", "X-Detgate-Identity", b"a\xff", "X-Detgate-Identity"),
        ("", "X-Detgate-Run", b"a/b", "X-Detgate-Run"),
        ("", "X-Detgate-Run", b"", "X-Detgate-Run"),
        ("", "X-Detgate-Run", b"..", "X-Detgate-Run"),
        ("", "X-Index-Order", b"random", "X-Index-Order"),
        ("", "X-Index-Order", b"client", "X-Index-Order"),
        ("", "X-Member-Index", b"x", "X-Member-Index"),
        ("", "Idempotency-Key", b"", "Idempotency-Key"),
        ("", "Idempotency-Key", b"k" * 257, "Idempotency-Key"),
        *(
            ("/sessions/s", "X-Request-Index", value, "X-Request-Index")
            for value in (b"", b"-1", b"1.0", b"1e3", b"0x1", b"one", b"2147483648", b"9" * 40, b"1 2")
        ),
        ("/sessions/a%00b", "X-Fine", b"", "session id"),
        ("/sessions/a%FFb", "X-Fine", b"", "session id"),
        (f"/sessions/{'a' * 257}", "X-Fine", b"", "session id"),
        ("/runs/a%2Fb", "X-Fine", b"", "run"),
    ],
)
async def test_a_malformed_header_or_path_is_refused_by_name(path: str, name: str, value: bytes, param: str) -> None:
    async with gate_of() as (worker, gate):
        headers = {name: value} if name == "X-Session-ID" else {"X-Session-ID": b"s", name: value}
        fields = [(key.encode(), each) for key, each in headers.items()]
        refused(await gate.http.post(path + CHAT, json=chat(), headers=fields), 400, "invalid_header", param)
        assert worker.seen == []
        assert index(await ask(gate)) == 0


@both_carriers
async def test_spaces_around_a_headers_value_are_no_part_of_it(carrier: CarrierName) -> None:
    """A proxy in front may take them away (RFC 9110, 5.5)."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        body = json.dumps(chat()).encode()
        lines = [b"host: g", b"x-session-id: \t 17:3 \t ", b"x-request-index:4  ", b"content-length: %d " % len(body)]
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
        writer.write(b"POST %b HTTP/1.1\r\n%b\r\n\r\n%b" % (CHAT.encode(), b"\r\n".join(lines), body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
        assert b"x-detgate-request-id: 17:3:4\r\n" in head
        assert b"x-detgate-session: 17:3\r\n" in head


async def test_a_number_needs_a_session() -> None:
    async with gate_of() as (_, gate):
        refused(await ask(gate, session=None, X_Request_Index="1"), 400, "session_required", "X-Request-Index")


async def test_the_largest_values_are_taken() -> None:
    async with gate_of() as (_, gate):
        assert index(await ask(gate, session="n", X_Request_Index="2147483647")) == 2**31 - 1
        assert index(await ask(gate, session="é" * 128)) == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"", 400),
        (CHAT, b"{", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"model": "test-model", "messages": [], "seed": 1, "seed": 2}', 400),
        *(
            (CHAT, b'{"model": "test-model", "messages": [], "seed": %b}' % seed, 400)
            for seed in (b"-1", b'"12"', b"true", b"1.5", b"1e3", b"9223372036854775808")
        ),
        (CHAT, b'{"model": "test-model", "messages": [], "seed": 1, "sampling_seed": 2}', 400),
        (CHAT, b'{"model": "test-model", "messages": [], "n": "two"}', 400),
        (CHAT, b'{"model": "test-model", "messages": [], "n": 100000}', 400),
        (CHAT, b'{"model": "no-such-model", "messages": []}', 404),
        (CHAT, b'{"model": "test-model", "x": "' + b"a" * 2000 + b'"}', 413),
        ("/v1/nothing", b"{}", 404),
        ("/classify", b'{"model": "test-model", "input": "a"}', 400),
        *(
            (
                "/inference/v1/generate",
                b'{"model": "test-model", "token_ids": [1], "sampling_params": %b}' % params,
                400,
            )
            for params in (b"true", b"1", b'"x"', b"[]", b'[{"n": 1}]')
        ),
        (
            "/v1/completions",
            b'{"model": "test-model", "prompt": ["a", "b"], "prompt_embeds": ["c", "d"], "n": 5000}',
            400,
        ),
    ],
)
async def test_what_is_refused_before_it_could_be_sampled_takes_no_index(path: str, body: bytes, status: int) -> None:
    async with gate_of(limits={"body_bytes": 1024}) as (worker, gate):
        answer = await gate.http.post(f"/sessions/s{path}", content=body)
        assert answer.status_code == status, answer.text
        assert "x-detgate-index" not in answer.headers
        if status == 400:
            assert answer.headers["x-should-retry"] == "false"
        assert worker.seen == []
        assert index(await ask(gate)) == 0


async def test_what_cannot_be_shared_out_takes_no_index() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        body = {"text": ["a", "b"], "sampling_params": [{"temperature": 1}]}
        refused(await gate.http.post("/sessions/s/generate", json=body), 400, "cannot_split", "sampling_params")
        assert index(await ask(gate)) == 0


async def test_a_wrong_method_and_a_missing_key_take_no_index() -> None:
    async with gate_of(auth={"api_keys": ["secret"]}) as (_, gate):
        assert (await ask(gate)).status_code == 401
        gate.http.headers["authorization"] = "Bearer secret"
        assert (await gate.http.get(f"/sessions/s{CHAT}")).status_code == 405
        assert index(await ask(gate)) == 0


# --- what releases an index, and what uses it


def failing(*statuses: int) -> Script:
    """Answers with these statuses, one after the other, then politely."""
    left = list(statuses)

    async def script(seen: Seen, reply: Reply) -> None:
        if left and (status := left.pop(0)) != 200:
            reply.json({"error": {"message": "no", "type": "x", "param": None, "code": status}}, status)
        else:
            await polite(seen, reply)

    return script


@pytest.mark.parametrize("status", [401, 403, 404, 408, 409, 429, 500, 501, 502, 503, 504])
async def test_an_engines_failure_releases_the_index(status: int) -> None:
    async with gate_of(failing(status)) as (_, gate):
        failed = await ask(gate, "a")
        assert (failed.status_code, index(failed)) == (status, 0)
        assert index(await ask(gate, "b")) == 1
        again = await ask(gate, "a")
        assert said(again) == said(failed)
        assert index(await ask(gate, "a")) == 2
        await gate.until(lambda: len(gate.records()) == 8)
        used = [(record["index"], record["used"]) for record in gate.records() if record["event"] == "closed"]
        assert used == [(0, False), (1, True), (0, True), (2, True)]
        assert await gate.gauge("detgate_index_reused_total") == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_an_engines_refusal_of_the_request_uses_the_index(status: int) -> None:
    async with gate_of(failing(status)) as (_, gate):
        assert index(await ask(gate, "a")) == 0
        assert index(await ask(gate, "a")) == 1


Broken = Callable[[Seen, Reply], None]


def reset(seen: Seen, reply: Reply) -> None:
    reply.reset()


def half_an_answer(seen: Seen, reply: Reply) -> None:
    reply.head(200, ("content-type", "application/json"), length=1000)
    reply.writer.write(b"{")
    reply.close()


def half_a_stream(seen: Seen, reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h"))
    reply.close()


def a_stream_without_an_end(seen: Seen, reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h"))
    reply.end()


def an_error_in_a_stream(seen: Seen, reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h") + 'data: {"error": {"message": "engine died", "code": 500}}\n\n' + DONE)
    reply.end()


def aborted(seen: Seen, reply: Reply) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "h"}, "finish_reason": "abort"}
    reply.json(completion(choices=[choice]))


def an_aborted_stream(seen: Seen, reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h") + delta("", "abort") + DONE)
    reply.end()


@pytest.mark.parametrize(
    "broken",
    [
        reset,
        half_an_answer,
        half_a_stream,
        a_stream_without_an_end,
        an_error_in_a_stream,
        aborted,
        an_aborted_stream,
    ],
    ids=lambda broken: broken.__name__,
)
async def test_an_answer_that_is_none_releases_the_index(broken: Broken) -> None:
    first = True

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal first
        if first:
            first = False
            broken(seen, reply)
        else:
            await polite(seen, reply)

    async with gate_of(script) as (worker, gate):
        body = chat("a", stream="stream" in broken.__name__)
        url = f"/sessions/s{CHAT}"
        async with Wire(gate.port) as wire:
            wire.post(url, body)
            await wire.head()
            assert wire.header("x-detgate-index") == "0"
            await gate.until(lambda: len(gate.records()) == 2)
        again = await gate.http.post(url, content=raw(body))
        assert (again.status_code, index(again)) == (200, 0)
        assert worker.seen[0].json["seed"] == worker.seen[-1].json["seed"]
        assert index(await gate.http.post(url, content=raw(body))) == 1


async def test_no_healthy_replica_releases_the_index() -> None:
    async with gate_of() as (worker, gate):
        await worker.stop()
        failed = await ask(gate, "a")
        assert failed.status_code in (502, 503)
        assert index(failed) == 0
        async with FakeWorker(port=worker.port):
            await gate.until(lambda: all(replica.state == "up" for replica in gate.gateway.fleet.replicas))
            assert index(await ask(gate, "b")) == 1
            assert index(await ask(gate, "a")) == 0


class Held:
    """Begins an answer as it is told, then waits to be let go."""

    def __init__(self, begin: Callable[[Reply], None] = lambda reply: None) -> None:
        self.begin = begin
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        if self.go.is_set():
            await polite(seen, reply)
            return
        self.begin(reply)
        await reply.writer.drain()
        self.arrived.set()
        await reply.gone()


def begun(reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h"))


@both_carriers
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_a_byte_reached_it_gives_the_index_back(
    stream: bool, carrier: CarrierName
) -> None:
    held = Held()
    async with gate_of(held, carrier=carrier) as (_, gate):
        url = f"/sessions/s{CHAT}"
        async with Wire(gate.port) as wire:
            wire.post(url, chat("a", stream=stream))
            await held.arrived.wait()
        held.go.set()
        await gate.until(lambda: len(gate.records()) == 2)
        assert gate.records()[-1]["outcome"] == "abandoned"
        assert index(await gate.http.post(url, content=raw(chat("b")))) == 1
        assert index(await gate.http.post(url, content=raw(chat("a", stream=stream)))) == 0


@both_carriers
async def test_a_client_that_leaves_after_a_byte_reached_it_has_used_the_index(carrier: CarrierName) -> None:
    held = Held(begun)
    async with gate_of(held, carrier=carrier) as (_, gate):
        url, body = f"/sessions/s{CHAT}", chat("a", stream=True)
        async with Wire(gate.port) as wire:
            wire.post(url, body)
            await wire.head()
            await wire.chunk()
        held.go.set()
        await gate.until(lambda: len(gate.records()) == 2)
        closed = gate.records()[-1]
        assert (closed["outcome"], closed["used"]) == ("abandoned", True)
        repeat = await gate.http.post(url, content=raw(body), headers={"x-stainless-retry-count": "1"})
        assert (index(repeat), reasons(repeat)) == (0, {"retry-shared"})
        assert index(await gate.http.post(url, content=raw(body))) == 1


async def test_a_repeat_of_what_is_still_in_flight_waits_for_its_index() -> None:
    held = Held()
    async with gate_of(held) as (_, gate):
        async with Wire(gate.port) as wire:
            wire.post(CHAT, chat("a"), ("X-Session-ID", "s"))
            await held.arrived.wait()
            held.go.set()
            headers = {"x-stainless-retry-count": "1"}
            repeat = asyncio.create_task(ask(gate, "a", **headers))
            await gate.until(lambda: waiting(gate) == 1)
        answer = await repeat
        assert (index(answer), reasons(answer)) == (0, set())


def waiting(gate: Gate) -> int:
    """Claims that wait in the gateway's store."""
    store = gate.gateway.pipeline.store
    assert isinstance(store, MemoryStore)
    return held_back(store)


async def test_a_repeat_that_waited_in_vain_shares_the_index() -> None:
    held = Held()
    async with gate_of(held, timeouts={"settle": 0.05}) as (_, gate), Wire(gate.port) as wire:
        wire.post(CHAT, chat("a"), ("X-Session-ID", "s"))
        await held.arrived.wait()
        held.go.set()
        headers = {"x-stainless-retry-count": "1"}
        async with asyncio.timeout(2):
            answer = await ask(gate, "a", **headers)
        assert (index(answer), reasons(answer)) == (0, {"retry-shared"})


async def test_an_idempotency_key_is_bound_to_its_index() -> None:
    async with gate_of(failing(500)) as (worker, gate):
        answers = [await ask(gate, "a", Idempotency_Key="k")]
        assert index(await ask(gate, "a")) == 1
        answers += [await ask(gate, "a", Idempotency_Key="k") for _ in range(2)]
        assert [index(answer) for answer in answers] == [0, 0, 0]
        assert len({said(answer) for answer in answers}) == 1
        refused(await ask(gate, "b", Idempotency_Key="k"), 409, "idempotency_conflict", "Idempotency-Key")
        assert len(worker.seen) == 4
        elsewhere = await ask(gate, "b", "other", Idempotency_Key="k")
        assert index(elsewhere) == 0


# --- the OpenAI SDK's own retries


class Eager(openai.AsyncOpenAI):
    """The SDK, without its pauses between retries."""

    def _calculate_retry_timeout(self, *args: object, **more: object) -> float:
        return 0.0


@asynccontextmanager
async def sdk(gate: Gate, session: str = "s", **settings: Any) -> AsyncIterator[Eager]:
    base = f"{gate.url}/sessions/{session}/v1"
    async with Eager(base_url=base, api_key="key", timeout=10, **settings) as client:
        yield client


async def sampled(client: Eager, text: str = "hello") -> httpx.Headers:
    """One request through the SDK: the headers of the answer that it took."""
    answer = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": text}]
    )
    answer.parse()
    return httpx.Headers(list(answer.headers.items()))


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 0], ids=lambda status: str(status or "reset"))
async def test_a_retry_of_the_sdk_has_the_same_index_and_seed(status: int) -> None:
    inner = failing(status)

    async def script(seen: Seen, reply: Reply) -> None:
        if status == 0 and len(worker.seen) == 1:
            reply.reset()
        else:
            await inner(seen, reply)

    inner = failing() if status == 0 else inner
    async with gate_of(script) as (worker, gate), sdk(gate) as client:
        headers = await sampled(client)
        first, second = worker.seen
        assert second.header("x-stainless-retry-count") == "1"
        assert first.body == second.body
        assert headers["x-detgate-request-id"] == "s:0"
        assert headers["x-detgate-seed"] == str(first.json["seed"])
        assert (await sampled(client))["x-detgate-request-id"] == "s:1"


async def test_retries_of_the_sdk_end_and_the_index_stays_for_the_next_who_asks() -> None:
    async with gate_of(failing(503, 503, 503)) as (worker, gate), sdk(gate, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await sampled(client)
        assert len(worker.seen) == 3
        assert (await sampled(client))["x-detgate-request-id"] == "s:0"
        assert len({seen.json["seed"] for seen in worker.seen}) == 1


@pytest.mark.parametrize("order", ["arrival", "content"])
@pytest.mark.parametrize("seed", range(6))
async def test_identical_requests_with_failures_get_each_its_own_seed(seed: int, order: str) -> None:
    """Whoever fails and retries, the answers that are delivered have the same n indices as without failures."""
    chance = random.Random(seed)

    async def script(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(chance.random() * 0.01)
        roll = chance.random()
        if roll < 0.25:
            reply.json({"error": {"message": "no"}}, 503)
        elif roll < 0.4:
            reply.reset()
        else:
            await polite(seen, reply)

    async with (
        gate_of(script, index_order=order, health={"interval": 0.02}) as (_, gate),
        sdk(gate, max_retries=30) as client,
    ):
        answers = await asyncio.gather(*(sampled(client) for _ in range(8)))
        assert sorted(int(answer["x-detgate-index"]) for answer in answers) == list(range(8))
        identity = answers[0]["x-detgate-request-id"].rsplit(":", 1)[0]
        seeds = {schemes.load("v1").seed(42, identity.replace("%2F", "/"), number, None) for number in range(8)}
        assert {int(answer["x-detgate-seed"]) for answer in answers} == seeds


# --- racing


class Together:
    """Answers when so many requests are in flight at once."""

    def __init__(self, count: int) -> None:
        self.barrier = asyncio.Barrier(count)

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        await self.barrier.wait()
        await polite(seen, reply)


async def at_once(order: str, texts: list[str], stream: bool = False) -> tuple[dict[str, str], list[str], Gate, float]:
    """Send all at once: each prompt's seed, the guarantees, and how many the gateway counted as racing."""
    async with gate_of(Together(len(texts)), index_order=order) as (_, gate):
        url = f"/sessions/s{CHAT}"
        answers = await asyncio.gather(*(gate.http.post(url, json=chat(text, stream=stream)) for text in texts))
        await gate.until(lambda: len(gate.records()) == 2 * len(texts))
        racing = await gate.gauge("detgate_racing_total")
        closed = [record["racing"] for record in gate.records() if record["event"] == "closed"]
        assert closed == [order == "arrival"] * len(texts)
        seeds = {text: answer.headers["x-detgate-seed"] for text, answer in zip(texts, answers, strict=True)}
        return seeds, [answer.headers["x-detgate-guarantee"] for answer in answers], gate, racing


PROMPTS = [f"prompt {number}" for number in range(16)]


async def test_siblings_in_content_order_repeat_whatever_order_they_are_sent_in() -> None:
    seeds, guarantees, _, racing = await at_once("content", PROMPTS)
    shuffled, *_ = await at_once("content", random.Random(1).sample(PROMPTS, len(PROMPTS)))
    assert shuffled == seeds
    assert len(set(seeds.values())) == 16
    assert (set(guarantees), racing) == ({"balanced; unverified"}, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_siblings_in_arrival_order_are_all_said_to_have_raced(stream: bool) -> None:
    """In ledger and metrics, and in the headers too: none had left when the last of them arrived."""
    seeds, guarantees, _, racing = await at_once("arrival", PROMPTS, stream)
    assert len(set(seeds.values())) == 16
    assert (set(guarantees), racing) == ({"none; racing; unverified"}, 16)


async def test_a_race_is_recorded_of_a_stream_whose_head_has_left() -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json.get("stream"):
            reply.sse()
            reply.chunk(delta("h"))
            await go.wait()
            reply.chunk(delta("", "stop") + DONE)
            reply.end()
        else:
            await polite(seen, reply)

    async with gate_of(script) as (_, gate), Wire(gate.port) as wire:
        wire.post(f"/sessions/s{CHAT}", chat("a", stream=True))
        await wire.head()
        await wire.chunk()
        assert "racing" not in (wire.header("x-detgate-guarantee") or "")
        assert reasons(await ask(gate, "b")) == {"racing"}
        go.set()
        assert await wire.body()
        await gate.until(lambda: len(gate.records()) == 4)
        assert [record["racing"] for record in gate.records() if record["event"] == "closed"] == [True, True]
        assert await gate.gauge("detgate_racing_total") == 2


async def test_equal_requests_at_once_do_not_race() -> None:
    async with gate_of(Together(8)) as (_, gate):
        answers = await asyncio.gather(*(ask(gate, "a") for _ in range(8)))
        assert sorted(index(answer) for answer in answers) == list(range(8))
        assert [reasons(answer) for answer in answers] == [set()] * 8


async def test_sessions_do_not_race_each_other() -> None:
    async with gate_of(Together(8)) as (_, gate):
        answers = await asyncio.gather(*(ask(gate, text, text) for text in "abcdefgh"))
        assert [(index(answer), reasons(answer)) for answer in answers] == [(0, set())] * 8


@both_carriers
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_one_at_a_time_never_races_itself(stream: bool, carrier: CarrierName) -> None:
    """Strict and without patience: the next request comes while the last byte of the answer is still warm."""
    async with (
        gate_of(carrier=carrier, profile="strict", timeouts={"settle": 0}) as (_, gate),
        Wire(gate.port) as wire,
    ):
        for number in range(20):
            wire.post(f"/sessions/s{CHAT}", chat(f"{number}", stream=stream))
            assert await wire.head() == 200
            assert wire.header("x-detgate-index") == str(number)
            assert "racing" not in (wire.header("x-detgate-guarantee") or "")
            await wire.body()


@pytest.mark.parametrize("stream", [False, True])
async def test_nor_does_it_where_the_store_is_slow(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has been told that an answer is complete before the last byte of it leaves."""
    complete = MemoryStore.complete

    async def slow(store: MemoryStore, key: ScopeKey, index: int, *, sure: bool = False) -> bool:
        await asyncio.sleep(0.02)
        return await complete(store, key, index, sure=sure)

    monkeypatch.setattr(MemoryStore, "complete", slow)
    async with gate_of(profile="strict", timeouts={"settle": 0}) as (_, gate), Wire(gate.port) as wire:
        for number in range(5):
            wire.post(f"/sessions/s{CHAT}", chat(f"{number}", stream=stream))
            assert await wire.head() == 200
            assert wire.header("x-detgate-index") == str(number)
            await wire.body()


async def test_a_request_that_is_cancelled_while_it_is_being_ended_gives_its_index_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, complete = Held(), MemoryStore.complete
    ending: list[asyncio.Task[Any] | None] = []

    async def stuck(store: MemoryStore, key: ScopeKey, index: int, *, sure: bool = False) -> bool:
        raced = await complete(store, key, index, sure=sure)
        ending.append(asyncio.current_task())
        await asyncio.Event().wait()
        return raced

    async with gate_of(held) as (_, gate), Wire(gate.port) as wire:
        with monkeypatch.context() as patched:
            patched.setattr(MemoryStore, "complete", stuck)
            wire.post(f"/sessions/s{CHAT}", raw(chat("a")))
            await held.arrived.wait()
            wire.leave()
            await gate.until(lambda: len(ending) == 1)
            assert ending[0] is not None
            ending[0].cancel()
            await gate.until(lambda: any(record["event"] == "closed" for record in gate.records()))
        held.go.set()
        again = await gate.http.post(f"/sessions/s{CHAT}", content=raw(chat("a")))
        assert again.headers["x-detgate-index"] == "0"


async def test_strict_refuses_a_race_and_says_what_to_do() -> None:
    held = Held()
    async with (
        gate_of(held, profile="strict", timeouts={"settle": 0.05}) as (worker, gate),
        Wire(gate.port) as wire,
        sdk(gate) as client,
    ):
        wire.post(f"/sessions/s{CHAT}", chat("a"))
        await held.arrived.wait()
        held.go.set()
        message = refused(await ask(gate, "b"), 409, "racing_index", "X-Request-Index")
        assert "X-Index-Order: content" in message
        with pytest.raises(openai.ConflictError) as conflict:
            await sampled(client, "c")
        assert conflict.value.code == "racing_index"
        assert len(worker.seen) == 1
        assert index(await ask(gate, "d", X_Index_Order="content")) == 0
        wire.leave()
        await gate.until(lambda: [record["event"] for record in gate.records()].count("closed") == 2)
        assert index(await ask(gate, "e")) == 1


async def test_strict_lets_the_second_wait_for_the_first_and_says_so() -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        arrived.set()
        await go.wait()
        await polite(seen, reply)

    async with gate_of(script, profile="strict", timeouts={"settle": 10}) as (worker, gate):
        first = asyncio.create_task(ask(gate, "a"))
        await arrived.wait()
        others = [asyncio.create_task(ask(gate, text)) for text in "bcd"]
        await gate.until(lambda: waiting(gate) == 3)
        assert len(worker.seen) == 1
        go.set()
        assert index(await first) == 0
        answers = await asyncio.gather(*others)
        assert sorted(index(answer) for answer in answers) == [1, 2, 3]
        assert [reasons(answer) for answer in answers] == [{"racing"}] * 3
        assert waiting(gate) == 0


async def test_strict_in_content_order_takes_siblings_at_once() -> None:
    async with gate_of(Together(16), profile="strict", index_order="content") as (_, gate):
        answers = await asyncio.gather(*(ask(gate, text) for text in PROMPTS))
        assert {answer.status_code for answer in answers} == {200}
        assert all(answer.headers["x-detgate-guarantee"].startswith("strict") for answer in answers)


async def test_a_client_that_leaves_while_it_waits_takes_no_index() -> None:
    held = Held()
    async with gate_of(held, profile="strict", timeouts={"settle": 10}) as (_, gate):
        async with Wire(gate.port) as first, Wire(gate.port) as second:
            first.post(f"/sessions/s{CHAT}", chat("a"))
            await held.arrived.wait()
            second.post(f"/sessions/s{CHAT}", chat("b"))
            await gate.until(lambda: waiting(gate) == 1)
            second.leave()
            await gate.until(lambda: waiting(gate) == 0)
            held.go.set()
        await gate.until(lambda: len(gate.records()) == 2)
        assert index(await ask(gate, "c")) == 1


def test_the_routes_of_these_tests_take_an_index() -> None:
    assert {ROUTES[CHAT].kind, ROUTES["/v1/completions"].kind} == {"sample"}
    assert (ROUTES["/classify"].kind, ROUTES["/tokenize"].kind) == ("score", "plain")
