"""Why a request is not the same in two runs: pure functions of what both ledgers tell of it.

A request is looked at in the order in which things happened to it: what was asked, under which number, with which seed,
where it was sent, how often, and what came back. The first of these that differs is the cause; all others follow from
it or are told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway import schemes
from gateway.core import resume
from gateway.evidence.requests import Attempt, Request
from gateway.settings.deciding import routing

Cause = Literal[
    "missing-request",
    "other-prompt",
    "other-order",
    "other-seed",
    "other-replica",
    "other-engine",
    "other-retries",
    "other-answer",
]

CAUSES: dict[Cause, str] = {
    "missing-request": "one run has no record of it, or it got no answer there",
    "other-prompt": "it asks something else",
    "other-order": "the same requests of a session came under other indices",
    "other-seed": "it was sampled with another seed",
    "other-replica": "it was sent to another replica",
    "other-engine": "the replica's engine or its weights are not the same",
    "other-retries": "it was sent, or asked for, a different number of times",
    "other-answer": "all inputs are equal and the answer is not: the engine is not deterministic",
}
"""What each cause means."""

MARKS: dict[Cause, str] = {
    "missing-request": "∅",
    "other-prompt": "P",
    "other-order": "⇄",
    "other-seed": "S",
    "other-replica": "R",
    "other-engine": "E",
    "other-retries": "↻",
    "other-answer": "A",
}
"""What stands for each cause, so that none is told by its colour alone."""

HARMLESS: frozenset[Cause] = frozenset({"other-replica", "other-engine", "other-retries"})
"""Causes that need not change what the client got."""

_GIVEN_UP = frozenset({None, "aborted"})
"""How a sending ended that says nothing of its replica: not told, or given up by its client."""


@dataclass(slots=True)
class Run:
    """What is known of one run, beside its requests."""

    name: str
    deciding: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Session → its own master seed."""
    waited: Set[tuple[str, str]] = frozenset()
    """Effective identity and digest of requests that waited for a rival in vain."""

    def master(self, request: Request) -> int | None:
        """The master seed of a request; None where nothing tells."""
        return self.seeds.get(request.session, self.deciding.get("seed"))

    def whose(self, request: Request) -> str:
        """What its master seed is, in words."""
        return "the session's own master seed" if request.session in self.seeds else "the master seed"

    def let_wait(self, request: Request) -> bool:
        """It was asked for one with the bytes of this, which got no index. Most that is refused leaves no record."""
        return request.digest is not None and (request.identity, request.digest) in self.waited


@dataclass(slots=True)
class Difference:
    """One request that is not the same in both runs."""

    a: Request | None
    b: Request | None
    cause: Cause
    detail: str
    root: bool = True
    """False: it follows from an earlier difference of its session."""
    also: tuple[str, ...] = ()
    """What else is not the same."""
    unsure: bool = False
    """It may ask something else too: nothing tells."""
    siblings: tuple[int, ...] = ()
    """With other-order: the indices of its session that changed places."""

    @property
    def one(self) -> Request:
        """The request in the run that has it, A first."""
        request = self.a or self.b
        assert request is not None
        return request

    @property
    def answers_equal(self) -> bool:
        """The client got the same in both runs, as far as is known."""
        return self.a is not None and self.b is not None and same_answer(self.a, self.b)


def same_prompt(a: Request, b: Request) -> bool | None:
    """Whether two requests ask the same. None: their bytes differ, and nothing tells whether it matters."""
    if a.route != b.route:
        return False
    if a.digest is not None and a.digest == b.digest:
        return True
    if a.content is not None and b.content is not None:
        return a.content == b.content
    if a.order == b.order == "content" and a.base != a.identity:
        return a.identity == b.identity
    return None


def same_answer(a: Request, b: Request) -> bool:
    """Whether two requests ended alike for their client."""
    if not (a.delivered or b.delivered):
        return True
    return (
        a.delivered == b.delivered
        and a.status == b.status
        and (a.finish_reasons, a.answer) == (b.finish_reasons, b.answer)
        and (a.answer is not None or a.tokens == b.tokens)
    )


