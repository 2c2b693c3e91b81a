"""The changes of one run on a real store: one order, whatever was not heard, was forgotten or comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.shared.part import Terms
from gateway.shared.series import Made, Said, Series, Wanted
from gateway.tasks import stop
from tests.redis_server import Front, RedisServer
from tests.stores.redis import store, terms
from tests.waiting import until

LEASE = 1.0


class Witness:
    """Notes what it makes."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self.has: dict[str, int] = {}

    def make(self, made: Made) -> None:
        self.made.append((made.what, made.name or made.pool))

    def inside(self) -> dict[str, int]:
        return self.has


@asynccontextmanager
async def following(url: str, *known: Made, given: Terms | None = None) -> AsyncIterator[tuple[Series, Witness]]:
    """A gateway that follows the changes, and takes part. `known`: what it knows from elsewhere."""
    given = given or terms(lease=LEASE)
    async with store(url, given) as kept:
        kept.serve("run")
        witness = Witness()
        series = Series(kept.link, kept.part("run"), given.gateway, LEASE, 0.5, witness)
        for made in known:
            series.remember(made)
        assert series.unsure
        await until(lambda: not series.unsure)
        try:
            yield series, witness
        finally:
            await series.close()


def wanted(what: str, name: str = "", after: int | None = None) -> Wanted:
    return Wanted(what, "p", name, after, {"pool": "p", "name": name})


def made(number: int, what: str, name: str = "") -> Made:
    line = b'%d 1000 %b {"pool":"p","name":"%b"}' % (number, what.encode(), name.encode())
    return Made(number, 1.0, what, "p", name, line)


async def test_all_make_the_same_in_the_same_order_before_who_asked_is_answered() -> None:
    async with RedisServer() as server, following(server.url) as (one, first), following(server.url) as (two, second):
        for number in range(6):
            await (one, two)[number % 2].make([wanted("weights", str(number)), wanted("add", f"r{number}")])
            assert first.made == second.made
            assert one.number == two.number == 2 * (number + 1)
        assert first.made[:2] == [("weights", "0"), ("add", "r0")]
        # Whoever comes later makes what stands, not what was done.
        async with following(server.url) as (_, third):
            assert third.made == [*((("add", f"r{number}")) for number in range(5)), ("weights", "5"), ("add", "r5")]


async def test_a_message_that_is_lost_is_noticed_at_the_next_beat_and_nobody_is_sure_until_then() -> None:
    async with RedisServer() as server, following(server.url) as (one, _), following(server.url) as (two, second):
        two._link.unsubscribe(two._channel, two._hear)
        await one.make([wanted("pause")])
        assert (second.made, two.unsure) == ([("pause", "p")], False)
        two.newest(7)
        assert two.unsure
        await until(lambda: not two.unsure)
        two._link.subscribe(two._channel, two._hear)


async def test_a_step_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RedisServer() as server, following(server.url) as (one, _), following(server.url) as (two, second):
        failed = asyncio.Event()

        async def fails(connection: bytes) -> None:
            failed.set()
            raise OverflowError

        monkeypatch.setattr(two, "_step", fails)
        two.newest(7)
        await failed.wait()
        monkeypatch.undo()
        await one.make([wanted("pause")])
        assert second.made == [("pause", "p")]


async def test_who_missed_more_than_is_kept_makes_what_stands() -> None:
    async with RedisServer() as server, Front(server.port) as front, following(server.url) as (one, _):
        async with following(front.url) as (two, second):
            await one.make([wanted("pause"), wanted("add", "a")])
            front.lead(1)
            await until(lambda: two._link.why_down is not None)
            assert not two.unsure
            await one.make([wanted("resume"), wanted("add", "b"), wanted("drain", "a"), wanted("remove", "a")])
            await server.ask("DEL", "detgate:{run}:changes:list")
            front.lead(server.port)
            await until(lambda: two.number == one.number)
            assert second.made == [("pause", "p"), ("add", "a"), ("resume", "p"), ("add", "b"), ("remove", "a")]
            await two.make([wanted("pause")])
            assert second.made[-1] == ("pause", "p")


async def test_who_may_be_taken_for_gone_is_not_sure_of_what_it_knows() -> None:
    async with RedisServer() as server, following(server.url) as (one, _):
        assert not one.unsure
        one._part._leased_until = 0.0
        assert one.unsure
        await until(lambda: not one.unsure)


async def test_what_comes_late_to_a_store_that_has_lost_it_counts_unless_later_changes_did() -> None:
    late = [made(3, "pause"), made(4, "remove", "x"), made(5, "weights", "old")]
    async with RedisServer() as server, following(server.url) as (one, first):
        await one.make([wanted("weights", "1"), *(wanted("add", f"r{n}") for n in range(8)), wanted("weights", "new")])
        async with following(server.url, *late) as (two, second):
            await until(lambda: one.number == two.number == 11)
            assert ("weights", "old") not in first.made
            assert first.made[-2:] == [("pause", "p"), ("remove", "x")]
            assert ("weights", "new") in second.made
            await two.make([wanted("resume", after=3)])
            assert first.made[-1] == second.made[-1] == ("resume", "p")


async def test_a_new_epoch_numbers_its_changes_above_all_before() -> None:
    async with RedisServer() as server, following(server.url) as (one, _), following(server.url) as (two, second):
        await one.make([wanted("pause")])
        await server.ask("FLUSHALL")
        await until(lambda: one._part.memory.epoch == two._part.memory.epoch == 1)
        await one.make([wanted("resume")])
        assert one.number == two.number == 1_000_000_001
        assert second.made == [("pause", "p"), ("resume", "p")]


async def test_what_is_kept_of_replicas_that_were_taken_out_is_bounded() -> None:
    async with RedisServer() as server, following(server.url) as (one, _):
        for part in range(11):
            await one.make([wanted("remove", f"r{part}-{n}") for n in range(100)])
        kept = await server.ask("HLEN", "detgate:{run}:changes")
        assert kept == 1 + len(one._stands) == 1 + 1000
        assert one._stands.keys() == {f"replica:r{part}-{n}" for part in range(1, 11) for n in range(100)}
        assert await server.ask("PTTL", "detgate:{run}:changes") > 0


async def test_who_has_gone_counts_until_what_it_left_had_time_to_end_and_who_leaves_does_not() -> None:
    async with RedisServer() as server, following(server.url) as (one, _):

        async def said(name: str, inside: int, *, lives: bool) -> None:
            async with asyncio.timeout(10):
                while True:
                    live, gone = await one.said()
                    if (gone, live)[lives].get(name, Said(-1, {})).inside.get("p") == inside:
                        assert name not in (live, gone)[lives]
                        return

        async with following(server.url) as (two, second):
            second.has = {"p": 2}
            await one.make([wanted("pause")])
            live, gone = await one.said()
            assert (live[two._gateway], gone) == (Said(1, {"p": 2}), {})
            second.has = {"p": 1}
            await said(two._gateway, 1, lives=True)
        assert await one.said() == ({one._gateway: Said(1, {})}, {})

        async with store(server.url, terms("killed", lease=LEASE)) as killed:
            killed.serve("run")
            witness = Witness()
            witness.has = {"p": 3}
            series = Series(killed.link, killed.part("run"), "killed", LEASE, 0.5, witness)
            await said("killed", 3, lives=True)
            await stop(killed._runs["run"]._life, series._following)
            await said("killed", 3, lives=False)
            async with asyncio.timeout(10):
                while "killed" in (await one.said())[1]:
                    pass
