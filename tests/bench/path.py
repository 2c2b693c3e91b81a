"""What a request costs on its way through the data plane, without sockets: scripted clients and replicas in one loop.

    python -m tests.bench.path                     # CPU µs a request, the least of some rounds
    python -m tests.bench.path --mode stream       # the same a stream of 200 events, and an event
    python -m tests.bench.path --calls             # calls of functions a request, the same on every machine
    python -m tests.bench.path --profile           # where the time goes

Everything else is as `detgate serve` has it: uvicorn's protocol class, uvloop, the ledger on disk, metrics, slots.
Other programs must be silent for the times to mean something; the number of calls does not depend on them.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

import uvicorn
import uvloop
from uvicorn.server import ServerState

from gateway.assembly import Gateway
from gateway.carriers.http1 import Carrier
from gateway.serve import collect_rarely
from gateway.settings import Settings
from gateway.upstream import Connection, Connections
from tests.harness import DONE, chat, completion, delta, pool

Mode = Literal["plain", "session", "stream", "64k", "1m"]

EVENTS = 200
"""Of one stream."""

_WORDS = "The quick brown fox jumps over the lazy dog. " * 14
_LENGTHS: dict[Mode, int] = {"64k": 1 << 16, "1m": 1 << 20}


class _End(asyncio.Transport):
    """One end of a connection that is no socket."""

    protocol: asyncio.Protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class _Replica(_End):
    """Answers what it is sent, piece by piece, each in a turn of the loop of its own."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()

    def write(self, data: Any) -> None:
        self._loop.call_soon(self._say, 0)

    def writelines(self, list_of_data: Any) -> None:
        self._loop.call_soon(self._say, 0)

    def _say(self, number: int) -> None:
        self.protocol.data_received(self._pieces[number])
        if number + 1 < len(self._pieces):
            self._loop.call_soon(self._say, number + 1)


