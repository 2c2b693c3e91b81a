"""What leaves memory comes back as it was, and what stays in memory is bounded."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim, Scope, Session, Wait
from gateway.ledger.writer import Ledger
from gateway.shelf import Shelf
from gateway.stores import ScopeKey, memory
from gateway.stores.memory import MemoryStore
from gateway.tasks import stop

RUN = "r"


@pytest.fixture
def scarce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """A store that can hold next to nothing."""
    monkeypatch.setattr(memory, "ENTRIES", 2)
    store = MemoryStore(scopes=1)
    store.restore(RUN, tmp_path, [])
    yield store
    store.close(RUN)


def scope(session: str, identity: str | None = None) -> ScopeKey:
    return ScopeKey(RUN, session, identity or session)


def plain(body: str, **more: Any) -> Ask:
    return Ask("arrival", body.encode(), **more)


async def served(store: MemoryStore, key: ScopeKey, ask: Ask, *, used: bool = True) -> Claim:
    claim = await store.claim(key, ask, 0.0)
    await store.complete(key, claim.index)
    await store.settle(key, claim.index, used=used)
    return claim


class Rule:
    """The rule by itself: scopes that nobody packs. Its waits are over at once."""

    def __init__(self) -> None:
        self._scopes: dict[ScopeKey, Scope] = {}
        self._sessions: dict[str, Session] = {}

    def _scope(self, key: ScopeKey) -> Scope:
        session = self._sessions.setdefault(key.session, Session())
        return self._scopes.setdefault(key, Scope(key.identity, session))

    async def claim(self, key: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        outcome = self._scope(key).claim(ask)
        if isinstance(outcome, Wait):
            outcome = self._scope(key).claim(ask, raced=outcome.why == "racing", final=True)
        assert isinstance(outcome, Claim)
        return outcome

    async def complete(self, key: ScopeKey, index: int) -> bool:
        return self._scope(key).complete(index)

    async def settle(self, key: ScopeKey, index: int, *, used: bool) -> bool:
        return self._scope(key).settle(index, used=used)


@pytest.mark.parametrize("seed", range(6))
async def test_a_store_without_memory_answers_as_one_with_plenty_and_as_the_rule(
    scarce: MemoryStore, seed: int
) -> None:
    plenty, draw = MemoryStore(), random.Random(seed)
    few = seed < 3
    """Scopes, each of which is asked often; else many, of most of which there is one request or two."""
    stores = (plenty, scarce, Rule())
    live: list[tuple[ScopeKey, int]] = []
    seen = set[str]()
    for _ in range(700):
        if live and draw.random() < 0.6:
            key, index = live.pop(draw.randrange(len(live)))
            used = draw.random() < 0.6
            raced = {await store.complete(key, index) for store in stores}
            released = {await store.settle(key, index, used=used) for store in stores}
            assert len(raced) == len(released) == 1
            continue
        session = f"s{draw.randrange(6)}"
        key = scope(session, f"{session}/{draw.randrange(3 if few else 40)}")
        body = draw.randrange(9 if few else 2)
        ask = Ask(
            "client" if session == "s0" else "arrival",
            bytes([body]),
            f"content {body % 4}",
            draw.randrange(12) if session == "s0" else None,
            f"key {draw.randrange(9)}" if draw.random() < 0.3 else None,
            draw.choice((0, 0, 1, 2)),
        )
        outcomes = [await _told(store, key, ask) for store in stores]
        assert outcomes[0] == outcomes[1] == outcomes[2]
        seen |= {outcomes[0]} if isinstance(outcomes[0], str) else {*outcomes[0].flags, f"reused {outcomes[0].reused}"}
        assert plenty.next_index(key) == scarce.next_index(key)
        if isinstance(outcomes[0], Claim):
            live.append((key, outcomes[0].index))
    assert all(store.knows(RUN, f"s{n}") for n in range(6) for store in (plenty, scarce))
    assert not any(store.knows(RUN, "s") for store in (plenty, scarce))
    assert not few or seen >= {
        "racing",
        "retry-shared",
        "retry-unmatched",
        "reused True",
        "index_conflict",
        "idempotency_conflict",
    }


async def _told(store: MemoryStore | Rule, key: ScopeKey, ask: Ask) -> Claim | str:
    try:
        return await store.claim(key, ask, 0.0)
    except Conflict as conflict:
        return conflict.code


async def test_scopes_that_are_not_used_leave_memory_and_their_sessions_are_known(tmp_path: Path) -> None:
    store = MemoryStore(scopes=64)
    store.restore(RUN, tmp_path, [])
    for number in range(2000):
        await served(store, scope(f"s{number}"), plain("a", key="k", content="c"))
        await served(store, scope("anonymous", f"anonymous/{number}"), Ask("content", b"a"))
    assert store.scopes <= 64 + memory.BATCH
    assert len(store._sessions) <= store.scopes
    assert store.knows(RUN, "s0")
    assert not store.knows(RUN, "s")
    assert store.next_index(scope("s7")) == 1
    assert (await served(store, scope("s7"), plain("b"))).index == 1
    assert (await served(store, scope("s8"), plain("a", key="k", content="c"))).index == 0
    assert (await served(store, scope("anonymous", "anonymous/7"), Ask("content", b"a"))).index == 1
    store.close(RUN)
    assert os.listdir(tmp_path) == []


async def test_the_file_has_a_row_for_each_scope_however_often_it_leaves(tmp_path: Path) -> None:
    store = MemoryStore(scopes=8)
    store.restore(RUN, tmp_path, [])
    for turn in range(5):
        for number in range(50):
            await served(store, scope("s", f"s/{number}"), plain(f"turn {turn}"))
            await served(store, scope(f"t{number}"), plain(f"turn {turn}"))
    database = store._shelves[RUN]._database
    assert database is not None
    rows = database.execute("SELECT count(*), count(DISTINCT key) FROM row").fetchone()
    assert rows == (101, 101)  # one of them says that there is a session "s"
    assert store.knows(RUN, "s")
    store.close(RUN)


async def test_a_scope_of_one_request_that_is_over_takes_little_memory(tmp_path: Path) -> None:
    store = MemoryStore()
    store.restore(RUN, tmp_path, [])
    await served(store, scope("one"), plain("a"))
    await served(store, scope("two"), plain("a"))
    await served(store, scope("two"), plain("b"))
    await served(store, scope("released"), plain("a"), used=False)
    await store.claim(scope("in flight"), plain("a"), 0.0)
    await served(store, scope("looked at"), plain("a"))
    assert store.next_index(scope("looked at")) == 1
    assert await store.has_issued(scope("looked at"), 0)
    packed = {key.session for key, kept in store._scopes.items() if isinstance(kept, bytes)}
    assert packed == {"one", "looked at"}
    store.close(RUN)


async def test_the_one_used_last_leaves_last(tmp_path: Path) -> None:
    store = MemoryStore(scopes=16)
    store.restore(RUN, tmp_path, [])
    for number in range(200):
        await served(store, scope("kept"), plain(str(number)))
        await served(store, scope(f"s{number}"), plain("a"))
    assert scope("kept") in store._scopes
    assert scope("s0") not in store._scopes
    store.close(RUN)


async def test_what_is_in_flight_or_waited_for_stays(scarce: MemoryStore) -> None:
    held = await scarce.claim(scope("held"), plain("a"), 0.0)
    waiting = asyncio.create_task(scarce.claim(scope("held"), Ask("arrival", b"b", exclusive=True), 60.0))
    for number in range(50):
        await served(scarce, scope(f"s{number}"), plain("a"))
    await scarce.complete(scope("held"), held.index)
    assert (await waiting).index == 1


async def test_a_long_session_keeps_a_part_of_what_it_was_asked_in_memory(tmp_path: Path) -> None:
    store = MemoryStore()
    store.restore(RUN, tmp_path, [])
    for number in range(1000):
        claim = await served(store, scope("s"), plain(str(number), key=f"k{number}", content="c"), used=number != 5)
        assert claim.index == number
        await served(store, scope("t"), plain(str(number)), used=number != 5)
    for name in ("s", "t"):
        kept = store._claimed(scope(name))
        assert len(kept.asked) + len(kept.bound) + len(kept.session.keys) <= 3 * memory.ENTRIES
    assert (await served(store, scope("s"), plain("7", key="k7", content="c"))).index == 7
    with pytest.raises(Conflict, match="other content"):
        await store.claim(scope("s"), plain("8", key="k8", content="other"), 0.0)
    assert (await served(store, scope("t"), plain("5"))).index == 5
    assert (await served(store, scope("t"), plain("5"))).index == 1000
    assert (await served(store, scope("t"), plain("9", repeat=1))) == Claim(9, ("retry-shared",), reused=True)
    store.close(RUN)


def weight(kept: Scope | bytes) -> int:
    """A scope's, as it is counted. Bytes are of one that remembers one request."""
    return memory.WEIGHT + (1 if isinstance(kept, bytes) else len(kept.asked))


