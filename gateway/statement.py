"""What an answer says of itself: the headers that tell what was decided, and what of the promise holds."""

from __future__ import annotations

from urllib.parse import quote

from gateway.core import guarantee
from gateway.core.types import Handling, Headers
from gateway.sending import Sending
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from gateway.work import Asked, Work


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
        return flags

    def of_answer(self, work: Work, asked: Asked, sending: Sending) -> Headers:
        """The headers of an answer that a replica gave."""
        headers = self.of_decision(work, asked)
        job = sending.job
        reasons = job.flags + self._reasons_of(sending, asked.handling)
        if work.raced and "racing" not in reasons:
            reasons.insert(0, "racing")
        for reason in reasons:
            self._reasons.add(reason)
        best: guarantee.Level = "strict" if self._strict and job.pool.stable else "balanced"
        headers += (
            (b"x-detgate-replica", sending.replica.name.encode()),
            (b"x-detgate-attempts", b"%d" % job.attempts),
            (b"x-detgate-guarantee", guarantee.header(best, reasons).encode()),
        )
        return headers

    def of_decision(self, work: Work, asked: Asked) -> Headers:
        """The headers of what was decided, which a refusal has too."""
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
        replica = sending.replica
        reasons = list(replica.reasons)
        if replica.preempted_at > sending.exchange.sent_at and "preempted" not in sending.job.flags:
            reasons.append("preempted")
        return reasons
