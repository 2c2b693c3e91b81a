from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim, Scope, Session, Wait
from gateway.stores import ScopeKey
from tests.timelines import TIMELINES, Step, steps, told


@dataclass(eq=False)
class Attempt:
    """One sending of a request."""

    key: ScopeKey
    ask: Ask
    outcome: Claim | Conflict | None = None
    """None: it waits."""
    raced: bool = False
    """It has waited for a rival."""
    ended: bool = False
    settled: bool = False
    told: bool = False
    """It was said to have raced when its answer ended."""

    @property
    def index(self) -> int:
        assert isinstance(self.outcome, Claim)
        return self.outcome.index


@dataclass
class Desk:
    """A store reduced to its rule: scopes, and those who wait, who are asked again after every change."""

    scopes: dict[ScopeKey, Scope] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    waiting: list[Attempt] = field(default_factory=list)
    claimed: list[Attempt] = field(default_factory=list)
    """Every attempt that got an index, in that order."""
    asked: list[tuple[Attempt, bool]] = field(default_factory=list)
    """The same, and each attempt whenever it was kept from a number by a rival; then with True."""
    written: list[tuple[Attempt, bool | None]] = field(default_factory=list)
    """The ledger: claims, and ends with whether the index was used."""

    def send(self, attempt: Attempt) -> None:
        self.scope(attempt.key)
        self._ask(attempt)
        if attempt.outcome is None:
            self.waiting.append(attempt)

    def scope(self, key: ScopeKey) -> Scope:
        session = self.sessions.setdefault(key.session, Session())
        return self.scopes.setdefault(key, Scope(key.identity, session))

    def end(self, attempt: Attempt) -> bool:
        attempt.ended = True
        attempt.told = self.scopes[attempt.key].complete(attempt.index)
        self._changed()
        return attempt.told

    def settle(self, attempt: Attempt, *, used: bool) -> bool:
        attempt.settled = True
        self.written.append((attempt, used))
        released = self.scopes[attempt.key].settle(attempt.index, used=used)
        self._changed()
        return released

    def leave(self, attempt: Attempt) -> None:
        self.waiting.remove(attempt)

    def give_up(self, attempt: Attempt) -> None:
        self.waiting.remove(attempt)
        self._ask(attempt, final=True)
        assert attempt.outcome is not None

    def restored(self) -> Desk:
        """Another, that knows what was written."""
        other = Desk(claimed=self.claimed, asked=self.asked, written=self.written)
        for attempt, used in self.written:
            scope = other.scope(attempt.key)
            if used is None:
                assert isinstance(attempt.outcome, Claim)
                scope.restore(attempt.ask, attempt.index, raced="racing" in attempt.outcome.flags)
            else:
                scope.complete(attempt.index)
                if attempt.told:
                    scope.restore_raced(attempt.index)
                scope.settle(attempt.index, used=used)
        return other

    def _changed(self) -> None:
        for attempt in tuple(self.waiting):
            self._ask(attempt)
            if attempt.outcome is not None:
                self.waiting.remove(attempt)

    def _ask(self, attempt: Attempt, *, final: bool = False) -> None:
        try:
            outcome = self.scopes[attempt.key].claim(attempt.ask, raced=attempt.raced, final=final)
        except Conflict as conflict:
            attempt.outcome = conflict
            if conflict.code == "racing_index":
                self.asked.append((attempt, True))
            return
        if isinstance(outcome, Wait):
            if outcome.why == "racing":
                attempt.raced = True
                self.asked.append((attempt, True))
        else:
            attempt.outcome = outcome
            self.claimed.append(attempt)
            self.asked.append((attempt, False))
            self.written.append((attempt, None))


def play(desk: Desk, attempts: dict[str, Attempt], step: Step) -> str:
    """Do what one line says, and say what comes of it."""
    if step.verb == "asks":
        attempts[step.who] = Attempt(step.scope, step.ask)
        desk.send(attempts[step.who])
    attempt = attempts[step.who]
    match step.verb:
        case "gives up":
            desk.give_up(attempt)
        case "leaves":
            desk.leave(attempt)
            return ""
        case "waits on":
            assert attempt.outcome is None
            return ""
        case "ends":
            return "raced" if desk.end(attempt) else ""
        case "delivers" | "fails":
            if not attempt.ended:
                desk.end(attempt)
            return "released" if desk.settle(attempt, used=step.verb == "delivers") else ""
        case _:
            assert step.verb in ("asks", "gets")
    return "waits" if attempt.outcome is None else told(attempt.outcome)


@pytest.mark.parametrize("name", TIMELINES)
def test_timeline(name: str) -> None:
    desk, attempts = Desk(), dict[str, Attempt]()
    for step in steps(TIMELINES[name]):
        assert (step.line, play(desk, attempts, step)) == (step.line, step.outcome)


