"""A gateway's server, without sockets: requests reach its ASGI application, and whatever it sends reaches the client.

The body comes after the head and in two pieces, and the client may leave at any step between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

from tests.simulate.loop import Process
from tests.simulate.network import Network


class Said(NamedTuple):
    """Something that reached the client."""

    what: str
    """start, body, end, or broken: the connection is gone."""
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    data: bytes = b""


class Visit:
    """One request at one gateway. `cut`: the client leaves in the middle of its body."""

    def __init__(
        self, network: Network, process: Process, application: Any, scope: Any, body: bytes, *, cut: bool
    ) -> None:
        self._network, self._loop = network, network.loop
        self.process = process
        self._scope, self._application = scope, application
        self.body = body
        self._client: Process = network.loop.world
        self._coming: deque[dict[str, Any]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.said: asyncio.Queue[Said] = asyncio.Queue()
        self.over = False
        """The client hears nothing more."""
        self._last = self._arrived = 0.0
        self._send(self._begin)
        half = len(body) // 2
        self._send(self._take, {"type": "http.request", "body": body[:half], "more_body": True})
        if cut:
            self.leave()
        else:
            self._send(self._take, {"type": "http.request", "body": body[half:], "more_body": False})

    def leave(self) -> None:
        """The client closes its connection."""
        self.over = True
        self._send(self._take, {"type": "http.disconnect"})

    def reset(self) -> None:
        """The gateway is gone."""
        self._reach(Said("broken"))

    # --- to the gateway
    def _send(self, what: Any, *args: Any) -> None:
        self._arrived = max(self._arrived, self._network.arrives("client", self.process.name))
        self._loop.call_at(self._arrived, what, *args, context=self.process.context)

    def _begin(self) -> None:
        self._loop.create_task(self._run(), name="visit")

    async def _run(self) -> None:
        self._scope["visit"] = self
        try:
            await self._application(self._scope, self._receive, self._answer)
        except Exception:
            self._reach(Said("broken"))
        else:
            self._reach(Said("broken"))

    def _take(self, message: dict[str, Any]) -> None:
        self._coming.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _receive(self) -> dict[str, Any]:
        while not self._coming:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._coming.popleft()

    # --- to the client
    async def _answer(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._reach(Said("start", message["status"], tuple(message["headers"])))
        else:
            if message["body"]:
                self._reach(Said("body", data=message["body"]))
            if not message.get("more_body", False):
                self._reach(Said("end"))

    def _reach(self, said: Said) -> None:
        self._last = max(self._last, self._network.arrives(self.process.name, "client"))
        self._loop.call_at(self._last, self._heard, said, context=self._client.context)

    def _heard(self, said: Said) -> None:
        if not self.over:
            self.over = said.what in ("end", "broken")
            self.said.put_nowait(said)
