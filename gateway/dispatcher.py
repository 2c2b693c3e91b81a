"""Sends calls: route, admit, send, and try elsewhere while nothing has reached the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from gateway.core import ids, isolation, priority
from gateway.core.digits import natural
from gateway.core.document import Edit, Set
from gateway.core.errors import Aborted, AnswerTooLarge, Busy, UpstreamFault, UpstreamTimeout
from gateway.core.fields import lines
from gateway.core.plan import seed_edits
from gateway.core.types import Call
from gateway.departures import Departures
from gateway.fleet import Fleet, Pool, Replica
from gateway.lanes import Lane, Place
from gateway.sending import Job, Outcome, Sending
from gateway.settings import Settings
from gateway.tasks import start
from gateway.telemetry import Telemetry
from gateway.upstream import Broken, Exchange, Late

BROKEN_STATUS = (500, 502, 504)
"""Answers that speak against the replica. 4xx speaks against its request, 503 of its load."""


class Dispatcher:
    """Sends calls. Owns the calls that are live."""

    def __init__(self, settings: Settings, fleet: Fleet, telemetry: Telemetry) -> None:
        self.fleet = fleet
        self.live: dict[str, Sending] = {}
        self._plain = 0
        self._apart = 0
        """Bytes that the requests hold which were taken apart."""
        self._most_apart = settings.limits.held_bytes
        self._waiting: dict[Replica, set[Place]] = {}
        """Replica → places in its lanes that are waited for."""
        self._telemetry = telemetry
        self._attempts = settings.limits.attempts
        self._home_seconds = settings.timeouts.home
        self._lane_seconds = settings.timeouts.lane
        self._weights_seconds = settings.timeouts.weights
        self._departures = Departures(fleet, settings.timeouts.settle, self.forget)
        self.vacate = self._departures.vacate
        self.abort = self._departures.abort
        self.running = self._departures.running

    def forget(self, sending: Sending) -> None:
        """A sending occupies its replica no more."""
        sending.replica.load -= 1
        sent = sending.sent
        if sent is not None and sending.computes:
            sending.replica.leave(complete=sent.complete)
            if sending.replica.preempted_at > sent.sent_at and "preempted" not in sending.job.flags:
                sending.job.flags.append("preempted")
        self.live.pop(sending.engine_id, None)
        if sending.job.trace is not None:
            status, complete = (sent.status, sent.complete) if sent is not None else (0, False)
            sending.job.trace.left(sending.engine_id, status, complete=complete)

    def named(self, name: str) -> list[Sending]:
        """The live sendings of a request, or of one of its prompts, by the id that client or gateway gave it."""
        return [
            sending
            for sending in self.live.values()
            if name in sending.client_ids or name in (sending.job.request_id, sending.engine_id)
        ]

    async def join(self, job: Job, calls: Sequence[Call]) -> list[Sending]:
        """Route several calls of one request and put them into their lanes, all or none. Raises `Busy`."""
        joined: list[Sending] = []
        lanes: set[str] = set()
        self._take_apart(job, calls)
        try:
            for call in calls:
                replica = await self._to_home(job) if job.pool.fixed_home else self._chosen(job, set())
                joined.append(self._put(job, call, replica, lanes))
            await job.pool.lanes.reserve([sending.place for sending in joined if sending.lane is not None])
        except BaseException:
            for sending in joined:
                sending.end()
            raise
        return joined

    def _take_apart(self, job: Job, calls: Sequence[Call]) -> None:
        size = sum(len(call.document.raw) for call in calls)
        if self._apart and self._apart + size > self._most_apart:
            raise Busy(
                f"Requests that were taken apart hold {self._apart} bytes already. Ask again later, ask for fewer "
                "samples at once, or raise limits.held_bytes.",
                code="too_many_bytes",
            )
        self._apart += size
        job.apart = size

    async def send(self, job: Job, call: Call, joined: Sending | None = None) -> Sending:
        """Send until a replica answers with a first byte that may be passed on, or nothing is left to try.

        `joined`: where the call was put first. An answer that is no stream is read whole. Raises `Busy` where no
        replica can take the call, `UpstreamFault` where all that were tried broke.
        """
        avoid: set[str] = set()
        broke = attempts = 0
        fresh = False
        while True:
            if joined is not None:
                sending, joined = joined, None
            elif job.pool.fixed_home:
                sending = self._put(job, call, await self._to_home(job))
            else:
                sending = self._put(job, call, self._chosen(job, avoid))
            replica = sending.replica
            try:
                if sending.lane is not None and not await self._turn(job, sending, sending.lane):
                    sending.end()
                    continue
                if sending.computes and not job.passage.entered and not self._enter(job):
                    sending.end()
                    await self._opened(job)
                    continue
                attempts += 1
                if attempts > job.attempts:
                    job.attempts = attempts
                exchange = await self._attempt(job, call, sending, fresh=fresh)
                if exchange.status == 503 and attempts < self._attempts and job.pool.has_other({*avoid, replica.name}):
                    self._count(sending, "unavailable")
                    sending.end()
                    avoid.add(replica.name)
                    continue
                if not exchange.complete:
                    await (exchange.begun() if exchange.streams else exchange.finished())
            except Broken as error:
                self._count(sending, "connect" if error.phase == "connect" else "broken")
                sending.end()
                if sending.unwanted:
                    raise Aborted("The request was aborted by its id.") from None
                fresh = error.stale
                if not error.stale:
                    broke += error.phase != "connect"
                    avoid.add(replica.name)
                    replica.failed(error.blame, error.reason)
                self._go_on(job, replica, error, broke, attempts, avoid)
                continue
            except Late:  # this gateway stood still for so long that its place may be another's
                sending.end()
                attempts -= 1
                continue
            except BaseException:
                self._count(sending, "aborted")
                sending.end()
                raise
            # What an answer says of its replica: a whole one that is no error of the server, that it serves.
            if exchange.status in BROKEN_STATUS:
                replica.failed("broke", f"it answered {exchange.status}")
            elif exchange.complete and exchange.status != 503:
                replica.served()
            self._count(sending, "answered")
            return sending

    # --- route
    def _chosen(self, job: Job, avoid: set[str]) -> Replica:
        """The replica for a call that waits for none."""
        return self._follow(job, avoid) if job.follows else self._by_rule(job, avoid)

    def _by_rule(self, job: Job, avoid: set[str]) -> Replica:
        pool = job.pool
        usable = pool.usable(avoid)
        if not usable:
            raise Busy(
                f"No replica of pool {pool.name} is up. {pool.why_down()}", code="no_healthy_replica", retry_after=2
            )
        job.candidates, job.loads = pool.ranked(job.key, usable)
        if pool.stable and "home-down" not in job.flags and not pool.at_home(job.key, job.candidates):
            job.flags.append("home-down")
        return usable[job.candidates[0]]

    def _follow(self, job: Job, avoid: set[str]) -> Replica:
        kept = job.pool.kept(job.session)
        job.sticky = kept is not None and kept.name not in avoid
        if kept is not None and job.sticky:
            job.candidates = [kept.name]
            return kept
        replica = self._by_rule(job, avoid)
        if kept is None:
            job.pool.keep(job.session, replica)
        return replica

    async def _to_home(self, job: Job) -> Replica:
        pool = job.pool
        home = pool.home(job.key)
        if home.up:
            job.candidates = [home.name]
            return home
        if pool.routing.on_home_down == "wait":
            with suppress(TimeoutError):
                async with asyncio.timeout(self._home_seconds):
                    while not home.up:
                        await home.changed.wait()
                        home = pool.home(job.key)
                job.candidates = [home.name]
                return home
        raise Busy(
            f"Replica {home.name}, to which this request belongs, is down: {home.reason}. "
            "Ask again later, or set routing.on_home_down: next.",
            code="home_down",
            retry_after=2,
        )

    def _put(self, job: Job, call: Call, replica: Replica, lanes: set[str] | None = None) -> Sending:
        """Let a call occupy its replica, and put it into the lane there. Raises `Busy`.

        `lanes`: those in which its request has a place already.
        """
        sending = self._occupy(job, call, replica)
        if sending.computes and job.pool.lanes.scope != "none":
            try:
                sending.lane = job.pool.lanes.find(replica.name, job.session, job.group)
                if sending.lane is not None:
                    index, identity = job.place
                    rank = (job.priority, index, natural(identity), call.sample)
                    further = lanes is not None and sending.lane.name in lanes
                    sending.place = sending.lane.join(rank, further=further)
                    if lanes is not None:
                        lanes.add(sending.lane.name)
            except BaseException:
                sending.end()
                raise
        return sending

    def _occupy(self, job: Job, call: Call, replica: Replica) -> Sending:
        replica.chosen()
        ids_of_client = job.client_ids
        if job.apart and len(ids_of_client) > 1:
            ids_of_client = ids_of_client[call.prompt : call.prompt + 1]
        if not job.request_id:
            self._plain += 1
            return Sending(self, job, replica, f"#{self._plain}", ids_of_client)
        copy = 0
        while (engine_id := ids.engine_id(job.request_id, call.sample, copy)) in self.live:
            copy += 1
        return Sending(self, job, replica, engine_id, ids_of_client)

    # --- admit
    async def _turn(self, job: Job, sending: Sending, lane: Lane) -> bool:
        """Wait until a call's turn has come. False: its replica went down meanwhile, or was drained, so it must go
        elsewhere.
        """
        if not (sending.place.taken or sending.unwanted):
            loop = asyncio.get_running_loop()
            since = loop.time()
            waiting = self._watched(sending.replica)
            waiting.add(sending.place)
            try:
                async with asyncio.timeout(self._lane_seconds):
                    await lane.turn(sending.place)
            except TimeoutError:
                raise Busy(
                    f"Its turn in lane {lane.name} did not come within {self._lane_seconds:g} s. "
                    "Ask again later, or raise timeouts.lane.",
                    code="lane_timeout",
                ) from None
            finally:
                waiting.discard(sending.place)
                waited = loop.time() - since
                job.lane_wait += waited
                self._telemetry.lane_wait.observe(waited, job.pool.name)
            if sending.replica.state == "down" and not sending.unwanted:
                return False
        if sending.unwanted:
            raise Aborted("The request was aborted by its id.")
        if lane.doubt and await self._doubtful(job.pool, lane, sending.place):
            job.flags.append("lane-uncertain")
        return not sending.replica.draining

    def _watched(self, replica: Replica) -> set[Place]:
        """The places in a replica's lanes that are waited for, which are woken when it is drained."""
        waiting = self._waiting.get(replica)
        if waiting is None:
            waiting = self._waiting[replica] = set()
            start(self._wake(replica, waiting), f"drain of {replica.name}")
        return waiting

    async def _wake(self, replica: Replica, waiting: set[Place]) -> None:
        while not replica.draining:
            await replica.changed.wait()
        del self._waiting[replica]
        for place in waiting:
            place.wake()

    def _enter(self, job: Job) -> bool:
        """Pass the gate. False: it is shut."""
        if not job.pool.gate.enter(job.passage):
            return False
        job.entered(job)
        return True

    async def _opened(self, job: Job) -> None:
        """Wait for the gate, in no lane: what is inside may need the place. Raises `Busy`."""
        gate, loop = job.pool.gate, asyncio.get_running_loop()
        if gate.full:
            raise Busy(
                f"{gate.waiting} requests wait for the new weights of pool {gate.pool} already. "
                "Ask again later, or raise limits.queue.",
                code="queue_full",
            )
        since = loop.time()
        try:
            async with asyncio.timeout(self._weights_seconds):
                await gate.opened()
        except TimeoutError:
            raise Busy(
                f"The weights of pool {gate.pool} have been changing for {self._weights_seconds:g} s. Ask again later.",
                code="weights_paused",
            ) from None
        finally:
            job.lane_wait += loop.time() - since

    def leave(self, job: Job) -> None:
        """A request has ended."""
        self._apart -= job.apart
        job.pool.gate.leave(job.passage)

    async def _doubtful(self, pool: Pool, lane: Lane, place: Place) -> bool:
        """Whether the engine may still work on what left the lane before. One that does not say is doubted once."""
        replica = pool.replicas.get(lane.doubt)
        running = await self._departures.running(pool, replica) if replica is not None else None
        if replica is None or running is None:
            lane.doubt = ""
            return True
        if running <= await pool.lanes.inside(lane, place, replica.inside):
            lane.doubt = ""
            return False
        return True

    # --- forward
    async def _attempt(self, job: Job, call: Call, sending: Sending, *, fresh: bool) -> Exchange:
        """Send once and wait for the head of what comes back."""
        replica = sending.replica
        body, own = call.document.raw, b""
        if job.request_id:
            handling, engine = job.handling, job.pool.engine
            edits = [*call.edits, *seed_edits(handling, call)]
            if handling.engine_id is not None:
                edits.append(Set(handling.engine_id, b'"%b"' % sending.engine_id.encode()))
            edits += engine.extra(job.route, call.document, replica.facts)
            if job.salt or job.rank is not None:
                edits = self._beside(job, call, sending, edits)
            if edits:
                body = call.document.edited(edits)
            own = lines(engine.id_headers(sending.engine_id))
        if job.trace is not None:
            own += job.trace.sent(sending.engine_id, replica)
        head = b"%b %b%b HTTP/1.1\r\n%b%b%bcontent-length: %d\r\n\r\n" % (
            job.method, replica.prefix, job.target, replica.head, own, job.headers, len(body),
        )  # fmt: skip
        if not sending.admitted():
            raise Late
        job.replicas.append(replica.name)
        exchange = None if fresh else replica.connections.again(head, body)
        if exchange is None:
            try:
                exchange = await replica.connections.send(head, body, fresh=fresh, still=sending.admitted)
            except Late:
                job.replicas.pop()
                raise
        sending.sent = exchange
        if sending.computes:
            replica.enter()
        if sending.unwanted:
            sending.give_up()
        job.sent_at = exchange.sent_at
        if not exchange.status:
            await exchange.head()
        return exchange

    def _beside(self, job: Job, call: Call, sending: Sending, edits: list[Edit]) -> list[Edit]:
        """`edits`, and what the pool's settings put into the body beside seed and id."""
        handling, engine = job.handling, job.pool.engine
        if job.salt and handling.salt is not None:
            parts = job.salt
            if job.pool.settings.isolate_cache == "request":
                parts = (*parts, b"%d" % call.sample, b"%d" % job.attempts)
            edits = isolation.salted(handling.salt, parts, call, edits)
        if job.rank is not None and handling.priority and sending.replica.facts.priority_scheduling:
            told = priority.value(job.rank, sending.engine_id, higher_first=engine.HIGHER_FIRST)
            edits = [*edits, Set(("priority",), b"%d" % told)]
        return edits

    def _go_on(self, job: Job, replica: Replica, error: Broken, broke: int, attempts: int, avoid: set[str]) -> None:
        """Raise if a broken call is not sent again."""
        if error.too_large:
            raise AnswerTooLarge(f"Replica {replica.name} did not answer: {error.reason} (limits.answer_bytes).")
        if broke >= 2:
            raise UpstreamFault(
                "A replica broke while it served this request, and so did the next that was tried, so it is sent no "
                f"more. The last, {replica.name}: {error.reason}.",
                code="suspected_poison",
            )
        kind = UpstreamTimeout if error.timeout else UpstreamFault
        if error.phase != "connect" and not job.pool.routing.retry_sent:
            raise kind(f"Replica {replica.name} broke after the request was sent: {error.reason}.")
        if attempts >= self._attempts or (not error.stale and not job.pool.elsewhere(avoid)):
            raise kind(f"Replica {replica.name} did not answer: {error.reason}.", retry_after=1)

    def _count(self, sending: Sending, outcome: Outcome) -> None:
        sending.job.ended.append((sending.replica.name, outcome))
        self._telemetry.sendings.add(sending.job.pool.name, sending.replica.name, outcome)