def same(before: Desk, after: Desk) -> None:
    """What was restored is what there was. It may hold more for raced, and know less of who asked in vain."""
    for key, scope in after.scopes.items():
        was = before.scopes[key]
        assert (scope.next, scope.kind, scope.bound) == (was.next, was.kind, was.bound)
        assert (scope.released, scope.live, scope.session) == (was.released, {}, was.session)
        assert scope.raced >= was.raced
        assert scope.asked == was.asked or any(attempt.ask.exclusive for attempt in before.claimed)


@pytest.mark.parametrize("name", TIMELINES)
def test_a_ledger_read_back_gives_the_same_counters(name: str) -> None:
    desk, attempts = Desk(), dict[str, Attempt]()
    for step in steps(TIMELINES[name]):
        play(desk, attempts, step)
    desk.waiting.clear()
    for attempt in desk.claimed:
        if not attempt.ended:
            desk.end(attempt)
        if not attempt.settled:
            desk.settle(attempt, used=False)
    same(desk, desk.restored())


# --- any timeline


class Logical(NamedTuple):
    """One logical request: what a client wants one answer to, however often it must ask."""

    name: str
    key: ScopeKey
    ask: Ask


@dataclass
class Counter:
    """What must be true of a scope, worked out from what happened alone."""

    owners: dict[int, set[str]] = field(default_factory=dict)
    """Index → the logical requests that have it: with an attempt under way, or delivered."""
    used: set[int] = field(default_factory=set)
    drawn: dict[int, bytes] = field(default_factory=dict)
    """Indices in flight that were drawn from the counter, and the bytes they were drawn for."""
    raced: set[int] = field(default_factory=set)
    contended: bool = False
    """Somebody was told to wait for those in flight."""