async def test_what_scopes_remember_counts_for_the_memory_that_they_may_take(tmp_path: Path) -> None:
    store = MemoryStore(scopes=64)
    store.restore(RUN, tmp_path, [])
    most = (64 + 9) * (memory.WEIGHT + 1)  # they leave nine at a time
    for turn in range(40):
        for number in range(60):
            await served(store, scope(f"s{number}"), plain(f"turn {turn}"))
            taken = sum(map(weight, store._scopes.values()))
            assert taken == store._weight <= most
    assert 3 < store.scopes < 15
    assert (await served(store, scope("s0"), plain("turn 3", repeat=1))) == Claim(3, ("retry-shared",), reused=True)
    assert (await served(store, scope("s0"), plain("new"))).index == 40
    store.close(RUN)


async def test_where_the_file_cannot_grow_scopes_stay_in_memory_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(scopes=1)
    store.restore(RUN, tmp_path / "no such folder", [])
    for number in range(20):
        await served(store, scope(f"s{number}"), plain("a"))
    assert store.scopes == 20
    assert (await served(store, scope("s0"), plain("b"))).index == 1


def opened(index: int, body: str, *flags: str) -> dict[str, Any]:
    names = {"session": "s", "identity": "s", "index": index, "order": "arrival", "digest": body.encode().hex()}
    return {"event": "opened", "run": RUN, **names, "content": None, "key": None, "repeat": 0, "flags": list(flags)}


