"""Lanes: who goes when, and that no place is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.digits import natural
from gateway.core.errors import Busy
from gateway.lanes import Lane, Lanes, Place, Rank


def rank(index: int, identity: str = "", *, priority: int = 0, sample: int = 0) -> Rank:
    return (priority, index, natural(identity), sample)


def drained(lane: Lane, *waiting: Place) -> list[Place]:
    """The places in the order in which they are taken, when each that has one leaves at once."""
    order: list[Place] = []
    left = list(waiting)
    while left:
        taken = [place for place in left if place.taken]
        assert taken, "nobody goes on although the lane is free"
        for place in taken:
            left.remove(place)
            order.append(place)
            lane.leave(place)
    return order


# --- order


def test_a_round_goes_by_priority_then_index_then_identity_with_numbers_as_numbers_then_sample() -> None:
    lane = Lane("lane", limit=1, queue=100)
    ranks = [
        rank(5, "a", priority=-1),
        rank(0, "17:2"),
        rank(0, "17:10"),
        rank(0, "17:10", sample=1),
        rank(0, "a:1"),
        rank(1, "17:1"),
        rank(0, "17:1", priority=1),
    ]
    running = lane.join(rank(9))
    waiting = [lane.join(each) for each in reversed(ranks)]
    lane.leave(running)
    assert [place.rank for place in drained(lane, *waiting)] == ranks


def test_equals_go_in_the_order_of_their_coming() -> None:
    lane = Lane("lane", limit=1, queue=100)
    running = lane.join(rank(0))
    waiting = [lane.join(rank(7, "same")) for _ in range(5)]
    lane.leave(running)
    assert drained(lane, *waiting) == waiting


def test_who_comes_while_a_round_runs_waits_for_the_next_whatever_its_rank() -> None:
    lane = Lane("lane", limit=1, queue=100)
    running = lane.join(rank(0))
    late, later = lane.join(rank(8)), lane.join(rank(9))
    lane.leave(running)
    newcomers = []
    for _ in range(3):
        newcomers.append(lane.join(rank(0)))
    assert late.taken
    assert drained(lane, late, later, *newcomers) == [late, later, *newcomers]


def test_newcomers_before_it_in_order_never_starve_who_waits() -> None:
    lane = Lane("lane", limit=1, queue=100)
    running = lane.join(rank(0))
    patient = lane.join(rank(1000))
    rivals = [lane.join(rank(0)) for _ in range(3)]
    passed = 0
    while not patient.taken:
        rivals.append(lane.join(rank(0)))
        lane.leave(running)
        running = next(place for place in (patient, *rivals) if place.taken)
        passed += running is not patient
    assert passed == 4, "those of its own round, and none that came after it was formed"


def test_limit_bounds_what_is_in_the_lane() -> None:
    lane = Lane("lane", limit=3, queue=100)
    places = [lane.join(rank(number)) for number in range(5)]
    assert [place.taken for place in places] == [True, True, True, False, False]
    lane.leave(places[1])
    assert [place.taken for place in places] == [True, False, True, True, False]


# --- the queue's bound


def test_a_full_queue_refuses_with_an_error_that_asks_to_come_again() -> None:
    lane = Lane("rm-0", limit=1, queue=2)
    places = [lane.join(rank(number)) for number in range(3)]
    with pytest.raises(Busy, match=r"2 requests wait in lane rm-0 .* limits\.queue") as caught:
        lane.join(rank(3))
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "queue_full", 1)
    lane.leave(places[2])
    assert not lane.join(rank(3)).taken


def test_a_queue_of_none_still_has_the_lane_itself() -> None:
    lane = Lane("lane", limit=1, queue=0)
    assert lane.join(rank(0)).taken
    with pytest.raises(Busy):
        lane.join(rank(1))


# --- waiting and giving up


class Crowd:
    """Requests as tasks: each joins a lane, waits for its turn, stays until it is let go, and leaves."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.inside: list[int] = []
        self.most = 0
        self.through: list[int] = []
        self.go: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def enter(self, number: int) -> None:
        self.go[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._request(number))

    async def _request(self, number: int) -> None:
        place = self.lane.join(rank(number))
        try:
            await self.lane.turn(place)
            self.inside.append(number)
            self.most = max(self.most, len(self.inside))
            try:
                await self.go[number].wait()
            finally:
                self.inside.remove(number)
            self.through.append(number)
        finally:
            self.lane.leave(place)

    async def ended(self) -> None:
        for event in self.go.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("leaver", [1, 2, 3])
async def test_who_waits_may_leave_at_any_moment_also_as_its_turn_comes(leaver: int, moment: int) -> None:
    lane = Lane("lane", limit=1, queue=10)
    crowd = Crowd(lane)
    for number in range(4):
        crowd.enter(number)
    await ticks(2)
    crowd.go[0].set()
    await ticks(moment)
    crowd.tasks[leaver].cancel()
    await crowd.ended()
    assert set(crowd.through) >= {0, 1, 2, 3} - {leaver}
    assert crowd.most == 1
    assert (lane.running, lane.waiting, lane.used) == (0, 0, False)


async def test_a_turn_that_comes_in_the_same_moment_as_the_leaving_goes_to_the_next() -> None:
    lane = Lane("lane", limit=1, queue=10)
    running, first, second = (lane.join(rank(number)) for number in range(3))
    waiting = asyncio.create_task(lane.turn(first))
    await ticks(1)
    lane.leave(running)
    assert first.taken
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    lane.leave(first)
    assert second.taken
    assert lane.running == 1


