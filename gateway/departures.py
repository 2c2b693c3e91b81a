"""What was given up and may still be in an engine: its place in a lane is given back when the engine has left it.

Engines are slow to see a closed connection, and two requests must never meet in one batch of a lane of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gateway.core.errors import StoreFault
from gateway.fleet import Fleet, Pool, Replica
from gateway.lanes import Lane, Place
from gateway.questions import ask
from gateway.sending import Sending
from gateway.tasks import start
from gateway.upstream import Broken

LEAVE_SECONDS = 5.0
"""How long a place in a lane is held for a request that was given up, until the engine says that it has gone."""

LOOK_SECONDS = 0.1
"""How often the engine is asked meanwhile."""

ASK_SECONDS = 1.0
"""How long an engine may take to answer a question of the gateway's own."""


class Departures:
    """Watches requests leave. `forget` is told of each whose connection has ended."""

    def __init__(self, fleet: Fleet, settle_seconds: float, forget: Callable[[Sending], None]) -> None:
        self._settle_seconds = settle_seconds
        self._forget = forget
        for pool in fleet:
            pool.lanes.heir = partial(self.inherit, pool)

    async def vacate(self, sending: Sending, lane: Lane) -> None:
        """Give a place back that was given up in mid-answer: when nothing of the request is left in the engine."""
        lanes = sending.job.pool.lanes
        lanes.leaving(lane, sending.place)
        sure = False
        try:
            await self._let_end(sending)
            sure = sending.exchange.complete or await self._left(sending, lane)
        finally:
            if not sure:
                lane.doubt = sending.replica.name
            lanes.leave(lane, sending.place)

    def inherit(self, pool: Pool, lane: Lane, place: Place, name: str) -> None:
        """Give the place of a gateway that has gone back, when its request has left the engine."""
        start(self._inherit(pool, lane, place, name), "lane")

    async def _inherit(self, pool: Pool, lane: Lane, place: Place, name: str) -> None:
        replica = pool.replicas.get(name)
        sure = False
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                sure = replica is None or await self._let_go(pool, replica, lane, place)
        except TimeoutError:
            pass
        finally:
            if not sure:
                lane.doubt = name
            pool.lanes.leave(lane, place)

    async def _let_end(self, sending: Sending) -> None:
        """Abort. But a reward engine may finish first, since an abort could change what shares its next batch."""
        exchange = sending.exchange
        try:
            if sending.job.pool.role == "reward" and exchange.alive:
                with suppress(TimeoutError, Broken):
                    async with asyncio.timeout(self._settle_seconds):
                        await exchange.drain()
        finally:
            try:
                exchange.leave()
            finally:
                self._forget(sending)

    async def _left(self, sending: Sending, lane: Lane) -> bool:
        """Wait, for a bounded time, until an engine has let go of a request."""
        pool, replica = sending.job.pool, sending.replica
        replica.leaving += 1
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await sending.exchange.left()
                await self.abort(sending)
                return await self._let_go(pool, replica, lane, sending.place)
        except TimeoutError:
            return False
        finally:
            replica.leaving -= 1

    async def _let_go(self, pool: Pool, replica: Replica, lane: Lane, place: Place) -> bool:
        """Wait until the engine has no more requests than were sent to it and have not ended. False: none can tell."""
        while True:
            running = await self.running(pool, replica)
            try:
                if running is not None and running <= await pool.lanes.inside(lane, place, replica.inside):
                    return True
            except StoreFault:
                return False
            await asyncio.sleep(LOOK_SECONDS)

    async def running(self, pool: Pool, replica: Replica) -> float | None:
        """How many requests the engine says are in it; None where it does not say. None are where nothing listens."""
        if pool.engine.LOAD is None:
            return None
        try:
            told = await ask(replica.connections, replica.head, pool.engine.LOAD, ASK_SECONDS)
        except Broken as error:
            if error.blame != "refused":
                return None
            replica.failed(error.blame, error.reason)
            return 0.0
        return pool.engine.running(told.text)

    async def abort(self, sending: Sending) -> None:
        """Name a request to an engine that ends what is named; a closed connection it may be slow to see."""
        abort = sending.job.pool.engine.ABORT
        if abort is not None:
            (path, body), replica = abort, sending.replica
            with suppress(Broken):
                await ask(replica.connections, replica.head, path, ASK_SECONDS, "POST", body(sending.engine_id))
