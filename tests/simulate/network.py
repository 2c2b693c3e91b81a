"""Connections without sockets: bytes come late, in order, and not at all once an end is gone.

A path between two hosts may *stall*, in one direction or both: what is sent stays under way until it heals, and arrives
then, however long ago its sender gave up.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulate.loop import PROCESS, Loop, Process

Trace = Callable[[str], None]


class Service(Protocol):
    """A host that takes connections."""

    up: bool

    def accept(self) -> asyncio.Protocol:
        """The host's side of a new connection."""


class Network:
    """All that lies between processes."""

    def __init__(self, loop: Loop, seed: int, trace: Trace) -> None:
        self.loop = loop
        self.trace = trace
        self._chance = random.Random(f"network {seed}")
        self._services: dict[str, Service] = {}
        self._stalls: dict[tuple[str, str], float] = {}
        self._ends: list[End] = []
        loop.connect = self.connect

    def listen(self, host: str, service: Service) -> None:
        self._services[host] = service

    def latency(self) -> float:
        """Seconds that bytes take, mostly very few."""
        some = self._chance.random()
        return 0.0002 + 0.002 * some + (0.05 * some if some > 0.995 else 0.0)

    def arrives(self, source: str, target: str) -> float:
        """When what is sent now arrives."""
        return max(self.loop.time(), self._stalls.get((source, target), 0.0)) + self.latency()

    def stall(self, source: str, target: str, seconds: float) -> None:
        """What is sent from one host to another stays under way for so long."""
        self._stalls[source, target] = self.loop.time() + seconds

    def hold(self, source: str, target: str, seconds: float) -> None:
        """What is sent by the connections that there are stays under way for so long; others are not held."""
        for end in self._ends:
            if end.host == source and end.peer.host == target:
                end.held_until = self.loop.time() + seconds

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        process = PROCESS.get()
        when = self.arrives(process.name, host)
        await asyncio.sleep(when - self.loop.time())
        service = self._services[host]
        if not service.up:
            await asyncio.sleep(self.arrives(host, process.name) - self.loop.time())
            raise ConnectionRefusedError(111, "Connection refused")
        near = End(self, process, process.name, factory())
        far = End(self, self.loop.world, host, service.accept())
        near.peer, far.peer = far, near
        self._ends = [end for end in self._ends if end.open]
        self._ends += (near, far)
        self.loop.world.context.copy().run(far.protocol.connection_made, far)
        near.protocol.connection_made(near)
        return near, near.protocol

    def cut(self, host: str, other: str | None = None) -> None:
        """Break all connections of a host, or those between two."""
        for end in self._ends:
            if end.open and end.host == host and (other is None or end.peer.host == other):
                end.abort()
                end.peer.abort()

    def vanish(self, process: Process) -> None:
        """The system closes what a process had open, whose protocols hear nothing of it."""
        for end in self._ends:
            if end.process is process and end.open:
                end.open = False
                end.carry_end()


class End(asyncio.Transport):
    """One end of a connection."""

    peer: End

    def __init__(self, network: Network, process: Process, host: str, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.open = True
        self.process, self.host = process, host
        self.protocol: Any = protocol
        self._network = network
        self._loop = network.loop
        self._last = self.held_until = 0.0
        self._paused = False
        self._kept: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.open and data:
            self._loop.call_at(self._next(), self.peer.arrive, bytes(data), context=self.peer.process.context)

    def carry_end(self) -> None:
        """Have the other end learn that this one is gone."""
        self._loop.call_at(self._next(), self.peer.lost, context=self.peer.process.context)

    def _next(self) -> float:
        self._last = max(self._last, self.held_until, self._network.arrives(self.host, self.peer.host))
        return self._last

    def arrive(self, data: bytes) -> None:
        if not self.open:
            return
        if self._paused:
            self._kept.append(data)
            return
        self._network.trace(f"{self.peer.host} > {self.host} {len(data)} {zlib.crc32(data):08x}")
        self.protocol.data_received(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Close this direction alone: the other end hears of it when it has read all that was sent before."""
        if self.open:
            self._loop.call_at(self._next(), self.peer.ended, context=self.peer.process.context)

    def ended(self) -> None:
        if self.open and not self.protocol.eof_received():
            self.abort()

    def lost(self) -> None:
        if self.open:
            self.open = False
            self.protocol.connection_lost(ConnectionResetError(104, "Connection reset by peer"))

    def abort(self) -> None:
        if self.open:
            self.open = False
            self.carry_end()
            self._loop.call_soon(self.protocol.connection_lost, None, context=self.process.context)

    close = abort

    def is_closing(self) -> bool:
        return not self.open

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        kept, self._kept = self._kept, []
        for data in kept:
            self.arrive(data)
