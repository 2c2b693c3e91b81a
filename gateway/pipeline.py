"""The path of a request, one straight line: identify → index → seed → rewrite → route → admit → forward → record.

Nothing else knows the order of the steps. The pipeline gets a request value and a client to answer; it knows neither
ASGI nor sockets. A client that leaves cancels the task that runs here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import structlog

from gateway import orders, schemes
from gateway.answers import Asking, Client, answered, break_stream, relay
from gateway.bodies import Heard
from gateway.core import canonical, fields, identity, ids, plan, resume, shapes, traces
from gateway.core.document import values
from gateway.core.errors import Busy, Fault, TooLarge
from gateway.core.indexing import Ask
from gateway.core.seen import Observed
from gateway.core.types import Call, Headers, Request
from gateway.dispatcher import Dispatcher
from gateway.episodes import Episodes
from gateway.fleet import Fleet
from gateway.guards import Guards
from gateway.intake import Intake
from gateway.keys import given
from gateway.local import Local
from gateway.reader import Reader
from gateway.record import Record
from gateway.routes import API_OF, is_data_plane
from gateway.runs import Runs
from gateway.sending import Job, Sending
from gateway.session import Session
from gateway.sessions import PREFIX, Sessions
from gateway.settings import Settings
from gateway.statement import Statement
from gateway.stores import ScopeKey, Store
from gateway.telemetry import Telemetry
from gateway.tracing import Tracing
from gateway.versions import Versions
from gateway.work import Asked, Work

log = structlog.get_logger("detgate.request")

_BLANK = b" \t\r\n\xef\xbb\xbf"
"""What may stand in front of JSON: space, and a byte order mark."""


class Pipeline:
    """The data plane."""

    def __init__(
        self,
        settings: Settings,
        runs: Runs,
        sessions: Sessions,
        fleet: Fleet,
        store: Store,
        telemetry: Telemetry,
        intake: Intake,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self._intake = intake
        self.store = store
        self.dispatcher = Dispatcher(settings, fleet, telemetry)
        self._local = Local(fleet, self.dispatcher)
        self._runs = runs
        self._sessions = sessions
        self._reader = Reader(settings, runs.own.name, sessions, fleet)
        self._episodes = Episodes(settings, telemetry)
        self._record = Record(settings, sessions, store, telemetry)
        self._statement = Statement(settings, telemetry)
        self._telemetry = telemetry
        self._tracing = tracing
        self._located = {route: identity.Location(route) for route in API_OF}
        self.draining = False
        self.drained = asyncio.Event()
        self.serving = 0
        """Requests that were taken and have not ended."""
        self._guards = Guards(settings.guards, sessions, telemetry)
        self._versions = Versions(settings, sessions)
        self._off = settings.profile == "off"
        self._bodies = settings.ledger.body_bytes if settings.ledger.bodies else 0
        self._most_values = settings.limits.body_values
        self._scheme = schemes.load(settings.scheme)
        self._strict = settings.profile == "strict"

    def owns(self, path: str) -> bool:
        """Whether a request path belongs to the data plane."""
        return path in API_OF or is_data_plane(identity.locate(path).route)

    def drain(self) -> None:
        """Take no more requests: `drained` is set when those that were taken have ended."""
        self.draining = True
        if not self.serving:
            self.drained.set()

    async def serve(self, request: Request, client: Client) -> None:
        """Answer one request, whatever happens."""
        self.serving += 1
        self._intake.bytes += len(request.body)
        work = Work(asyncio.get_running_loop().time(), request)
        try:
            if self._tracing is not None:
                work.trace = self._tracing.begin(request)
            if self._bodies:
                client = work.heard = Heard(client, self._bodies)
            location = self._located.get(request.path) or identity.locate(request.path)
            work.api = API_OF.get(location.route, "openai")
            if self.draining:
                raise Busy("The gateway is shutting down. Ask another, or ask again later.", code="shutting_down")
            if self._sessions.shared:
                await self._prepare(request, location)
            names, session = self._identify(work, request, location)
            self._check_body(request)
            if self._local.owns(location.route):
                await self._local.answer(location.route, request, client, session)
                return
            asked = work.asked = self._reader.read(request, location.route, names, session)
            if session is not None and session.group is not None:
                await self._guards.check(asked, session, session.group)
            self._versions.check(asked)
            await self._claim(work, asked)
            decided = self._plan(work, asked)
            job = work.job = self._job(work, asked, decided)
            if asked.session is not None:
                await self._episodes.turn(asked, asked.session, job)
            await self._forward(work, asked, decided, job, client)
        except Fault as fault:
            self._refuse(work, client, fault)
        except asyncio.CancelledError:
            if not client.disconnected:
                self._refuse(
                    work, client, Busy("The gateway shut down before the answer was whole.", code="shutting_down")
                )
            raise
        except Exception:
            self._refuse(work, client, Fault("The gateway failed; its log says why."))
            log.exception("request failed", path=request.path, **work.told())
        finally:
            if not client.response_complete:
                client.break_off()
            try:
                await self._record.closed(work, started=client.started)
            finally:
                self._intake.bytes -= len(request.body)
                self.serving -= 1
                if self.draining and not self.serving:
                    self.drained.set()

    def _check_body(self, request: Request) -> None:
        """Raise `Encoded` for a body that no engine reads, `TooLarge` for one that would take seconds to read.

        Nobody else would be served meanwhile.
        """
        body = request.body
        if b"content-encoding" in request.fields and body and not self._off:
            fields.plain(request.headers)
        if len(body) > 8 * self._most_values and body.lstrip(_BLANK)[:1] == b"{" and values(body) > self._most_values:
            raise TooLarge(
                f"The body holds more than {self._most_values} strings, lists and objects. "
                "Ask for less at once, or raise limits.body_values.",
                code="too_many_values",
            )

    # --- identify: the names that the request gives, and the session, if it was created.
    def _identify(
        self, work: Work, request: Request, location: identity.Location
    ) -> tuple[identity.Named, Session | None]:
        names, key = identity.named(location, request.fields), given(request.fields)
        if names.run is not None and key.startswith(PREFIX):
            self._runs.revive(names.run)
        visitor = self._sessions.visitor(key)
        work.user = visitor.name
        return names, self._sessions.find(visitor, names, self._runs.own.name)

    async def _prepare(self, request: Request, location: identity.Location) -> None:
        """Know of a session that was created at another gateway."""
        names, key = identity.named(location, request.fields), given(request.fields)
        if names.run is not None and (names.session is not None or key.startswith(PREFIX)):
            self._runs.find(names.run)
        await self._sessions.prepared(names.run or self._runs.own.name, key)

    # --- index: claimed before anything waits.
    async def _claim(self, work: Work, asked: Asked) -> None:
        caller, handling, document = asked.caller, asked.handling, asked.document
        if self._off or not handling.computes:
            return
        work.run = self._runs.find(asked.run)
        if work.run.ledger.broken:
            work.run.ledger.check()
        order, number = caller.order, caller.number
        if handling.kind == "score":
            order, number = "content", None
        content = asked.content
        bound = number is not None or caller.key is not None
        if asked.origin is not None and asked.resumes is not None:
            named, place = asked.resumes
            if not await self.store.has_issued(ScopeKey(asked.run, caller.session, named), place):
                raise resume.unknown(asked.run)
            order = "arrival" if number is None else "client"
            effective = asked.origin.scope
        else:
            effective = orders.ORDERS[order].effective(caller.identity, content)
        work.scope = ScopeKey(asked.run, caller.session, effective)
        ask = Ask(
            order,
            canonical.raw(asked.route, document.raw),
            content() if bound else None,
            number,
            caller.key,
            caller.repeat,
            self._strict,
        )
        work.ask = ask
        if asked.digest is None and canonical.varies(document):
            content()
        work.claim = await self.store.claim(work.scope, ask, self.settings.timeouts.settle)

    # --- seed and rewrite: what follows from the index, by pure functions alone.
    def _plan(self, work: Work, asked: Asked) -> plan.Plan:
        claim, caller = work.claim, asked.caller
        if claim is None or work.scope is None:
            call = Call(sample=0, prompt=0, seed=None, document=asked.document, edits=())
            return plan.Plan("", 0, None, "none", "", (call,))
        work.plan = plan.make(
            asked.handling,
            asked.wish,
            scheme=self._scheme,
            master=self.settings.seed if caller.seed is None else caller.seed,
            mix=self.settings.client_seed == "mix",
            identity=work.scope.identity,
            index=claim.index,
            ordinal=caller.ordinal,
            member=caller.member,
            origin=asked.origin,
            positional=asked.pool.engine.POSITIONAL,
        )
        self._record.opened(work, asked, work.plan)
        return work.plan

    # --- route, admit and forward: gateway.dispatcher tries replicas, gateway.answers brings the answer back.
    def _job(self, work: Work, asked: Asked, decided: plan.Plan) -> Job:
        request, pool, caller, body = asked.request, asked.pool, asked.caller, asked.document.value
        target = f"{asked.route}?{request.query}" if request.query else asked.route
        request_id = decided.request_id
        key = request_id or canonical.raw(asked.route, asked.document.raw).hex()
        by_session = bool(request_id) and caller.named and pool.routing.key == "session"
        if by_session:
            key = caller.identity
        elif asked.origin is not None:
            key = ids.request_id(asked.origin.identity, asked.origin.index, caller.ordinal)
        headers = fields.upstream(request.headers)
        if traces.PARENT in request.fields and work.trace is None:
            headers += traces.passed(request.headers, request.fields)
        return Job(
            pool=pool,
            handling=asked.handling,
            route=asked.route,
            method=request.method.encode(),
            target=target.encode(),
            headers=headers,
            request_id=request_id,
            key=key,
            session=f"{asked.run}/{caller.session}",
            group=f"{asked.run}/{caller.group or caller.session}",
            place=(decided.index, decided.identity),
            priority=_priority(asked) if asked.priority is not None or "priority" in body else 0,
            rank=_rank(asked, decided) if pool.settings.priority != "off" else None,
            salt=_salt(asked, request_id) if pool.isolates else (),
            client_ids=_client_ids(body),
            flags=self._statement.reasons(work, asked),
            follows=by_session and not pool.stable,
            entered=lambda job: self._versions.entered(asked, job),
            trace=work.trace,
        )

    async def _forward(self, work: Work, asked: Asked, decided: plan.Plan, job: Job, client: Client) -> None:
        def head(sending: Sending, headers: Headers) -> bytes:
            if work.claim is not None and work.scope is not None:
                work.raced = self.store.raced(work.scope, work.claim.index)
            return fields.downstream(headers) + self._statement.of_answer(work, asked, sending)

        async def complete() -> None:
            observed = self._examine(work, asked, job, began=client.started)
            if observed is not None and work.plan is not None and work.ask is not None:
                await self._guards.examine(asked, work.plan, work.ask.raw, observed, job.flags, began=client.started)
            await self._record.complete(work)

        try:
            await relay(
                self.dispatcher,
                Asking(job, asked.document, decided.calls, asked.wish.samples, client, work.answer, head, complete),
            )
        finally:
            self.dispatcher.leave(job)

    def _examine(self, work: Work, asked: Asked, job: Job, *, began: bool) -> Observed | None:
        """Look at what came; gives it where it may have a clone.

        Raises a `Fault` that takes the place of an answer of which the client has nothing yet.
        """
        observed = work.answer.observed
        if observed is None or work.plan is None or not answered(work.answer.status, observed):
            return None
        self._versions.examine(asked, job, observed, began=began)
        return observed if self._guards.concerns(asked) else None

    def _refuse(self, work: Work, client: Client, fault: Fault) -> None:
        work.fault = fault
        work.answer.status = fault.status
        self._telemetry.refusals.add(fault.code)
        if client.response_complete:
            return
        try:
            if client.started:
                break_stream(client, work.answer, fault, work.api)
                return
            headers = fields.lines(shapes.error_headers(fault))
            if work.asked is not None:
                headers += self._statement.of_decision(work, work.asked)
            client.reply(fault.status, headers, shapes.error_body(fault, work.api))
        except Exception:  # then nobody is told, but none waits: see `serve`
            log.exception("a request could not be refused", path=work.request.path, **work.told())


def _priority(asked: Asked) -> int:
    """What the priority that it was sent with is worth in a lane: engines count a body's own in either direction."""
    if asked.priority is not None:
        return asked.priority
    given = asked.document.value.get("priority")
    if type(given) is not int:
        return 0
    return -given if asked.pool.engine.HIGHER_FIRST else given


def _rank(asked: Asked, decided: plan.Plan) -> int | None:
    """What the engine is told of its turn; nothing where one call draws several samples, which would have one alike."""
    if not decided.request_id or asked.wish.samples > len(decided.calls):
        return None
    return decided.index if asked.pool.settings.priority == "index" else asked.priority


def _salt(asked: Asked, request_id: str) -> tuple[bytes, ...]:
    """What its cache salt is made of. The time is a part of a request's own: no other run and no retry meets it."""
    if asked.pool.settings.isolate_cache == "run":
        return (b"run", asked.run.encode())
    return (b"request", request_id.encode(), b"%d" % time.time_ns())


def _client_ids(body: dict[str, Any]) -> Sequence[str]:
    """The ids that the client gave in the body, by which it may abort: one, or one for each prompt."""
    given = body.get("rid") or body.get("request_id")
    given = given if isinstance(given, list) else [given]
    return given if all(isinstance(each, str) for each in given) else ()
