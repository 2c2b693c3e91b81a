"""One call to a replica: route, admit, send, and try elsewhere while nothing has reached the client.

A `Sending` holds what a call occupies: the replica's load, a place in its lane, and the id the engine knows it by. It
gives all of it back exactly once, when the replica's answer has ended or the call was given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from gateway.core import ids, isolation, priority
from gateway.core.digits import natural
from gateway.core.document import Edit, Set
from gateway.core.errors import Aborted, Busy, StoreFault, UpstreamFault, UpstreamTimeout
from gateway.core.fields import lines
from gateway.core.plan import seed_edits
from gateway.core.types import Call, Handling
from gateway.fleet import Fleet, Pool, Replica
from gateway.gates import Passage
from gateway.lanes import NO_PLACE, Lane, Place
from gateway.settings import Settings
from gateway.tasks import start
from gateway.telemetry import Telemetry
from gateway.tracing import Trace
from gateway.upstream import Broken, Exchange

LEAVE_SECONDS = 5.0
"""How long a place in a lane is held for a request that was given up, until the engine says that it has gone."""

LOOK_SECONDS = 0.1
"""How often the engine is asked meanwhile."""

ASK_SECONDS = 1.0
"""How long an engine may take to answer a question of the gateway's own."""

BROKEN_STATUS = (500, 502, 504)
"""Answers that speak against the replica. 4xx speaks against its request, 503 of its load."""

Outcome = Literal["answered", "connect", "broken", "unavailable", "aborted"]


@dataclass(slots=True)
class Job:
    """What all calls and attempts of one logical request have in common."""

    pool: Pool
    handling: Handling
    route: str
    method: bytes
    target: bytes
    """Route and query, as they go upstream."""
    headers: bytes
    """The client's headers, as far as they go upstream."""
    request_id: str
    key: str
    """What routing hashes."""
    session: str = ""
    """Run and session: what a lane of that scope is found by."""
    group: str = ""
    """Run and group; of a session without a group that session."""
    place: tuple[int, str] = (0, "")
    """Index and identity: the canonical order among those who wait in a lane."""
    priority: int = 0
    """Stands before them in that order; lower goes first."""
    rank: int | None = None
    """Where it stands among those who wait in the engine, if that is told so; lower goes first."""
    salt: tuple[bytes, ...] = ()
    """What the salt of the engine's prefix cache is made of; nothing: it gets none."""
    client_id: str | None = None
    """The id that the client gave the request in its body: an abort may name it."""
    flags: list[str] = field(default_factory=list)
    """Reasons for X-Detgate-Guarantee that came up on the way."""
    follows: bool = False
    """Goes where its session was first sent to, while that replica is there."""
    sticky: bool = False
    """Went where its session was first sent to: the rule was not asked."""
    loads: Mapping[str, int] | None = None
    """What the last choice was made among, where it depends on loads."""
    attempts: int = 0
    candidates: list[str] = field(default_factory=list)
    """What the last choice was made among, the best first."""
    replicas: list[str] = field(default_factory=list)
    """Replica of each attempt, in order."""
    ended: list[tuple[str, Outcome]] = field(default_factory=list)
    """Replica of each sending that got an answer or was given up, and how it went."""
    lane_wait: float = 0.0
    sent_at: float = 0.0
    passage: Passage = field(default_factory=Passage)
    """How it stands at its pool's gate."""
    entered: Callable[[Job], None] = lambda job: None
    """Called when it has passed that; may raise a `Fault`."""
    trace: Trace | None = None
    """Its spans, where requests are traced."""