def over(event: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"event": event, "run": RUN, "session": "s", "identity": "s", "index": index, **fields}


async def test_what_was_complete_or_taken_again_when_others_raced_has_not_raced(tmp_path: Path) -> None:
    store, key = MemoryStore(), scope("s")
    records = [
        opened(0, "complete"),
        over("complete", 0),
        opened(1, "released"),
        over("closed", 1, used=False),
        opened(1, "released"),
        opened(2, "c"),
        opened(3, "d", "racing"),
        *(over("closed", index, used=False) for index in range(4)),
    ]
    assert store.restore(RUN, tmp_path, records) == []
    flags = {body: (await served(store, key, plain(body))).flags for body in ("complete", "released", "c", "d")}
    assert flags == {"complete": (), "released": (), "c": ("racing",), "d": ("racing",)}


@pytest.mark.parametrize("used", [True, False])
def test_of_two_claims_of_an_index_the_one_that_is_over_was_complete_if_it_was_used(tmp_path: Path, used: bool) -> None:
    records = [opened(0, "a"), opened(0, "a"), over("complete", 0), over("closed", 0, used=used)]
    [lost] = MemoryStore().restore(RUN, tmp_path, records)
    assert (lost["error"], lost["used"]) == ("gateway-lost", not used)


async def test_where_the_ledger_has_a_gap_nothing_is_said_to_be_unknown(tmp_path: Path) -> None:
    store = MemoryStore()
    store.restore(RUN, tmp_path, [])
    assert not await store.has_issued(scope("s"), 0)
    store.fence(RUN)
    assert await store.has_issued(scope("s"), 0)


def test_a_shelf_that_nothing_was_put_on_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"left by a process that was killed")
    shelf = Shelf(tmp_path / "state.db")
    assert shelf.empty
    assert shelf.get(b"a") is None
    assert os.listdir(tmp_path) == []
    shelf.put([(b"ab", b"1")])
    assert (shelf.get(b"ab"), shelf.get(b"a")) == (b"1", None)
    shelf.drop(b"ab")
    assert shelf.get(b"ab") is None
    shelf.close()


class Told:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def closed(self, record: dict[str, Any]) -> None:
        self.records.append(record)


