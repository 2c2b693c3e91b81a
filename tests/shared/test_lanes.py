"""Lanes over several gateways, in a real server: the rule of `gateway.lanes`, leases, and what outlives a gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gateway.core.digits import natural
from gateway.core.errors import Busy, StoreFault
from gateway.core.ordering import sortable
from gateway.lanes import Lane, Place
from gateway.shared import lanes
from gateway.shared.lanes import Claim, Places
from gateway.shared.link import Link
from gateway.tasks import start, stop
from tests.redis_server import Front, RedisServer, linked
from tests.waiting import until

LEASE = 0.4


def claim(lane: str = "r", index: int = 0, replica: str = "r", name: str = "s") -> Claim:
    return Claim(lane, replica, sortable(0, index, natural(name), 0))


@asynccontextmanager
async def places(
    link: Link, limit: int = 1, queue: int = 100, seconds: float = 60.0, *, apart: bool = True, keep: bool = True
) -> AsyncIterator[Places]:
    """What one gateway has. `keep`: its lease is kept."""
    made = Places(link, "pool", limit, queue, seconds, apart=apart)
    keeping = start(made.run(), "lease") if keep else None
    try:
        yield made
    finally:
        if keeping is not None:
            await stop(keeping)
        await made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is looked after at once."""
    monkeypatch.setattr(lanes, "LOOK_SECONDS", 0.02)


@pytest.mark.parametrize("seed", range(12))
async def test_two_gateways_go_by_the_rule_of_one_process(seed: int) -> None:
    """The same joins and leaves, in a lane of this process and over two gateways: the same go in, in the same order."""
    chance = random.Random(seed)
    limit, queue = chance.choice([(1, 3), (2, 4), (3, 100)])
    alone = Lane("r", limit, queue)
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, limit, queue, keep=False) as here, places(two, limit, queue, keep=False) as there:
            both: list[tuple[Place, Claim, Places]] = []
            for number in range(60):
                if both and chance.random() < 0.45:
                    place, asked, home = both.pop(chance.randrange(len(both)))
                    alone.leave(place)
                    home.leave(asked)
                    await home.tally("r", "r")
                else:
                    home = chance.choice([here, there])
                    rank = chance.randrange(3), chance.randrange(12), natural(f"s{chance.randrange(12)}"), number
                    asked = Claim("r", "r", sortable(*rank))
                    full = alone.running == limit and alone.waiting == queue
                    if full:
                        with pytest.raises(Busy) as busy:
                            alone.join(rank)
                        with pytest.raises(Busy) as refused:
                            await home.join([asked])
                        assert (refused.value.code, refused.value.message) == (busy.value.code, busy.value.message)
                        continue
                    place = alone.join(rank)
                    await home.join([asked])
                    both.append((place, asked, home))
                await until(
                    lambda: [place.taken for place, *_ in both] == [asked.state == "in" for _, asked, _ in both]
                )


async def test_places_of_one_request_are_taken_all_or_none() -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link, 1, 2, keep=False) as home:
        first = [claim("a"), claim("a", 1), claim("a", 2), claim("b")]
        await home.join(first)
        with pytest.raises(Busy, match="2 requests wait in lane a"):
            await home.join([claim("c"), claim("a", 3)])
        other = claim("c")
        await home.join([other])
        assert other.state == "in"
        home.leave(first[2])
        many = [claim("a", index) for index in range(3, 8)]
        await home.join(many)
        assert {each.state for each in many} == {"waiting"}, "taken whole, however many they are"


async def test_what_a_silent_gateway_had_is_taken_over_and_it_can_neither_use_nor_free_it_any_more(quick: None) -> None:
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, seconds=LEASE, keep=False) as silent, places(two, seconds=LEASE) as heir:
            inherited: list[Claim] = []
            heir.inherit = inherited.append
            held, behind, waiting = claim(), claim(index=1), claim(index=2)
            await silent.turn(held)
            await silent.join([behind])
            turn = start(heir.turn(waiting), "turn")
            await until(lambda: bool(inherited))
            # Taken over, and held: the engine may still work on it. Who waited in the silent gateway waits no more.
            assert (inherited[0].lane, inherited[0].replica, inherited[0].leaving) == ("r", "r", True)
            assert not turn.done()
            silent.leave(held)
            await one.call(lanes.SCRIPT, ("detgate:{lanes:pool}:",), silent._args("tally", "r", "r"))
            assert not turn.done()
            heir.leave(inherited[0])
            async with asyncio.timeout(5):
                await turn
            # It comes back: what waited asks anew, by another name, and comes after who is in.
            late, name = start(silent.turn(behind), "late"), behind.id
            keeping = start(silent.run(), "lease")
            await until(lambda: behind.state == "waiting" and behind.id != name)
            assert not late.done()
            heir.leave(waiting)
            async with asyncio.timeout(5):
                await late
            await stop(keeping)


