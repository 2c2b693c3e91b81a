"""A whole gateway in the test's own event loop, and scripted workers for what real engines do not show.

    async with gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.post("/v1/chat/completions", json=chat("hi"))

`Wire` is a client down to its socket, for what an HTTP library would hide.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import structlog
from prometheus_client.parser import text_string_to_metric_families

from gateway.assembly import Gateway
from gateway.carriers.asgi import Application, DataPlane, Receive, Send
from gateway.serve import Server
from gateway.settings import Settings
from gateway.sim.server import close
from gateway.tasks import start, stop
from tests import waiting

# A traceback with every local in colour takes a second.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

MODEL = "test-model"

CarrierName = Literal["http1", "asgi"]


def pool(name: str, *urls: str, **settings: Any) -> dict[str, Any]:
    """A pool's configuration: replicas `{name}-0`, `{name}-1` … at these URLs."""
    replicas = [{"name": f"{name}-{number}", "url": url} for number, url in enumerate(urls)]
    return {"name": name, "engine": "vllm", "models": [MODEL], "replicas": replicas} | settings


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | fields


@dataclass
class Gate:
    """A running gateway."""

    gateway: Gateway
    server: Server
    url: str
    port: int
    http: httpx.AsyncClient
    ledger: Path
    serving: asyncio.Task[None]
    """Ends when the server has drained and stopped."""

    def records(self) -> list[dict[str, Any]]:
        """The ledger as it is now, but for marks that an answer is complete and what replicas tell of themselves."""
        self.gateway.runs.own.ledger.flush()
        lines = (line for file in sorted(self.ledger.rglob("*.jsonl")) for line in file.read_text().splitlines())
        records = map(json.loads, lines)
        return [each for each in records if each["event"] != "complete" and each.get("change") != "introduced"]

    def in_flight(self, replica: str) -> int:
        """The load of a replica, as the gateway counts it."""
        return next(each.load for each in self.gateway.fleet.replicas if each.name == replica)

    def idle(self) -> bool:
        """No client is connected and nothing is on its way to a replica."""
        return not self.server.server_state.connections and not any(each.load for each in self.gateway.fleet.replicas)

    async def gauge(self, name: str, **labels: str) -> float:
        """The value of a series, as /metrics shows it."""
        text = (await self.http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise KeyError(name, labels)

    async def until(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until a condition of the gateway's own state holds; fails the test if it does not in time."""
        await waiting.until(holds, seconds)


class _Gateway(Gateway):
    """The real gateway. Its control plane is built when it is first asked: most tests never do."""

    @property
    def application(self) -> Application:
        whole = cache(lambda: Gateway.application.__get__(self))

        async def rest(scope: Any, receive: Receive, send: Send) -> None:
            await whole()(scope, receive, send)

        return DataPlane(self, rest)


class _Server(Server):
    """The real server, without its hold on the process's signals."""

    def __init__(self, gateway: Gateway, sock: socket.socket, carrier: CarrierName) -> None:
        super().__init__(gateway, [sock])
        self.listening = asyncio.Event()
        if carrier == "asgi":
            self.config.http = "httptools"

    @property
    def handles_signals(self) -> bool:
        return False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def drop(self) -> None:
        """Stop listening and drop every connection."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def gateway(
    *pools: dict[str, Any],
    carrier: CarrierName = "http1",
    middleware: Callable[[Application], Application] | None = None,
    resume: bool = False,
    **settings: Any,
) -> AsyncIterator[Gate]:
    """A gateway on a free port, with its ledger in a temporary folder. Ready when every replica was probed.

    `middleware` is put around the ASGI application, as an operator would.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "pools": list(pools),
            "ledger": {"path": folder},
            "health": {"interval": 0.05, "timeout": 5.0},
            "port": 0,
        } | settings
        made = _Gateway(Settings.load(None, {}, given), resume=resume)
        listener = socket.create_server(("127.0.0.1", made.settings.port), backlog=4096)
        port = listener.getsockname()[1]
        server = _Server(made, listener, carrier)
        if middleware is not None:
            server.config.app = middleware(made.application)
        async with made.running():
            serving = start(server.listen(), "server")
            await server.listening.wait()
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=30.0, verify=False, trust_env=False) as http:
                gate = Gate(made, server, url, port, http, made.settings.ledger.path, serving)
                await gate.until(lambda: all(replica.state != "unknown" for replica in made.fleet.replicas))
                try:
                    yield gate
                finally:
                    await stop(serving)
                    server.drop()
                    await gate.until(gate.idle)


def _fields(lines: list[str]) -> list[tuple[str, str]]:
    """Header fields, their names in lower case."""
    return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]


# --- a client


class Wire:
    """One connection of a client to a gateway.

    async with Wire(gate.port) as wire:
        wire.post("/v1/chat/completions", chat(stream=True))
        status = await wire.head()

    `receive_buffer`: bytes that the kernel takes in for a client that does not read.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self._port = port
        self._receive_buffer = receive_buffer
        self.headers: list[tuple[str, str]] = []
        """Those of the last answer, names in lower case."""

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except OSError:
            sock.close()
            raise
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def post(self, path: str, body: Any, *headers: tuple[str, str]) -> None:
        """A request with a JSON body, or with these bytes."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: gateway", f"content-length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + raw)

    async def head(self) -> int:
        """Wait for an answer's head; its status."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        self.headers = _fields(lines)
        return int(first.split(" ")[1])

    def header(self, name: str) -> str | None:
        """The first value of a header of the last answer, by its name in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; nothing at its end. Raises where it breaks off."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def received(self, length: int) -> bytes:
        """So many bytes of a chunked body, whatever its chunks."""
        data = b""
        while len(data) < length:
            data += await self.chunk()
        return data

    async def body(self) -> bytes:
        """The whole body. Raises `IncompleteReadError` where it breaks off."""
        length = self.header("content-length")
        if length is not None:
            return await self.reader.readexactly(int(length))
        data = b""
        while piece := await self.chunk():
            data += piece
        return data

    async def broken_body(self) -> bytes:
        """What comes of a chunked body that must break off."""
        data = b""
        try:
            while piece := await self.chunk():
                data += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return data
        raise AssertionError(f"a clean end after {data[-200:]!r}")

    def leave(self) -> None:
        """Drop the connection, whatever is under way."""
        self.writer.transport.abort()


