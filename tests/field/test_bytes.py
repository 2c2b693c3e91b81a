"""Requests reach the engine byte for byte, and its answers the client; framing and headers are right."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.field import clock
from tests.field.routes import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EVERY,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SAMPLING,
    SGLANG_CHAT,
    TOKENS,
    Route,
    assert_shape,
    both_carriers,
    over,
)
from tests.harness import CarrierName, FakeWorker, Reply, Seen, Wire, gateway

TALKING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)
"""Routes that stream text."""


def numbers(value: Any) -> dict[str, int]:
    """Token counts of a usage object, by OpenAI's names."""
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    counts = {names.get(name, name): count for name, count in value.items()}
    return {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}


USAGE = {
    CHAT: {"prompt_tokens": 18, "completion_tokens": 6},
    COMPLETIONS: {"prompt_tokens": 5, "completion_tokens": 5},
    MESSAGES: {"prompt_tokens": 18, "completion_tokens": 6},
    RESPONSES: {"prompt_tokens": 18, "completion_tokens": 6},
    GENERATE: {"prompt_tokens": 5, "completion_tokens": 5},
}
"""What the streams of the routes count."""


class InStep:
    """Sends each piece of a stream when the client has every whole event of those before it."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self._go = asyncio.Semaphore(0)

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        reply.sse()
        for piece in self.pieces:
            reply.chunk(piece)
            await self._go.acquire()
        reply.end()

    async def read(self, wire: Wire) -> None:
        """Take the answer, piece by piece."""
        rest = b""
        for piece in self.pieces:
            rest += piece
            whole = rest[: rest.rfind(b"\n\n") + 2] if b"\n\n" in rest else b""
            if whole:
                if not wire.headers:
                    assert await wire.head() == 200
                assert await wire.received(len(whole)) == whole
                rest = rest[len(whole) :]
            self._go.release()
        assert not rest
        assert await wire.chunk() == b""


@both_carriers
@over(TALKING)
async def test_a_character_cut_in_two_arrives_as_it_was_sent(route: Route, carrier: CarrierName) -> None:
    """A stream cut after the first byte of 北 passes unchanged, event by event, and is still read (plano#980)."""
    text = "\\g<1>北京".encode()
    stream = b"".join(re.sub(rb'("(?:content|text|delta)":")[^"]*', text, event) for event in route.events)
    cut = [match.start() + 1 for match in re.finditer("北".encode(), stream)]
    assert cut
    script = InStep(*(stream[a:b] for a, b in zip([0, *cut], [*cut, len(stream)], strict=True)))
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            await script.read(wire)
        await gate.until(lambda: any(record["event"] == "closed" for record in gate.records()))
        assert gate.records()[-1]["answer"] is not None


@over(TALKING)
async def test_a_usage_event_cut_in_two_is_counted(route: Route) -> None:
    """The last event with a usage comes in two pieces; it is in the ledger (envoy ai-gateway#2162)."""
    stream = b"".join(route.events)
    middle = stream.rindex(b"tokens") + 3
    script = InStep(stream[:middle], stream[middle:])
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            await script.read(wire)
        await gate.until(lambda: gate.records()[-1]["event"] == "closed")
        assert numbers(gate.records()[-1]["usage"]) == USAGE[route]


@both_carriers
@over(TALKING)
async def test_the_end_of_a_stream_in_one_write(route: Route, carrier: CarrierName) -> None:
    """Finish, usage and [DONE] in one TCP write pass unchanged and are all read (gpustack#6155)."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(route.events[0])
        await first.wait()
        reply.chunk(b"".join(route.events[1:]))
        reply.end()

    first = asyncio.Event()
    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            assert await wire.received(len(route.events[0])) == route.events[0]
            first.set()
            assert await wire.body() == b"".join(route.events[1:])
        await gate.until(lambda: gate.records()[-1]["event"] == "closed")
        record = gate.records()[-1]
        assert record["outcome"] == "delivered"
        assert numbers(record["usage"]) == USAGE[route]


@pytest.mark.parametrize("stream", [False, True])
@over(TALKING)
async def test_a_compressed_answer_reaches_a_client_that_can_read_it(route: Route, stream: bool) -> None:
    """The replica, or a proxy before it, compresses all the same; the client decodes (open-webui#23928)."""
    plain = b"".join(route.events) if stream else route.answer

    async def script(seen: Seen, reply: Reply) -> None:
        kind = "text/event-stream" if stream else "application/json"
        packed = gzip.compress(plain)
        reply.head(200, ("content-type", kind), ("content-encoding", "gzip"))
        reply.chunk(packed[:50])
        await reply.writer.drain()
        reply.chunk(packed[50:])
        reply.end()

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body(stream=stream))
        assert answer.content == plain
        assert gate.records()[-1]["outcome"] == "delivered"
        assert numbers(gate.records()[-1]["usage"]) == USAGE[route]


async def as_sent(route: Route, body: bytes, **settings: Any) -> bytes:
    """What reaches an engine of a body, whole."""
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url), **settings) as gate:
        answer = await gate.http.post(route.path, content=body)
        assert answer.status_code == 200, answer.text
        return worker.seen[0].body


