"""Serving a simulated engine: in a process of its own, or many in one event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn

from gateway.sim.app import App, build
from gateway.sim.connection import SimProtocol
from gateway.sim.engine import Engine
from gateway.sim.settings import SimSettings

_TICK = 0.1

_ACCEPTING = 6
"""Turns of the loop until a connection that was accepted is one that can be closed."""


async def close(listener: asyncio.Server) -> None:
    """Stop listening, with no connection left half made.

    What was accepted in one turn of the loop fails so where its server is closed in the next (CPython's asyncio).
    """
    for sock in listener.sockets:
        asyncio.get_running_loop().remove_reader(sock.fileno())
    for _ in range(_ACCEPTING):
        await asyncio.sleep(0)
    listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server inside another program: no hold on signals, a start and an end that can be awaited."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        ticks = 0
        while not self.ended.is_set():
            await self.on_tick(ticks)
            ticks += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _TICK)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)
        for listener in self.servers:
            await listener.wait_closed()


class SimServer:
    """One simulated engine on 127.0.0.1 as an async context manager; port 0 takes a free one.

    After `stop`, `start` serves again on the same port: the same engine and counters, revived if it died.
    """

    def __init__(self, settings: SimSettings, port: int = 0) -> None:
        self.app: App = build(settings)
        self.port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        return self.app.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens. OSError: the port is taken."""
        # Named as TCP, or asyncio leaves Nagle's algorithm on and tokens wait for acknowledgements.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", self.port))
        except OSError:
            listener.close()
            raise
        self.port = listener.getsockname()[1]
        self.engine.dead = False
        self._server = _Server(_config(self.app, self.engine.settings))
        self._task = asyncio.create_task(self._server.serve([listener]))
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Stops listening and resets what is open, as when the process is killed."""
        if self._server is None or self._task is None:
            return
        for listener in self._server.servers:
            await close(listener)
        self.app.crash()
        self._server.ended.set()
        await self._task
        self._server = self._task = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def serve(settings: SimSettings, host: str, port: int) -> None:
    """Serves until the process is told to end."""
    uvicorn.Server(_config(build(settings), settings, host, port, "info")).run()


def _config(
    app: App, settings: SimSettings, host: str = "127.0.0.1", port: int = 0, log: str = "critical"
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=SimProtocol,
        ws="none",
        lifespan="off",
        log_level=log,
        access_log=False,
        timeout_keep_alive=settings.keep_alive_seconds,
    )
