"""What an answer says of itself: the headers that tell what was decided, and what of the promise holds."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from gateway.core import guarantee
from gateway.core.types import Handling
from gateway.sending import Sending
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from gateway.work import Asked, Work

_OF_DECISION = (
    b"x-request-id: %b\r\nx-detgate-request-id: %b\r\nx-detgate-session: %b\r\n"
    b"x-detgate-index: %d\r\nx-detgate-seed-source: %b\r\n%b"
)
_OF_ANSWER = b"%bx-detgate-replica: %b\r\nx-detgate-attempts: %d\r\nx-detgate-guarantee: %b\r\n"


_SEGMENT = b"x-detgate-segment: %d\r\n"


def _seed(seed: int | None) -> bytes:
    return b"" if seed is None else b"x-detgate-seed: %d\r\n" % seed


@lru_cache(maxsize=4096)
def _visible(session: str) -> bytes:
    """A session's id as a header may have it."""
    return quote(session, safe="!#$&'()*+,/:;=?@[]~ ").encode()


@lru_cache(maxsize=1024)
def _guarantee(best: guarantee.Level, reasons: tuple[str, ...]) -> bytes:
    return guarantee.header(best, list(reasons)).encode()


class Statement:
    """Writes the X-Detgate headers."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._reasons = telemetry.reasons
        self._off = settings.profile == "off"
        self._strict = settings.profile == "strict"

    def reasons(self, work: Work, asked: Asked) -> list[str]:
        """Reasons, known before anything is sent, why the promise does not hold whole."""
        if self._off:
            return ["off"]
        if work.claim is None:
            return []
        flags = list(work.claim.flags)
        if asked.handling.kind == "sample" and asked.handling.seed is None:
            flags.append("no-seed")
        if asked.caller.random_session:
            flags.append("random-session")
        if asked.pool.isolates and asked.handling.salt is None:
            flags.append("cache-shared")
        return flags

    def of_answer(self, work: Work, asked: Asked, sending: Sending) -> bytes:
        """The header lines of an answer that a replica gave."""
        job = sending.job
        reasons = job.flags + self._reasons_of(sending, asked.handling)
        if work.raced and "racing" not in reasons:
            reasons.insert(0, "racing")
        for reason in reasons:
            self._reasons.add(reason)
        best: guarantee.Level = "strict" if self._strict and job.pool.stable else "balanced"
        return _OF_ANSWER % (
            self.of_decision(work, asked),
            sending.replica.name.encode(),
            job.attempts,
            _guarantee(best, tuple(reasons)),
        )

    def of_decision(self, work: Work, asked: Asked) -> bytes:
        """The header lines of what was decided, which a refusal has too."""
        decided = work.plan
        own_id = asked.request.fields.get(b"x-request-id")
        if decided is None:
            return b"" if own_id is None else b"x-request-id: %b\r\n" % own_id
        request_id = decided.request_id.encode()
        return _OF_DECISION % (
            own_id or request_id,
            request_id,
            _visible(asked.caller.session),
            decided.index,
            decided.seed_source.encode(),
            _seed(decided.seed) if asked.origin is None else _seed(decided.seed) + _SEGMENT % (decided.index + 1),
        )

    def _reasons_of(self, sending: Sending, handling: Handling) -> list[str]:
        """What the replica that answers takes away from the promise."""
        if self._off or handling.kind not in ("sample", "score"):
            return []
        replica = sending.replica
        reasons = list(replica.reasons)
        if replica.preempted_at > sending.exchange.sent_at and "preempted" not in sending.job.flags:
            reasons.append("preempted")
        return reasons
