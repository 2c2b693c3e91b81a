"""Streams that break end as an error in their API's own shape; streams that do not break arrive whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from gateway.core.sse import EVENT_LIMIT
from tests.field.routes import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SAMPLING,
    SGLANG_CHAT,
    SGLANG_COMPLETIONS,
    SGLANG_MESSAGES,
    TOKENS,
    Route,
    both_carriers,
    over,
)
from tests.harness import CarrierName, FakeWorker, Gate, Reply, Script, Seen, Wire, delta, gateway


def reset(reply: Reply) -> None:
    """A TCP reset."""
    reply.reset()


def close(reply: Reply) -> None:
    """The connection closes in mid-body."""
    reply.close()


def end(reply: Reply) -> None:
    """The body ends as HTTP wants it, and the answer was not whole."""
    reply.end()


def done(reply: Reply) -> None:
    """A [DONE] that lies, and a clean end."""
    reply.chunk("data: [DONE]\n\n")
    reply.end()


def torn(reply: Reply) -> None:
    """Half an event, then a clean end."""
    reply.chunk('data: {"cho')
    reply.end()


def unended(reply: Reply) -> None:
    """An event without the blank line that ends it, cut within a character, then a clean end."""
    reply.chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "\xe5\x8c')
    reply.end()


BREAKS = (reset, close, end, done, torn, unended)


def breaking(route: Route, how: Callable[[Reply], None], got: asyncio.Event) -> Script:
    """Two chunks, and when the client has them, the break."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in route.events[:2]:
            reply.chunk(event)
        await got.wait()
        how(reply)

    return script


def last_event(body: bytes) -> tuple[str | None, Any]:
    """Name and data of the last event in a stream."""
    event = body.decode().strip("\n").split("\n\n")[-1]
    fields = dict(line.split(": ", 1) for line in event.split("\n"))
    return fields.get("event"), json.loads(fields["data"])


def assert_error(route: Route, name: str | None, data: Any) -> None:
    """The last event tells of an error, in the shape of the route's API."""
    if route in (MESSAGES, SGLANG_MESSAGES):
        assert name == data["type"] == "error"
        assert set(data["error"]) == {"type", "message"}
        assert data["error"]["type"] == "api_error"
    elif route is RESPONSES:
        assert name == data["type"] == "error"
        assert set(data) == {"type", "sequence_number", "code", "message", "param"}
        assert data["sequence_number"] == 2
    else:
        assert name is None
        assert set(data["error"]) == {"message", "type", "param", "code"}


@both_carriers
@over((*SAMPLING, SGLANG_CHAT, SGLANG_MESSAGES))
async def test_a_stream_that_breaks_never_ends_cleanly(route: Route, carrier: CarrierName) -> None:
    """Two chunks, then a break of any kind: an error event, and a broken transfer (open-webui#29628)."""
    async with FakeWorker() as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        for how in BREAKS:
            got = asyncio.Event()
            worker.script = breaking(route, how, got)
            async with Wire(gate.port) as wire:
                wire.post(route.path, route.body(stream=True))
                assert await wire.head() == 200
                sent = b"".join(route.events[:2])
                assert await wire.received(len(sent)) == sent
                got.set()
                assert_error(route, *last_event(await wire.broken_body()))
        await gate.until(gate.idle)
        closed = [(record["outcome"], record["used"]) for record in gate.records() if record["event"] == "closed"]
        assert closed == [("failed", False)] * len(BREAKS)


def has_ended(gate: Gate, count: int) -> bool:
    """So many requests have ended."""
    return len(ends(gate)) == count


def ends(gate: Gate) -> list[tuple[str, bool, str | None]]:
    """Of each request how it ended, whether its index is used, and the digest of its content."""
    return [(each["outcome"], each["used"], each["answer"]) for each in gate.records() if each["event"] == "closed"]


UNREADABLE = {"number": b"NaN", "text": b'"\\ud83d"', "long": b'"' + b"x" * 2 * EVENT_LIMIT + b'"'}