class Sending:
    """One attempt of one call, from routing to the upstream's last byte."""

    __slots__ = ("_home", "computes", "engine_id", "job", "lane", "place", "replica", "sent", "unwanted")

    def __init__(self, home: Dispatcher, job: Job, replica: Replica, engine_id: str) -> None:
        self._home: Dispatcher | None = home
        self.job = job
        self.computes = job.handling.computes
        self.replica = replica
        self.engine_id = engine_id
        self.sent: Exchange | None = None
        self.lane: Lane | None = None
        self.place = NO_PLACE
        self.unwanted = False
        replica.load += 1
        home.live[engine_id] = self

    @property
    def exchange(self) -> Exchange:
        """The exchange with the replica, once the call was sent."""
        assert self.sent is not None
        return self.sent

    @property
    def under_way(self) -> bool:
        """The replica has the request and has not ended its answer."""
        return self.sent is not None and not self.sent.complete

    async def pipe(self, sink: Callable[[bytes], bool]) -> None:
        """As `Exchange.pipe`; how it goes speaks for or against the replica."""
        try:
            await self.exchange.pipe(sink)
        except Broken as error:
            self.replica.failed(error.blame, error.reason)
            raise
        if self.exchange.complete:
            self.replica.served()

    def give_up(self) -> None:
        """Its client wants no answer any more."""
        self.unwanted = True
        if self.sent is not None:
            give_up = self.sent.leave if self.job.pool.lanes.apart else self.sent.abort
            give_up("aborted by its client")
        else:
            self.place.wake()

    def end(self) -> None:
        """Give everything back; what is still under way at the replica is aborted. Harmless when repeated.

        A place in a lane that keeps requests apart is given back when the engine has left what was there.
        """
        home, self._home = self._home, None
        if home is None:
            return
        lane = self.lane
        if lane is not None and self.under_way and self.job.pool.lanes.apart:
            start(home.vacate(self, lane), "lane")
            return
        try:
            if self.sent is not None and not self.sent.complete:
                self.sent.abort()
        finally:
            home.forget(self)
            if lane is not None:
                self.job.pool.lanes.leave(lane, self.place)