async def test_who_is_woken_has_no_place_and_keeps_none() -> None:
    lane = Lane("lane", limit=1, queue=10)
    running, waker = lane.join(rank(0)), lane.join(rank(1))
    waiting = asyncio.create_task(lane.turn(waker))
    await ticks(1)
    waker.wake()
    await waiting
    assert not waker.taken
    lane.leave(waker)
    lane.leave(running)
    assert not lane.used


def test_leaving_again_takes_nothing_from_others() -> None:
    lane = Lane("lane", limit=1, queue=10)
    first, second = lane.join(rank(0)), lane.join(rank(1))
    for _ in range(3):
        lane.leave(first)
    assert second.taken
    assert lane.running == 1


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["go", "cancel"]), st.integers(0, 30)),
        st.tuples(st.just("tick"), st.integers(1, 3)),
    ),
    max_size=60,
)


@given(moves=MOVES, limit=st.integers(1, 3), queue=st.integers(0, 6))
def test_whatever_tasks_do_no_place_is_lost_or_shared(moves: list[tuple[str, int]], limit: int, queue: int) -> None:
    async def main() -> None:
        lane = Lane("lane", limit, queue)
        crowd = Crowd(lane)
        for move, number in moves:
            if move == "tick":
                await ticks(number)
            elif move == "enter" and number not in crowd.tasks:
                crowd.enter(number)
            elif move == "go" and number in crowd.go:
                crowd.go[number].set()
            elif move == "cancel" and number in crowd.tasks:
                crowd.tasks[number].cancel()
        await crowd.ended()
        assert crowd.most <= limit
        assert (lane.running, lane.waiting) == (0, 0)

    asyncio.run(main())


class Turns(RuleBasedStateMachine):
    """A lane against the rule in its plainest form: two lists, of which the first is sorted when it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane("lane", limit=2, queue=5)
        self.inside: list[Place] = []
        self.round: list[Place] = []
        self.next: list[Place] = []

    @rule(index=st.integers(0, 4), priority=st.integers(-1, 1))
    def join(self, index: int, priority: int) -> None:
        full = len(self.inside) == 2
        if full and len(self.round) + len(self.next) == 5:
            with pytest.raises(Busy):
                self.lane.join(rank(index, priority=priority))
            return
        place = self.lane.join(rank(index, priority=priority))
        (self.next if full else self.inside).append(place)

    @precondition(lambda self: self.inside or self.round or self.next)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.inside + self.round + self.next))
        self.lane.leave(place)
        for places in (self.inside, self.round, self.next):
            if place in places:
                places.remove(place)
        if len(self.inside) < 2 and (self.round or self.next):
            if not self.round:
                self.round, self.next = sorted(self.next, key=lambda each: each.rank), []
            self.inside.append(self.round.pop(0))

    @invariant()
    def as_the_rule_says(self) -> None:
        assert all(place.taken for place in self.inside)
        assert not any(place.taken for place in self.round + self.next)
        assert (self.lane.running, self.lane.waiting) == (len(self.inside), len(self.round) + len(self.next))


TestTurns = Turns.TestCase


# --- the lanes of a pool


@contextmanager
def inside(lanes: Lanes, replica: str, session: str) -> Iterator[Lane]:
    lane = lanes.find(replica, session)
    assert lane is not None
    place = lane.join(rank(0))
    try:
        yield lane
    finally:
        lanes.leave(lane, place)


@pytest.mark.parametrize(
    ("scope", "shared"),
    [
        ("replica", {("a", "s1"), ("a", "s2")}),
        ("pool", {("a", "s1"), ("a", "s2"), ("b", "s1"), ("b", "s2")}),
        ("session", {("a", "s1"), ("b", "s1")}),
    ],
)
def test_a_scope_says_who_shares_a_lane(scope: str, shared: set[tuple[str, str]]) -> None:
    lanes = Lanes("pool", scope, 1, 10)
    with inside(lanes, "a", "s1") as lane:
        same = {(r, s) for r in "ab" for s in ("s1", "s2") if lanes.find(r, s) is lane}
    assert same == shared


def test_without_a_scope_nothing_is_bounded() -> None:
    assert Lanes("pool", "none", None, 10).find("a", "s") is None
    assert Lanes("pool", "replica", None, 10).find("a", "s") is None


@pytest.mark.parametrize("scope", ["session", "replica", "pool"])
def test_a_lane_exists_only_while_somebody_uses_it(scope: str) -> None:
    lanes = Lanes("pool", scope, 1, 10)
    for number in range(100):
        with inside(lanes, f"replica-{number}", f"session-{number}") as lane:
            waiting = lane.join(rank(1))
        assert len(lanes) == 1
        assert lanes.find(f"replica-{number}", f"session-{number}") is lane
        lanes.leave(lane, waiting)
    assert len(lanes) == 0


def test_a_lane_in_doubt_is_remembered() -> None:
    lanes = Lanes("pool", "replica", 1, 10)
    with inside(lanes, "a", "s") as lane:
        lane.doubt = "a"
    assert lanes.find("a", "other") is lane


@pytest.mark.parametrize(
    ("scope", "limit", "exclusive"),
    [("replica", 1, True), ("pool", 1, True), ("replica", 2, False), ("session", 1, False)],
)
def test_only_one_a_replica_or_pool_keeps_a_batch_to_itself(scope: str, limit: int, exclusive: bool) -> None:
    assert Lanes("pool", scope, limit, 10).exclusive is exclusive


def test_waiting_counts_over_all_lanes() -> None:
    lanes = Lanes("pool", "session", 1, 10)
    with inside(lanes, "a", "s1") as one, inside(lanes, "a", "s2") as two:
        places = [(one, one.join(rank(1))), (two, two.join(rank(1))), (two, two.join(rank(2)))]
        assert lanes.waiting == 3
        for lane, place in places:
            lanes.leave(lane, place)
        assert lanes.waiting == 0
