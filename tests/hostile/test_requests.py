"""Each kind of hostile request is refused with the right status or served right, and nothing of it is left behind.

Behind every request another follows on the same connection: it is answered where the first was read as a whole, and
never otherwise, so no byte of a request is taken for one of the next.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.harness import CarrierName, FakeWorker, Gate, Reply, Seen, Wire, chat, gateway, pool
from tests.hostile.answers import Answer, parse
from tests.hostile.cases import BODY, CASES, CHUNKED, HOST, LENGTH, LIVEZ, Case, chunks, get, post

LAST = get(b"/livez", lines=HOST + b"Connection: close\r\n")
LIMITS = {"head_bytes": 8192, "body_bytes": 100_000}


async def everything(
    port: int, pieces: list[bytes], methods: list[str] | None = None, *, later: bool = False
) -> list[Answer]:
    """Send pieces, each in a write of its own; the answers that came before the connection ended.

    `later`: the connection has seen a request and its answer before.
    """
    async with Wire(port) as wire:
        if later:
            wire.writer.write(get(b"/v1/models"))
            assert await wire.head() == 200
            await wire.body()
        for piece in pieces:
            wire.writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return parse(await wire.reader.read(), methods)


async def check(gate: Gate, worker: FakeWorker, case: Case, size: int) -> str | None:
    """What is wrong with the answers to a case that is sent in pieces of a size; None: nothing."""
    before, claimed = len(worker.seen), len(gate.records())
    sent = case.sent if case.ends and case.answers[-1] == 200 else case.sent + LAST
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    answers = await everything(gate.port, pieces, later=len(pieces) == 1)
    statuses = [answer.status for answer in answers]
    if statuses != case.answers + [200] * (not case.ends):
        return f"{case.name}: {statuses}"
    for answer in answers:
        if answer.status >= 400 and "message" not in json.loads(answer.body)["error"]:
            return f"{case.name}: {answer.body!r}"
    asked = case.sent.count(b"POST ") - case.sent.count(b"/sessions HTTP")
    served = sum(b"choices" in answer.body for answer in answers)
    if len(worker.seen) - before != served or served > asked:
        return f"{case.name}: the engine saw {len(worker.seen) - before} of {served}"
    await gate.until(gate.idle)
    opened = sum(record["event"] == "opened" for record in gate.records()[claimed:])
    return None if opened == served else f"{case.name}: {opened} indices for {served} answers"


@pytest.mark.parametrize("size", [1 << 20, 7], ids=["whole", "crumbs"])
async def test_each_is_refused_or_served_as_it_should_be(size: int) -> None:
    """In one piece behind another request that was answered, and in crumbs."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=LIMITS) as gate:
        wrong = [
            found for case in CASES if (found := await check(gate, worker, case, max(size, len(case.sent) // 500)))
        ]
        assert wrong == []


@pytest.mark.parametrize("sent", [post(HOST, LENGTH) * 40, LIVEZ * 500], ids=["data plane", "control plane"])
async def test_a_connection_asks_for_only_so_much_ahead(sent: bytes) -> None:
    """What is beyond is not answered; the last answer says that the connection ends, so a client asks again."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=LIMITS) as gate:
        answers = await everything(gate.port, [sent])
        assert [answer.status for answer in answers] == [200] * 33
        assert [answer.header("connection") for answer in answers] == [None] * 32 + ["close"]


async def test_what_follows_a_body_that_is_too_large_is_not_read() -> None:
    """It is cut off while it streams in: the client reads why, and nothing behind is taken for a request."""
    large = post(HOST, CHUNKED, body=b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=LIMITS) as gate:
        async with Wire(gate.port) as wire:
            wire.writer.write(large)
            wire.writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            assert await wire.head() == 413
            assert wire.header("connection") == "close"
            assert json.loads(await wire.body())["error"]["code"] == "request_too_large"
            wire.writer.write(b"0\r\n\r\n" + LIVEZ)
            assert await wire.reader.read() == b""
        assert worker.seen == []


async def test_a_body_in_crumbs_takes_no_more_memory_than_a_whole_one() -> None:
    body = json.dumps(chat("x" * 20_000)).encode()
    crumbs = b"".join(b"2\r\n%b\r\n" % body[at : at + 2] for at in range(0, len(body) - 1, 2))
    crumbs += b"1\r\n%b\r\n" % body[-1:] if len(body) % 2 else b""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=LIMITS) as gate:
        async with Wire(gate.port) as wire:
            wire.writer.write(post(HOST, CHUNKED, body=crumbs))
            await gate.until(lambda: any(c.cycle is not None for c in connections(gate)))
            await gate.until(lambda: all(c.cycle.length == len(body) for c in connections(gate)))
            assert all(len(c.cycle.body) <= 2 for c in connections(gate))
            wire.writer.write(b"0\r\n\r\n")
            assert await wire.head() == 200
        assert worker.seen[0].json["messages"] == json.loads(body)["messages"]


def connections(gate: Gate) -> list[Any]:
    return list(gate.server.server_state.connections)


@pytest.mark.parametrize(
    "begun",
    [
        get(b"/livez")[:-2] + b"X-A: ",
        post(HOST, LENGTH, body=b"")[:-2] + b"X",
        post(HOST, CHUNKED, body=b"1;"),
        post(HOST, CHUNKED, body=chunks(BODY)[:-2] + b"X-A: "),
        post(HOST, CHUNKED, path=b"/sessions", body=b"1;"),
    ],
    ids=["value", "name", "extension", "trailer", "extension, control plane"],
)
async def test_a_line_without_end_is_not_kept(begun: bytes) -> None:
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url), limits=LIMITS) as gate,
        Wire(gate.port) as wire,
    ):
        wire.writer.write(begun)
        answered = asyncio.create_task(wire.head())
        sent = 0
        while not answered.done():
            wire.writer.write(b"a" * 1000)
            sent += 1000
            await asyncio.sleep(0.001)
            assert sent < 10 * LIMITS["head_bytes"]
        assert answered.result() == 431
        assert worker.seen == []


async def test_trailers_decide_nothing_and_go_nowhere() -> None:
    trailer = b"X-Session-ID: trailing\r\nX-Trailer: 1\r\nAuthorization: Bearer x\r\n"
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        sent = post(HOST, CHUNKED, b"Connection: close\r\n", body=chunks(BODY, trailer=trailer))
        (answer,) = await everything(gate.port, [sent[:-80], sent[-80:]])
        assert answer.header("x-detgate-session") == "anonymous"
        assert not [name for name, _ in worker.seen[0].headers if "trail" in name or name == "authorization"]


async def test_answers_come_in_the_order_of_the_requests() -> None:
    """A refusal waits for the slow answer before it, whichever plane gives it."""
    go = asyncio.Event()

    async def slow(seen: Seen, reply: Reply) -> None:
        await go.wait()
        reply.json({"choices": [{"text": "a"}]})

    async with FakeWorker(slow) as worker, gateway(pool("policy", worker.url), limits=LIMITS) as gate:
        asking = asyncio.create_task(
            everything(gate.port, [post(HOST, LENGTH) + get(b"/v1/chat/completions") + get(b"/nothing") + LAST])
        )
        await gate.until(lambda: bool(worker.seen))
        go.set()
        assert [answer.status for answer in await asking] == [200, 405, 404, 200]
        metrics = get(b"/metrics") + post(HOST, LENGTH) + get(b"/v1/models") + LAST
        answers = await everything(gate.port, [metrics])
        assert [b"# TYPE" in answers[0].body, b"choices" in answers[1].body, b"test-model" in answers[2].body] == [
            True
        ] * 3


async def test_answers_to_head_have_no_body() -> None:
    targets = (b"/v1/chat/completions", b"/v1/models", b"/livez", b"/nothing")
    sent = [get(target, b"HEAD") for target in targets] + [LAST]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answers = await everything(gate.port, [b"".join(sent)], ["HEAD"] * 4 + ["GET"])
        assert [answer.status for answer in answers] == [405, 405, 405, 404, 200]


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_word_of_one(status: int) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.writer.write(b"HTTP/1.1 %d None\r\nx-a: b\r\n\r\n" % status)

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), profile="off") as gate:
        assert [answer.status for answer in await everything(gate.port, [post(HOST, LENGTH) + LAST])] == [status, 200]


async def test_leave_to_send_a_body_is_given_when_its_turn_has_come() -> None:
    """Not to a request whose answer is not the next, and not for a body that is refused."""
    go = asyncio.Event()

    async def slow(seen: Seen, reply: Reply) -> None:
        await go.wait()
        reply.json({"choices": [{"text": "a"}]})

    asking = b"Expect: 100-continue\r\n"
    async with FakeWorker(slow) as worker, gateway(pool("policy", worker.url)) as gate, Wire(gate.port) as wire:
        wire.writer.write(post(HOST, LENGTH) + post(HOST, LENGTH, asking, body=b""))
        await gate.until(lambda: bool(worker.seen))
        go.set()
        assert await wire.head() == 200
        await wire.body()
        assert await wire.head() == 100
        wire.writer.write(BODY)
        assert await wire.head() == 200


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("POST", "/readyz", 405)])
async def test_a_control_route_that_refuses_before_the_body_ends_the_connection(
    method: str, path: str, status: int
) -> None:
    """Whether the body comes nobody knows."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate, Wire(gate.port) as wire:
        head = f"{method} {path} HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
        wire.writer.write(head.encode())
        assert await wire.head() == status
        assert wire.header("connection") == "close"
        await wire.body()
        assert await wire.reader.read() == b""


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
async def test_a_compressed_body_is_refused_and_the_message_says_so(carrier: CarrierName) -> None:
    body = gzip.compress(json.dumps(chat()).encode())
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        for coding, status in (("gzip", 415), ("br", 415), ("identity", 400)):
            got = await gate.http.post("/v1/chat/completions", content=body, headers={"content-encoding": coding})
            assert got.status_code == status
            assert (f"Content-Encoding: {coding}" in got.json()["error"]["message"]) is (status == 415)
        plain = await gate.http.post("/v1/chat/completions", json=chat(), headers={"content-encoding": "identity"})
        assert plain.status_code == 200


CODED = {"gzip": 415, "br": 415, "zstd": 415, "x-gzip": 415, "GZIP": 415, "identity, gzip": 415, "made-up": 415}
CODED |= {"": 200, "identity": 200, "Identity": 200, "identity, identity": 200, ",": 200}


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
@pytest.mark.parametrize("stream", [False, True])
async def test_whether_a_body_is_encoded_its_header_says_and_not_its_looks(carrier: CarrierName, stream: bool) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        for coding, status in CODED.items():
            given = {"content-encoding": coding}
            got = await gate.http.post("/v1/chat/completions", json=chat(stream=stream), headers=given)
            assert got.status_code == status, coding
            if status == 415:
                assert got.json()["error"]["code"] == "encoded_body"
            for path, asked in (("/abort_request", {"rid": "x"}), ("/sessions", {"identity": "x"})):
                answer = await gate.http.post(path, json=asked, headers=given)
                assert (answer.status_code == 415) is (status == 415), (path, coding)
        several = [("content-encoding", "gzip"), ("content-encoding", "identity")]
        assert (await gate.http.post("/v1/chat/completions", json=chat(), headers=several)).status_code == 415
        assert (await gate.http.get("/v1/models", headers={"content-encoding": "gzip"})).status_code == 200
        assert {seen.header("content-encoding") for seen in worker.seen} == {None}


async def test_a_plain_proxy_passes_what_is_encoded_with_the_word_for_it() -> None:
    body = gzip.compress(json.dumps(chat()).encode())
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), profile="off") as gate:
        await gate.http.post("/v1/chat/completions", content=body, headers={"content-encoding": "gzip"})
        [seen] = [each for each in worker.seen if each.target == "/v1/chat/completions"]
        assert (seen.body, seen.header("content-encoding")) == (body, "gzip")


async def test_what_names_a_request_cannot_add_lines_to_a_head() -> None:
    """Session ids, identities and request ids hold anything but control characters; they stay one value each."""
    names = ["a: b", "x;y,z", 'q"uo\\te', "é\u2028x", "%0d%0aX-Evil: 1", "~1", "a/b?c#d", "..", "\u202e"]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for name in names:
            lines = [
                b"%b: %b\r\n" % (key, name.encode())
                for key in (b"X-Session-ID", b"X-Request-ID", b"X-Detgate-Identity")
            ]
            (answer,) = await everything(gate.port, [post(HOST, LENGTH, *lines, b"Connection: close\r\n")])
            assert answer.status == 200, name
            seen = worker.seen[-1]
            assert not [key for key, _ in [*answer.headers, *seen.headers] if "evil" in key]
            assert answer.header("x-request-id") == name.encode().decode("latin-1")
            for value in (
                answer.header("x-detgate-session"),
                answer.header("x-detgate-request-id"),
                seen.header("x-request-id"),
            ):
                assert value is not None
                assert value.isascii()
                assert value.isprintable()
        assert len({seen.header("x-request-id") for seen in worker.seen}) == len(names)


async def test_a_client_that_leaves_in_mid_body_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for path in (b"/v1/chat/completions", b"/sessions", b"/admin/pools/policy/replicas"):
            async with Wire(gate.port) as wire:
                wire.writer.write(post(HOST, LENGTH, path=path, body=BODY[:-5]))
                await gate.until(lambda: len(connections(gate)) > 0)
                await asyncio.sleep(0.01)
        await gate.until(gate.idle)
        assert worker.seen == []
        assert gate.records() == []
    assert [record for record in caplog.records if record.exc_info] == []
