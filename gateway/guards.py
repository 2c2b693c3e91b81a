"""Guards against samples that share their noise without anyone having meant it.

One looks at requests before they take an index: two members of a group with one seed. The other looks at answers: equal
ones that were drawn with different seeds come from an engine that does not use them, or from a model that is very sure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from gateway.core import canonical, plan
from gateway.core.errors import CallerFault, Conflict
from gateway.core.seen import Observed, Sample
from gateway.core.types import Call
from gateway.session import Group, Session
from gateway.sessions import Sessions
from gateway.settings import Guards as GuardSettings
from gateway.telemetry import Telemetry
from gateway.work import Asked

log = structlog.get_logger("detgate.guards")


class Guards:
    """Looks at requests and at answers."""

    def __init__(self, settings: GuardSettings, sessions: Sessions, telemetry: Telemetry) -> None:
        self._sessions = sessions
        self._refuses = settings.shared_seed == "refuse"
        self._refuses_clones = settings.clones == "refuse"
        self._tokens = settings.clone_tokens
        self._telemetry = telemetry
        self._warned: set[str] = set()
        self._warned_of_clones: set[str] = set()

    async def check(self, asked: Asked, session: Session, group: Group) -> None:
        """Notice a seed and prompt that another member of the group has sent: the two would be clones.

        At temperature 0 nothing is drawn, so nothing is shared. Raises `CallerFault` where guards.shared_seed refuses.
        """
        if not asked.wish.seeded or _greedy(asked.wish.calls):
            return
        first = await self._sessions.first(group, f"seed {asked.content()}", session.known.session)
        if first == session.known.session:
            return
        self._telemetry.guard.add("shared_seed")
        if self._refuses:
            raise CallerFault(
                f"Member {first} of this group has sent the same prompt with the same seed, so both would get the "
                "same answer. Send no seed, or another for each member; guards.shared_seed: warn lets it pass.",
                code="shared_seed",
                param="seed",
            )
        if asked.run not in self._warned:
            self._warned.add(asked.run)
            log.warning(
                "members of a group share seed and prompt: their answers are clones", run=asked.run, group=group.id
            )

    def concerns(self, asked: Asked) -> bool:
        """Whether the answer to a request could equal another one that counts."""
        alone = asked.wish.samples == 1 and (asked.session is None or asked.session.group is None)
        return not alone and asked.handling.kind == "sample"

    async def examine(
        self, asked: Asked, decided: plan.Plan, raw: bytes, observed: Observed, flags: list[str], *, began: bool
    ) -> None:
        """Notice an answer that equals another one of its group, or of its own call, drawn with another seed.

        `raw`: digest of the request's bytes. Raises `Conflict` where guards.clones refuses, unless the client has a
        part of the answer already (`began`). It is then not delivered, so whoever asks again gets the same index, seed
        and answer.
        """
        if decided.seed is None or _greedy(decided.calls):
            return
        twin = await self._twin(asked, decided, raw, observed)
        if twin is None:
            return
        self._telemetry.guard.add("clones")
        flags.append("cloned")
        if asked.run not in self._warned_of_clones:
            self._warned_of_clones.add(asked.run)
            log.warning("equal answers to different seeds", run=asked.run, request=decided.request_id, equals=twin)
        if self._refuses_clones and not began:
            raise Conflict(
                f"The answer to {decided.request_id} is the same as that of {twin}, though their seeds differ: the "
                "engine does not use them, or the model is very sure. guards.clones: warn lets it pass; "
                "guards.clone_tokens says from which length answers count.",
                code="cloned_samples",
            )

    async def _twin(self, asked: Asked, decided: plan.Plan, raw: bytes, observed: Observed) -> str | None:
        """What an answer is a clone of, in words; None: of nothing."""
        longer = self._longer(decided.calls, observed.samples or _alone(observed))
        if len({content for content, _ in longer}) < len(longer):
            return "another sample of the same call"
        group = asked.session.group if asked.session is not None else None
        if group is None or not longer or observed.content is None:
            return None
        what = f"answer {_prompt(asked, raw)} {observed.content}"
        seeds = _seeds(asked, decided)
        told = await self._sessions.first(group, what, f"{seeds} {decided.request_id}")
        other, _, first = told.partition(" ")
        return first if other != seeds else None

    def _longer(self, calls: Sequence[Call], samples: Sequence[Sample]) -> set[tuple[str, int]]:
        """What was drawn, and long enough to tell: each with its seed, or its place where one call drew several."""
        if len(calls) != len(samples):
            return {(sample.content, place) for place, sample in enumerate(samples) if sample.tokens >= self._tokens}
        return {
            (sample.content, call.seed or 0)
            for call, sample in zip(calls, samples, strict=True)
            if sample.tokens >= self._tokens and not _is_greedy(call.document.value)
        }


def _alone(observed: Observed) -> tuple[Sample, ...]:
    """The one choice of an answer with a usage."""
    usage = observed.usage or {}
    tokens = usage.get("completion_tokens") or usage.get("output_tokens")
    return (Sample(observed.content, tokens),) if observed.content and isinstance(tokens, int) else ()


def _prompt(asked: Asked, raw: bytes) -> str:
    """Digest of what is asked, whatever the seed. `raw`: that of its bytes, which is enough where nothing varies."""
    if not asked.wish.seeded:
        return asked.content() if canonical.varies(asked.document) else raw.hex()
    return canonical.content(plan.unseeded(asked.handling, asked.document), asked.route)


def _seeds(asked: Asked, decided: plan.Plan) -> str:
    """What the seeds of an answer follow from: that of sample 0, unless prompts have seeds of their own."""
    if not asked.wish.each:
        return str(decided.seed)
    return canonical.raw("", b",".join([b"%d" % (call.seed or 0) for call in decided.calls])).hex()


def _greedy(calls: Sequence[Call]) -> bool:
    """Nothing is drawn."""
    return all(_is_greedy(call.document.value) for call in calls)


def _is_greedy(value: Mapping[str, Any]) -> bool:
    params = value.get("sampling_params")
    params = params if isinstance(params, dict) else value
    return params.get("temperature") == 0 or params.get("top_k") == 1
