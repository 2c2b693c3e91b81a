"""Real Redis servers for tests, and an address before them that can be led elsewhere.

async with RedisServer() as server, linked(server.url) as link:
    …
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hiredis

from gateway.shared.address import parse
from gateway.shared.link import Link
from gateway.tasks import start, stop
from tests import ports

MISSING = "redis-server is not installed, and these tests want a real one: apt-get install redis-server, or .ci/run"


class RedisServer:
    """A server of its own, with nothing kept on disk unless `options` say so."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        self.binary = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
        assert self.binary is not None, MISSING
        self.port = port or ports.free()
        self._options = options
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    async def __aenter__(self) -> Self:
        await self.start()
        await self.meet()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, and remove what it left."""
        self.kill()
        self._folder.cleanup()

    async def start(self) -> None:
        """Start it, and wait until it answers, with its data."""
        words = ["--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", self._folder.name]
        words += ["--repl-diskless-sync-delay", "0"]
        self._process = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond, and so does its end
            [str(self.binary), *words, "--loglevel", "warning", *self._options],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        async with asyncio.timeout(20):
            while True:
                with suppress(OSError, EOFError, hiredis.ReplyError):
                    if await self.ask("PING") == b"PONG":
                        return
                assert self._process.poll() is None, "redis-server did not start"
                await asyncio.sleep(0.01)

    async def meet(self) -> None:
        """Have gateways take it for a server at which they have met for long, so that a new run begins at once."""
        name = (await self.ask("INFO", "server")).partition(b"run_id:")[2].split()[0]
        await self.ask("HSET", "detgate:server", "process", name, "since", 0)

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It stands still, its sockets open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def ask(self, *words: str | bytes | int) -> Any:
        """One command by a connection of its own; its reply. Raises `hiredis.ReplyError`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(pack(words))
            parser = hiredis.Reader(notEnoughData=_MORE)
            while (reply := parser.gets()) is _MORE:
                data = await reader.read(65536)
                if not data:
                    raise EOFError
                parser.feed(data)
        finally:
            writer.close()
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply


_MORE: Any = object()
pack: Any = hiredis.pack_command


class Front:
    """An address that leads to a server, until it is led to another: what a service name does in a failover."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.lose: bytes | None = None
        """Once these bytes have passed to the server, what it answers next is lost with the connection."""
        self._losing = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await stop(*self._tasks)

    def close(self) -> None:
        """Nobody gets through any more."""
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for writer in tuple(self._open):
            writer.transport.abort()

    def lead(self, target: int) -> None:
        """From now on to another server."""
        self.target = target
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        try:
            self._open |= ends
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            ends.add(back)
            self._open |= ends
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer, back=True))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self._open -= ends
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if back and self._losing:
                    self._losing = False
                    break
                if not back and self.lose is not None and self.lose in data:
                    self.lose, self._losing = None, True
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def linked(url: str, seconds: float = 2.0, *failed: Any) -> AsyncIterator[Link]:
    """A link to a server, kept up."""
    link = Link(parse(url), seconds, *failed)
    task = start(link.run(), "link")
    try:
        yield link
    finally:
        await stop(task)
