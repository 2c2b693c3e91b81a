"""The replicas of the simulation: what is in each one's batch, from a request's arrival until the engine has let go.

A request whose connection is gone is noticed a little later, as real engines do, and is in the batch until then.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulate.loop import Loop
from tests.simulate.network import Network

_MODE = {"vllm_env": {"VLLM_BATCH_INVARIANT": True}, "vllm_config": {"cache_config": {"enable_prefix_caching": False}}}
"""What it tells of its settings."""

LATE = 0.3
"""Seconds, at most, until an engine notices that a connection is gone."""


@dataclass(eq=False)
class Inside:
    """One request in an engine."""

    name: str
    """Which request of a client it is, by its text."""
    engine_id: str
    seed: Any
    gateway: str
    since: float
    until: float = -1.0
    """When the engine let go of it."""
    wanted: bool = True
    """Its connection is there."""
    left: float = math.inf
    """When its connection was gone."""


class Engine:
    """One replica."""

    def __init__(self, name: str, pool: str, network: Network, seed: int, entered: Callable[[Engine, Inside], None]):
        self.name, self.pool = name, pool
        self.up = True
        self.inside: list[Inside] = []
        self.seen: list[Inside] = []
        self.chance = random.Random(f"engine {name} {seed}")
        self.loop: Loop = network.loop
        self.entered = entered
        self.break_next = 0
        """Answers that are to break off."""
        self.slow = 1.0

    def accept(self) -> asyncio.Protocol:
        return Connection(self)

    def take(self, gateway: str, text: str, body: dict[str, Any], engine_id: str) -> Inside:
        """A request enters the batch."""
        inside = Inside(text, engine_id, body.get("seed"), gateway, self.loop.time())
        self.inside.append(inside)
        self.seen.append(inside)
        self.entered(self, inside)
        return inside

    def let_go(self, inside: Inside) -> None:
        if inside in self.inside:
            self.inside.remove(inside)
            inside.until = self.loop.time()

    def die(self) -> None:
        """It is gone, and what was in it with it."""
        self.up = False
        for inside in tuple(self.inside):
            self.let_go(inside)

    def tell(self, path: str) -> tuple[int, bytes]:
        """What it answers to a question about itself."""
        if path == "/v1/models":
            return 200, b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % self.pool.encode()
        if path == "/metrics":
            return 200, self.metrics().encode()
        if path == "/version":
            return 200, b'{"version":"0.32.0"}'
        if path == "/server_info?config_format=json":
            return 200, json.dumps(_MODE).encode()
        generates = path == "/v1/chat/completions" and self.pool == "policy"
        return 200 if path == "/health" else 405 if generates else 404, b""

    def metrics(self) -> str:
        return (
            f"vllm:num_requests_running {len(self.inside)}\nvllm:num_requests_waiting 0\nvllm:num_preemptions_total 0\n"
        )


_CUT = re.compile(rb"content-length: *(\d+)", re.I)
_ID = re.compile(rb"\r\nx-request-id: *([^\r]*)", re.I)


class Connection(asyncio.Protocol):
    """A gateway's connection to it: one exchange at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._out: Any = None
        self._data = b""
        self._inside: Inside | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._out = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._out = None
        if self._timer is not None:
            self._timer.cancel()
        inside, self._inside = self._inside, None
        if inside is not None:
            engine = self._engine
            inside.wanted, inside.left = False, engine.loop.time()
            engine.loop.call_later(LATE * engine.chance.random(), engine.let_go, inside)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, parted, body = self._data.partition(b"\r\n\r\n")
        length = _CUT.search(head)
        if not parted or len(body) < (int(length[1]) if length else 0):
            return
        self._data = b""
        method, path, _ = head.decode().split(" ", 2)
        if method == "GET":
            self._say(*self._engine.tell(path))
            return
        engine_id = _ID.search(head)
        self._serve(json.loads(body), engine_id[1].decode() if engine_id else "")

    def _say(self, status: int, body: bytes) -> None:
        if self._out is not None:
            self._out.write(
                b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(body), body)
            )

    def _serve(self, body: dict[str, Any], engine_id: str) -> None:
        engine, chance = self._engine, self._engine.chance
        busy = chance.random()
        if busy < 0.01:
            self._say(503, b'{"error":{"message":"busy","type":"server_error"}}')
            return
        if busy < 0.015:
            self._say(500, b'{"error":{"message":"broken","type":"server_error"}}')
            return
        text = _text(body)
        inside = self._inside = engine.take(self._out.peer.host, text, body, engine_id)
        parts = _parts(text, body)
        seconds = engine.slow * chance.choice([0.01, 0.05, 0.2, 0.2, 0.5]) * (0.5 + chance.random())
        breaks = chance.randrange(len(parts) + 1) if engine.break_next or chance.random() < 0.02 else -1
        engine.break_next = max(0, engine.break_next - (breaks >= 0))
        self._timer = engine.loop.call_later(seconds, self._write, inside, parts, breaks, seconds / 4)

    def _write(self, inside: Inside, parts: list[bytes], breaks: int, pause: float) -> None:
        engine = self._engine
        self._timer = None
        if breaks == 0:
            # It breaks while it computes: nothing of this request is left in it.
            self._inside = None
            engine.let_go(inside)
            self._out.abort()
            return
        part, *rest = parts
        if not rest:
            self._inside = None
            engine.let_go(inside)
        self._out.write(part)
        if rest:
            self._timer = engine.loop.call_later(pause, self._write, inside, rest, breaks - 1, pause)


def _text(body: dict[str, Any]) -> str:
    """The text that says which request it is."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    given = body.get("prompt", body.get("input"))
    return str(given[0] if isinstance(given, list) else given)


def _parts(text: str, body: dict[str, Any]) -> list[bytes]:
    """An answer as it leaves, piece by piece."""
    said = f"{text} by {body.get('seed')}"
    if "messages" not in body and "prompt" not in body:
        told: dict[str, Any] = {"id": "classify-1", "data": [{"index": 0, "label": said, "probs": [0.5]}], "usage": {}}
    elif body.get("stream"):
        return _stream(said, "prompt" in body)
    else:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"text": said} if "prompt" in body else {"message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        told = {"id": "cmpl-1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    raw = json.dumps(told).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
    return [head + raw[:5], raw[5:]]


def _stream(said: str, plain: bool) -> list[bytes]:
    parts = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"]
    for word, finish in (*((word, None) for word in said.split(" ")), ("", "stop")):
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"text": word} if plain else {"delta": {"content": word}}
        event = json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})
        parts.append(_chunk(b"data: %b\n\n" % event.encode()))
    parts[0] += parts.pop(1)
    parts.append(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    return parts


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
