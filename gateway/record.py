"""The end of a request: its index is settled, the ledger told, the numbers counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.answers import answered
from gateway.bodies import kept
from gateway.core import plan
from gateway.core.errors import StoreFault, UpstreamFault
from gateway.core.seen import UNNAMED, Observed
from gateway.runs import Run
from gateway.sending import Job
from gateway.session import Interaction
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.stores import ScopeKey, Store
from gateway.telemetry import Telemetry
from gateway.work import Asked, Work

log = structlog.get_logger("detgate.request")

UNRECORDED = "unrecorded"
"""The ledger could not be written, and `ledger.on_error` lets requests go on."""


class Record:
    """Tells ledger, metrics and log of every request."""

    def __init__(self, settings: Settings, sessions: Sessions, store: Store, telemetry: Telemetry) -> None:
        self._settings = settings
        self._sessions = sessions
        self._store = store
        self._telemetry = telemetry
        self._debug = settings.log.level == "debug"
        self._config = settings.digest()
        self._bodies = settings.ledger.body_bytes if settings.ledger.bodies else 0

    def opened(self, work: Work, asked: Asked, decided: plan.Plan) -> None:
        """Write what was claimed and decided. Raises `LedgerFault`: then the request must not go on."""
        assert work.claim is not None
        assert work.scope is not None
        assert work.ask is not None
        caller = asked.caller
        run, document = work.run, asked.document
        assert run is not None
        model = document.value.get("model")
        record = {
            "event": "opened",
            "time": time.time(),
            "run": work.scope.run,
            "epoch": max(run.epoch, work.claim.epoch),
            "gateway": self._store.gateway,
            "session": work.scope.session,
            "identity": work.scope.identity,
            "ordinal": caller.ordinal,
            "index": decided.index,
            "group": caller.group,
            "member": caller.member,
            "order": work.ask.kind,
            "resumes": None if asked.origin is None else asked.origin.name(caller.ordinal),
            "digest": work.ask.raw.hex(),
            "content": asked.digest,
            "key": caller.key,
            "user": work.user,
            "repeat": work.ask.repeat,
            "seed": decided.seed,
            "seed_source": decided.seed_source,
            "scheme": self._settings.scheme,
            "request_id": decided.request_id,
            "route": asked.route,
            "kind": asked.handling.kind,
            "pool": asked.pool.name,
            "model": model if isinstance(model, str) else None,
            "stream": document.value.get("stream") is True,
            "n": asked.wish.samples,
            "config": self._config,
            "flags": work.claim.flags,
        }
        if self._bodies:
            record |= kept("request", document.raw[: self._bodies], len(document.raw), self._bodies)
        if not run.ledger.claimed(record):
            work.claim = work.claim._replace(flags=(*work.claim.flags, UNRECORDED))
        if asked.session is not None:
            work.session = asked.session
            interaction = None
            if asked.handling.kind == "sample":
                interaction = Interaction(work.scope.identity, decided.index, decided.request_id)
            work.interaction = self._sessions.enter(asked.session, interaction)

    async def complete(self, work: Work) -> None:
        """The answer has ended: the request races no more. If it is good, its index is used, whatever happens next.

        Raises a `Fault` where it must not be delivered: its index may be another's.
        """
        if work.claim is None or work.scope is None or work.completed:
            return
        work.completed = True
        work.raced = await self._store.complete(work.scope, work.claim.index, sure=_whole(work, unwanted=True))
        if _whole(work) and (run := _recorded(work)) is not None:
            run.ledger.complete({"event": "complete", **_names(work.scope, work.claim.index)})

    async def closed(self, work: Work, *, started: bool) -> None:
        """The request is over. `started`: bytes of an answer had reached the client."""
        asked, job, answer = work.asked, work.job, work.answer
        now = asyncio.get_running_loop().time()
        if work.session is not None:
            trouble = None if answer.delivered else self._error(work) or _outcome(work)
            answer_id = answer.observed.id if answer.observed is not None else None
            self._sessions.leave(work.session, trouble, work.interaction, answer_id)
        if work.claim is not None and work.scope is not None:
            used = answer.delivered or (started and _good_so_far(work))
            try:
                if not work.completed:
                    work.completed = True
                    work.raced = await self._store.complete(work.scope, work.claim.index)
            finally:  # its client may leave at this moment too
                # First the record: should the process be killed in between, the store ends what it still has for open.
                if (run := _recorded(work)) is not None:
                    self._close_record(work, run, used, now)
                await self._store.settle(work.scope, work.claim.index, used=used)
        self._count(work)
        pool = asked.pool.name if asked is not None else ""
        route = asked.route if asked is not None else "unknown"
        self._telemetry.requests.add(pool, route, str(answer.status or 499))
        self._telemetry.total.observe(now - work.since)
        if answer.first_byte_at:
            self._telemetry.first_byte.observe(answer.first_byte_at - work.since)
        if self._debug:
            self._log(work, route, now)
        if work.trace is not None:
            work.trace.end(work, _outcome(work), self._error(work))
        if job is not None and answer.complete_at:
            before = job.sent_at - work.since - job.lane_wait
            self._telemetry.overhead.observe(max(0.0, before + now - answer.complete_at))

    def _log(self, work: Work, route: str, now: float) -> None:
        """One line a request, at DEBUG."""
        asked, decided, job, answer = work.asked, work.plan, work.job, work.answer
        caller = asked.caller if asked is not None else None
        log.debug(
            "request",
            **work.told(),
            route=route,
            run=asked.run if asked is not None else None,
            session=caller.session if caller is not None else None,
            identity=work.scope.identity if work.scope is not None else None,
            group=caller.group if caller is not None else None,
            member=caller.member if caller is not None else None,
            index=decided.index if decided is not None else None,
            seed=decided.seed if decided is not None else None,
            replica=job.replicas[-1] if job is not None and job.replicas else None,
            attempts=job.attempts if job is not None else 0,
            lane=job.pool.lanes.scope if job is not None else None,
            lane_wait=job.lane_wait if job is not None else 0.0,
            weight_version=answer.observed.weight_version if answer.observed is not None else None,
            mode=self._settings.profile,
            status=answer.status or None,
            outcome=_outcome(work),
            seconds=round(now - work.since, 6),
        )

    def _error(self, work: Work) -> str | None:
        """What went wrong: the code of a refusal, or the words of what broke a stream."""
        if work.fault is not None and work.answer.error is None:
            return work.fault.code
        return work.answer.error or (work.answer.observed.error if work.answer.observed else None)

    def _close_record(self, work: Work, run: Run, used: bool, now: float) -> None:
        assert work.scope is not None
        assert work.plan is not None
        assert work.asked is not None
        answer, job = work.answer, work.job
        run_name, session, identity = work.scope
        record: dict[str, Any] = {
            "event": "closed",
            "time": time.time(),
            "run": run_name,
            "session": session,
            "identity": identity,
            "index": work.plan.index,
            "outcome": _outcome(work),
            "used": used,
            "racing": work.raced,
            "status": answer.status or None,
            "error": self._error(work),
        }
        if job is None:
            record |= _UNSENT
        else:
            replica = work.asked.pool.replicas.get(job.replicas[-1]) if job.replicas else None
            record |= {
                "replica": job.replicas[-1] if job.replicas else None,
                "replicas": job.replicas,
                "candidates": job.candidates,
                "loads": job.loads,
                "attempt": job.attempts,
                "attempts": [{"replica": name, "outcome": ended} for name, ended in job.ended],
                "engine": replica.fingerprint if replica is not None else None,
                "flags": job.flags,
                "sticky": job.sticky,
                "lane_wait": job.lane_wait,
            }
        observed = answer.observed
        if observed is None:
            record |= _UNSEEN
        else:
            record |= {
                "finish_reasons": observed.finish_reasons,
                "usage": None if observed.usage is None else counts(observed.usage),
                "answer": observed.content,
                "answer_id": observed.id,
                "weight_version": _weights(observed, job),
            }
        record["first_byte_seconds"] = round(answer.first_byte_at - work.since, 6) if answer.first_byte_at else None
        record["seconds"] = round(now - work.since, 6)
        if work.heard is not None:
            record |= kept("answer", work.heard.body, work.heard.length, self._bodies)
        run.ledger.closed(record)

    def _count(self, work: Work) -> None:
        if work.claim is None or work.asked is None:
            return
        if work.asked.handling.kind == "sample" and work.asked.handling.seed is None:
            self._telemetry.unseeded.add(work.asked.route)
        if work.raced or "racing" in work.claim.flags:
            self._telemetry.racing.add()
        if work.claim.reused:
            self._telemetry.reused.add()


def _weights(observed: Observed | None, job: Job | None) -> str | None:
    """Which weights answered: as the engine told, else as they were named."""
    told = observed.weight_version if observed is not None else None
    named = job.passage.weights if job is not None else None
    return told if told not in (None, UNNAMED) else named


def _outcome(work: Work) -> str:
    answer = work.answer
    if answer.delivered:
        return "delivered"
    if answer.left and (answer.observed is None or answer.observed.error is None):
        return "abandoned"
    if work.fault is not None:
        return "failed" if isinstance(work.fault, UpstreamFault | StoreFault) else "refused"
    if answer.error is not None or answer.observed is not None or answer.status >= 400:
        return "failed"
    return "abandoned"


_UNSENT: dict[str, Any] = {
    "replica": None,
    "replicas": [],
    "candidates": [],
    "loads": None,
    "attempt": 0,
    "attempts": [],
    "engine": None,
    "flags": [],
    "sticky": False,
    "lane_wait": 0.0,
}
_UNSEEN: dict[str, Any] = dict.fromkeys(("finish_reasons", "usage", "answer", "answer_id", "weight_version"))
"""What stands in a record where nothing was sent, or no answer was seen: every record has all columns."""


def _names(scope: ScopeKey, index: int) -> dict[str, Any]:
    run, session, identity = scope
    return {"run": run, "session": session, "identity": identity, "index": index}


def _recorded(work: Work) -> Run | None:
    """The run whose ledger has this request's claim; None: none has."""
    if work.plan is None or work.claim is None or UNRECORDED in work.claim.flags:
        return None
    return work.run


def counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """What of an engine's usage are whole numbers, so that a column has one type whatever the engine says."""
    told: dict[str, Any] = {}
    for name, value in usage.items():
        if type(value) is int:
            told[name] = value
        elif isinstance(value, Mapping):
            told[name] = counts(value)
    return told


def _whole(work: Work, *, unwanted: bool = False) -> bool:
    """Its answer came whole and is an answer, so that only the client's leaving could leave it undelivered.

    `unwanted`: also one that its client asked to abort.
    """
    answer = work.answer
    observed = answer.observed
    if observed is not None and not observed.ended and work.asked is not None and work.asked.handling.kind == "sample":
        return False
    return answered(answer.status, observed, unwanted=unwanted)


def _good_so_far(work: Work) -> bool:
    """What reached a client that then left was part of a good answer, so its index is used."""
    answer = work.answer
    return (
        work.fault is None and answer.error is None and answer.status > 0 and answered(answer.status, answer.observed)
    )