def unreadable(route: Route, what: str) -> list[bytes]:
    """The events of a stream, with a field in its last ones that the gateway does not read."""
    *events, a, b, c = route.events
    return [*events, *(each.replace(b"data: {", b'data: {"odd":' + UNREADABLE[what] + b",") for each in (a, b, c))]


@pytest.mark.parametrize("what", UNREADABLE)
@over((*SAMPLING, SGLANG_CHAT, SGLANG_MESSAGES))
async def test_a_whole_stream_is_delivered_though_its_end_could_not_be_read(route: Route, what: str) -> None:
    events = unreadable(route, what)

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in events:
            reply.chunk(event)
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True))
        assert answer.content == b"".join(events)
        await gate.until(lambda: ends(gate) == [("delivered", True, None)])


@pytest.mark.parametrize("what", UNREADABLE)
@over((SGLANG_CHAT, SGLANG_COMPLETIONS, GENERATE))
async def test_so_is_one_that_is_merged(route: Route, what: str) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in unreadable(route, what):
            reply.chunk(event)
        reply.end()

    fields = {"sampling_params": {"n": 2, "temperature": 1}} if route is GENERATE else {"n": 2, "temperature": 1}
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True, **fields))
        assert answer.content.endswith(b"data: [DONE]\n\n")
        await gate.until(lambda: [end[:2] for end in ends(gate)] == [("delivered", True)])


@both_carriers
@over((SGLANG_CHAT, SGLANG_COMPLETIONS, GENERATE))
async def test_one_broken_sample_breaks_the_merged_stream(route: Route, carrier: CarrierName) -> None:
    """Of two samples one breaks in mid-stream: an error event, no clean end, and the other is cancelled."""
    first = asyncio.Event()
    cancelled = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(route.events[0])
        reply.chunk(route.events[1])
        if seen is not worker.seen[0]:
            await reply.writer.drain()
            await reply.gone()
            cancelled.set()
        await first.wait()
        reply.reset()

    fields = {"sampling_params": {"n": 2, "temperature": 1}} if route is GENERATE else {"n": 2, "temperature": 1}
    async with (
        FakeWorker(script) as worker,
        gateway(route.pool(worker.url), carrier=carrier) as gate,
        Wire(gate.port) as wire,
    ):
        wire.post(route.path, route.body(stream=True, **fields))
        assert await wire.head() == 200
        await wire.chunk()
        await gate.until(lambda: len(worker.seen) == 2)
        first.set()
        assert_error(route, *last_event(await wire.broken_body()))
        async with asyncio.timeout(1):
            await cancelled.wait()


async def ask_chat(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async for _ in await client.chat.completions.create(model="tiny-llm", messages=messages, stream=True):
        pass


async def ask_completions(client: openai.AsyncOpenAI) -> None:
    async for _ in await client.completions.create(model="tiny-llm", prompt="hi", stream=True):
        pass


async def ask_responses(client: openai.AsyncOpenAI) -> None:
    async for event in await client.responses.create(model="tiny-llm", input="hi", stream=True):
        if event.type == "error":
            raise openai.OpenAIError(event.message)


HOW = pytest.mark.parametrize("how", [reset, torn, unended])


@HOW
@pytest.mark.parametrize(
    ("route", "ask"),
    [(CHAT, ask_chat), (COMPLETIONS, ask_completions), (RESPONSES, ask_responses)],
    ids=["chat", "completions", "responses"],
)
async def test_the_openai_sdk_is_told_that_a_stream_broke(route: Route, ask: Any, how: Callable[[Reply], None]) -> None:
    """The SDK, which takes any clean end for a whole answer, raises the gateway's message (litellm#32159)."""
    got = asyncio.Event()
    got.set()
    async with FakeWorker(breaking(route, how, got)) as worker, gateway(route.pool(worker.url)) as gate:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="k", max_retries=0, http_client=http) as sdk:
            with pytest.raises(openai.OpenAIError, match=r"generate-0 (broke in mid-|ended the )stream"):
                await ask(sdk)