# --- the fake worker


@dataclass
class Seen:
    """A request as it reached the fake worker."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int = 0
    """Which of the worker's connections it came by, from 1."""

    def header(self, name: str) -> str | None:
        """The first value of a header, by its name in lower case."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """The fake worker's way to answer, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    keep: bool = True

    def head(self, status: int = 200, *headers: tuple[str, str], length: int | None = None) -> None:
        """A response head: chunked unless a length is given."""
        framing = ("transfer-encoding", "chunked") if length is None else ("content-length", str(length))
        lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in (*headers, framing))]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def sse(self) -> None:
        """The head of an event stream."""
        self.head(200, ("content-type", "text/event-stream; charset=utf-8"))

    def chunk(self, data: bytes | str) -> None:
        """One chunk of a chunked body."""
        raw = data.encode() if isinstance(data, str) else data
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    def end(self) -> None:
        """The end of a chunked body."""
        self.writer.write(b"0\r\n\r\n")

    def json(self, body: Any, status: int = 200, *headers: tuple[str, str]) -> None:
        """A whole JSON answer."""
        raw = json.dumps(body).encode()
        self.head(status, ("content-type", "application/json"), *headers, length=len(raw))
        self.writer.write(raw)

    def text(self, body: str) -> None:
        """A whole answer in plain text."""
        self.head(200, ("content-type", "text/plain; version=0.0.4; charset=utf-8"), length=len(body))
        self.writer.write(body.encode())

    def reset(self) -> None:
        """Break the connection with a reset."""
        self.writer.transport.abort()
        self.keep = False

    def close(self) -> None:
        """Close the connection without more bytes."""
        self.writer.close()
        self.keep = False

    async def gone(self) -> None:
        """Wait until the other side closes the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass
        self.keep = False


Script = Callable[[Seen, Reply], Awaitable[None]]


def completion(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    } | fields


def delta(text: str = "", finish: str | None = None, index: int = 0) -> str:
    """One event of a chat stream."""
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n"


DONE = "data: [DONE]\n\n"


async def polite(seen: Seen, reply: Reply) -> None:
    """Answers every request with a short completion, streamed if it was asked to."""
    if seen.body and seen.json.get("stream"):
        reply.sse()
        for event in (delta("h"), delta("i"), delta("", "stop"), DONE):
            reply.chunk(event)
        reply.end()
    else:
        reply.json(completion())


class FakeWorker:
    """A server that does what its script says. Probes are answered unless `probes` says otherwise.

    `keep_alive`: seconds after which it closes an idle connection. With `backlog` it can be made deaf.
    """

    def __init__(
        self,
        script: Script = polite,
        *,
        probes: Script | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive: float | None = None,
        backlog: int = 1024,
    ) -> None:
        self.script = script
        self.probes = probes
        self.host = host
        self.port = port
        self.keep_alive = keep_alive
        self.seen: list[Seen] = []
        self._backlog = backlog
        self._fillers: list[socket.socket] = []
        self.connections = 0
        self.open = 0
        """Connections that are open now."""
        self.running = 0
        """Requests that the script has not left yet."""
        self.expired = 0
        """Connections that it closed because they were idle for `keep_alive`."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=2**26, backlog=self._backlog)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            await close(self._server)
            await stop(*self._tasks)
            self._server = None
        while self._fillers:
            self._fillers.pop().close()

    def deafen(self) -> None:
        """Accept no more: who connects from now on waits for an answer from the kernel that does not come."""
        assert self._server is not None
        asyncio.get_running_loop().remove_reader(self._server.sockets[0].fileno())
        for _ in range(self._backlog + 2):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        number = self.connections
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        try:
            async with asyncio.timeout(self.keep_alive):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except TimeoutError:
            self.expired += 1
            return False
        first, *lines = head[:-4].split("\r\n")
        method, target, _ = first.split(" ")
        headers = _fields(lines)
        length = int(next((value for name, value in headers if name == "content-length"), "0"))
        seen = Seen(method, target, headers, await reader.readexactly(length), number)
        reply = Reply(reader, writer)
        await self._answer(seen, reply)
        if reply.keep:
            await writer.drain()
        return reply.keep

    async def _answer(self, seen: Seen, reply: Reply) -> None:
        if is_probe(seen):
            if self.probes is not None:
                await self.probes(seen, reply)
            elif seen.target == "/v1/models":
                reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            elif seen.target == "/metrics":
                reply.text(f"vllm:num_requests_running {self.running}\n")
            elif seen.target == "/v1/loads":
                reply.json({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})
            else:
                reply.json({})
            return
        self.seen.append(seen)
        self.running += 1
        try:
            await self.script(seen, reply)
        finally:
            self.running -= 1


def is_probe(seen: Seen) -> bool:
    """Whether a request is the gateway's own, not a client's."""
    return seen.method == "GET"
