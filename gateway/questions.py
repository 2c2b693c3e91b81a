"""What the gateway itself asks of a replica: whole answers, bounded in time and in length."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from gateway.upstream import Broken, Connections

LONGEST = 16 << 20
"""Bytes of an answer that are read."""


class Answered(NamedTuple):
    """What was answered."""

    status: int
    body: bytes

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


Ask = Callable[[str], Awaitable[Answered]]
"""GETs a path. Raises `Broken` where there is no answer."""


async def ask(
    connections: Connections, headers: bytes, path: str, seconds: float, method: str = "GET", body: bytes = b""
) -> Answered:
    """Ask on one of these connections, with these header lines. Raises `Broken`, also where it takes longer."""
    head = f"{method} {connections.address.prefix}{path} HTTP/1.1\r\n".encode() + headers
    if body:
        head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    head += b"\r\n"
    try:
        async with asyncio.timeout(seconds):
            try:
                return await _asked(connections, head, body, fresh=False)
            except Broken as error:
                if not error.stale:
                    raise
            return await _asked(connections, head, body, fresh=True)
    except TimeoutError:
        raise Broken(f"no answer within {seconds:g} s", "send", timeout=True) from None


async def _asked(connections: Connections, head: bytes, body: bytes, *, fresh: bool) -> Answered:
    pieces: list[bytes] = []
    room = LONGEST

    def take(data: bytes) -> bool:
        nonlocal room
        pieces.append(data)
        room -= len(data)
        return room < 0

    exchange = await connections.send(head, body, fresh=fresh)
    try:
        await exchange.pipe(take)
    finally:
        exchange.abort()
    if room < 0:
        raise Broken(f"the answer is longer than {LONGEST} bytes", "body")
    return Answered(exchange.status, b"".join(pieces))