@HOW
async def test_the_anthropic_sdk_is_told_that_a_stream_broke(how: Callable[[Reply], None]) -> None:
    """The SDK raises the gateway's message (litellm#32159)."""
    got = asyncio.Event()
    got.set()
    async with FakeWorker(breaking(MESSAGES, how, got)) as worker, gateway(MESSAGES.pool(worker.url)) as gate:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(base_url=gate.url, api_key="k", max_retries=0, http_client=http) as sdk:
            stream = await sdk.messages.create(
                model="tiny-llm", max_tokens=5, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            with pytest.raises(anthropic.APIStatusError, match=r"generate-0 (broke in mid-|ended the )stream"):
                async for _ in stream:
                    pass


OPENAI_ERROR = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
ERRORS = {
    CHAT: OPENAI_ERROR + b"data: [DONE]\n\n",
    COMPLETIONS: OPENAI_ERROR + b"data: [DONE]\n\n",
    TOKENS: OPENAI_ERROR,
    GENERATE: b'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n',
    MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"EngineCore died"}}\n\n',
    RESPONSES: (
        b'event: error\ndata: {"type":"error","code":"server_error","message":"EngineCore died","param":null,'
        b'"sequence_number":2}\n\n'
    ),
}


@both_carriers
@over(tuple(ERRORS))
async def test_an_engine_that_tells_of_its_error_is_passed_on(route: Route, carrier: CarrierName) -> None:
    """An error event in mid-stream passes unchanged, and is recorded as a failure (bifrost#5040)."""
    stream = b"".join(route.events[:2]) + ERRORS[route]

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(stream)
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True))
        assert answer.content == stream
        await gate.until(lambda: gate.records()[-1]["event"] == "closed")
        record = gate.records()[-1]
        assert (record["outcome"], record["used"]) == ("failed", False)
        assert record["error"] == "EngineCore died"


@both_carriers
async def test_so_is_one_of_several_samples(carrier: CarrierName) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in SGLANG_CHAT.events[:2]:
            reply.chunk(event)
        reply.chunk(OPENAI_ERROR + b"data: [DONE]\n\n")
        reply.end()

    async with FakeWorker(script) as worker, gateway(SGLANG_CHAT.pool(worker.url), carrier=carrier) as gate:
        body = SGLANG_CHAT.body(stream=True, n=2, temperature=1)
        answer = await gate.http.post(SGLANG_CHAT.path, json=body)
        assert OPENAI_ERROR in answer.content
        assert b"[DONE]" not in answer.content
        await gate.until(lambda: gate.records()[-1]["event"] == "closed")
        record = gate.records()[-1]
        assert (record["outcome"], record["used"], record["error"]) == ("failed", False, "EngineCore died")


