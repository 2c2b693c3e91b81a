"""What every store must do. Each file of gateway/stores is one, and is opened here by the file of its name."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from gateway import stores
from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim
from gateway.stores import ScopeKey, Store
from tests.timelines import TIMELINES, Step, steps, told

NAMES = sorted(module.name for module in iter_modules(stores.__path__))
PATIENCE = 60.0
"""Seconds that a claim waits where its timeline says that it gives up; others wait for ever."""

SCOPE = ScopeKey("run", "session", "me")


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> Any:
    return import_module(f"tests.stores.{request.param}")


def strict(raw: bytes) -> Ask:
    return Ask("arrival", raw, exclusive=True)


class Timeline:
    """Plays a timeline on a store. Its clock stands in for those that would wait too long for a test."""

    def __init__(self, kind: Any, store: Store, text: str) -> None:
        self.kind = kind
        self.store = store
        self.steps = steps(text)
        self.impatient = {step.who for step in self.steps if step.verb == "gives up"}
        self.tasks: dict[str, asyncio.Task[Claim]] = {}
        self.scopes: dict[str, ScopeKey] = {}
        self.ended: set[str] = set()
        loop = asyncio.get_running_loop()
        self.ahead = 0.0
        real = loop.time
        loop.time = lambda: real() + self.ahead  # type: ignore[method-assign]

    async def play(self) -> None:
        for step in self.steps:
            assert (step.line, await self.does(step)) == (step.line, step.outcome)
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def does(self, step: Step) -> str:
        match step.verb:
            case "asks":
                seconds = PATIENCE if step.who in self.impatient else 1000 * PATIENCE
                self.scopes[step.who] = step.scope
                self.tasks[step.who] = asyncio.create_task(self.store.claim(step.scope, step.ask, seconds))
                return await self.outcome(step)
            case "gives up":
                self.ahead += PATIENCE
                return await self.outcome(step)
            case "gets":
                return await self.outcome(step)
            case "waits on":
                await self.kind.quiet(self.store)
                assert not self.tasks[step.who].done()
                return ""
            case "leaves":
                self.tasks[step.who].cancel()
                await asyncio.wait({self.tasks[step.who]})
                return ""
            case "ends":
                return "raced" if await self.ends(step.who) else ""
        if step.who not in self.ended:
            await self.ends(step.who)
        index = self.tasks[step.who].result().index
        released = await self.store.settle(self.scopes[step.who], index, used=step.verb == "delivers")
        return "released" if released else ""

    async def outcome(self, step: Step) -> str:
        task = self.tasks[step.who]
        if step.outcome == "waits":
            await self.kind.quiet(self.store)
            if not task.done():
                return "waits"
        async with asyncio.timeout(10):
            try:
                return told(await task)
            except Conflict as conflict:
                return told(conflict)

    async def ends(self, who: str) -> bool:
        self.ended.add(who)
        index, scope = self.tasks[who].result().index, self.scopes[who]
        known = self.store.raced(scope, index)
        raced = await self.store.complete(scope, index)
        assert known == raced
        return raced


@pytest.mark.parametrize("name", TIMELINES)
async def test_timeline(kind: Any, name: str) -> None:
    async with kind.opened() as store:
        await Timeline(kind, store, TIMELINES[name]).play()
        assert kind.waiting(store) == 0


async def test_who_comes_in_the_moment_of_a_hand_over_does_not_overtake(kind: Any) -> None:
    async with kind.opened() as store:
        first = await store.claim(SCOPE, strict(b"first"), 60)
        waits = asyncio.create_task(store.claim(SCOPE, strict(b"waits"), 60))
        await kind.quiet(store)
        await store.complete(SCOPE, first.index)
        late = asyncio.create_task(store.claim(SCOPE, strict(b"late"), 60))
        assert (await waits).index == 1
        await kind.quiet(store)
        assert not late.done()
        await store.complete(SCOPE, 1)
        assert (await late).index == 2
        assert kind.waiting(store) == 0


async def test_who_leaves_in_the_moment_of_a_hand_over_holds_nothing(kind: Any) -> None:
    async with kind.opened() as store:
        first = await store.claim(SCOPE, strict(b"first"), 60)
        leaves = asyncio.create_task(store.claim(SCOPE, strict(b"leaves"), 60))
        behind = asyncio.create_task(store.claim(SCOPE, strict(b"behind"), 60))
        await kind.quiet(store)
        await store.complete(SCOPE, first.index)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        async with asyncio.timeout(10):
            claim = await behind
        await store.complete(SCOPE, claim.index)
        await store.settle(SCOPE, claim.index, used=True)
        again = await store.claim(SCOPE, strict(b"leaves"), 60)
        assert {claim.index, again.index} == {1, 2}
        assert kind.waiting(store) == 0


async def test_who_leaves_in_the_moment_of_a_refusal_is_gone(kind: Any) -> None:
    async with kind.opened() as store:
        await store.claim(SCOPE, strict(b"first"), 60)
        late = asyncio.create_task(store.claim(SCOPE, strict(b"late"), 0))
        await kind.quiet(store)
        late.cancel()
        await asyncio.wait({late})
        assert kind.waiting(store) == 0


async def test_no_time_to_wait_is_a_refusal_at_once(kind: Any) -> None:
    async with kind.opened() as store:
        await store.claim(SCOPE, strict(b"first"), 60)
        async with asyncio.timeout(10):
            with pytest.raises(Conflict) as refused:
                await store.claim(SCOPE, strict(b"second"), 0)
        assert refused.value.code == "racing_index"
        assert kind.waiting(store) == 0


async def test_claims_at_once_get_each_an_index(kind: Any) -> None:
    async with kind.opened() as store:
        different = [store.claim(SCOPE, Ask("arrival", b"%d" % number), 1) for number in range(100)]
        equal = [store.claim(SCOPE, Ask("arrival", b"x"), 1) for _ in range(100)]
        claims = await asyncio.gather(*different, *equal)
        assert sorted(claim.index for claim in claims) == list(range(200))


async def test_many_repeats_that_wait_for_many_get_each_its_own(kind: Any) -> None:
    async with kind.opened() as store:
        first = [await store.claim(SCOPE, Ask("arrival", b"x"), 60) for _ in range(50)]
        repeats = [asyncio.create_task(store.claim(SCOPE, Ask("arrival", b"x", repeat=1), 60)) for _ in range(50)]
        await kind.quiet(store)
        for claim in reversed(first):
            await store.complete(SCOPE, claim.index)
            await store.settle(SCOPE, claim.index, used=False)
        async with asyncio.timeout(10):
            taken = [(await repeat).index for repeat in repeats]
        assert taken == list(range(49, -1, -1))
        assert kind.waiting(store) == 0


async def test_runs_sessions_and_identities_have_counters_of_their_own(kind: Any) -> None:
    async with kind.opened() as store:
        for scope in (
            ScopeKey("run", "session", "me"),
            ScopeKey("other run", "session", "me"),
            ScopeKey("run", "other session", "me"),
            ScopeKey("run", "session", "somebody else"),
        ):
            assert await store.claim(scope, Ask("arrival", b"x", "x", key=None), 1) == Claim(0)


async def test_what_was_issued_is_known_for_good(kind: Any) -> None:
    async with kind.opened() as store:
        assert not await store.has_issued(SCOPE, 0)
        numbered = SCOPE._replace(identity="numbered")
        for scope, ask in ((SCOPE, Ask("arrival", b"x")), (numbered, Ask("client", b"x", "x", 7))):
            claim = await store.claim(scope, ask, 1)
            assert await store.has_issued(scope, claim.index)
            await store.complete(scope, claim.index)
            await store.settle(scope, claim.index, used=False)
        for number in range(12):
            await store.claim(SCOPE._replace(identity=f"{number}"), Ask("arrival", b"x"), 1)
        assert [await store.has_issued(SCOPE, index) for index in (0, 1)] == [True, False]
        assert [await store.has_issued(numbered, index) for index in (0, 6, 7, 8)] == [False, False, True, False]
        for other in (SCOPE._replace(session="other"), SCOPE._replace(run="other"), SCOPE._replace(identity="none")):
            assert not await store.has_issued(other, 0)


async def test_a_key_holds_in_one_session_of_one_run(kind: Any) -> None:
    async with kind.opened() as store:
        ask = Ask("arrival", b"x", "x", key="K")
        await store.claim(ScopeKey("run", "session", "me"), ask, 1)
        assert (await store.claim(ScopeKey("run 2", "session", "you"), ask, 1)).index == 0
        with pytest.raises(Conflict):
            await store.claim(ScopeKey("run", "session", "you"), ask, 1)


async def test_a_session_is_known_once_it_has_asked(kind: Any) -> None:
    async with kind.opened() as store:
        assert not store.knows("run", "session")
        await store.claim(SCOPE, strict(b"x"), 0)
        assert store.knows("run", "session")
        assert not store.knows("other", "session")
        assert not store.knows("run", "me")


async def test_the_next_number_is_told_unless_the_client_numbers(kind: Any) -> None:
    async with kind.opened() as store:
        assert store.next_index(SCOPE) == 0
        for index in range(2):
            await store.claim(SCOPE, Ask("arrival", b"%d" % index), 0)
        assert store.next_index(SCOPE) == 2
        await store.settle(SCOPE, 0, used=False)
        assert store.next_index(SCOPE) == 2
        numbered = SCOPE._replace(session="numbered")
        await store.claim(numbered, Ask("client", b"x", "c", 5), 0)
        assert store.next_index(numbered) is None