async def test_a_place_that_came_too_late_is_not_used(quick: None) -> None:
    """Its turn had come, but the process stood still until the lease had run out: another has the place by now."""
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, seconds=LEASE, keep=False) as silent, places(two, seconds=LEASE) as heir:
            heir.inherit = heir.leave
            mine = claim()
            await silent.join([mine])
            assert mine.state == "in"
            theirs = claim(index=1)
            async with asyncio.timeout(5):
                await heir.turn(theirs)
            late = start(silent.turn(mine), "late")
            await until(lambda: mine.state == "waiting")
            assert not late.done()
            heir.leave(theirs)
            async with asyncio.timeout(5):
                await late
            assert mine.state == "in"


async def test_a_lease_that_nobody_ended_goes_on() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        async with places(link, seconds=0.1, keep=False) as home:
            mine = claim()
            await home.join([mine])
            name = mine.id
            await asyncio.sleep(0.15)
            await home.turn(mine)
            assert (mine.id, mine.state) == (name, "in")


async def test_a_store_that_forgot_lets_nobody_in_until_it_was_told_again(quick: None) -> None:
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, seconds=LEASE) as here, places(two, seconds=LEASE) as there:
            mine, theirs = claim(), claim(index=1)
            await here.turn(mine)
            await there.join([claim("other")])
            await server.ask("FLUSHALL")
            turn = start(there.turn(theirs), "turn")
            # Long after the store has heard again of the place that is held, nobody has got in beside it.
            await asyncio.sleep(3 * LEASE)
            assert not turn.done()
            assert (await there.tally("r", "r")).open == 1
            here.leave(mine)
            async with asyncio.timeout(5):
                await turn


async def test_another_server_is_told_what_there_is_and_waits_before_it_lets_in(quick: None) -> None:
    async with RedisServer() as server, RedisServer() as other, Front(server.port) as front:
        async with linked(front.url) as one, linked(front.url) as two:
            async with places(one, seconds=LEASE) as here, places(two, seconds=LEASE) as there:
                mine, theirs = claim(), claim(index=1)
                await here.turn(mine)
                await there.join([claim("other")])
                # A copy that lags: it knows the gateways and not the place.
                about = await server.ask("GET", "detgate:{lanes:pool}:about")
                await other.ask("SET", "detgate:{lanes:pool}:about", about)
                front.lead(other.port)
                await until(lambda: two.generation == 2 and two.why_down is None)
                turn = start(there.turn(theirs), "turn")
                await asyncio.sleep(3 * LEASE)
                assert not turn.done()
                here.leave(mine)
                async with asyncio.timeout(5):
                    await turn


async def test_a_first_replica_holds_nobody_up(quick: None) -> None:
    async with RedisServer() as server, RedisServer() as replica, Front(server.port) as front:
        async with linked(front.url) as link, places(link) as home:
            mine = claim()
            await home.turn(mine)
            await replica.ask("REPLICAOF", "127.0.0.1", server.port)
            while b"state=online" not in await server.ask("INFO", "replication"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            front.lead(server.port)
            await until(lambda: link.generation == 2 and link.why_down is None)
            home.leave(mine)
            async with asyncio.timeout(5):
                await home.turn(claim(index=1))
            assert await server.ask("EXISTS", "detgate:{lanes:pool}:quiet") == 0


async def test_a_look_that_failed_is_made_again(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link) as kept:
        failed = asyncio.Event()

        async def fails() -> None:
            failed.set()
            raise OverflowError

        monkeypatch.setattr(kept, "_look", fails)
        await failed.wait()
        monkeypatch.undo()
        looked = asyncio.Event()

        async def looks() -> None:
            looked.set()

        monkeypatch.setattr(kept, "_look", looks)
        await looked.wait()


async def test_a_lost_message_costs_time_alone(quick: None) -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link) as home:
        link.unsubscribe(home._channel, home._hear)
        first, second = claim(), claim(index=1)
        await home.turn(first)
        turn = start(home.turn(second), "turn")
        await until(lambda: second.state == "waiting")
        home.leave(first)
        async with asyncio.timeout(5):
            await turn
        link.subscribe(home._channel, home._hear)