@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"no such tool"}}', b'data: {"error":{"message":"no such tool"}}\n\n']
)
@over((CHAT, COMPLETIONS, MESSAGES, RESPONSES, SGLANG_CHAT))
async def test_a_refusal_that_is_called_a_stream_is_a_refusal(route: Route, body: bytes) -> None:
    """Its status is kept and its message is told in the API's shape, of one call and of several."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.head(400, ("content-type", "text/event-stream"))
        for at in range(0, len(body), 8):
            reply.chunk(body[at : at + 8])
            await reply.writer.drain()
        reply.end()

    fields = {"n": 2} if route is SGLANG_CHAT else {}
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True, **fields))
        assert answer.status_code == 400
        assert "no such tool" in answer.json()["error"]["message"]
        await gate.until(lambda: ends(gate) == [("delivered", True, None)])


@both_carriers
@pytest.mark.parametrize("how", ["leaves", "breaks"])
@over((CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE, SGLANG_CHAT, SGLANG_MESSAGES))
async def test_the_last_event_is_the_end(route: Route, how: str, carrier: CarrierName) -> None:
    """SDKs leave at it, before the engine has ended its body; and that may break off. The answer is whole."""
    told = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in route.events:
            reply.chunk(event)
        await reply.writer.drain()
        if how == "leaves":
            await reply.gone()
        else:
            await told.wait()
            reply.reset()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        created = (await gate.http.post("/sessions", json={"identity": "17:3"})).json()
        key = {"authorization": f"Bearer {created['api_key']}"}
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True), *key.items())
            assert await wire.head() == 200
            assert await wire.received(len(b"".join(route.events))) == b"".join(route.events)
            if how == "breaks":
                told.set()
                assert await wire.chunk() == b""
        await gate.until(lambda: [end[:2] for end in ends(gate)] == [("delivered", True)])
        ended = (await gate.http.delete("/sessions/17:3", headers=key)).json()
        assert (ended["state"], ended["why"]) == ("ended", None)


SEVERAL: list[tuple[Route, dict[str, Any]]] = [
    (SGLANG_CHAT, {"n": 2, "temperature": 1}),
    (SGLANG_COMPLETIONS, {"n": 2, "temperature": 1}),
    (GENERATE, {"sampling_params": {"n": 2, "temperature": 1}}),
]


@both_carriers
@pytest.mark.parametrize(("route", "fields"), SEVERAL, ids=[route.path for route, _ in SEVERAL])
async def test_the_last_event_of_each_of_several_samples_is_the_end(
    route: Route, fields: dict[str, Any], carrier: CarrierName
) -> None:
    """Whatever the engine does with a body that is over, the client has a clean end, and nothing is held for long."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in route.events:
            reply.chunk(event)
        await reply.writer.drain()
        await reply.gone()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True, **fields))
        assert answer.content.endswith(b"data: [DONE]\n\n")
        await gate.until(lambda: [end[:2] for end in ends(gate)] == [("delivered", True)])
        await gate.until(lambda: all(not replica.load for replica in gate.gateway.fleet.replicas))
        assert len(worker.seen) == 2


TOLD: list[tuple[Route, dict[str, Any]]] = [
    *((route, {}) for route in (*ERRORS, SGLANG_CHAT, SGLANG_COMPLETIONS, SGLANG_MESSAGES)),
    *((route, {"n": 2}) for route in (CHAT, SGLANG_CHAT, SGLANG_COMPLETIONS)),
    (GENERATE, {"sampling_params": {"n": 2, "temperature": 1}}),
]


@pytest.mark.parametrize(
    ("route", "fields"), TOLD, ids=[f"{route.path}-{'several' if fields else 'one'}" for route, fields in TOLD]
)
async def test_a_client_that_leaves_when_it_was_told_of_an_error_has_no_answer(
    route: Route, fields: dict[str, Any]
) -> None:
    """SDKs raise at the event and leave, before or after the engine's `[DONE]`: the same index is given again."""
    error = ERRORS.get(route, ERRORS[MESSAGES] if route is SGLANG_MESSAGES else OPENAI_ERROR)

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in route.events[:2]:
            reply.chunk(event)
        reply.chunk(error.partition(b"\n\n")[0] + b"\n\n")
        await reply.writer.drain()
        await reply.gone()

    body = route.body(stream=True, **fields)
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        for number in range(2):
            async with Wire(gate.port) as wire:
                wire.post(f"/sessions/s{route.path}", body)
                assert await wire.head() == 200
                assert wire.header("x-detgate-index") == "0"
                told = b""
                while b"EngineCore died" not in told:
                    told += await wire.chunk()
            await gate.until(partial(has_ended, gate, number + 1))
        closed = [record for record in gate.records() if record["event"] == "closed"]
        assert [(each["outcome"], each["used"], each["error"]) for each in closed] == [
            ("failed", False, "EngineCore died")
        ] * 2