class _Client(_End):
    """Asks again when it has its answer."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load

    def write(self, data: Any) -> None:
        if not data.endswith(self._load.ends_with):
            return
        if not self._load.streams and not data.startswith(b"HTTP/1.1 200"):
            raise AssertionError(data)
        self._load.ended += 1
        self.ask()

    def ask(self) -> None:
        load = self._load
        if load.begun < load.goal:
            load.begun += 1
            load.loop.call_soon(self.protocol.data_received, load.request())
        elif load.ended == load.goal:
            load.over.set()


class Load:
    """Clients that each have one request in flight."""

    def __init__(self, mode: Mode, carriers: Callable[[], Carrier], clients: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.streams = mode == "stream"
        self.ends_with = b"0\r\n\r\n" if self.streams else b"}"
        self.goal = self.begun = self.ended = 0
        self.over = asyncio.Event()
        self._asked = 0
        self._session = mode == "session"
        text = (_WORDS * (_LENGTHS.get(mode, 600) // len(_WORDS) + 1))[: _LENGTHS.get(mode, 600)]
        extra = {"stream": True} if self.streams else {}
        body = chat("Request @@@@@@@@: " + text, temperature=0.7, max_tokens=200, **extra)
        self._body = json.dumps(body, separators=(",", ":")).encode()
        self._clients = []
        for _ in range(clients):
            client, carrier = _Client(self), carriers()
            client.protocol = carrier
            carrier.connection_made(client)
            self._clients.append(client)

    def request(self) -> bytes:
        """The next request, unlike all others."""
        self._asked += 1
        body = self._body.replace(b"@@@@@@@@", b"%08d" % self._asked)
        session = b"x-session-id: s%d\r\n" % self._asked if self._session else b""
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nUser-Agent: bench\r\nAccept: */*\r\n"
            b"Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (session, len(body), body)
        )

    async def run(self, requests: int) -> None:
        """So many requests, one after the other from each client."""
        self.goal, self.begun, self.ended = requests, 0, 0
        self.over.clear()
        for client in self._clients:
            client.ask()
        await self.over.wait()
        for _ in range(4):  # the last answers are recorded
            await asyncio.sleep(0)


def _answer(mode: Mode) -> list[bytes]:
    if mode != "stream":
        body = json.dumps(completion(_WORDS[:200]), separators=(",", ":")).encode()
        head = b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        return [head + body]
    events = [delta(f"word {number} ", "stop" if number == EVENTS - 1 else None) for number in range(EVENTS)]
    pieces = [b"%x\r\n%b\r\n" % (len(event), event.encode()) for event in (*events, DONE)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head + pieces[0], *pieces[1:-1], pieces[-1] + b"0\r\n\r\n"]


@asynccontextmanager
async def load(mode: Mode, *, clients: int = 64, replicas: int = 2) -> AsyncIterator[Load]:
    """A load on a gateway with so many replicas, which are up."""
    pieces = _answer(mode)

    async def connect(self: Connections) -> Connection:
        connection, end = Connection(self), _Replica(pieces)
        end.protocol = connection
        connection.connection_made(end)
        return connection

    urls = [f"http://127.0.0.1:{port}" for port in range(20000, 20000 + replicas)]
    connects = Connections._connect
    Connections._connect = connect  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.load(None, {}, {"ledger": {"path": folder}, "pools": [pool("policy", *urls)]})
            gateway = Gateway(settings)
            for replica in gateway.fleet.replicas:
                replica.probed("ok", "")
            config = uvicorn.Config(gateway.application, lifespan="off", log_config=None, access_log=False)
            config.load()
            state = ServerState()

            def carrier() -> Carrier:
                loop = asyncio.get_running_loop()
                return Carrier(gateway, config=config, server_state=state, app_state={}, _loop=loop)

            yield Load(mode, carrier, clients)
            for replica in gateway.fleet.replicas:
                replica.connections.close()
            gateway.runs.close()
    finally:
        Connections._connect = connects  # type: ignore[method-assign]


async def calls(mode: Mode, requests: int, *, clients: int = 8, replicas: int = 2) -> float:
    """Calls of functions, Python's and built-in ones, for each request."""
    async with load(mode, clients=clients, replicas=replicas) as running:
        await running.run(2 * clients + 10 * replicas)  # connections are opened
        profile = cProfile.Profile()
        profile.enable()
        await running.run(requests)
        profile.disable()
    return float(pstats.Stats(profile).total_calls) / requests  # type: ignore[attr-defined]


async def seconds(mode: Mode, requests: int, rounds: int, *, clients: int, replicas: int) -> float:
    """CPU seconds a request, in the fastest of some rounds."""
    async with load(mode, clients=clients, replicas=replicas) as running:
        await running.run(max(requests // 4, clients))
        collect_rarely()
        found = []
        for _ in range(rounds):
            since = time.process_time()
            await running.run(requests)
            found.append((time.process_time() - since) / requests)
    return min(found)


async def _profile(mode: Mode, requests: int, clients: int, replicas: int) -> None:
    async with load(mode, clients=clients, replicas=replicas) as running:
        await running.run(requests)
        profile = cProfile.Profile()
        profile.enable()
        await running.run(requests)
        profile.disable()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(50)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.path")
    parser.add_argument("--mode", choices=get_args(Mode), default="plain")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    mode: Mode = given.mode
    requests: int = given.requests or {"stream": 60, "1m": 40}.get(mode, 1000)
    if given.profile:
        uvloop.run(_profile(mode, requests, given.clients, given.replicas))
    elif given.calls:
        found = uvloop.run(calls(mode, requests, clients=given.clients, replicas=given.replicas))
        print(f"{mode}: {found:.0f} calls a request")
    else:
        found = 1e6 * uvloop.run(seconds(mode, requests, given.rounds, clients=given.clients, replicas=given.replicas))
        print(f"{mode}: {found:.1f} µs a request" + (f", {found / EVENTS:.2f} an event" if mode == "stream" else ""))


if __name__ == "__main__":
    main()
