"""A primary that is cut off and a replica that takes its place, again and again, while gateways are busy.

`ROUNDS` says how often. Of three rounds the first loses nothing, the second the last writes, the third those and a
gateway too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from gateway.core.errors import Conflict, StoreFault
from gateway.core.indexing import Ask, Claim
from gateway.stores import ScopeKey
from gateway.stores.redis import RedisStore
from tests.redis_server import Front, RedisServer
from tests.shared.test_epochs import follow, vanish
from tests.stores.redis import store, terms
from tests.waiting import until

ROUNDS = int(os.environ.get("ROUNDS", "3"))
SESSIONS = 40
LEASE = 1.5


@dataclass
class Servers:
    """A primary and its replica; after each failover another replica follows the new primary."""

    stack: AsyncExitStack
    primary: RedisServer
    replica: RedisServer
    front: Front

    @classmethod
    @asynccontextmanager
    async def up(cls) -> AsyncIterator[Servers]:
        async with AsyncExitStack() as stack:
            primary = await stack.enter_async_context(RedisServer())
            await primary.meet()
            replica = await stack.enter_async_context(RedisServer())
            front = await stack.enter_async_context(Front(primary.port))
            servers = cls(stack, primary, replica, front)
            await servers.follow()
            yield servers

    async def follow(self) -> None:
        await follow(self.replica, self.primary)

    async def cut(self, *, losing: float | None) -> None:
        """The primary is cut off and its replica promoted. `losing`: for so long it had got no writes any more."""
        if losing is None:
            await self.primary.ask("CLIENT", "PAUSE", 60_000, "WRITE")
            await self.primary.ask("WAIT", 1, 10_000)
            await asyncio.sleep(0.05)
        else:
            await self.replica.ask("REPLICAOF", "127.0.0.1", 1)
            await asyncio.sleep(losing)
        self.front.cut()
        self.primary.kill()
        await self.replica.ask("REPLICAOF", "NO", "ONE")
        self.primary, self.replica = self.replica, await self.stack.enter_async_context(RedisServer())
        self.front.lead(self.primary.port)
        await self.follow()


@dataclass
class Load:
    """Clients that ask for indices, each for sessions of its own, and what they were given."""

    stores: list[RedisStore]
    issued: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Session, epoch and index → the request that it was issued to."""
    fenced: set[str] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    """How many sessions of a client were fenced, so that it began another."""
    served_by: dict[str, set[RedisStore]] = field(default_factory=dict)
    done: int = 0
    refused: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, number: int) -> None:
        texts = count()
        while not self.over.is_set():
            session = f"s{number}.{self.begun.get(number, 0)}"
            text = f"{number} {next(texts)}"
            for attempt in count():
                others = attempt if number % 2 else 0
                kept = self.stores[(number + others) % len(self.stores)]
                if self.over.is_set() or await self.asks(kept, session, text, attempt):
                    self.begun[number] = self.begun.get(number, 0) + (session in self.fenced)
                    break
                await asyncio.sleep(0.02)

    async def asks(self, kept: RedisStore, session: str, text: str, attempt: int) -> bool:
        """One attempt. Whether there is to be no other."""
        scope = ScopeKey("run", session, "me")
        ask = Ask("arrival", text.encode().ljust(16, b"."), text, repeat=attempt, exclusive=True)
        try:
            claim = await kept.claim(scope, ask, 0.2)
        except Conflict as conflict:
            if conflict.code != "session_fenced":
                raise
            self.fenced.add(session)
            return True
        except StoreFault:
            self.refused += 1
            return False
        self.served_by.setdefault(session, set()).add(kept)
        self.given(session, text, claim)
        await kept.complete(scope, claim.index)
        await kept.settle(scope, claim.index, used=True)
        self.done += 1
        return True

    def given(self, session: str, text: str, claim: Claim) -> None:
        place = (session, claim.epoch, claim.index)
        assert self.issued.setdefault(place, text) == text, (place, self.issued[place], text)


async def test_no_index_is_given_twice_in_an_epoch_and_only_lost_sessions_are_fenced() -> None:
    async with Servers.up() as servers, AsyncExitStack() as stack:

        async def another() -> RedisStore:
            kept = await stack.enter_async_context(store(servers.front.url, terms(lease=LEASE, grace=0.3)))
            with suppress(StoreFault, Conflict):
                await kept.claim(ScopeKey("run", "hello", "me"), Ask("content", b"x"), 0)
            return kept

        load = Load([await another() for _ in range(3)])
        clients = [asyncio.create_task(load.client(number)) for number in range(SESSIONS)]
        may_be_fenced: set[str] = set()
        for number in range(ROUNDS):
            done = load.done
            await until(lambda done=done: load.done > done + 200, 30)  # type: ignore[misc]
            kind = number % 3
            if kind == 2:
                gone = load.stores.pop()
                may_be_fenced |= {session for session, by in load.served_by.items() if gone in by}
                vanish(gone)
            await servers.cut(losing=None if kind == 0 else 0.1)
            epoch = number + 1
            await until(lambda epoch=epoch: all(_epoch(kept) == epoch for kept in load.stores), 20)  # type: ignore[misc]
            done = load.done
            await until(lambda done=done: load.done > done + 100, 30)  # type: ignore[misc]
            assert load.fenced <= may_be_fenced
            if kind == 2:
                load.stores.append(await another())
        load.over.set()
        await asyncio.gather(*clients)
        assert not may_be_fenced or load.fenced
        print(f"{ROUNDS} failovers, {load.done} requests, {load.refused} refusals, {len(load.fenced)} sessions fenced")


def _epoch(kept: RedisStore) -> int:
    part = kept._run("run").part
    return part.memory.epoch if part.connection is not None else -1
