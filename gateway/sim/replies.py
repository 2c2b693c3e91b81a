"""What a handler answers: a whole body or a stream of events, and how either is sent with a fault."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.sim.connection import Connection
from gateway.sim.faults import Fault

Headers = tuple[tuple[str, str], ...]

_SPLIT_SECONDS = 0.002
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = ()


@dataclass(frozen=True)
class Event:
    """Bytes of a stream, the tokens that they carry, and whether they belong to its end."""

    data: bytes
    tokens: int = 0
    tail: bool = False


@dataclass(frozen=True)
class Stream:
    """A streamed answer; `broken` is what the engine sends when it fails in the middle."""

    events: AsyncIterator[Event]
    broken: bytes
    headers: Headers = ()


class EngineDied(Exception):
    """The request did what crashes this engine."""


def as_json(value: object) -> bytes:
    return orjson.dumps(value)


def answer(value: object, status: int = 200, headers: Headers = ()) -> Reply:
    return Reply(status, as_json(value), headers=headers)


def data(value: object, *, tokens: int = 0, tail: bool = False) -> Event:
    """One unnamed event."""
    return Event(b"data: " + as_json(value) + b"\n\n", tokens, tail)


def named(name: str, value: object, *, tokens: int = 0, tail: bool = False) -> Event:
    """One named event."""
    return Event(b"event: " + name.encode() + b"\ndata: " + as_json(value) + b"\n\n", tokens, tail)


class Sender:
    """Sends one answer with the fault that its request met."""

    def __init__(self, connection: Connection, fault: Fault, headers: Headers = ()) -> None:
        self._connection = connection
        self._fault = fault
        self._headers = (*headers, *fault.extra_headers)
        self._squeeze = zlib.compressobj(wbits=31) if fault.gzip else None

    async def send(self, reply: Reply | Stream) -> None:
        if isinstance(reply, Stream):
            await self._stream(reply)
        else:
            await self._whole(reply)

    async def _whole(self, reply: Reply) -> None:
        body = gzip.compress(reply.body) if self._fault.gzip else reply.body
        headers = ((("content-type", reply.content_type),) if reply.body else ()) + reply.headers
        if self._breaks_at(self._first_break()):
            clean = self._fault.close_after_tokens is not None
            await self._head(reply.status, headers if clean else (*headers, ("content-length", str(len(body)))))
            await self._write(body[: len(body) // 2])
            await self._break()
            return
        await self._head(reply.status, (*headers, ("content-length", str(len(body)))))
        for part in self._parts(body)[:-1]:
            await self._write(part)
            await asyncio.sleep(_SPLIT_SECONDS)
        await self._write(self._parts(body)[-1], last=True)

    async def _stream(self, stream: Stream) -> None:
        await self._head(200, (("content-type", "text/event-stream; charset=utf-8"), *stream.headers))
        sent = 0
        held = b""
        async for event in stream.events:
            if event.tokens and self._breaks_at(sent):
                await self._break()
                return
            if event.tokens and sent == self._fault.error_event_after_tokens:
                await self._write(stream.broken)
                break
            if event.tokens:
                await self._before_token()
            sent += event.tokens
            if event.tail and self._fault.coalesce:
                held += event.data
            else:
                await self._event(event.data)
        if self._squeeze is not None:
            held = self._squeeze.compress(held) + self._squeeze.flush()
        await self._write(held, last=True)

    async def _before_token(self) -> None:
        if self._fault.delay_token:
            await asyncio.sleep(self._fault.delay_token)
        if self._fault.comments:
            await self._event(_COMMENT)

    async def _event(self, payload: bytes) -> None:
        if self._squeeze is not None:
            payload = self._squeeze.compress(payload) + self._squeeze.flush(zlib.Z_SYNC_FLUSH)
        parts = self._parts(payload)
        for part in parts:
            await self._write(part)
            if len(parts) > 1:
                await asyncio.sleep(_SPLIT_SECONDS)

    def _parts(self, payload: bytes) -> list[bytes]:
        if not self._fault.chunk_split or len(payload) < 2:
            return [payload]
        wide = next((place for place, byte in enumerate(payload) if byte >= 0xC0), len(payload) // 2 - 1)
        return [payload[: wide + 1], payload[wide + 1 :]]

    def _first_break(self) -> int:
        fault = self._fault
        given = (
            fault.reset_after_tokens,
            fault.cut_after_tokens,
            fault.close_after_tokens,
            fault.silent_after_tokens,
        )
        return min((count for count in given if count is not None), default=-1)

    def _breaks_at(self, sent: int) -> bool:
        return sent >= 0 and sent == self._first_break()

    async def _break(self) -> None:
        fault = self._fault
        if fault.reset_after_tokens is not None:
            self._connection.reset()
        elif fault.cut_after_tokens is not None:
            self._connection.cut()
        elif fault.close_after_tokens is not None:
            await self._write(b"", last=True)
            return
        await self._connection.gone()

    async def _head(self, status: int, headers: Headers) -> None:
        compressed = (("content-encoding", "gzip"),) if self._fault.gzip else ()
        pairs = [(name.encode(), value.encode()) for name, value in (*headers, *compressed, *self._headers)]
        await self._connection.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, payload: bytes, *, last: bool = False) -> None:
        message: dict[str, Any] = {"type": "http.response.body", "body": payload, "more_body": not last}
        await self._connection.send(message)
