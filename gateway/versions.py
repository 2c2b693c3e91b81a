"""Whether requests meet the weights that they should: those of their session, and one version from start to end."""

from __future__ import annotations

from gateway.core.errors import Busy, Conflict
from gateway.core.seen import UNNAMED, Observed
from gateway.sending import Job
from gateway.session import Session
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.work import Asked


class Versions:
    """Compares what was met with what was promised."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self._sessions = sessions
        self._strict = settings.profile == "strict"

    def check(self, asked: Asked) -> None:
        """Refuse a request before it takes an index, if the weights are not its session's. Raises `Conflict`."""
        session, now = asked.session, asked.pool.gate.weights
        if self._strict and session is not None and session.holds and now is not None:
            held = session.held.get(asked.pool.name, now)
            if held != now:
                raise _other(session, asked.pool.name, held, now)

    def entered(self, asked: Asked, job: Job) -> None:
        """A request goes to the engine. Raises `Conflict` where the weights have changed while it waited."""
        if job.passage.weights is not None:
            self._met(asked, job, job.passage.weights, may_refuse=True)

    def examine(self, asked: Asked, job: Job, observed: Observed, *, began: bool) -> None:
        """Look at what an answer tells. Raises `Busy` or `Conflict` in strict, unless the client has a part of it."""
        gate, sent = job.pool.gate, job.passage.weights
        if sent is None and not observed.weight_version:
            return
        told = [each for each in (observed.weight_version or "").split(",") if each not in ("", UNNAMED)]
        if told:
            gate.told = told[-1]
        if len(set(told)) > 1 or (not told and sent not in (None, gate.weights)):
            job.flags.append("weights-mixed")
            if self._strict and not began:
                raise Busy(
                    f"The weights of pool {gate.pool} were changed while the answer was made "
                    f"({', then '.join(told or [sent or '', gate.weights or ''])}). Ask again: same index, same seed.",
                    code="weights_mixed",
                )
        elif told:
            self._met(asked, job, told[-1], may_refuse=not began)

    def _met(self, asked: Asked, job: Job, version: str, *, may_refuse: bool) -> None:
        session, pool = asked.session, job.pool.name
        if session is None or not session.holds or asked.handling.kind not in ("sample", "score"):
            return
        held = session.held.get(pool)
        if held is None:
            self._sessions.hold(session, pool, version)
        elif held != version and "weights-changed" not in job.flags:
            if self._strict and may_refuse:
                raise _other(session, pool, held, version)
            job.flags.append("weights-changed")


def _other(session: Session, pool: str, held: str, now: str) -> Conflict:
    of = f"session {session.known.session}" if session.group is None else f"group {session.group.id}"
    return Conflict(
        f"Pool {pool} has weights {now}, and {of} is held to {held}. End it and create another.",
        code="weight_version",
    )
