"""What becomes of indices when the store forgets: in whole, in part, or perhaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.errors import Conflict, StoreFault
from gateway.core.indexing import Ask, Claim, Scope, Session
from gateway.shared import scripts
from gateway.shared.part import LostEnd, Memory
from gateway.stores import ScopeKey
from gateway.stores.redis import RedisStore
from gateway.tasks import start, stop
from tests.redis_server import Front, RedisServer
from tests.shared.test_scripts import EXAMPLES
from tests.stores.redis import store, terms
from tests.waiting import until

LEASE = 1.0
ME = ScopeKey("run", "session", "me")


def key(session: str) -> ScopeKey:
    return ScopeKey("run", session, "me")


def ask(raw: str, key: str | None = None, number: int | None = None, repeat: int = 0, *, strict: bool = False) -> Ask:
    kind = "arrival" if number is None else "client"
    return Ask(kind, raw.encode().ljust(16, b"."), raw, number, key, repeat, strict)  # type: ignore[arg-type]


async def served(kept: RedisStore, scope: ScopeKey, *asks: Ask, used: bool = True) -> list[Claim]:
    """Claims one after the other, each to its end."""
    claims = []
    for each in asks:
        claims.append(await kept.claim(scope, each, 0.2))
        await kept.complete(scope, claims[-1].index)
        await kept.settle(scope, claims[-1].index, used=used)
    return claims


async def numbered(kept: RedisStore, scope: ScopeKey, *asks: Ask) -> list[int]:
    return [claim.index for claim in await served(kept, scope, *asks)]


async def joined(kept: RedisStore, epoch: int | None = None) -> Memory:
    """Wait until it takes part, in this epoch."""
    part = kept._run("run").part
    await until(lambda: part.connection is not None and epoch in (None, part.memory.epoch))
    return part.memory


async def met(kept: RedisStore, others: int) -> None:
    """Wait until it has seen so many gateways, itself included."""
    await until(lambda: len(kept._run("run").part.peers) >= others)


def vanish(kept: RedisStore) -> None:
    """As when its process is killed: it says nothing any more."""
    run = kept._runs["run"]
    run._life.cancel()
    run.part.leave()
    run.part._refused = [b"gone"]  # its clients hear at once that it is


async def follow(replica: RedisServer, primary: RedisServer) -> None:
    """Make it a replica, and wait until it has all there is."""
    await replica.ask("REPLICAOF", "127.0.0.1", primary.port)
    for _ in range(2000):
        if await _told(replica, b"master_link_status") == b"up":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the replica does not follow")


class Pair:
    """A primary with a replica, and an address that leads to whichever serves."""

    def __init__(self) -> None:
        self.primary, self.replica = RedisServer(), RedisServer()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Front]:
        async with self.primary, self.replica:
            await self.primary.meet()
            await self.follow()
            async with Front(self.primary.port) as front:
                self.front = front
                yield front

    async def follow(self) -> None:
        """The replica follows, and has all there is."""
        await follow(self.replica, self.primary)

    async def part(self) -> None:
        """The replica gets nothing any more."""
        await self.replica.ask("REPLICAOF", "127.0.0.1", 1)

    async def fail_over(self) -> None:
        """The primary dies, the replica takes its place."""
        self.front.cut()
        self.primary.kill()
        await self.replica.ask("REPLICAOF", "NO", "ONE")
        self.front.lead(self.replica.port)

    async def caught_up(self) -> None:
        """The replica has all that the primary has."""
        for _ in range(2000):
            offset = await _told(self.primary, b"master_repl_offset")
            if await _told(self.replica, b"slave_repl_offset") == offset:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("the replica does not catch up")


async def _told(server: RedisServer, name: bytes) -> bytes:
    told: bytes = await server.ask("INFO", "replication")
    return told.partition(name + b":")[2].split()[0]


async def test_after_a_failover_that_lost_nothing_all_goes_on_in_a_new_epoch() -> None:
    pair = Pair()
    async with pair.up() as front:
        async with store(front.url, terms(lease=LEASE)) as one, store(front.url, terms(lease=LEASE)) as two:
            assert await numbered(one, ME, ask("a"), ask("b")) == [0, 1]
            assert await numbered(two, ME, ask("c")) == [2]
            await pair.caught_up()
            await pair.fail_over()
            claim = await two.claim(ME, ask("d", strict=True), 0)
            assert (claim.index, claim.flags, claim.epoch) == (3, (), 1)
            await joined(one, 1)
            assert await pair.replica.ask("SCARD", "detgate:{run}:missing") == 0


async def test_what_a_failover_lost_is_told_again() -> None:
    pair = Pair()
    async with pair.up() as front:
        async with store(front.url, terms(lease=LEASE)) as one, store(front.url, terms(lease=LEASE)) as two:
            assert await numbered(one, ME, ask("a")) == [0]
            await joined(two)
            await pair.caught_up()
            await pair.part()
            assert await numbered(one, ME, ask("b"), ask("c", "K")) == [1, 2]
            assert await numbered(two, ME, ask("d")) == [3]
            failed = await served(two, ME, ask("e"), used=False)
            live = await one.claim(ME, ask("f"), 0)
            assert (failed[0].index, live.index) == (4, 5)
            assert await numbered(one, key("n"), ask("x", number=7)) == [7]
            await pair.fail_over()
            assert (await two.claim(ME, ask("g"), 0)).flags == ("racing",)  # with what is in flight still
            assert await one.complete(ME, live.index)
            assert not await one.settle(ME, live.index, used=True)
            assert await numbered(one, ME, ask("c", "K"), ask("e"), ask("h")) == [2, 4, 7]
            with pytest.raises(Conflict) as refused:
                await two.claim(key("n"), ask("y", number=7), 0)
            assert refused.value.code == "index_conflict"
            assert (await joined(two)).epoch == 1


async def test_a_server_that_became_another_within_one_connection_is_found_out() -> None:
    async with RedisServer() as server, RedisServer() as stale:
        await server.meet()
        async with store(server.url, terms(lease=60.0, grace=0.02)) as one:
            assert await numbered(one, ME, ask("a")) == [0]
            await follow(stale, server)
            await stale.ask("REPLICAOF", "NO", "ONE")
            assert await numbered(one, ME, ask("b"), ask("c")) == [1, 2]
            assert one._run("run").part.memory.epoch == 0  # a first replica changes the server's id, and nothing else
            await follow(server, stale)
            await server.ask("REPLICAOF", "NO", "ONE")
            generation = one.link.generation
            claim = await one.claim(ME, ask("d"), 0)
            assert (claim.index, claim.epoch) == (3, 1)
            assert one.link.generation == generation


@pytest.mark.parametrize("how", ["flush", "restart", "forgotten run"])
async def test_what_a_store_forgot_in_whole_is_told_again(how: str) -> None:
    async with RedisServer() as server, Front(server.port) as front:
        async with store(front.url, terms(lease=LEASE)) as one, store(front.url, terms(lease=LEASE)) as two:
            assert await numbered(one, ME, ask("a"), ask("b")) == [0, 1]
            await served(two, ME, ask("c"), used=False)
            live = await two.claim(ME, ask("d"), 0)
            match how:
                case "flush":
                    await server.ask("FLUSHALL")
                case "restart":
                    server.kill()
                    await server.start()
                case _:
                    await server.ask("DEL", "detgate:{run}:state")
            claim = await one.claim(ME, ask("e"), 0)
            assert (claim.index, claim.flags, claim.epoch) == (4, ("racing",), 1)
            assert await two.complete(ME, live.index)
            assert await two.settle(ME, live.index, used=False)
            await one.complete(ME, claim.index)
            assert await numbered(two, ME, ask("d"), ask("c"), ask("f")) == [3, 2, 5]
            assert await server.ask("SCARD", "detgate:{run}:missing") == 0


async def test_a_newcomer_does_not_take_a_run_that_was_forgotten_for_a_new_one() -> None:
    async with RedisServer() as server:
        async with store(server.url, terms(lease=LEASE)) as one:
            assert await numbered(one, ME, ask("a"), ask("b")) == [0, 1]
            one.link._wire.drop("for the test")  # type: ignore[union-attr]
            await server.ask("FLUSHALL")
            async with store(server.url, terms(lease=LEASE)) as two:
                claim = await two.claim(ME, ask("c"), 0)
                assert (claim.index, claim.epoch) == (2, 1)


async def test_what_an_earlier_connection_sent_is_not_run_late() -> None:
    async with RedisServer() as server, Front(server.port) as front:
        await server.meet()
        async with store(front.url, terms("g", lease=LEASE)) as one:
            assert await numbered(one, ME, ask("a")) == [0]
            part = one._run("run").part
            earlier = part.connection
            front.cut()
            await until(lambda: part.connection not in (None, earlier))
            words = ("g", earlier or b"", 1000, b"s" * 16, b"t" * 16, "a", b"x" * 16, "", "", "", 0, 0, b"[]", 1000)
            assert await one.link.call(scripts.CLAIM, part.keys, words) == [b"away"]
            assert await one.link.call(scripts.BEAT, part.keys, ("g", earlier or b"", 1000)) == [b"away"]
            assert await numbered(one, ME, ask("b")) == [1]


async def test_after_a_flush_what_was_issued_is_known_once_it_was_told_again() -> None:
    async with RedisServer() as server, store(server.url, terms(lease=LEASE)) as one:
        await server.meet()
        assert await numbered(one, ME, ask("a")) == [0]
        numbers = ME._replace(identity="numbers")
        assert await numbered(one, numbers, ask("a", number=3)) == [3]
        await server.ask("FLUSHALL")
        assert [await one.has_issued(ME, index) for index in (0, 1)] == [True, False]
        assert [await one.has_issued(numbers, index) for index in (0, 3)] == [False, True]


@pytest.mark.parametrize("strict", [True, False])
async def test_only_sessions_of_a_gateway_that_is_gone_are_fenced(strict: bool) -> None:
    pair = Pair()
    async with pair.up() as front:
        async with store(front.url, terms(lease=LEASE), strict=strict, seconds=5) as here:
            async with store(front.url, terms("doomed", lease=LEASE), strict=strict) as doomed:
                assert await numbered(here, key("ours"), ask("a")) == [0]
                assert await numbered(doomed, key("theirs"), ask("a")) == [0]
                assert await numbered(here, key("both"), ask("a")) == [0]
                await joined(doomed)
                await pair.caught_up()
                await pair.part()
                assert await numbered(doomed, key("theirs"), ask("b")) == [1]
                assert await numbered(here, key("ours"), ask("b")) == [1]
                vanish(doomed)
            await pair.fail_over()
            assert await numbered(here, key("ours"), ask("c")) == [2]
            assert await numbered(here, key("both"), ask("b")) == [1]
            assert await numbered(here, key("new"), ask("b")) == [0]
            assert await pair.replica.ask("SMEMBERS", "detgate:{run}:missing") == [b"doomed"]
            # What a fenced session asked may have been forgotten, so nothing is said to be unknown there.
            assert [await here.has_issued(key(name), 5) for name in ("ours", "both", "theirs")] == [False, False, True]
            if strict:
                with pytest.raises(Conflict) as refused:
                    await here.claim(key("theirs"), ask("c"), 0)
                assert refused.value.code == "session_fenced"
            else:
                for _ in range(2):
                    claim = (await served(here, key("theirs"), ask("c")))[0]
                    assert (claim.flags, claim.epoch) == (("epoch",), 1)


async def test_a_gateway_that_dies_between_its_report_and_its_part_is_missed() -> None:
    """What it had in flight ends, and goes to who asks again."""
    async with RedisServer() as server, store(server.url, terms(lease=LEASE)) as two:
        await server.meet()
        async with store(server.url, terms(lease=LEASE)) as one:
            await joined(two)
            assert (await one.claim(ME, ask("a"), 0.2)).index == 0
            part = one._runs["run"].part
            vanish(one)
            await server.ask("FLUSHALL")
            telling = start(part._take(), "telling")
            awaited = scripts.prefix_of("run") + b"awaited"
            while not part._reported or await server.ask("SISMEMBER", awaited, one.terms.gateway):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await stop(telling)
            assert part.connection is None
            await joined(two, 1)
            again = await two.claim(ME, ask("a", repeat=1), 10.0)
            assert (again.index, again.reused, again.flags) == (0, True, ())


async def test_the_end_of_one_that_is_gone_is_told_until_it_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """To who noticed; and when that is gone too before it has said so, to the next."""
    async with (
        RedisServer() as server,
        store(server.url, terms(lease=LEASE)) as doomed,
        store(server.url, terms(lease=LEASE)) as one,
        store(server.url, terms(lease=LEASE)) as other,
    ):
        told: list[tuple[RedisStore, LostEnd]] = []
        written: set[RedisStore] = set()
        for kept in (one, other):
            await joined(kept)

            def lost(ends: Sequence[LostEnd], kept: RedisStore = kept) -> bool:
                told.extend((kept, end) for end in ends)
                return kept in written

            monkeypatch.setattr(kept._run("run"), "lost", lost)
        claim = await doomed.claim(ME, ask("x"), 0.2)
        vanish(doomed)
        await until(lambda: len(told) >= 3)
        [noticed], [end] = {kept for kept, _ in told}, {end for _, end in told}
        assert (end.gateway, end.place, end.used) == (doomed.gateway, claim.index, False)
        vanish(noticed)
        heir = other if noticed is one else one
        written.add(heir)
        await until(lambda: told[-1] == (heir, end))
        while await server.ask("EXISTS", "detgate:{run}:ends"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert [kept for kept, _ in told].count(heir) == 1


async def test_a_gateway_that_tells_late_is_heard_and_its_sessions_are_served_again() -> None:
    async with RedisServer() as server, Front(server.port) as front:
        await server.meet()
        async with store(server.url, terms(lease=LEASE), seconds=5) as one:
            async with store(front.url, terms(lease=LEASE), seconds=0.3) as late:
                assert await numbered(one, key("a"), ask("a")) == [0]
                assert await numbered(late, key("b"), ask("a"), ask("b")) == [0, 1]
                await met(one, 2)
                front.target = 1
                front.cut()
                await server.ask("FLUSHALL")
                with pytest.raises(Conflict):
                    await one.claim(key("b"), ask("c"), 0)
                front.target = server.port
                await joined(late, 1)
                claim = await one.claim(key("b"), ask("c"), 0)
                assert (claim.index, claim.flags, claim.epoch) == (2, (), 1)


async def test_what_is_told_too_late_of_an_index_that_went_to_another_binds_nobody_to_it() -> None:
    async with RedisServer() as server, Front(server.port) as front:
        await server.meet()
        async with (
            store(server.url, terms(lease=LEASE), seconds=5, strict=False) as one,
            store(front.url, terms(lease=LEASE), seconds=0.3, strict=False) as late,
        ):
            assert await numbered(one, key("a"), ask("a")) == [0]
            assert await numbered(late, key("b"), ask("x")) == [0]
            assert await numbered(late, key("b"), ask("y", "K")) == [1]
            await met(one, 2)
            front.target = 1
            front.cut()
            await server.ask("FLUSHALL")
            claims = await served(one, key("b"), ask("p"), ask("q"))
            assert [(claim.index, claim.flags) for claim in claims] == [(0, ("epoch",)), (1, ("epoch",))]
            front.target = server.port
            await joined(late, 1)
            again = await served(late, key("b"), ask("x", repeat=1), ask("y", "K"))
            assert [claim.index for claim in again] == [2, 3]
            assert "retry-unmatched" in again[0].flags


async def test_until_all_have_told_requests_wait_and_are_then_refused() -> None:
    async with RedisServer() as server, Front(server.port) as front:
        await server.meet()
        async with store(server.url, terms(lease=2.0, grace=0.02), seconds=0.3) as one:
            async with store(front.url, terms(lease=2.0, grace=0.02), seconds=0.3) as other:
                assert await numbered(one, ME, ask("a")) == [0]
                await joined(other)
                await met(one, 2)
                front.target = 1
                front.cut()
                await server.ask("FLUSHALL")
                one._run("run").part.leave()
                with pytest.raises(StoreFault):
                    await one.claim(ME, ask("b"), 0)
                assert "other gateways" in str(one.why_down("run"))
                front.target = server.port
                await joined(one, 1)
                assert await numbered(one, ME, ask("b")) == [1]


# --- any story, with a store that forgets all, or the last of it, in the middle


class Story:
    """One session served by two gateways, and by the rule, which never forgets."""

    def __init__(self, server: RedisServer, stores: tuple[RedisStore, RedisStore], run: str) -> None:
        self.server = server
        self.stores = stores
        self.scope = ScopeKey(run, "s", "me")
        self.rule = Scope("me", Session())
        self.live: list[tuple[RedisStore, int]] = []
        self.copy: dict[bytes, bytes] = {}

    async def claims(self, which: int, each: Ask) -> None:
        kept = self.stores[which]
        outcome = self.rule.claim(each, final=True)
        assert isinstance(outcome, Claim)
        claim = await kept.claim(self.scope, each, 0)
        assert claim.index == outcome.index
        self.live.append((kept, claim.index))

    async def ends(self, which: int, used: bool) -> None:
        if self.live:
            kept, index = self.live.pop(which % len(self.live))
            self.rule.complete(index)
            await kept.complete(self.scope, index)
            released = self.rule.settle(index, used=used)
            assert await kept.settle(self.scope, index, used=used) == released

    async def copied(self) -> None:
        """What the store knows now is what it may fall back to."""
        self.copy = {name: await self.server.ask("DUMP", name) for name in await self.keys()}

    async def keys(self) -> list[bytes]:
        names: list[bytes] = await self.server.ask("KEYS", f"detgate:{{{self.scope.run}}}:*")
        return names

    async def forgets(self, first: int) -> None:
        """The store falls back to its last copy, as another server would that takes its place.

        `first`: which gateway tells it first.
        """
        epoch = self.stores[0]._run(self.scope.run).part.memory.epoch
        await self.server.ask("DEL", *await self.keys())
        for name, value in self.copy.items():
            await self.server.ask("RESTORE", name, 0, value, "REPLACE")
        if self.copy:
            await self.server.ask(
                "HSET", f"detgate:{{{self.scope.run}}}:state", "@server", "another", "@process", "another"
            )
        order = (self.stores[first], self.stores[1 - first])
        for kept in order:
            kept._run(self.scope.run).part.leave()
            await kept.link.call(scripts.SETTLED, scripts.MEETING, ())
        for kept in self.stores:
            part = kept._run(self.scope.run).part
            await until(lambda part=part: part.connection is not None and part.memory.epoch > epoch)  # type: ignore[misc]


def content_of(words: str) -> Ask:
    """A request, with a key of its own content or without one."""
    content, _, key = words.partition(" ")
    return ask(content, key or None)


happenings = st.lists(
    st.one_of(
        st.tuples(
            st.just("claims"),
            st.integers(0, 1),
            st.builds(content_of, st.sampled_from(["x", "y", "z", "x K"])),
        ),
        st.tuples(st.just("ends"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("ends"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("forgets"), st.integers(0, 1)),
        st.tuples(st.just("copied")),
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=max(10, EXAMPLES // 10), deadline=None)
@given(happenings)
@example([("claims", 0, ask("x")), ("copied",), ("ends", 0, False), ("forgets", 0), ("claims", 0, ask("x"))])
@example([("claims", 0, ask("x")), ("copied",), ("ends", 0, True), ("forgets", 0), ("claims", 0, ask("x"))])
@example(
    [("claims", 1, ask("x")), ("ends", 0, False), ("claims", 0, ask("y")), ("forgets", 0), ("claims", 0, ask("x"))]
)
@example(
    [
        *(("claims", 0, ask("x", "K")), ("ends", 0, True), ("claims", 1, ask("x", "K"))),
        *(("forgets", 1), ("ends", 0, False)),
    ]
)
def test_whatever_a_store_forgets_it_is_told(story: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        async with RedisServer() as server:
            await server.meet()
            given = [terms(lease=5.0, grace=0.02), terms(lease=5.0, grace=0.02)]
            async with store(server.url, given[0]) as one, store(server.url, given[1]) as two:
                told = Story(server, (one, two), "run")
                for kept in (one, two):
                    await joined(kept)
                for verb, *words in story:
                    await getattr(told, str(verb))(*words)

    asyncio.run(play())


async def test_a_server_that_throws_away_what_was_released_has_forgotten_and_is_told_again() -> None:
    async with RedisServer() as server:
        one, two = (store(server.url, terms(lease=LEASE), strict=True) for _ in range(2))
        async with one as one_kept, two as two_kept:
            assert await numbered(one_kept, ME, ask("a")) == [0]
            assert [claim.index for claim in await served(one_kept, ME, ask("b"), used=False)] == [1]
            assert await numbered(two_kept, ME, ask("c")) == [2]
            flying = await two_kept.claim(ME, ask("e"), 0.2)
            await server.ask("DEL", "detgate:{run}:released")
            await two_kept.complete(ME, flying.index)
            await two_kept.settle(ME, flying.index, used=False)
            (again,) = await served(two_kept, ME, ask("b"))
            assert (again.index, again.epoch, again.flags) == (1, 1, ())
            assert await numbered(one_kept, ME, ask("e"), ask("d")) == [flying.index, 4]


async def test_gateways_notice_by_themselves_what_a_server_has_thrown_away() -> None:
    async with RedisServer() as server, store(server.url, terms(lease=LEASE)) as kept:
        assert [claim.index for claim in await served(kept, ME, ask("a"), used=False)] == [0]
        await server.ask("DEL", "detgate:{run}:released")
        await joined(kept, 1)
        assert await server.ask("ZCARD", "detgate:{run}:released") == 2