async def test_who_waits_while_the_store_is_away_is_refused_in_bounded_time(quick: None) -> None:
    async with RedisServer() as server, linked(server.url, 0.2) as link, places(link) as home:
        first, second = claim(), claim(index=1)
        await home.turn(first)
        turn = start(home.turn(second), "turn")
        await until(lambda: second.state == "waiting")
        server.freeze()
        async with asyncio.timeout(5):
            with pytest.raises(StoreFault):
                await turn
            with pytest.raises(StoreFault):
                await home.join([claim(index=2)])
        home.leave(first)
        home.leave(second)
        server.thaw()
        # What was left while nobody listened is no more: nobody else, and no clock, has to free it.
        third = claim(index=3)
        async with asyncio.timeout(5):
            while third.state != "in":
                third = claim(index=3)
                with suppress(StoreFault):
                    await home.turn(third)
        assert (await home.tally("r", "r")).open == 1


async def test_a_join_that_is_run_late_takes_no_place() -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link, keep=False) as home:
        await home.join([claim("other")])
        late: Any = home._args("join", 100, "r", b"", "r", f"{home._token}:99")
        late = (*late[:2], 0, *late[3:])
        assert await link.call(lanes.SCRIPT, ("detgate:{lanes:pool}:",), late) == [b"unknown"]
        first = claim()
        await home.join([first])
        assert first.state == "in"


async def test_what_a_gateway_told_by_an_earlier_connection_and_is_run_late_frees_no_place() -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link, keep=False) as home:
        await home.turn(claim())
        told = home._args("enrol", 1, 0)
        link.generation += 1
        await home._renew()
        taken = claim("other")
        await home.turn(taken)
        assert await link.call(lanes.SCRIPT, (home._root,), told) == [b"late"]
        assert await home.inside(claim()) == 1
        assert (await home.tally("other", "r")).open == 1


async def test_who_is_cancelled_while_it_asks_leaves_nothing_behind() -> None:
    async with RedisServer() as server, linked(server.url) as link, places(link, keep=False) as home:
        await home.join([claim("other")])
        for _ in range(50):
            asking = start(home.turn(claim()), "turn")
            await asyncio.sleep(0)
            await stop(asking)
        first = claim()
        await home.join([first])
        assert first.state == "in"
        assert (await home.tally("r", "r")).open == 1


async def test_all_that_was_done_with_a_replica_is_counted() -> None:
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, 3, keep=False) as here, places(two, 3, keep=False) as there:
            mine, ours, theirs = claim(), claim(), claim()
            await here.join([mine, ours])
            await there.join([theirs])
            here.leaving(ours)
            assert await here.tally("r", "r") == (3, 0, 2, 1)
            assert await here.inside(mine) == 1
            here.leave(ours)
            here.leave(mine)
            assert await here.tally("r", "r") == (3, 1, 1, 0)


async def test_whose_lease_has_run_out_is_passed_over_before_anyone_has_noticed() -> None:
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with places(one, seconds=LEASE, keep=False) as silent, places(two, keep=False) as other:
            mine, dead, next_one = claim(), claim(index=1), claim(index=2)
            await other.join([mine])
            await silent.join([dead])
            await other.join([next_one])
            await asyncio.sleep(2 * LEASE)
            other.leave(mine)
            async with asyncio.timeout(5):
                await other.turn(next_one)


async def test_where_places_are_not_held_for_an_engine_they_are_free_when_a_lease_ends(quick: None) -> None:
    async with RedisServer() as server, linked(server.url) as one, linked(server.url) as two:
        async with (
            places(one, seconds=LEASE, apart=False, keep=False) as silent,
            places(two, seconds=LEASE, apart=False) as heir,
        ):
            await silent.join([claim()])
            async with asyncio.timeout(5):
                await heir.turn(claim(index=1))
