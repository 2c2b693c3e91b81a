"""Groups whose members go one after the other: a member starts when the sessions of those before it have ended.

For `lane: {scope: group, members: episode}`. The lane itself keeps requests of a group apart; this decides which member
may come to it at all. A member that failed has ended too, and stops nobody.
"""

from __future__ import annotations

import asyncio

from gateway.core.errors import Busy
from gateway.sending import Job
from gateway.session import Group, Session
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from gateway.work import Asked


class Episodes:
    """Lets members start in their order."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._seconds = settings.timeouts.group
        self._strict = settings.profile == "strict"

    async def turn(self, asked: Asked, session: Session, job: Job) -> None:
        """Wait until a request's member may start, `timeouts.group` at most.

        Then it goes on and says `group-order`, and so do all later ones of its member, without a wait. In strict it
        raises `Busy` instead, which names the member that it waited for.
        """
        if not job.pool.lanes.episodes or not asked.handling.computes:
            return
        group = session.group
        if group is None or group.ahead(session) is None:
            return
        if not session.overtook:
            ahead = await self._wait(group, session, job)
            if ahead is None:
                return
            if self._strict:
                raise Busy(
                    f"Member {session.known.member} of group {group.id} waits for member {ahead.known.member} "
                    f"(session {ahead.known.session}) to end. End it (DELETE /sessions/…), or ask again later.",
                    code="group_waiting",
                    retry_after=1,
                )
            session.overtook = True
        job.flags.append("group-order")

    async def _wait(self, group: Group, session: Session, job: Job) -> Session | None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            with job.pool.lanes.holding():
                return await group.turn(session, self._seconds)
        finally:
            job.lane_wait += loop.time() - since
            self._telemetry.lane_wait.observe(loop.time() - since, job.pool.name)