def with_members(route: Route, members: str) -> bytes:
    """The route's request with these members written behind its own, in unusual white space."""
    return json.dumps(route.body(), indent=1).encode()[:-2] + b" ,\t" + members.encode() + b"\r\n }"


@over(EVERY)
async def test_digits_are_kept(route: Route) -> None:
    """A seed above 2⁵³, an integer of 2⁶⁴ and a small fraction keep their digits (llm-d-router#2518)."""
    body = with_members(route, '"seed": 9007199254740993, "a": 18446744073709551616, "b": 1e-7, "c": 1.0')
    seen = await as_sent(route, body)
    for digits in (b"9007199254740993", b'"a": 18446744073709551616', b'"b": 1e-7', b'"c": 1.0'):
        assert seen.count(digits) == 1
    if route in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, CLASSIFY):
        assert seen == body


UNTOUCHED = {
    "Switchyard#439": '"schema": {"type": "object", "properties": {"zebra": {}, "apple": {}, "mango": {}}}',
    "sglang#24207": '"return_routed_experts": true, "foo": {"a": null}',
    "vllm-router#275": '"tools": [{"type": "function", "function": {"name": "x"}}]',
    "twice": '"bar": 1, "bar": {"b": 2, "b": []}',
}


@over(EVERY)
async def test_what_the_gateway_does_not_set_is_not_touched(route: Route) -> None:
    """Key order, unknown and null fields, tools without parameters: as sent, but for the seed and the id."""
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url)) as gate:
        for report, members in UNTOUCHED.items():
            body = with_members(route, members)
            assert (await gate.http.post(route.path, content=body)).status_code == 200, report
            assert route.without_own(worker.seen[-1].body) == body, report


@over((*SAMPLING, SGLANG_CHAT))
async def test_the_same_index_makes_the_same_bytes(route: Route) -> None:
    """A request sent twice under one index is the same to the engine, byte for byte (kubeai#690)."""
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url)) as gate:
        for _ in range(2):
            headers = {"x-session-id": "s", "x-request-index": "3"}
            answer = await gate.http.post(route.path, json=route.body(), headers=headers)
            assert answer.headers["x-detgate-request-id"] == "s:3"
        one, two = worker.seen
        assert one.body == two.body
        assert one.headers == two.headers


def marked(data: bytes) -> bytes:
    """A JSON object with a member that nobody knows."""
    return data.replace(b"{", b'{"zebra": {"n": 1e-7, "n": null},', 1)


@pytest.mark.parametrize("stream", [False, True])
@over(EVERY)
async def test_an_answer_with_an_unknown_field_passes(route: Route, stream: bool) -> None:
    """What the engine adds to its answers reaches the client, in its bytes (semantic-router#3708)."""
    if stream and route.stream is None:
        stream = False
    answer = b"".join(map(marked, route.events)) if stream else marked(route.answer)

    async def script(seen: Seen, reply: Reply) -> None:
        if stream:
            reply.sse()
            reply.chunk(answer)
            reply.end()
        else:
            reply.head(200, ("content-type", "application/json"), length=len(answer))
            reply.writer.write(answer)

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        got = await gate.http.post(route.path, json=route.body(stream=stream))
        assert got.status_code == 200
        assert got.content == answer


