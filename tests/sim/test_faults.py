"""Every fault, as a client on a socket meets it."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.sim import Fault, SimServer
from gateway.sim.faults import Faults
from tests.sim.serving import serving

STREAM = {"prompt": "a", "max_tokens": 6, "seed": 1, "ignore_eos": True, "stream": True}
WHOLE = {**STREAM, "stream": False}
SHORT = httpx.Timeout(10, read=0.4)
ROUTES = {
    "/v1/completions": STREAM,
    "/v1/chat/completions": {**STREAM, "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a", "stream": True, "max_output_tokens": 6, "ignore_eos": True},
    "/v1/messages": {**STREAM, "messages": [{"role": "user", "content": "a"}]},
}


async def read(client: httpx.AsyncClient, body: Any = STREAM, path: str = "/v1/completions") -> bytes:
    """All bytes of an answer, undecoded; an unfinished transfer raises."""
    async with client.stream("POST", path, json=body) as answer:
        return b"".join([part async for part in answer.aiter_raw()])


async def read_broken(client: httpx.AsyncClient, body: dict[str, Any] = STREAM) -> bytes:
    """What came before the transfer broke."""
    parts: list[bytes] = []
    with pytest.raises(httpx.TransportError):
        await gather(parts, client, body)
    return b"".join(parts)


async def gather(parts: list[bytes], client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/completions", json=body, timeout=SHORT) as answer:
        async for part in answer.aiter_raw():
            parts.append(part)


def texts(body: bytes) -> list[str]:
    chunks = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]
    return [choice["text"] for chunk in chunks for choice in chunk.get("choices", [])]


def test_rules_match_by_route_and_count() -> None:
    faults = Faults()
    faults.add(delay_token=0.5)
    faults.add(status=503, times=2, route="/v1/completions")
    faults.add(health_status=500)
    assert faults.take("/generate") == Fault(delay_token=0.5)
    assert faults.take("/v1/models") == Fault()
    assert faults.take("/health") == Fault(health_status=500)
    both = Fault(delay_token=0.5, status=503)
    assert [faults.take("/v1/completions") for _ in range(3)] == [both, both, Fault(delay_token=0.5)]
    faults.clear()
    assert faults.take("/health") == Fault()


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="stauts"):
        Faults().add(stauts=503)


def test_faults_are_switched_over_http() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            told = (await client.post("/_sim", json={"status": 429, "times": 1})).json()
            assert told["faults"] == [{"status": 429, "route": None, "times": 1}]
            answers = [await client.post("/v1/completions", json=WHOLE) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [429, 200]
            assert (await client.post("/_sim", json={"stauts": 503})).status_code == 400
            await client.post("/_sim", json={"hang": True})
            assert (await client.delete("/_sim")).json()["faults"] == []
            await client.post("/_sim", json={"paused": True})
            assert server.engine.paused
            await client.post("/_sim", json={"paused": False})
            assert not server.engine.paused

    asyncio.run(main())


def test_the_counters_are_told_over_http() -> None:
    async def main() -> None:
        async with serving("vllm") as (_, client):
            await client.post("/v1/completions", json=WHOLE, headers={"X-Request-Id": "abc"})
            told = (await client.get("/_sim")).json()
            assert (told["requests"], told["running"], told["peak_running"]) == (1, 0, 1)
            [seen] = told["seen"]
            assert (seen["id"], seen["seed"], seen["seeds"]) == ("cmpl-abc", 1, [1])
            assert ["x-request-id", "abc"] in seen["headers"]
            assert json.loads(told["bodies"][0]) == WHOLE

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_status_has_the_shape_of_the_engine(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            server.engine.faults.add(status=503)
            answer = await client.post("/v1/completions", json=WHOLE, headers={"X-Request-Id": "abc"})
            body = answer.json()
            assert answer.status_code == 503
            assert (body["error"] if engine == "vllm" else body)["code"] == 503
            [seen] = server.engine.counters.seen
            assert (seen.id, seen.seed, seen.seeds) == ("abc", 1, ())

    asyncio.run(main())


def test_delays_hold_the_head_and_each_token() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(delay_head=0.2, delay_token=0.05)
            begun = asyncio.get_running_loop().time()
            async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
                assert asyncio.get_running_loop().time() - begun >= 0.2
                await answer.aread()
            assert asyncio.get_running_loop().time() - begun >= 0.2 + 6 * 0.05

    asyncio.run(main())


def test_a_hanging_engine_answers_probes_and_notices_that_the_client_left() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(hang=True)
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=WHOLE, timeout=SHORT)
            assert (await client.get("/health")).status_code == 200
            assert server.engine.counters.disconnects == 1

    asyncio.run(main())


def test_reset_before_the_head_comes_after_the_whole_body() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(reset_before_head=True, times=1)
            with pytest.raises(httpx.ReadError):
                await client.post("/v1/completions", json=WHOLE)
            assert json.loads(server.engine.counters.bodies[0]) == WHOLE
            assert (await client.post("/v1/completions", json=WHOLE)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["reset_after_tokens", "cut_after_tokens"])
def test_a_stream_breaks_after_its_tokens(fault: str) -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            intact = texts(await read(client))
            server.engine.faults.add(**{fault: 2})  # type: ignore[arg-type]
            assert texts(await read_broken(client)) == intact[:2]
            await server.engine.idle()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["reset_after_tokens", "cut_after_tokens"])
def test_a_whole_answer_breaks_midway(fault: str) -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            intact = await read(client, WHOLE)
            server.engine.faults.add(**{fault: 2})  # type: ignore[arg-type]
            got = await read_broken(client, WHOLE)
            assert len(got) == len(intact) // 2

    asyncio.run(main())


def test_a_reset_is_a_reset_and_a_cut_is_a_close() -> None:
    async def end(server: SimServer) -> bytes | type[Exception]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        try:
            return await reader.read()
        except ConnectionResetError as error:
            return type(error)
        finally:
            writer.close()

    async def main() -> None:
        async with serving("vllm") as (server, _):
            server.engine.faults.add(reset_after_tokens=2, times=1)
            assert await end(server) is ConnectionResetError
            server.engine.faults.add(cut_after_tokens=2, times=1)
            got = await end(server)
            assert isinstance(got, bytes)
            assert got.count(b"data: ") == 2
            assert not got.endswith(b"0\r\n\r\n")

    asyncio.run(main())


def test_a_clean_close_comes_without_done() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(close_after_tokens=2)
            got = await read(client)
            assert len(texts(got)) == 2
            assert b"[DONE]" not in got
            with pytest.raises(json.JSONDecodeError):
                json.loads(await read(client, WHOLE))

    asyncio.run(main())


def test_a_silent_stream_stays_open() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(silent_after_tokens=2)
            parts: list[bytes] = []
            with pytest.raises(httpx.ReadTimeout):
                await gather(parts, client, STREAM)
            assert len(texts(b"".join(parts))) == 2

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("path", ROUTES)
def test_an_error_event_has_the_shape_of_its_route(engine: str, path: str) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            server.engine.faults.add(error_event_after_tokens=2)
            frames = (await read(client, ROUTES[path], path)).decode().strip().split("\n\n")
            if path in ("/v1/completions", "/v1/chat/completions"):
                assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == 500
                assert frames[-1] == "data: [DONE]"
            elif path == "/v1/messages":
                name, data = frames[-1].split("\n")
                assert name == "event: error"
                assert json.loads(data.removeprefix("data: "))["type"] == "error"
            else:
                assert '"error"' in "".join(frames[-2:])
                assert "response.completed" not in "".join(frames)

    asyncio.run(main())


def test_a_failing_whole_answer_is_a_500() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(error_event_after_tokens=2)
            assert (await client.post("/v1/completions", json=WHOLE)).status_code == 500

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_abort_is_a_200_with_partial_text(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            [intact] = (await client.post("/v1/completions", json=WHOLE)).json()["choices"]
            server.engine.faults.add(abort_after_tokens=2)
            answer = await client.post("/v1/completions", json=WHOLE)
            [choice] = answer.json()["choices"]
            assert answer.status_code == 200
            assert choice["finish_reason"] == "abort"
            assert 0 < len(choice["text"]) < len(intact["text"])
            assert intact["text"].startswith(choice["text"])
            streamed = await read(client)
            assert b'"finish_reason":"abort"' in streamed
            assert "".join(texts(streamed)) == choice["text"]

    asyncio.run(main())


def test_writes_can_be_split_inside_a_character() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            body = {**STREAM, "max_tokens": 200}
            intact = await read(client, body)
            server.engine.faults.add(chunk_split=True)
            parts = []
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                parts = [part async for part in answer.aiter_raw()]
            split = [part for part in parts if part[-1] >= 0xC0]
            assert split
            for part in split:
                with pytest.raises(UnicodeDecodeError):
                    part.decode()
            assert texts(b"".join(parts)) == texts(intact)
            assert len(parts) > 2 * intact.count(b"data: ") - 5

    asyncio.run(main())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_end_can_come_in_one_write(engine: str) -> None:
    async def main() -> None:
        async with serving(engine) as (server, client):
            server.engine.faults.add(coalesce=True)
            body = {**ROUTES["/v1/chat/completions"], "stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                parts = [part async for part in answer.aiter_raw()]
            assert parts[-1].count(b"data: ") == 3
            assert b'"finish_reason":"length"' in parts[-1]
            assert parts[-1].endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


@pytest.mark.parametrize("body", [STREAM, WHOLE])
def test_answers_can_be_compressed(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            plain = (await client.post("/v1/completions", json=body)).text
            server.engine.faults.add(gzip=True)
            answer = await client.post("/v1/completions", json=body)
            assert answer.headers["content-encoding"] == "gzip"
            assert plain.count("text_completion") == answer.text.count("text_completion")
            assert answer.text.rstrip().endswith(plain.rstrip()[-20:])

    asyncio.run(main())


def test_headers_can_be_added() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(extra_headers=[["Set-Cookie", "a=1"], ["Set-Cookie", "b=2"]])
            answer = await client.post("/v1/completions", json=WHOLE)
            assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]

    asyncio.run(main())


def test_comments_can_stand_between_the_tokens() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            intact = await read(client)
            server.engine.faults.add(comments=True)
            got = await read(client)
            assert got.count(b": keep-alive\n\n") == 6
            assert texts(got) == texts(intact)

    asyncio.run(main())


def test_probes_can_be_slow_or_fail() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.faults.add(health_status=503, health_delay=0.1, times=1)
            begun = asyncio.get_running_loop().time()
            assert (await client.post("/v1/completions", json=WHOLE)).status_code == 200
            assert (await client.get("/health")).status_code == 503
            assert asyncio.get_running_loop().time() - begun >= 0.1
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())
