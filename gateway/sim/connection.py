"""One request's connection: its body, its end, and ways to break it.

A reset needs the socket, which ASGI hides: `SimProtocol` puts the transport into the scope's extensions.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_EXTENSION = "detgate.sim.transport"
_NO_LINGER = struct.pack("ii", 1, 0)


class SimProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the transport within the application's reach."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"transport": self.transport}}


class Connection:
    """The ASGI callables of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send = send
        self._receive = receive
        extension = (scope.get("extensions") or {}).get(_EXTENSION, {})
        self._transport: asyncio.Transport | None = extension.get("transport")

    async def body(self) -> bytes | None:
        """The whole body; None: the client left before its end."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def gone(self) -> None:
        """Waits until the client has left, or the connection is broken."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def reset(self) -> None:
        """Resets the connection (RST), behind what was written before.

        ConnectionResetError: there is no socket, the application runs without a server.
        """
        transport = self._reachable()
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and not transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        transport.abort()

    def cut(self) -> None:
        """Closes the connection (FIN) in the middle of the transfer."""
        self._reachable().close()

    def _reachable(self) -> asyncio.Transport:
        if self._transport is None:
            raise ConnectionResetError("the simulated engine closed the connection")
        return self._transport