@both_carriers
@over((CHAT, MESSAGES, GENERATE))
async def test_an_aborted_stream_spoils_no_later_answer(route: Route, carrier: CarrierName) -> None:
    """After a stream left half way, the next request's answer is its own (bifrost#1613)."""

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json.get("stream"):
            reply.sse()
            reply.chunk(route.events[0])
            await reply.gone()
        else:
            route.reply(reply)

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url), carrier=carrier) as gate:
        assert (await gate.http.post(route.path, json=route.body())).content == route.answer
        async with Wire(gate.port) as wire:
            wire.post(route.path, route.body(stream=True))
            assert await wire.head() == 200
            await wire.chunk()
        for _ in range(3):
            assert (await gate.http.post(route.path, json=route.body())).content == route.answer
        connections = [seen.connection for seen in worker.seen]
        assert connections[0] == connections[1]
        assert connections[1] not in connections[2:]


@both_carriers
@pytest.mark.parametrize("size", [7_000, 200_000, 2_000_000, 20_000_000])
async def test_long_bodies_arrive_whole(size: int, carrier: CarrierName) -> None:
    """From kilobytes to megabytes, byte for byte (GIE#2988)."""
    body = json.dumps(CHAT.body(messages=[{"role": "user", "content": "0123456789 é" * (size // 13)}])).encode()
    assert CHAT.without_own(await as_sent(CHAT, body, carrier=carrier)) == body


@over(EVERY)
async def test_long_bodies_arrive_whole_on_every_route(route: Route) -> None:
    """200 KB on each (GIE#2988)."""
    body = with_members(route, f'"padding": "{"x" * 200_000}"')
    assert route.without_own(await as_sent(route, body)) == body


@pytest.mark.parametrize("junk", [b"0\r\n\r\n", b"HTTP/1.1 500 Late\r\ncontent-length: 3\r\n\r\nbad"])
async def test_bytes_behind_an_answer_belong_to_nobody(junk: bytes) -> None:
    """More than one answer in one read: the first counts, and the connection is not used again (bifrost#1613)."""

    async def script(seen: Seen, reply: Reply) -> None:
        CHAT.reply(reply)
        reply.writer.write(junk)

    async with FakeWorker(script) as worker, gateway(CHAT.pool(worker.url)) as gate:
        for _ in range(3):
            answer = await gate.http.post(CHAT.path, json=CHAT.body())
            assert (answer.status_code, answer.content) == (200, CHAT.answer)
        assert len({seen.connection for seen in worker.seen}) == 3


def chunked(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1000):
        piece = body[start : start + 1000]
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


@both_carriers
@over((CHAT, MESSAGES, GENERATE))
async def test_a_chunked_body_is_bounded_too(route: Route, carrier: CarrierName) -> None:
    """One byte over the limit, and no length told: 413 in the API's error shape (headroom#3326)."""
    fits = json.dumps(route.body(padding="x" * 5000)).encode()
    limits = {"body_bytes": len(fits)}
    async with (
        FakeWorker(route.polite) as worker,
        gateway(route.pool(worker.url), carrier=carrier, limits=limits) as gate,
    ):
        for body, status in ((fits, 200), (fits + b" ", 413)):
            async with Wire(gate.port) as wire:
                head = f"POST {route.path} HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
                wire.writer.write(head.encode())
                for piece in chunked(body):
                    wire.writer.write(piece)
                assert await wire.head() == status
                answer = await wire.body()
        assert_shape(route, json.loads(answer), "request_too_large")
        assert len(worker.seen) == 1


@both_carriers
@over((CHAT, MESSAGES, CLASSIFY))
async def test_a_body_over_the_limit_is_refused_readably(route: Route, carrier: CarrierName) -> None:
    """A client that sends all of it before it reads finds the 413, and no reset (aisix#205)."""
    body = json.dumps(route.body(padding="x" * 6_000_000)).encode()
    limits = {"body_bytes": len(body) - 1}
    async with (
        FakeWorker(route.polite) as worker,
        gateway(route.pool(worker.url), carrier=carrier, limits=limits) as gate,
    ):
        async with Wire(gate.port) as wire:
            wire.post(route.path, body, ("connection", "close"))
            await wire.writer.drain()
            wire.writer.write_eof()
            assert await wire.head() == 413
            assert_shape(route, json.loads(await wire.body()), "request_too_large")
            assert await wire.reader.read() == b""
        assert worker.seen == []
        assert (await gate.http.post(route.path, content=body[:-1000] + b'"}')).status_code == 200


async def test_images_within_the_default_limit() -> None:
    """8.5 MiB of chat with three data URLs pass (sglang#38735)."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'iVBORw0K' * 372_000}"}}
    content = [{"type": "text", "text": "What is this?"}, image, image, image]
    body = json.dumps(CHAT.body(messages=[{"role": "user", "content": content}])).encode()
    assert len(body) > 8.5 * 2**20
    assert CHAT.without_own(await as_sent(CHAT, body)) == body


@both_carriers
@pytest.mark.parametrize("key", [None, "the-replicas-own"])
@over((CHAT, GENERATE, CLASSIFY))
async def test_headers_between_neighbours_go_no_further(route: Route, carrier: CarrierName, key: str | None) -> None:
    """Hop-by-hop and named fields and the client's keys are dropped, the replica's is sent (sglang#3070)."""
    async with (
        FakeWorker(route.polite) as worker,
        gateway(route.pool(worker.url, api_key=key), carrier=carrier) as gate,
        Wire(gate.port) as wire,
    ):
        wire.post(
            route.path,
            route.body(),
            ("Authorization", "Bearer clients"),
            ("X-Api-Key", "clients"),
            ("Api-Key", "clients"),
            ("Cookie", "session=clients"),
            ("Connection", "x-drop, keep-alive"),
            ("Connection", "X-Drop-Too"),
            ("x-drop", "1"),
            ("x-drop-too", "1"),
            ("TE", "trailers"),
            ("Trailer", "x-sum"),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Authorization", "Basic clients"),
            ("Proxy-Connection", "keep-alive"),
            ("Upgrade", "h2c"),
            ("Expect", "100-continue"),
            ("X-Kept", "yes"),
        )
        status = await wire.head()
        if status == 100:
            status = await wire.head()
        assert status == 200
        seen = worker.seen[0].headers
    names = [name for name, _ in seen]
    assert len(names) == len(set(names))
    own = {"authorization"} if key else set()
    own |= {"x-request-id"} if route.engine == "vllm" else set()
    assert set(names) == {"host", "content-length", "accept-encoding", "x-kept", *own}
    assert dict(seen)["host"] == worker.url.removeprefix("http://")
    assert dict(seen)["accept-encoding"] == "identity"
    assert dict(seen).get("authorization") == (f"Bearer {key}" if key else None)
    assert not any("clients" in value for _, value in seen)


@both_carriers
@pytest.mark.parametrize("stream", [False, True])
async def test_one_server_one_date_and_all_cookies(stream: bool, carrier: CarrierName) -> None:
    """The replica's Server and Date make no second ones; both its cookies pass (production-stack 3fdb37a)."""

    async def script(seen: Seen, reply: Reply) -> None:
        kind = "text/event-stream" if stream else "application/json"
        reply.head(
            200,
            ("content-type", kind),
            ("Server", "uvicorn"),
            ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("Connection", "x-hop"),
            ("x-hop", "1"),
        )
        reply.chunk(b"".join(CHAT.events) if stream else CHAT.answer)
        reply.end()

    async with (
        FakeWorker(script) as worker,
        gateway(CHAT.pool(worker.url), carrier=carrier) as gate,
        Wire(gate.port) as wire,
    ):
        wire.post(CHAT.path, CHAT.body(stream=stream))
        assert await wire.head() == 200
        names = [name for name, _ in wire.headers]
        assert names.count("server") == names.count("date") == 1
        assert wire.header("server") == "detgate"
        assert "1970" not in (wire.header("date") or "")
        assert [value for name, value in wire.headers if name == "set-cookie"] == ["a=1", "b=2"]
        assert "x-hop" not in names
        assert len(names) - names.count("set-cookie") == len(set(names)) - 1


@both_carriers
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_one_upstream_path_however_the_addresses_are_written(suffix: str, carrier: CarrierName) -> None:
    """A slash or a /v1 too many, at the replica or at the client, makes no other path (litellm#8350)."""
    async with FakeWorker() as worker, gateway(CHAT.pool(worker.url + suffix), carrier=carrier) as gate:
        for path in ("/v1/chat/completions", "//v1/chat/completions", "/v1//chat///completions"):
            async with Wire(gate.port) as wire:
                wire.post(path, CHAT.body())
                assert await wire.head() == 200, path
                await wire.body()
        assert [seen.target for seen in worker.seen] == ["/v1/chat/completions"] * 3


@both_carriers
async def test_an_encoded_slash_parts_no_path(carrier: CarrierName) -> None:
    """A session id that holds a slash is one part of the path, and its request finds its route (litellm#8350)."""
    async with FakeWorker() as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post("/sessions/a%2Fb/v1/chat/completions", json=CHAT.body())
        assert answer.headers["x-detgate-request-id"] == "a/b:0"


@both_carriers
@pytest.mark.parametrize("session", ["%00", "x" * 257, "%FF"])
async def test_a_session_id_that_cannot_be_is_refused(session: str, carrier: CarrierName) -> None:
    """400 that says what an id may be, whichever part of the gateway reads the path first."""
    async with FakeWorker() as worker, gateway(CHAT.pool(worker.url), carrier=carrier) as gate:
        answer = await gate.http.post(f"/sessions/{session}/v1/chat/completions", json=CHAT.body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")


@over((CHAT, COMPLETIONS, MESSAGES, RESPONSES, SGLANG_CHAT, TOKENS, GENERATE))
async def test_words_in_a_prompt_decide_nothing(route: Route) -> None:
    """A prompt that looks like fields has no effect on route, index or seed (router_overhead.md)."""
    told = ['"user": "bob"', '"seed": 1', '"session_id": "x"', '"rid": "y", "stream": true', "plain"]
    async with (
        FakeWorker(route.polite) as one,
        FakeWorker(route.polite) as two,
        FakeWorker(route.polite) as three,
        gateway(route.pool(one.url, two.url, three.url)) as gate,
    ):
        answers = []
        for run, words in enumerate(told):
            body = json.dumps(route.body()).replace("Say hi", "%").replace("The sky is", "%")
            body = body.replace("%", json.dumps(words)[1:-1]) if "%" in body else body
            headers = {"x-detgate-run": f"r{run}", "x-session-id": "s"}
            answer = await gate.http.post(route.path, content=body, headers=headers)
            names = ("replica", "seed", "seed-source", "request-id", "index")
            answers.append([answer.headers.get(f"x-detgate-{name}") for name in names])
        assert answers == [answers[0]] * len(told)


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
@over((CHAT, MESSAGES))
def test_chunks_keep_their_pace(route: Route, carrier: CarrierName) -> None:
    """Ten chunks that come 200 ms apart leave 200 ms apart (MiniMax-M3#22)."""

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for _ in range(10):
            reply.chunk(route.events[0])
            await asyncio.sleep(0.2)
        for event in route.events[1:]:
            reply.chunk(event)
        reply.end()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            FakeWorker(script) as worker,
            gateway(route.pool(worker.url), carrier=carrier) as gate,
            Wire(gate.port) as wire,
        ):
            wire.post(route.path, route.body(stream=True))
            await wire.head()
            times = []
            for _ in range(10):
                await wire.chunk()
                times.append(loop.time())
        gaps = [after - before for before, after in pairwise(times)]
        assert gaps == pytest.approx([0.2] * 9, abs=0.02)

    clock.run(main())