@pytest.mark.parametrize("wanted", [False, True])
async def test_so_has_one_that_leaves_an_aborted_stream_unless_it_aborted_it_itself(wanted: bool) -> None:
    asked = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.target == "/abort_request":
            reply.json({})
            asked.set()
            return
        reply.sse()
        reply.chunk(SGLANG_CHAT.events[0])
        if wanted:
            await asked.wait()
        reply.chunk(delta("h", "abort"))
        await reply.writer.drain()
        await reply.gone()

    async with (
        FakeWorker(script) as worker,
        gateway(SGLANG_CHAT.pool(worker.url)) as gate,
        Wire(gate.port) as wire,
    ):
        wire.post(SGLANG_CHAT.path, SGLANG_CHAT.body(stream=True))
        assert await wire.head() == 200
        told = await wire.chunk()
        if wanted:
            rid = wire.header("x-detgate-request-id")
            assert (await gate.http.post("/abort_request", json={"rid": rid})).status_code == 200
        while b"abort" not in told:
            told += await wire.chunk()
        wire.leave()
        await gate.until(lambda: [end[:2] for end in ends(gate)] == [("abandoned" if wanted else "failed", wanted)])


def call(index: int, **fields: Any) -> bytes:
    """A piece of a tool call in a chat stream."""
    tool = {"index": index, **fields}
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'tool_calls': [tool]}}]})}\n\n".encode()


def block(index: int, piece: str) -> bytes:
    """A piece of a tool's input in an Anthropic stream."""
    delta = {"type": "input_json_delta", "partial_json": piece}
    event = {"type": "content_block_delta", "index": index, "delta": delta}
    return f"event: content_block_delta\ndata: {json.dumps(event)}\n\n".encode()


ARGUMENTS = ('{"ci', 'ty": "Ber', 'lin"}'), ('{"zo', 'ne": "C', 'ET"}')
TOOLS = {
    CHAT: [
        *(call(i, id=f"call_{i}", function={"name": f"f{i}", "arguments": ""}) for i in range(2)),
        *(call(i, function={"arguments": ARGUMENTS[i][k]}) for k in range(3) for i in range(2)),
    ],
    MESSAGES: [block(i, ARGUMENTS[i][k]) for k in range(3) for i in range(2)],
}


@both_carriers
@over(tuple(TOOLS))
async def test_interleaved_tool_calls_are_not_touched(route: Route, carrier: CarrierName) -> None:
    """Two tool calls whose arguments come in turns, cut inside their JSON (litellm#37792)."""
    events = [route.events[0], *TOOLS[route], *route.events[1:]]

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in events:
            reply.chunk(event[:12])
            await reply.writer.drain()
            reply.chunk(event[12:])
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True))
        assert answer.content == b"".join(events)
        assert gate.records()[-1]["answer"] is not None


@both_carriers
@over(SAMPLING)
async def test_a_long_stream_is_complete(route: Route, carrier: CarrierName) -> None:
    """Many times 64 KB, and one event that is longer than that alone (production-stack#952)."""
    events = [*route.events[:-1] * 500, b": " + b"x" * 300_000 + b"\n\n", *route.events[-1:]]

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in events:
            reply.chunk(event)
            await reply.writer.drain()
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=True))
        assert answer.content == b"".join(events)
        assert gate.in_flight("generate-0") == 0


@both_carriers
async def test_a_slow_reader_holds_the_replica_back_and_gets_all(carrier: CarrierName) -> None:
    """A client that reads later gets every byte, and the gateway keeps no copy of it all (production-stack#952)."""
    piece = b": " + b"x" * 65_534 + b"\n\n"
    pieces = 400
    blocked = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for _ in range(pieces):
            reply.chunk(piece)
            try:
                await asyncio.wait_for(reply.writer.drain(), 0.2)
            except TimeoutError:
                blocked.set()
                await reply.writer.drain()
        for event in CHAT.events:
            reply.chunk(event)
        reply.end()

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        async with Wire(gate.port, receive_buffer=4096) as wire:
            wire.post(CHAT.path, CHAT.body(stream=True))
            async with asyncio.timeout(5):
                await blocked.wait()
            assert await wire.head() == 200
            size = 0
            while chunk := await wire.chunk():
                size += len(chunk)
        assert size == pieces * len(piece) + len(b"".join(CHAT.events))
