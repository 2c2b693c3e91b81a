"""What the ledger costs: CPU of one request with and without it, side by side in one process.

    python -m tests.ledger_cost [REQUESTS]

The whole data plane serves each request but for the client's socket, before a fake engine in the same process. The
least of five rounds counts, those with and without in turn; the fake engine's part is in both.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from gateway.core.types import Request
from gateway.ledger.writer import Ledger
from tests.harness import FakeWorker, Reply, Seen, chat, completion, gateway, pool

ROUNDS = 5


class Nobody:
    """A client without a socket."""

    started = response_complete = disconnected = False
    on_pause: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None

    def reply(self, status: int, headers: bytes, body: bytes) -> None: ...
    def start(self, status: int, headers: bytes, length: int | None = None) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def break_off(self) -> None: ...

    async def flushed(self) -> bool:
        return True


ANSWER = json.dumps(completion("x" * 400)).encode()


async def answer(seen: Seen, reply: Reply) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    reply.writer.write(head + ANSWER)


async def spent(requests: int) -> float:
    """µs of CPU of one request."""
    body = json.dumps(chat("y" * 600)).encode()
    async with FakeWorker(answer) as worker, gateway(pool("policy", worker.url), run="r") as gate:
        request = Request("POST", "/sessions/s/v1/chat/completions", "", [], {}, body)
        for _ in range(200):
            await gate.gateway.serve(request, Nobody())
        since = time.process_time()
        for _ in range(requests):
            await gate.gateway.serve(request, Nobody())
        return (time.process_time() - since) / requests * 1e6


def silent() -> Any:
    """Put nothing into the ledger."""
    return patch.multiple(
        Ledger, claimed=lambda *_: True, complete=lambda *_: None, closed=lambda *_: None, opened=lambda *_: None
    )


async def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    told: dict[str, list[float]] = {"without a ledger": [], "with it": []}
    for _ in range(ROUNDS):
        with silent():
            told["without a ledger"].append(await spent(requests))
        told["with it"].append(await spent(requests))
    for name, each in told.items():
        print(f"{name}: {min(each):.1f} µs a request")
    print(f"the ledger: {min(told['with it']) - min(told['without a ledger']):.1f} µs")


if __name__ == "__main__":
    asyncio.run(main())
