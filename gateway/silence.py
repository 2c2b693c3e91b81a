"""Ends answers that will not come: a replica that is silent for too long, by the time-outs in force.

One look a second at everything in flight, instead of a timer a request.
"""

from __future__ import annotations

import asyncio

from gateway.dispatcher import Dispatcher
from gateway.sending import Sending
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
        if exchange is None or exchange.complete or exchange.paused:
            return
        silent = now - exchange.heard
        idle, first_byte = self._timeouts.idle, self._timeouts.first_byte
        if exchange.begun_at:
            if idle is not None and silent > idle:
                exchange.abort(f"nothing came for {idle:g} s", timeout=True)
        elif first_byte is not None and now - exchange.sent_at > first_byte:
            exchange.abort(f"no first byte came within {first_byte:g} s", timeout=True)
        if silent > self._timeouts.dead and sending.replica.state == "down":
            exchange.abort(f"nothing came for {self._timeouts.dead:g} s and its probes fail", timeout=True)
