"""The path of a request, one straight line: identify → index → seed → rewrite → route → admit → forward → record.

Nothing else knows the order of the steps. The pipeline gets a request value and a client to answer; it knows neither
ASGI nor sockets. A client that leaves cancels the task that runs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote

import structlog

from gateway import orders, schemes
from gateway.answers import Answer, Asking, Client, break_stream, relay
from gateway.core import canonical, fields, guarantee, identity, plan, shapes
from gateway.core.document import Document, DuplicateField, Malformed
from gateway.core.errors import Busy, CallerFault, Fault, StoreFault, UpstreamFault, WrongMethod
from gateway.core.indexing import Ask, Claim, Kind
from gateway.core.types import Api, Call, Handling, Headers, Request
from gateway.fleet import Fleet, Pool
from gateway.keys import Keys
from gateway.ledger.writer import Ledger
from gateway.local import Local
from gateway.routes import API_OF, READ_FIELDS, is_data_plane
from gateway.sending import Dispatcher, Job, Sending
from gateway.settings import Settings
from gateway.stores import ScopeKey, Store
from gateway.telemetry import Telemetry

log = structlog.get_logger("detgate.request")


@dataclass(slots=True)
class Asked:
    """A request that was read and found good, before anything is taken for it."""

    request: Request
    caller: identity.Caller
    route: str
    pool: Pool
    handling: Handling
    document: Document
    wish: plan.Wish
    run: str


@dataclass(slots=True)
class Work:
    """What is known of a request while it runs, and what the record says of it at the end."""

    since: float
    api: Api = "openai"
    asked: Asked | None = None
    claim: Claim | None = None
    plan: plan.Plan | None = None
    job: Job | None = None
    scope: ScopeKey | None = None
    ask: Ask | None = None
    raced: bool = False
    """Another request raced with this one, as its end has shown."""
    completed: bool = False
    answer: Answer = field(default_factory=Answer)
    fault: Fault | None = None


class Pipeline:
    """The data plane."""

    def __init__(
        self,
        settings: Settings,
        run: str,
        fleet: Fleet,
        store: Store,
        ledger: Ledger,
        telemetry: Telemetry,
    ) -> None:
        self.settings = settings
        self.run = run
        self.fleet = fleet
        self.store = store
        self.ledger = ledger
        self.telemetry = telemetry
        self.dispatcher = Dispatcher(settings, fleet, telemetry)
        self._local = Local(fleet, self.dispatcher)
        self._keys = Keys(settings.auth)
        self._off = settings.profile == "off"
        self._scheme = schemes.load(settings.scheme)
        self._strict = settings.profile == "strict"

    def owns(self, path: str) -> bool:
        """Whether a request path belongs to the data plane."""
        return path in API_OF or is_data_plane(identity.locate(path).route)

    async def serve(self, request: Request, client: Client) -> None:
        """Answer one request, whatever happens."""
        work = Work(asyncio.get_running_loop().time())
        try:
            location = identity.locate(request.path)
            work.api = API_OF.get(location.route, "openai")
            self._keys.check(request.fields)
            if self._local.owns(location.route):
                await self._local.answer(location.route, request, client)
                return
            asked = work.asked = self._identify(request, location)
            await self._claim(work, asked)
            decided = self._plan(work, asked)
            job = work.job = self._job(work, asked, decided)
            await self._forward(work, asked, decided, job, client)
        except Fault as fault:
            self._refuse(work, client, fault)
        except asyncio.CancelledError:
            if not client.disconnected:
                self._refuse(work, client, Busy("The gateway is shutting down. Ask again.", code="shutting_down"))
            raise
        except Exception:
            log.exception("request failed", path=request.path)
            self._refuse(work, client, Fault("The gateway failed; its log says why."))
        finally:
            await self._record(work, client)

    # --- 1. identify: who asks, for what, of whom. Nothing is taken yet, so everything may still be refused.
    def _identify(self, request: Request, location: identity.Location) -> Asked:
        route = location.route
        caller = identity.identify(location, request.fields, self.settings.index_order)
        document = self._read(request)
        named = request.fields.get(b"x-detgate-pool")
        model = document.value.get("model")
        pool, handling = self.fleet.find(
            route, model if isinstance(model, str) else None, None if named is None else named.decode("latin-1")
        )
        if request.method not in handling.methods:
            raise WrongMethod(f"{route} takes {' or '.join(handling.methods)}, not {request.method}.")
        wish = plan.Wish()
        if handling.kind in ("sample", "score") and not self._off:
            self._admissible(caller, pool, handling, route)
            wish = self._wish(handling, document)
            pool.engine.check(route, document, pool.facts, wish.samples)
        return Asked(request, caller, route, pool, handling, document, wish, caller.run or self.run)

    def _read(self, request: Request) -> Document:
        if not request.body and request.method != "POST":
            return Document(b"{}")
        try:
            return Document(request.body)
        except Malformed as error:
            if self._off:
                return Document.opaque(request.body)
            raise CallerFault(str(error), code="invalid_json") from None

    def _admissible(self, caller: identity.Caller, pool: Pool, handling: Handling, route: str) -> None:
        if self.settings.sessions.required and not caller.named:
            raise CallerFault(
                "This gateway takes no request without a session: send X-Session-ID, or use /sessions/{id}/….",
                code="session_required",
                param="X-Session-ID",
            )
        if not self._strict:
            return
        if caller.random_session and not self.settings.sessions.allow_random:
            raise CallerFault(
                "This session id holds a random id, so no other run could repeat it. Send the session's logical name "
                "in X-Detgate-Identity, or set sessions.allow_random.",
                code="random_session",
                param="X-Session-ID",
            )
        if handling.kind == "sample" and handling.seed is None:
            raise CallerFault(
                f"{route} takes no seed on this engine, so its answers cannot repeat. Use /v1/chat/completions, or "
                "profile balanced, which serves it without the promise.",
                code="unseeded_route",
            )
        if (against := pool.contradicts) is not None:
            raise Busy(
                f"Pool {pool.name} cannot keep the promise: {against}. Mend it, or use profile balanced.",
                code="not_deterministic",
                retry_after=10,
            )

    def _wish(self, handling: Handling, document: Document) -> plan.Wish:
        try:
            document.check_unique(READ_FIELDS)
        except DuplicateField as error:
            raise CallerFault(str(error), code="duplicate_field", param=error.field) from None
        wish = plan.read_wish(handling, document)
        if wish.seed is not None and self.settings.client_seed == "reject":
            raise CallerFault(
                "This gateway gives the seeds itself (client_seed: reject). Send none.",
                code="client_seed_rejected",
                param="seed",
            )
        return wish

    # --- 2. index: claimed before anything waits.
    async def _claim(self, work: Work, asked: Asked) -> None:
        caller, handling, document = asked.caller, asked.handling, asked.document
        if self._off or handling.kind not in ("sample", "score"):
            return
        order = caller.order
        if handling.kind == "score" and order != "client":
            order = "content"
        content = Once(lambda: canonical.content(document, asked.route))
        bound = caller.number is not None or caller.key is not None
        work.scope = ScopeKey(asked.run, caller.session, orders.ORDERS[order].effective(caller.identity, content))
        ask = Ask(
            cast(Kind, order),
            canonical.raw(asked.route, document.raw),
            content() if bound else None,
            caller.number,
            caller.key,
            caller.repeat,
            exclusive=self._strict,
        )
        work.ask = ask
        work.claim = await self.store.claim(work.scope, ask, self.settings.timeouts.settle)

    # --- 3. seed and 4. rewrite: what follows from the index, by pure functions alone.
    def _plan(self, work: Work, asked: Asked) -> plan.Plan:
        claim, caller = work.claim, asked.caller
        if claim is None or work.scope is None:
            call = Call(sample=0, prompt=0, seed=None, document=asked.document, edits=())
            return plan.Plan("", 0, None, "none", "", (call,))
        work.plan = plan.make(
            asked.handling,
            asked.document,
            asked.wish,
            scheme=self._scheme,
            master=self.settings.seed,
            mix=self.settings.client_seed == "mix",
            identity=work.scope.identity,
            index=claim.index,
            member=caller.member,
            split=asked.pool.role == "reward" and asked.handling.kind == "score",
        )
        self._open_record(work, asked, work.plan)
        return work.plan

    # --- 5. route, 6. admit and 7. forward: gateway.sending tries replicas, gateway.answers brings the answer back.
    def _job(self, work: Work, asked: Asked, decided: plan.Plan) -> Job:
        request, pool, caller = asked.request, asked.pool, asked.caller
        query = f"?{request.query}" if request.query else ""
        request_id = decided.request_id
        if not request_id:
            key = canonical.raw(asked.route, asked.document.raw).hex()
        else:
            key = request_id if pool.routing.key == "request" else caller.identity
        return Job(
            pool=pool,
            handling=asked.handling,
            route=asked.route,
            method=request.method,
            target=asked.route + query,
            headers=fields.upstream(request.headers),
            request_id=request_id,
            key=key,
            session=caller.session,
            place=(decided.index, decided.identity),
            client_id=_client_id(asked.document),
            flags=self._flags(work, asked),
        )

    def _flags(self, work: Work, asked: Asked) -> list[str]:
        """Reasons, known before anything is sent, why the promise does not hold whole."""
        if self._off:
            return ["off"]
        if work.claim is None:
            return []
        flags = list(work.claim.flags)
        if asked.handling.kind == "sample" and asked.handling.seed is None:
            flags.append("no-seed")
            self.telemetry.unseeded.add(asked.route)
        if asked.caller.random_session:
            flags.append("random-session")
        if "racing" in flags:
            self.telemetry.racing.add()
        if work.claim.reused:
            self.telemetry.reused.add()
        return flags

    async def _forward(self, work: Work, asked: Asked, decided: plan.Plan, job: Job, client: Client) -> None:
        def head(sending: Sending, headers: Headers) -> Headers:
            return fields.downstream(headers) + self._headers(work, asked, sending)

        async def complete() -> None:
            await self._complete(work)

        await relay(
            self.dispatcher,
            Asking(
                asked.handling.api, asked.handling, asked.document, decided.calls, asked.wish.samples, job, client,
                work.answer, head, complete,
            ),
        )  # fmt: skip

    async def _complete(self, work: Work) -> None:
        if work.claim is not None and work.scope is not None and not work.completed:
            work.completed = True
            work.raced = await self.store.complete(work.scope, work.claim.index)

    # --- what the answer says of itself
    def _headers(self, work: Work, asked: Asked, sending: Sending) -> Headers:
        headers = self._decision(work, asked)
        job = sending.job
        reasons = job.flags + self._reasons_of(sending, asked.handling)
        best: guarantee.Level = "strict" if self._strict and job.pool.stable else "balanced"
        headers += (
            (b"x-detgate-replica", sending.replica.name.encode()),
            (b"x-detgate-attempts", b"%d" % job.attempts),
            (b"x-detgate-guarantee", guarantee.header(best, reasons).encode()),
        )
        return headers

    def _decision(self, work: Work, asked: Asked) -> Headers:
        decided = work.plan
        own_id = asked.request.fields.get(b"x-request-id")
        if decided is None:
            return [] if own_id is None else [(b"x-request-id", own_id)]
        request_id = decided.request_id.encode()
        headers = [
            (b"x-request-id", own_id or request_id),
            (b"x-detgate-request-id", request_id),
            (b"x-detgate-session", quote(asked.caller.session, safe="!#$&'()*+,/:;=?@[]~ ").encode()),
            (b"x-detgate-index", b"%d" % decided.index),
            (b"x-detgate-seed-source", decided.seed_source.encode()),
        ]
        if decided.seed is not None:
            headers.append((b"x-detgate-seed", b"%d" % decided.seed))
        return headers

    def _reasons_of(self, sending: Sending, handling: Handling) -> list[str]:
        """What the replica that answers takes away from the promise."""
        if self._off or handling.kind not in ("sample", "score"):
            return []
        pool, replica = sending.job.pool, sending.replica
        if pool.role == "reward":
            reasons = [] if pool.lanes.exclusive and not replica.facts.prefix_cache else ["reward-batched"]
            return [*reasons, "foreign-traffic"] if replica.foreign else reasons
        deterministic = replica.facts.deterministic
        if deterministic is False and handling.kind == "sample":
            return ["engine-not-deterministic"]
        return [] if deterministic or pool.declared else ["unverified"]

    def _refuse(self, work: Work, client: Client, fault: Fault) -> None:
        work.fault = fault
        work.answer.status = fault.status
        if client.response_complete:
            return
        if client.started:
            break_stream(client, work.answer, fault, work.api)
            return
        headers = shapes.error_headers(fault)
        if work.asked is not None:
            headers = headers + self._decision(work, work.asked)
        client.reply(fault.status, headers, shapes.error_body(fault, work.api))

    # --- 8. record: the index is settled, the ledger told, the numbers counted.
    def _open_record(self, work: Work, asked: Asked, decided: plan.Plan) -> None:
        assert work.claim is not None
        assert work.scope is not None
        assert work.ask is not None
        caller = asked.caller
        self.ledger.opened(
            {
                "event": "opened",
                "run": work.scope.run,
                "epoch": self.store.epoch,
                "session": work.scope.session,
                "identity": work.scope.identity,
                "index": decided.index,
                "order": work.ask.kind,
                "digest": work.ask.raw.hex(),
                "content": work.ask.content,
                "key": caller.key,
                "seed": decided.seed,
                "seed_source": decided.seed_source,
                "scheme": self.settings.scheme,
                "request_id": decided.request_id,
                "route": asked.route,
                "pool": asked.pool.name,
                "flags": work.claim.flags,
            }
        )

    async def _record(self, work: Work, client: Client) -> None:
        asked, job, answer = work.asked, work.job, work.answer
        now = asyncio.get_running_loop().time()
        if work.claim is not None and work.scope is not None:
            used = answer.delivered or self._partly_used(work, client)
            await self._complete(work)
            await self.store.settle(work.scope, work.claim.index, used=used)
            if work.plan is not None:
                self._close_record(work, used, now)
        pool = asked.pool.name if asked is not None else ""
        route = asked.route if asked is not None else "unknown"
        self.telemetry.requests.add(pool, route, str(answer.status or 499))
        self.telemetry.total.observe(now - work.since)
        if answer.first_byte_at:
            self.telemetry.first_byte.observe(answer.first_byte_at - work.since)
        if job is not None and answer.complete_at:
            before = job.sent_at - work.since - job.lane_wait
            self.telemetry.overhead.observe(max(0.0, before + now - answer.complete_at))

    def _partly_used(self, work: Work, client: Client) -> bool:
        """Bytes of a good answer reached a client that then left."""
        answer = work.answer
        return client.started and work.fault is None and answer.error is None and 0 < answer.status < 400 and (
            answer.observed is None
        )  # fmt: skip

    def _error(self, work: Work) -> str | None:
        """What went wrong: the code of a refusal, or the words of what broke a stream."""
        if work.fault is not None and work.answer.error is None:
            return work.fault.code
        return work.answer.error or (work.answer.observed.error if work.answer.observed else None)

    def _close_record(self, work: Work, used: bool, now: float) -> None:
        assert work.scope is not None
        assert work.plan is not None
        answer, job = work.answer, work.job
        observed = answer.observed
        try:
            self.ledger.closed(
                {
                    "event": "closed",
                    "run": work.scope.run,
                    "session": work.scope.session,
                    "identity": work.scope.identity,
                    "index": work.plan.index,
                    "outcome": _outcome(work),
                    "used": used,
                    "racing": work.raced,
                    "status": answer.status or None,
                    "error": self._error(work),
                    "replica": job.replicas[-1] if job is not None and job.replicas else None,
                    "replicas": job.replicas if job is not None else [],
                    "attempt": job.attempts if job is not None else 0,
                    "flags": job.flags if job is not None else [],
                    "sticky": job is not None and job.sticky,
                    "lane_wait": job.lane_wait if job is not None else 0.0,
                    "finish_reasons": observed.finish_reasons if observed is not None else None,
                    "usage": observed.usage if observed is not None else None,
                    "answer": observed.content if observed is not None else None,
                    "weight_version": observed.weight_version if observed is not None else None,
                    "first_byte_seconds": answer.first_byte_at - work.since if answer.first_byte_at else None,
                    "seconds": now - work.since,
                }
            )
        except StoreFault:
            self.telemetry.ledger_errors.add()


def _outcome(work: Work) -> str:
    answer = work.answer
    if answer.delivered:
        return "delivered"
    if work.fault is not None:
        return "failed" if isinstance(work.fault, UpstreamFault | StoreFault) else "refused"
    if answer.error is not None or answer.observed is not None:
        return "failed"
    return "abandoned"


def _client_id(document: Document) -> str | None:
    """The id that the client gave in the body, by which it may abort."""
    given = document.value.get("rid") or document.value.get("request_id")
    return given if isinstance(given, str) else None


class Once:
    """A value computed when it is first asked for."""

    def __init__(self, compute: Callable[[], str]) -> None:
        self._compute = compute
        self._value: str | None = None

    def __call__(self) -> str:
        if self._value is None:
            self._value = self._compute()
        return self._value