class Dispatcher:
    """Sends calls. Owns the calls that are live."""

    def __init__(self, settings: Settings, fleet: Fleet, telemetry: Telemetry) -> None:
        self.fleet = fleet
        self.live: dict[str, Sending] = {}
        self._plain = 0
        self._settle_seconds = settings.timeouts.settle
        self._telemetry = telemetry
        self._attempts = settings.limits.attempts
        self._home_seconds = settings.timeouts.home
        self._lane_seconds = settings.timeouts.lane
        self._weights_seconds = settings.timeouts.weights
        for pool in fleet:
            pool.lanes.heir = partial(self.inherit, pool)

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
                self.forget(sending)

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
            running = await self._running(pool, replica)
            try:
                if running is not None and running <= await pool.lanes.inside(lane, place, replica.inside):
                    return True
            except StoreFault:
                return False
            await asyncio.sleep(LOOK_SECONDS)

    async def _running(self, pool: Pool, replica: Replica) -> float | None:
        """How many requests the engine says are in it; None where it does not say. None are where nothing listens."""
        if pool.engine.LOAD is None:
            return None
        try:
            return pool.engine.running(await self._ask(replica, "GET", pool.engine.LOAD))
        except Broken as error:
            if error.blame != "refused":
                return None
            replica.failed(error.blame, error.reason)
            return 0.0

    async def abort(self, sending: Sending) -> None:
        """Name a request to an engine that ends what is named; a closed connection it may be slow to see."""
        abort = sending.job.pool.engine.ABORT
        if abort is not None:
            path, body = abort
            with suppress(Broken):
                await self._ask(sending.replica, "POST", path, body(sending.engine_id))

    async def _ask(self, replica: Replica, method: str, path: str, body: bytes = b"") -> str:
        """What a replica answers to a question of the gateway's own. Raises `Broken`, also when it takes too long."""
        head = f"{method} {replica.connections.address.prefix}{path} HTTP/1.1\r\n".encode() + replica.head
        if body:
            head += b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        exchange = await replica.connections.send(head + b"\r\n", body)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await exchange.finished()
        except TimeoutError:
            raise Broken(f"no answer within {ASK_SECONDS:g} s", "send", timeout=True) from None
        finally:
            exchange.abort()
        return exchange.body.decode(errors="replace")

    def named(self, name: str) -> list[Sending]:
        """The live sendings of a request, by the id that its client gave it or that the gateway gave it."""
        return [
            sending
            for sending in self.live.values()
            if name in (sending.job.client_id, sending.job.request_id, sending.engine_id)
        ]

    async def join(self, job: Job, calls: Sequence[Call]) -> list[Sending]:
        """Route several calls of one request and put them into their lanes, all or none. Raises `Busy`."""
        joined: list[Sending] = []
        try:
            for call in calls:
                replica = await self._to_home(job) if job.pool.fixed_home else self._chosen(job, set())
                joined.append(self._put(job, call, replica))
            await job.pool.lanes.reserve([sending.place for sending in joined if sending.lane is not None])
        except BaseException:
            for sending in joined:
                sending.end()
            raise
        return joined

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
        loads = pool.loads(avoid)
        if not loads:
            raise Busy(
                f"No replica of pool {pool.name} is up. {pool.why_down()}", code="no_healthy_replica", retry_after=2
            )
        job.candidates = pool.ranked(job.key, loads)
        replica = pool.replicas[job.candidates[0]]
        if not pool.stable:
            job.loads = loads
        elif "home-down" not in job.flags and replica is not pool.home(job.key):
            job.flags.append("home-down")
        return replica

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

    def _put(self, job: Job, call: Call, replica: Replica) -> Sending:
        """Let a call occupy its replica, and put it into the lane there. Raises `Busy`."""
        sending = self._occupy(job, call, replica)
        if sending.computes and job.pool.lanes.scope != "none":
            try:
                sending.lane = job.pool.lanes.find(replica.name, job.session, job.group)
                if sending.lane is not None:
                    index, identity = job.place
                    sending.place = sending.lane.join((job.priority, index, natural(identity), call.sample))
            except BaseException:
                sending.end()
                raise
        return sending

    def _occupy(self, job: Job, call: Call, replica: Replica) -> Sending:
        replica.vitals.chosen()
        if not job.request_id:
            self._plain += 1
            return Sending(self, job, replica, f"#{self._plain}")
        copy = 0
        while (engine_id := ids.engine_id(job.request_id, call.sample, copy)) in self.live:
            copy += 1
        return Sending(self, job, replica, engine_id)

    # --- admit
    async def _turn(self, job: Job, sending: Sending, lane: Lane) -> bool:
        """Wait until a call's turn has come. False: its replica went down meanwhile, so it must go elsewhere."""
        if not (sending.place.taken or sending.unwanted):
            loop = asyncio.get_running_loop()
            since = loop.time()
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
                waited = loop.time() - since
                job.lane_wait += waited
                self._telemetry.lane_wait.observe(waited, job.pool.name)
            if sending.replica.state == "down" and not sending.unwanted:
                return False
        if sending.unwanted:
            raise Aborted("The request was aborted by its id.")
        if lane.doubt and await self._doubtful(job.pool, lane, sending.place):
            job.flags.append("lane-uncertain")
        return True

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
        job.pool.gate.leave(job.passage)

    async def _doubtful(self, pool: Pool, lane: Lane, place: Place) -> bool:
        """Whether the engine may still work on what left the lane before. One that does not say is doubted once."""
        replica = pool.replicas.get(lane.doubt)
        running = await self._running(pool, replica) if replica is not None else None
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
        job.replicas.append(replica.name)
        exchange = None if fresh else replica.connections.again(head, body)
        if exchange is None:
            exchange = await replica.connections.send(head, body, fresh=fresh)
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
        if broke >= 2:
            raise UpstreamFault(
                "Two replicas broke while they served this request, so it is sent to no third. "
                f"The last, {replica.name}: {error.reason}.",
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
