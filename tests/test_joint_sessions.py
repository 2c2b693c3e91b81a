"""Sessions over several gateways, in a real server: one order of events, and what is decided in the store."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from gateway import joint_sessions
from gateway.core.errors import Busy, CallerFault, Conflict, Gone, Unauthorized
from gateway.core.identity import Named
from gateway.joint_sessions import JointSessions
from gateway.ledger.writer import Ledger
from gateway.session import Interaction, Session, Wanted
from gateway.settings import Settings
from gateway.shared import events
from gateway.shared.deeds import session_name
from gateway.shared.scripts import keys
from gateway.stores.memory import MemoryStore
from gateway.tasks import start, stop
from tests.redis_server import Front, RedisServer, linked
from tests.waiting import until

RUN = "r"


class Desk:
    """The sessions of one gateway."""

    def __init__(self, sessions: JointSessions, folder: Path) -> None:
        self.sessions = sessions
        self.folder = folder

    async def create(self, identity: str, **wanted: Any) -> tuple[list[str], list[str]]:
        made, keys = await self.sessions.create(RUN, Wanted(identity, **wanted))
        return [session.known.session for session in made], keys

    async def find(self, key: str) -> Session:
        """As a request would, that brings the key."""
        await self.sessions.prepared(RUN, key.encode())
        found = self.sessions.find(self.sessions.visitor(key.encode()), Named(run=None), RUN)
        assert found is not None
        return found

    def get(self, name: str) -> Session | None:
        return self.sessions._sessions.get((RUN, name))

    def records(self, event: str) -> list[dict[str, Any]]:
        lines = [line for file in sorted(self.folder.rglob("*.jsonl")) for line in file.read_bytes().splitlines()]
        return [record for record in map(orjson.loads, lines) if record["event"] == event]

    def serve(self, session: Session, index: int, answer: str | None, trouble: str | None = None) -> None:
        """A request of a session, from its index to its end."""
        identity = session.known.identity
        interaction = self.sessions.enter(session, Interaction(identity, index, f"{identity}:{index}"))
        self.sessions.leave(session, trouble, interaction, answer)


@asynccontextmanager
async def desks(
    url: str, folder: Path, number: int = 2, retention: float = 3600, **settings: Any
) -> AsyncIterator[list[Desk]]:
    async with AsyncExitStack() as stack:
        made = []
        for each in range(number):
            link = await stack.enter_async_context(linked(url))
            at = Path(tempfile.mkdtemp(dir=folder))
            sessions = JointSessions(Settings.load(None, {}, settings), MemoryStore(1000), link, retention)
            sessions.serve(RUN, Ledger(at, RUN, segment_bytes=2**20, on_error="fail"))
            stack.push_async_callback(sessions.close)
            sweeping = start(sessions.run(), f"sessions {each}")
            stack.push_async_callback(stop, sweeping)
            made.append(Desk(sessions, at))
        yield made


async def test_what_one_created_all_know_by_its_key_and_ids_are_given_once(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, 3) as (one, two, three):
        made = await asyncio.gather(*(desk.create("17") for desk in (one, two, three) * 8))
        names = [name for [name], _ in made]
        assert sorted(names) == sorted(["17", *(f"17-{ordinal}" for ordinal in range(1, 24))])
        for ([name], [key]), desk in zip(made, (two, three, one) * 8, strict=True):
            found = await desk.find(key)
            assert (found.known.session, found.known.identity) == (name, "17")
            assert found.known.ordinal == int(name.partition("-")[2] or "0")
        with pytest.raises(Unauthorized):
            await two.find("dgs-nobody")
        # One record each, by the gateway that was asked.
        assert sorted(record["session"] for desk in (one, two, three) for record in desk.records("session")) == sorted(
            names
        )


async def test_a_session_that_was_used_without_having_been_created_keeps_its_id(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, 1) as (one,):
        await server.ask("HSET", keys(RUN, "")[0], session_name("17"), "0")
        assert (await one.create("17"))[0] == ["17-1"]


async def test_groups_are_whole_at_every_gateway_and_tell_their_members_ends(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        names, made = await one.create("9", group_size=3, seed=2**63 - 1)
        assert names == ["9:0", "9:1", "9:2"]
        last = await two.find(made[2])
        group = last.group
        assert group is not None
        assert (group.id, group.size, [each.known.session for each in group.members]) == ("9", 3, names)
        assert last.known.seed == 2**63 - 1
        turn = start(group.turn(last, 10), "turn")
        for key in made[:2]:
            await asyncio.sleep(0)
            assert not turn.done()
            await one.sessions.end(await one.find(key))
        assert await turn is None
        assert (await two.create("9", group_size=3))[0] == ["9:0-1", "9:1-1", "9:2-1"]


async def test_an_end_is_decided_once_and_says_what_the_last_request_came_to_wherever_it_was(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        _, [key] = await one.create("a", failed_reward=-1.5)
        here, there = await one.find(key), await two.find(key)
        two.serve(there, 0, None, "replica_broke")
        await two.sessions.refresh(there)
        await one.sessions.refresh(here)
        assert here.trouble == "replica_broke"
        await asyncio.gather(one.sessions.end(here), two.sessions.end(there), one.sessions.end(here))
        await until(lambda: here.state == there.state == "failed")
        assert here.why == there.why == "its last request was not delivered: replica_broke"
        with pytest.raises(Gone):
            await two.find(key)
        [record] = one.records("session_ended") + two.records("session_ended")
        assert (record["state"], record["why"], record["session_reward"]) == ("failed", here.why, -1.5)
        await two.sessions.refresh(there)
        assert there.reward == -1.5


async def test_a_reward_finds_a_request_that_another_gateway_served(tmp_path: Path) -> None:
    async def look(session: Session, name: str) -> Interaction:
        if name != "old":
            raise CallerFault("no such", code="interaction_not_found")
        return Interaction("a", 99, "a:99")

    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        _, [key] = await one.create("a")
        here, there = await one.find(key), await two.find(key)
        with pytest.raises(CallerFault, match="No request"):
            await one.sessions.reward(here, None, 1.0, look)
        for index in range(3):
            two.serve(there, index, f"chatcmpl-{index}")
        await two.sessions.refresh(there)
        await one.sessions.reward(here, "chatcmpl-0", 0.1, look)
        await two.sessions.reward(there, "a:1", 0.2, look)
        await one.sessions.reward(here, None, 0.3, look)
        await one.sessions.reward(here, "a:0", 0.4, look)
        await two.sessions.reward(there, "old", 1.0, look)
        with pytest.raises(CallerFault):
            await two.sessions.reward(there, "nothing", 1.0, look)
        await one.sessions.refresh(here)
        assert (here.reward, here.interactions) == (1.9, 3)
        [*_, last] = one.records("reward")
        assert (last["index"], last["before"], last["reward"], last["session_reward"]) == (0, 0.1, 0.4, 0.9)
        await one.sessions.end(here)
        with pytest.raises(Gone):
            await two.sessions.reward(there, "a:0", 1.0, look)
        assert one.records("session_ended")[0]["session_reward"] == 1.9


async def test_requests_that_are_long_gone_are_not_kept(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, 1) as (one,):
        _, [key] = await one.create("a")
        session = await one.find(key)
        for index in range(200):
            one.serve(session, index, f"x{index}")
        await one.sessions.refresh(session)
        assert session.interactions == 200
        # Each request by its number, its own id and its answer's; and two fields of how many there are.
        assert await server.ask("HLEN", f"detgate:{{{RUN}}}:session:a:recent") == 3 * 64 + 2


async def test_of_an_index_that_is_answered_again_the_last_answer_is_kept(tmp_path: Path) -> None:
    async def look(session: Session, name: str) -> Interaction:
        raise CallerFault(name, code="interaction_not_found")

    async with RedisServer() as server, desks(server.url, tmp_path, 1) as (one,):
        _, [key] = await one.create("a")
        session = await one.find(key)
        one.serve(session, 0, "same")
        for number in range(300):
            one.serve(session, 1, f"x{number}")
        one.serve(session, 2, "same")
        one.serve(session, 0, "other")
        await one.sessions.refresh(session)
        assert await server.ask("HLEN", f"detgate:{{{RUN}}}:session:a:recent") == 3 * 3 + 2
        for name, index in (("x299", 1), ("same", 2), ("other", 0)):
            await one.sessions.reward(session, name, 1.0, look)
            assert one.records("reward")[-1]["index"] == index
        with pytest.raises(CallerFault, match="x298"):
            await one.sessions.reward(session, "x298", 1.0, look)


async def test_whatever_is_kept_ends_unless_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.05)

    async def endless() -> list[bytes]:
        names = await server.ask("KEYS", "detgate:{r}:session*")
        assert names
        return [name for name in names if await server.ask("PTTL", name) < 0]

    async with RedisServer() as server:
        async with desks(server.url, tmp_path, 1, retention=0.5) as (one,):
            with structlog.testing.capture_logs() as lines:
                await one.sessions._events[RUN].catch_up()
                assert await endless() == []
                about = await server.ask("HGETALL", "detgate:{r}:sessions:about")
                await asyncio.sleep(1.5)
                assert await server.ask("HGETALL", "detgate:{r}:sessions:about") == about
            assert lines == []
        async with desks(server.url, tmp_path, 1, sessions={"idle_seconds": 0.2}) as (one,):
            _, [key] = await one.create("a")
            session = await one.find(key)
            one.serve(session, 0, "x")
            one.serve(session, 1, None, "replica_broke")
            await one.sessions.refresh(session)
            assert await server.ask("EXISTS", "detgate:{r}:sessions:trouble") == 1
            assert await endless() == []
            await until(lambda: session.state == "failed")
            assert await server.ask("EXISTS", "detgate:{r}:sessions:ended") == 1
            assert await endless() == []


async def test_a_key_serves_one_open_session_at_a_time_wherever_it_is_asked_for(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        _, [key] = await one.create("a")
        with pytest.raises(Conflict):
            await two.sessions.create(RUN, Wanted("b"), key)
        await two.sessions.end(await two.find(key))
        _, [again] = await two.sessions.create(RUN, Wanted("b"), key)
        assert again == key
        assert (await one.find(key)).known.session == "b"


async def test_the_limit_holds_over_all_and_ended_ones_are_forgotten_everywhere(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, limits={"sessions": 3}) as (one, two):
        made = [await desk.create(f"s{number}") for number, desk in enumerate((one, two, one))]
        for desk in (one, two):
            with pytest.raises(Busy) as busy:
                await desk.create("more")
            assert busy.value.code == "too_many_sessions"
        for _, [key] in made:
            await one.sessions.end(await one.find(key))
        for number in range(3):
            _, [key] = await two.create(f"t{number}")
            await two.sessions.end(await two.find(key))
        await until(lambda: one.get("s2") is None and two.get("s2") is None)
        root = f"detgate:{{{RUN}}}:sessions"
        assert [await server.ask("HLEN", f"{root}:{part}") for part in ("all", "keys", "ended")] == [3, 3, 3]


async def test_who_begins_later_knows_what_there_is(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, 1) as (one,):
        for number in range(700):
            await one.create(f"s{number}")
        _, keys_of_group = await one.create("g", group_size=2)
        await one.sessions.end(await one.find(keys_of_group[0]), "on purpose")
        async with desks(server.url, tmp_path, 1) as (two,):
            last = await two.find(keys_of_group[1])
            assert last.group is not None
            assert last.group.failed is last.group.members[0]
            assert last.group.failed.why == "on purpose"
            assert two.sessions.live == 701


async def test_what_is_kept_no_more_as_events_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 60.0)
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        await two.create("before")
        link = two.sessions._events[RUN]
        link._link.unsubscribe(link._channel, link._hear)
        made = [await one.create(f"s{number}") for number in range(20)]
        assert two.get("s19") is None
        await server.ask("XTRIM", f"detgate:{{{RUN}}}:sessions:events", "MAXLEN", 3)
        assert (await two.find(made[7][1][0])).known.session == "s7"
        assert two.get("s19") is not None
        link._link.subscribe(link._channel, link._hear)


async def test_a_lost_message_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.05)
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        await two.create("before")
        link = two.sessions._events[RUN]
        link._link.unsubscribe(link._channel, link._hear)
        await one.create("a")
        await until(lambda: two.get("a"))
        link._link.subscribe(link._channel, link._hear)


async def test_what_cannot_be_taken_in_is_passed_over_and_all_loops_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.05)

    def failing(of: object, name: str, times: int = 1) -> None:
        whole, left = getattr(of, name), [None] * times

        def fails(*given: Any) -> Any:
            if left:
                left.pop()
                raise OverflowError(name)
            return whole(*given)

        monkeypatch.setattr(of, name, fails)

    async with RedisServer() as server, desks(server.url, tmp_path, sessions={"idle_seconds": 1.5}) as (one, two):
        await two.create("before")
        failing(two.sessions, "created")
        failing(two.sessions, "_sweep")
        failing(two.sessions._events[RUN], "_heard")
        await one.create("a")
        await one.create("b")
        await until(lambda: two.get("b"))
        assert two.get("a") is None
        await until(lambda: two.get("b").state == "failed")  # type: ignore[union-attr]
        for desk in (one, two):
            assert desk.sessions._link.generation == 1


@pytest.mark.parametrize("how", ["flushed", "another server", "an older copy"])
async def test_a_store_that_forgot_is_told_again_by_whoever_knows(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 0.05)
    async with RedisServer() as server, RedisServer() as other, Front(server.port) as front:
        async with desks(front.url, tmp_path) as (one, two):
            _, [key] = await one.create("a")
            _, of_group = await two.create("g", group_size=2)
            if how == "an older copy":
                await other.ask("REPLICAOF", "127.0.0.1", server.port)
                async with asyncio.timeout(10):
                    while not await other.ask("EXISTS", f"detgate:{{{RUN}}}:sessions:all"):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                await other.ask("REPLICAOF", "NO", "ONE")
            _, [late] = await one.create("late")
            await two.sessions.end(await two.find(of_group[0]), "on purpose")
            await two.find(late)
            if how == "flushed":
                await server.ask("FLUSHALL")
            else:
                front.lead(other.port)
            async with asyncio.timeout(10):
                while True:
                    target = server if how == "flushed" else other
                    told = await target.ask("HGET", f"detgate:{{{RUN}}}:sessions:about", "open")
                    if told == b"3" and await target.ask("HEXISTS", f"detgate:{{{RUN}}}:sessions:ended", "g:0"):
                        break
                    await asyncio.sleep(0.02)
            async with desks(front.url, tmp_path, 1) as (three,):
                assert (await three.find(key)).known.session == "a"
                assert (await three.find(late)).known.session == "late"
                group = (await three.find(of_group[1])).group
                assert group is not None
                assert group.failed is group.members[0]
                assert (await three.create("a"))[0] == ["a-1"]
                await until(lambda: one.get("a-1") and two.get("a-1"))


async def test_a_store_that_forgot_and_was_told_by_another_since_is_told_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 60.0)
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        links = [desk.sessions._events[RUN] for desk in (one, two)]
        await one.create("a")
        await two.sessions._events[RUN].catch_up()
        for each in links:
            each._link.unsubscribe(each._channel, each._hear)
        _, [key] = await two.create("known to two alone")
        await server.ask("FLUSHALL")
        await one.create("b")
        await one.create("c")
        await two.create("d")
        assert (await one.find(key)).known.session == "known to two alone"
        for each in links:
            each._link.subscribe(each._channel, each._hear)


async def test_who_hears_that_it_has_missed_something_looks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_SECONDS", 60.0)
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        await two.create("before")
        link = two.sessions._events[RUN]
        link._link.unsubscribe(link._channel, link._hear)
        await one.create("missed")
        link._link.subscribe(link._channel, link._hear)
        while (await server.ask("PUBSUB", "NUMSUB", link._channel))[1] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert two.get("missed") is None
        await one.create("heard")
        await until(lambda: two.get("missed") and two.get("heard"))


async def test_what_weights_a_group_met_first_holds_wherever_its_members_ask(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        _, of_group = await one.create("g", group_size=2, weights="hold")
        _, [alone] = await two.create("alone", weights="hold")
        first, other = await one.find(of_group[0]), await two.find(of_group[1])
        # Each meets another version at the same moment: one of the two holds for all.
        one.sessions.hold(first, "policy", "step-1")
        two.sessions.hold(other, "policy", "step-2")
        two.sessions.hold(await two.find(alone), "policy", "step-3")
        await until(lambda: first.held == other.held)
        assert first.held["policy"] in ("step-1", "step-2")
        assert (await one.find(alone)).held == {"policy": "step-3"}
        async with desks(server.url, tmp_path, 1) as (three,):
            assert (await three.find(of_group[0])).held == first.held
            assert (await three.find(alone)).held == {"policy": "step-3"}


async def test_a_session_is_idle_only_if_no_gateway_uses_it(tmp_path: Path) -> None:
    async with RedisServer() as server, desks(server.url, tmp_path, sessions={"idle_seconds": 1.5}) as (one, two):
        _, [used] = await one.create("used")
        _, [idle] = await one.create("idle")
        _, [open_there] = await one.create("open")
        two.sessions.enter(await two.find(open_there))
        async with asyncio.timeout(10):
            while one.get("idle") is None or one.get("idle").state == "open":  # type: ignore[union-attr]
                await two.find(used)
                await asyncio.sleep(0.05)
        assert (await one.find(used)).state == (await one.find(open_there)).state == "open"
        [record] = one.records("session_ended") + two.records("session_ended")
        assert (record["session"], record["why"]) == ("idle", "idle for 1.5 s")
        with pytest.raises(Gone):
            await two.find(idle)


async def test_what_guards_look_for_is_bounded_ends_and_does_without_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_sessions, "FIRSTS", 2)
    async with RedisServer() as server, desks(server.url, tmp_path) as (one, two):
        await one.create("17", group_size=1)
        await until(lambda: two.sessions.group(RUN, "17"))
        mine, theirs = one.sessions.group(RUN, "17"), two.sessions.group(RUN, "17")
        assert mine is not None
        assert theirs is not None
        for what in ("a", "b", "c"):
            assert await one.sessions.first(mine, what, "one") == "one"
        assert [await two.sessions.first(theirs, what, "two") for what in ("a", "b", "c")] == ["one", "one", "two"]
        assert await one.sessions.first(mine, "a", "again") == "one"
        [key] = await server.ask("KEYS", "*firsts*")
        assert await server.ask("HLEN", key) == 2
        assert 0 < await server.ask("PTTL", key) <= joint_sessions.FIRSTS_MS
        server.kill()
        assert await two.sessions.first(theirs, "d", "two") == "two"
        assert await two.sessions.first(theirs, "d", "again") == "two"
