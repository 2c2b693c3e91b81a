"""The gate of a pool: whether requests go to its engine now, and which weights those that do will meet.

While it is shut, what is in the engine ends and nothing new is sent, so that weights can be changed between requests. A
request passes with its first call; its other calls and its retries belong to what is inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

LOOK_SECONDS = 0.02
"""How often is looked whether it is known by now that the gate is open."""


@dataclass(slots=True, eq=False)
class Passage:
    """One request at a gate."""

    entered: bool = False
    weights: str | None = None
    """Which it met when it entered, if that was known."""


class Gate:
    """One pool's. `queue`: how many requests may wait while it is shut."""

    def __init__(self, pool: str, queue: int) -> None:
        self.pool = pool
        self.shut = False
        self.since: float | None = None
        """When it was shut, in seconds since the epoch; None: it is open."""
        self.number = 0
        """Of the change by which it stands as it does."""
        self.unsure: Callable[[], bool] = bool
        """Whether it may have been shut at another gateway: then nobody enters."""
        self.inside = 0
        """Requests that have entered and not left."""
        self.waiting = 0
        self.named: str | None = None
        """The version of the weights, as whoever changes them has named it."""
        self.told: str | None = None
        """The version that an answer of the engine has told since."""
        self._queue = queue
        self._changed: asyncio.Event | None = None
        """Of those who wait for a change; None: nobody does."""

    @property
    def weights(self) -> str | None:
        """The version of the weights that the engine has now; what the engine tells counts more than a name."""
        return self.named if self.told is None else self.told

    @property
    def full(self) -> bool:
        """As many wait as may."""
        return self.waiting >= self._queue

    def enter(self, passage: Passage) -> bool:
        """Let a request in, unless the gate is shut."""
        if self.shut or self.unsure():
            return False
        passage.entered, passage.weights = True, self.weights
        self.inside += 1
        return True

    def leave(self, passage: Passage) -> None:
        """A request has ended. Harmless when repeated, and for one that was never in."""
        if passage.entered:
            passage.entered = False
            self.inside -= 1
            self._tell()

    async def opened(self) -> None:
        """Wait until it is open."""
        self.waiting += 1
        try:
            while self.shut or self.unsure():
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self.shut else LOOK_SECONDS):
                        await self._change()
        finally:
            self.waiting -= 1

    def close(self, since: float) -> None:
        """Let nothing more in. `since`: now, in seconds since the epoch."""
        self.shut = True
        self.since = self.since or since

    def open(self) -> None:
        """Let in again, whoever waits too."""
        self.shut, self.since = False, None
        self._tell()

    def name(self, version: str) -> None:
        """The engine has other weights from now on."""
        self.named, self.told = version, None

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