async def strict_story(seed: int, folder: Path) -> tuple[list[Claim], list[Claim]]:
    """What retries come to, with and without a restart, after some requests of which several waited for a rival."""
    draw, told, store, key = random.Random(seed), Told(), MemoryStore(), scope("s")
    store.restore(RUN, folder, [])
    store.serve(RUN, folder, cast(Ledger, told))
    live: list[int] = []
    asks: list[tuple[Ask, asyncio.Task[Claim]]] = []
    latest = dict.fromkeys("xyz", -1)

    async def end(index: int, *, used: bool) -> None:
        raced = await store.complete(key, index)
        told.records.append(over("closed", index, used=used) | {"racing": raced})
        await store.settle(key, index, used=used)

    for _ in range(draw.randrange(3, 14)):
        chance = draw.random()
        if chance < 0.5:
            body = draw.choice("xyz")
            repeat = 0 if draw.random() < 0.6 else latest[body] + 1
            latest[body] = max(latest[body], repeat)
            ask = plain(body, repeat=repeat, exclusive=True)
            asks.append((ask, asyncio.create_task(store.claim(key, ask, 1000.0))))
        elif chance < 0.7 and asks:
            asks[draw.randrange(len(asks))][1].cancel()
        elif live:
            await end(live.pop(draw.randrange(len(live))), used=draw.random() < 0.6)
        for _ in range(3):
            await asyncio.sleep(0)
        for ask, claim in [each for each in asks if each[1].done()]:
            asks.remove((ask, claim))
            if not claim.cancelled():
                live.append(claim.result().index)
                told.records.append(opened(live[-1], ask.raw.decode(), *claim.result().flags) | {"repeat": ask.repeat})
    await stop(*(claim for _, claim in asks))
    for index in live:
        await end(index, used=True)
    again = MemoryStore()
    again.restore(RUN, folder / "again", told.records)
    retries = [plain(body, repeat=99, exclusive=True) for body in "xyz"]
    before = [await served(store, key, retry) for retry in retries]
    return before, [await served(again, key, retry) for retry in retries]


async def test_after_a_restart_no_retry_of_who_waited_in_vain_is_taken_for_another_request(tmp_path: Path) -> None:
    """At most a retry is told that it could be of several: where two of one request had waited at once."""
    same = 0
    for seed in range(800):
        before, after = await strict_story(seed, tmp_path)
        same += before == after
        for one, other in zip(before, after, strict=True):
            assert "retry-unmatched" not in one.flags or "retry-shared" not in other.flags, seed
    assert same > 790


async def hurried_story(seed: int, folder: Path, *, exclusive: bool) -> tuple[Scope, Scope]:
    """A counter, and the same after a restart, where many leave or come in the very moment of a hand-over."""
    draw, told, store, key = random.Random(seed), Told(), MemoryStore(), scope("s")
    store.restore(RUN, folder, [])
    store.serve(RUN, folder, cast(Ledger, told))
    live: list[int] = []
    waiting: list[asyncio.Task[None]] = []

    async def claims(body: str, repeat: int) -> None:
        ask = plain(body, repeat=repeat, exclusive=exclusive)
        claim = await store.claim(key, ask, 1000.0 if exclusive else draw.choice([0.0, 1000.0]))
        live.append(claim.index)
        told.records.append(opened(claim.index, body, *claim.flags) | {"repeat": repeat})

    async def end(index: int, *, used: bool) -> None:
        raced = await store.complete(key, index)
        told.records.append(over("closed", index, used=used) | {"racing": raced})
        await store.settle(key, index, used=used)

    for _ in range(draw.randrange(4, 16)):
        chance = draw.random()
        if chance < 0.5:
            waiting.append(asyncio.create_task(claims(draw.choice("xy"), draw.choice([0, 0, 1, 2]))))
        elif live:
            await end(live.pop(draw.randrange(len(live))), used=draw.random() < 0.4)
            if draw.random() < 0.5:
                waiting.append(asyncio.create_task(claims("x", 0)))
            for each in waiting:
                if draw.random() < 0.4:
                    each.cancel()
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(0)
    await stop(*waiting)
    while live:
        await end(live.pop(), used=draw.random() < 0.5)
    again = MemoryStore()
    again.restore(RUN, folder / "again", told.records)
    return store._scope(key), again._scope(key)


@pytest.mark.parametrize("exclusive", [True, False])
async def test_who_leaves_in_the_moment_of_a_hand_over_leaves_the_same_counter_after_a_restart(
    tmp_path: Path, exclusive: bool
) -> None:
    for seed in range(800):
        before, after = await hurried_story(seed, tmp_path, exclusive=exclusive)
        assert (after.next, dict(after.released), set(after.raced)) == (
            before.next,
            dict(before.released),
            set(before.raced),
        ), seed
