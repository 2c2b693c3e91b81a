"""Keeps what was said, for `ledger.bodies`: a body as text, cut off where it is too long.

Headers are never kept, nor any key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.answers import Client


def kept(name: str, body: bytes | bytearray, length: int, limit: int) -> dict[str, Any]:
    """A body for a record: its text, its length in bytes, and whether the text is only its beginning.

    A text that was not cut is the exact body, encoded in UTF-8; bytes that are no UTF-8 are replaced by U+FFFD.
    """
    cut = length > limit
    text = body[:limit].decode(errors="ignore" if cut else "replace")
    return {f"{name}_body": text, f"{name}_bytes": length, f"{name}_cut": cut}


class Heard:
    """A client's way back that keeps the beginning of all that goes there."""

    def __init__(self, client: Client, limit: int) -> None:
        self._client = client
        self._limit = limit
        self.body = bytearray()
        self.length = 0
        """Bytes that went there."""

    @property
    def started(self) -> bool:
        return self._client.started

    @property
    def response_complete(self) -> bool:
        return self._client.response_complete

    @property
    def disconnected(self) -> bool:
        return self._client.disconnected

    @property
    def on_pause(self) -> Callable[[], None] | None:
        return self._client.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], None] | None) -> None:
        self._client.on_pause = call

    @property
    def on_resume(self) -> Callable[[], None] | None:
        return self._client.on_resume

    @on_resume.setter
    def on_resume(self, call: Callable[[], None] | None) -> None:
        self._client.on_resume = call

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        self._keep(body)
        self._client.reply(status, headers, body)

    def start(self, status: int, headers: bytes, length: int | None = None) -> None:
        self._client.start(status, headers, length)

    def write(self, data: bytes) -> None:
        self._keep(data)
        self._client.write(data)

    def end(self) -> None:
        self._client.end()

    def break_off(self) -> None:
        self._client.break_off()

    async def flushed(self) -> bool:
        return await self._client.flushed()

    def _keep(self, data: bytes) -> None:
        self.length += len(data)
        if len(self.body) < self._limit:
            self.body += data[: self._limit - len(self.body)]
