"""What gateways have together beside their counters, where the store is shared: lanes and sessions.

Imported by `gateway.assembly` where that is so, since it needs what the store needs.
"""

from __future__ import annotations

import asyncio

from gateway.fleet import Fleet
from gateway.joint_lanes import JointLanes
from gateway.joint_sessions import JointSessions
from gateway.settings import Settings
from gateway.stores.redis import RedisStore
from gateway.telemetry import Telemetry


class Joint:
    """Takes the lanes of a fleet and the sessions of a gateway into the store."""

    def __init__(self, settings: Settings, store: RedisStore, fleet: Fleet, telemetry: Telemetry) -> None:
        timeouts = settings.timeouts
        store.fenced = telemetry.fenced.add
        self.sessions = JointSessions(settings, store, store.link, timeouts.run)
        self._lanes: list[JointLanes] = []
        for pool in fleet:
            lanes = pool.lanes = JointLanes(pool.lanes, store.link, timeouts.gateway, telemetry)
            if lanes.scope != "none":
                self._lanes.append(lanes)

    async def run(self) -> None:
        """Keep what this gateway has, for ever."""
        await asyncio.gather(*(lanes.places.run() for lanes in self._lanes))

    async def close(self) -> None:
        """Give up what it still has: nothing is in flight any more."""
        await self.sessions.close()
        for lanes in self._lanes:
            await lanes.places.close()
