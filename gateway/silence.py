"""Ends answers that will not come: a replica that is silent for too long, by the time-outs in force.

One look a second at everything in flight, instead of a timer a request.
"""

from __future__ import annotations

import asyncio

from gateway.sending import Dispatcher, Sending
from gateway.settings import Timeouts

LOOKS = 4
"""Looks within the shortest time-out in force."""


class Silence:
    """Watches what a dispatcher has in flight."""

    def __init__(self, timeouts: Timeouts, dispatcher: Dispatcher) -> None:
        self._timeouts = timeouts
        self._dispatcher = dispatcher
        bounds = [seconds for seconds in (timeouts.first_byte, timeouts.idle, timeouts.dead) if seconds]
        self._pause = min([1.0, *(seconds / LOOKS for seconds in bounds)])

    async def run(self) -> None:
        """Look for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._pause)
            now = loop.time()
            for sending in list(self._dispatcher.live.values()):
                self.look(sending, now)

    def look(self, sending: Sending, now: float) -> None:
        """End one sending if its replica has been silent for too long."""
        exchange = sending.sent
        if exchange is None or exchange.complete:
            return
        silent = now - exchange.heard
        bound = self._timeouts.idle if exchange.begun_at else self._timeouts.first_byte
        if bound is not None and silent > bound:
            exchange.abort(f"nothing came for {bound:g} s", timeout=True)
        elif silent > self._timeouts.dead and sending.replica.state == "down":
            exchange.abort(f"nothing came for {self._timeouts.dead:g} s and its probes fail", timeout=True)