def differing(a: Request, b: Request) -> list[Cause]:
    """In which respects two requests with the same prompt differ, the cause first."""
    found: list[Cause] = []
    if a.seed != b.seed:
        found.append("other-seed")
    sent = _sent_otherwise(a, b)
    if sent == "other-replica":
        found.append(sent)
    if a.replica == b.replica and (a.engine != b.engine or _other_weights(a, b)):
        found.append("other-engine")
    if sent == "other-retries":
        found.append(sent)
    if a.delivered != b.delivered and sent != "other-retries":
        found.append("missing-request")
    elif not same_answer(a, b):
        found.append("other-answer")
    return found


def explained(cause: Cause, a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    """In words, what differs between two requests with the same prompt."""
    return _EXPLAINED[cause](a, b, runs)


# --- what is not the same


def _sent_otherwise(a: Request, b: Request) -> Literal["other-replica", "other-retries"] | None:
    for mine, theirs in zip(a.attempts, b.attempts, strict=False):
        if mine.replica != theirs.replica:
            return "other-replica"
        if mine.ended != theirs.ended and _GIVEN_UP.isdisjoint((mine.ended, theirs.ended)):
            return "other-retries"
    return "other-retries" if len(a.attempts) != len(b.attempts) or a.claims != b.claims else None


def _other_weights(a: Request, b: Request) -> bool:
    """Whether both tell of their weights, and these differ."""
    return None not in (a.weight_version, b.weight_version) and a.weight_version != b.weight_version


# --- in words


def _seed(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    return f"seed {a.seed} in A, {b.seed} in B: {_why_seed(a, b, runs)}"


def _why_seed(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    if a.seed_source != b.seed_source:
        told = {"client": "the client's own", "derived": "derived", "none": "none was given"}
        return f"in A it is {told.get(a.seed_source or '', 'of unknown source')}, in B {told.get(b.seed_source or '')}"
    if a.seed_source == "client":
        return "the client sent another seed"
    if a.scheme != b.scheme:
        return f"the scheme is {a.scheme} in A, {b.scheme} in B"
    masters = [run.master(request) for run, request in zip(runs, (a, b), strict=True)]
    if masters[0] != masters[1] and None not in masters:
        whose = [run.whose(request) for run, request in zip(runs, (a, b), strict=True)]
        again = "" if whose[0] == whose[1] else f"{whose[1]} is "
        return f"{whose[0]} is {masters[0]} in A, {again}{masters[1]} in B"
    if a.member != b.member:
        return f"its place in the group is {a.member} in A, {b.member} in B"
    strangers = [side for side, request, master in zip("AB", (a, b), masters, strict=True)
                 if master is not None and _follows(request, master) is False]  # fmt: skip
    if strangers:
        return f"in {' and '.join(strangers)} it does not follow from the master seed: a client's seed is mixed in"
    for side, other, master in zip("AB", "BA", masters, strict=True):
        if master is not None and None in masters:
            return (f"the master seed is {master} in {side}; that of {other} is not known (no run.json beside its "
                    "records), and most likely another")  # fmt: skip
    return "the ledgers do not tell why (no run.json beside the records); most likely the master seed"


def _follows(request: Request, master: int) -> bool | None:
    """Whether a seed is derived from a master seed; None where that cannot be told."""
    if request.scheme not in schemes.names() or resume.origin(request.identity) is not None:
        return None
    seed = schemes.load(request.scheme).seed(master, request.identity, request.index, request.member)
    return seed == request.seed


def _replica(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    at = next(
        (number for number, pair in enumerate(zip(a.attempts, b.attempts, strict=False)) if pair[0][0] != pair[1][0]), 0
    )
    where = f"{a.attempts[at].replica} in A, {b.attempts[at].replica} in B" + (f" (attempt {at + 1})" if at else "")
    return f"{where}: {_why_replica(a, b, runs)}"


def _why_replica(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    away = [side for side, request in zip("AB", (a, b), strict=True) if "home-down" in request.flags]
    if away:
        return f"in {' and '.join(away)} its home was down"
    pool_a, pool_b = ((run.deciding.get("pools") or {}).get(one.pool) for run, one in zip(runs, (a, b), strict=True))
    if pool_a and pool_b and pool_a != pool_b:
        return f"the pool has {', '.join(pool_a)} in A, {', '.join(pool_b)} in B"
    if (rule := _other_rule(a, b, runs)) is not None:
        return rule
    follow = [side for side, request in zip("AB", (a, b), strict=True) if request.sticky]
    if len(follow) == 2:
        return f"{_FOLLOWS}, which had gone to another in each run"
    if follow:
        return f"in {follow[0]} {_FOLLOWS}; in {'B' if follow == ['A'] else 'A'} it was chosen anew"
    if a.loads is not None and b.loads is not None:
        if sorted(a.loads) != sorted(b.loads):
            return f"it could go to {', '.join(sorted(a.loads))} in A, {', '.join(sorted(b.loads))} in B"
        if a.loads != b.loads:
            return f"it was chosen by load, which was {_loads(a.loads)} in A, {_loads(b.loads)} in B"
    return "the candidates were not the same: a replica was down, drained, added or removed"


_FOLLOWS = "it follows the first choice of its session (routing.key: session)"


def _other_rule(a: Request, b: Request, runs: tuple[Run, Run]) -> str | None:
    """By which other rule the replica was chosen; None: by the same, as far as both runs tell."""
    told_a, told_b = (run.deciding for run in runs)
    if "profile" not in told_a or "profile" not in told_b:
        return None
    rule_a, rule_b = routing(told_a, a.pool or ""), routing(told_b, b.pool or "")
    others = [f"routing.{name} is {rule_a[name]} in A, {rule_b[name]} in B"
              for name in ("key", "slack") if rule_a[name] != rule_b[name]]  # fmt: skip
    if not others:
        return None
    if told_a["profile"] != told_b["profile"]:
        others.insert(0, f"profile is {told_a['profile']} in A, {told_b['profile']} in B")
    return f"the rule was another: {'; '.join(others)}"


def _loads(loads: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {load}" for name, load in sorted(loads.items()))


def _engine(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    told = []
    if _other_weights(a, b):
        told.append(f"weights {a.weight_version} in A, {b.weight_version} in B")
    if a.engine != b.engine:
        told.append(f"engine fingerprint {a.engine} in A, {b.engine} in B")
    return f"{a.replica}: {'; '.join(told)}"


def _retries(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    told = f"{_history(a)} in A, {_history(b)} in B"
    return told if a.delivered == b.delivered else f"{told}; {_ends(a, b)}"


def _history(request: Request) -> str:
    sent = " → ".join(_attempt(each) for each in request.attempts) or "not sent"
    return f"{sent}, asked for {request.claims} times" if request.claims > 1 else sent


def _attempt(attempt: Attempt) -> str:
    return attempt.replica if attempt.ended is None else f"{attempt.replica} ({attempt.ended})"


def _no_answer(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    return f"asked for in both runs, but {_ends(a, b)}"


def _ends(a: Request, b: Request) -> str:
    return "; ".join(f"in {side} {_end(request)}" for side, request in (("A", a), ("B", b)))


def _end(request: Request) -> str:
    if request.outcome is None:
        return "it had not ended"
    return request.outcome if request.error is None else f"{request.outcome} ({request.error})"


def _answer(a: Request, b: Request, runs: tuple[Run, Run]) -> str:
    where = a.replica if a.replica == b.replica else f"{a.replica} in A, {b.replica} in B"
    told = [f"replica {where}", f"{a.crowd} of this run in flight in A, {b.crowd} in B"]
    if a.status != b.status:
        told.append(f"status {a.status} in A, {b.status} in B")
    if a.finish_reasons != b.finish_reasons:
        told.append(f"finish {_listed(a.finish_reasons)} in A, {_listed(b.finish_reasons)} in B")
    if a.tokens != b.tokens:
        told.append(f"{a.tokens} tokens in A, {b.tokens} in B")
    return f"equal inputs, another answer: {'; '.join(told)}"


def _listed(reasons: list[str] | None) -> str:
    return ", ".join(map(str, reasons)) if reasons else "none"


_EXPLAINED: dict[Cause, Callable[[Request, Request, tuple[Run, Run]], str]] = {
    "missing-request": _no_answer,
    "other-seed": _seed,
    "other-replica": _replica,
    "other-engine": _engine,
    "other-retries": _retries,
    "other-answer": _answer,
}