class Indices(RuleBasedStateMachine):
    """Any requests in any order, with any ends, and retries as SDKs send them: after a failure, because a client
    ran out of patience, or of an answer that was lost on its way."""

    @initialize(strict=st.booleans())
    def open(self, strict: bool) -> None:
        self.strict = strict
        self.desk = Desk()
        self.sent: dict[Logical, list[Attempt]] = {}
        self.counters: dict[ScopeKey, Counter] = {}
        self.seen = 0
        self.unheard: set[Logical] = set()
        """Those of which a crash has left no record: none of their attempts had got an index."""

    # --- what clients do
    @rule(
        order=st.sampled_from(("arrival", "arrival", "content", "client")),
        content=st.sampled_from("xxy"),
        other=st.booleans(),
        number=st.integers(0, 2),
        key=st.sampled_from((None, None, None, "K", "L")),
        identity=st.sampled_from(("me", "me", "you")),
    )
    def a_new_request(self, order: str, content: str, other: bool, number: int, key: str | None, identity: str) -> None:
        session = "numbered" if order == "client" else "counted"
        effective = f"{identity}/{content}" if order == "content" else identity
        ask = Ask(
            order,  # type: ignore[arg-type]
            f"{content}{'.2' * other}".encode(),
            content,
            number if order == "client" else None,
            key,
            0,
            self.strict,
        )
        if order == "client":
            name = f"{identity} #{number} {content}"
        else:
            name = f"{session} {key}" if key is not None else f"request {len(self.sent)}"
        logical = Logical(name, ScopeKey("run", session, effective), ask)
        self.send(logical)

    @precondition(lambda self: self.retryable())
    @rule(data=st.data())
    def a_retry(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(self.retryable())))

    @precondition(lambda self: self.desk.waiting)
    @rule(data=st.data(), time=st.booleans())
    def a_wait_ends(self, data: st.DataObject, time: bool) -> None:
        attempt = data.draw(st.sampled_from(self.desk.waiting))
        if time:
            self.desk.give_up(attempt)
        else:
            self.desk.leave(attempt)
        self.account()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), used=st.booleans())
    def an_answer_ends_or_settles(self, data: st.DataObject, used: bool) -> None:
        self.advance(data.draw(st.sampled_from(self.under_way())), used)

    @rule()
    def a_crash(self) -> None:
        """The process dies and another reads the ledger back."""
        before = self.desk
        before.waiting.clear()
        while under_way := self.under_way():
            self.advance(under_way[0], used=False)
        self.desk = before.restored()
        same(before, self.desk)
        for key, counter in self.counters.items():
            counter.raced = set(self.desk.scopes[key].raced)
        for logical, sent in self.sent.items():
            if not any(isinstance(attempt.outcome, Claim) for attempt in sent):
                self.unheard.add(logical)

    def retryable(self) -> list[Logical]:
        """Conflicts are not retried."""
        return [
            logical
            for logical, sent in self.sent.items()
            if not isinstance(sent[-1].outcome, Conflict) and logical not in self.unheard
        ]

    def under_way(self) -> list[Attempt]:
        return [attempt for attempt in self.desk.claimed if not attempt.settled]

    # --- what follows
    def send(self, logical: Logical) -> None:
        sent = self.sent.setdefault(logical, [])
        attempt = Attempt(logical.key, logical.ask._replace(repeat=len(sent)))
        sent.append(attempt)
        self.desk.send(attempt)
        self.account()

    def advance(self, attempt: Attempt, used: bool) -> None:
        counter = self.counters[attempt.key]
        if not attempt.ended:
            others = [
                other
                for other in self.under_way()
                if other is not attempt and not other.ended and (other.key, other.index) == (attempt.key, attempt.index)
            ]
            if not others:
                counter.drawn.pop(attempt.index, None)
                counter.contended = counter.contended and bool(counter.drawn)
            assert self.desk.end(attempt) == (attempt.index in counter.raced)
        else:
            if used:
                counter.used.add(attempt.index)
            live = [
                other
                for other in self.under_way()
                if other is not attempt and (other.key, other.index) == (attempt.key, attempt.index)
            ]
            if not live and attempt.index not in counter.used:
                counter.owners[attempt.index].clear()
            released = self.desk.settle(attempt, used=used)
            assert released == (not live and attempt.index not in counter.used)
        self.account()

    def account(self) -> None:
        """Note every claim that was made since, in order."""
        for attempt, waits in self.desk.asked[self.seen :]:
            counter = self.counters.setdefault(attempt.key, Counter())
            if waits:
                counter.raced |= counter.drawn.keys()
                counter.contended = True
                continue
            name = next(logical.name for logical, sent in self.sent.items() if attempt in sent)
            counter.owners.setdefault(attempt.index, set()).add(name)
            assert isinstance(attempt.outcome, Claim)
            if attempt.ask.number is None and not attempt.outcome.reused:
                self.draw(counter, attempt)
            assert ("racing" in attempt.outcome.flags) == (attempt.index in counter.raced)
        self.seen = len(self.desk.asked)

    def draw(self, counter: Counter, attempt: Attempt) -> None:
        index, ask = attempt.index, attempt.ask
        rivals = [other for other, raw in counter.drawn.items() if raw != ask.raw and ask.kind == "arrival"]
        assert not (rivals and self.strict)
        if rivals:
            counter.raced |= {index, *counter.drawn}
        elif attempt.raced or counter.contended:
            counter.raced.add(index)
        counter.drawn[index] = ask.raw

    @invariant()
    def no_two_requests_own_one_index(self) -> None:
        for counter in self.counters.values():
            for index, owners in counter.owners.items():
                assert len(owners) <= 1, (index, owners)

    @invariant()
    def every_index_is_live_used_or_released_once(self) -> None:
        for key, scope in self.desk.scopes.items():
            counter = self.counters.get(key, Counter())
            released = [index for indices in scope.released.values() for index in indices]
            waits_for_key = [
                index for index, bound in scope.bound.items() if index not in scope.live and index not in counter.used
            ]
            accounted = sorted([*scope.live, *(counter.used - scope.live.keys()), *released, *waits_for_key])
            issued = sorted(scope.bound) if scope.kind == "client" else list(range(scope.next))
            assert accounted == issued
            assert all(indices == sorted(indices) and indices for indices in scope.released.values())

    def teardown(self) -> None:
        """Nothing is left behind when all has settled."""
        while self.desk.waiting:
            self.desk.give_up(self.desk.waiting[0])
            self.account()
        while under_way := self.under_way():
            self.advance(under_way[0], used=False)
        self.no_two_requests_own_one_index()
        self.every_index_is_live_used_or_released_once()
        for scope in self.desk.scopes.values():
            assert (scope.live, scope.drawn, scope.calm) == ({}, {}, set())
            assert all(asked.live == 0 for asked in scope.asked.values())


TestIndices = Indices.TestCase
TestIndices.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), requests=st.integers(1, 6))
def test_identical_requests_with_failures_and_retries_get_each_its_own_of_the_first_indices(
    data: st.DataObject, requests: int
) -> None:
    """A client retries when it was told of the failure: then the set of indices is the same in every run."""
    desk, key = Desk(), ScopeKey("run", "session", "me")
    retries = dict.fromkeys(range(requests), 0)
    under_way: dict[int, Attempt] = {}
    delivered: dict[int, int] = {}
    failures = 0
    while retries.keys() - delivered.keys():
        running = [name for name, attempt in under_way.items() if isinstance(attempt.outcome, Claim)]
        idle = sorted(retries.keys() - delivered.keys() - under_way.keys())
        name = data.draw(st.sampled_from([*idle, *running]))
        if name in idle:
            under_way[name] = Attempt(key, Ask("arrival", b"x", repeat=retries[name]))
            desk.send(under_way[name])
            continue
        attempt = under_way.pop(name)
        used = failures > 20 or data.draw(st.booleans())
        failures += not used
        desk.end(attempt)
        desk.settle(attempt, used=used)
        if used:
            delivered[name] = attempt.index
        else:
            retries[name] += 1
    assert sorted(delivered.values()) == list(range(requests))
    assert desk.waiting == []
