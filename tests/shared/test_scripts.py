"""The scripts are the rule: whatever is asked in whatever order, the store says what `Scope` says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask, Claim, Scope, Session, Wait, refused
from gateway.shared import scripts
from gateway.shared.address import parse
from gateway.shared.deeds import KINDS, scope_name, session_name
from gateway.shared.link import Link
from gateway.shared.part import Part, Telling, Terms
from gateway.tasks import start, stop
from tests.redis_server import RedisServer

EXAMPLES = int(os.environ.get("EXAMPLES", "150"))


class Step(NamedTuple):
    """Something that happens to a session: a claim, or to one of those that were claimed, the answer's end or all."""

    verb: str
    identity: str
    ask: Ask
    raced: bool
    final: bool
    which: int
    used: bool


def asks() -> st.SearchStrategy[Ask]:
    letters = st.sampled_from("xyz")
    return st.builds(
        lambda letter, variant, kind, number, key, repeat, exclusive: Ask(
            kind,
            (letter + variant).encode().ljust(16, b"."),
            letter,
            number if kind == "client" else None,
            key,
            repeat,
            exclusive,
        ),
        letters,
        st.sampled_from(["", "2"]),
        st.sampled_from(["arrival"] * 4 + ["content", "client"]),
        st.integers(0, 3),
        st.sampled_from([None] * 4 + ["K", "L"]),
        st.sampled_from([0, 0, 0, 1, 1, 2, 3]),
        st.booleans(),
    )


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["claim"] * 4 + ["complete", "settle", "settle"]),
        st.sampled_from(["me", "me", "me", "you"]),
        asks(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 30),
        st.booleans(),
    ),
    max_size=40,
)


class Nothing:
    """Deeds of a gateway that has done nothing."""

    async def since(self, number: int, *, lapsed: bool) -> Telling:
        return Telling()

    def resume(self, tokens: Any) -> None: ...

    def lost(self, ends: Any) -> bool:
        return True

    def met(self, gateways: Any) -> None: ...


class Both:
    """One session by the rule, and by the store."""

    def __init__(self, link: Link, part: Part) -> None:
        session = Session()
        self.scopes = {name: Scope(name, session) for name in ("me", "you")}
        self.link = link
        self.part = part
        self.numbers = count(1)
        self.claims: list[list[Any]] = []
        """Identity, index, token, whether the answer has ended, bytes."""

    async def does(self, step: Step) -> None:
        if step.verb == "claim":
            await self.claim(step)
        elif self.claims:
            claim = self.claims[step.which % len(self.claims)]
            if step.verb == "complete" and not claim[3]:
                await self.complete(claim)
            elif step.verb == "settle":
                if not claim[3]:
                    await self.complete(claim)
                await self.settle(claim, step.used)

    async def claim(self, step: Step) -> None:
        ask, token = step.ask, next(self.numbers)
        by_rule: Claim | Wait | Conflict
        try:
            by_rule = self.scopes[step.identity].claim(ask, raced=step.raced, final=step.final)
        except Conflict as conflict:
            by_rule = conflict
        answer = await self.call(
            scripts.CLAIM,
            token,
            scope_name("s", step.identity),
            session_name("s"),
            KINDS[ask.kind],
            ask.raw,
            ask.content or "",
            "" if ask.number is None else ask.number,
            ask.key or "",
            ask.repeat,
            ask.exclusive + 2 * step.raced + 4 * step.final,
            b"[]",
            3600_000,
        )
        if isinstance(by_rule, Wait):
            stands = []
            if by_rule.why == "racing" and ask.key is None:
                stands = [self.scopes[step.identity].asked[ask.raw].index]
            assert answer == [b"wait", by_rule.why.encode(), *stands]
        elif isinstance(by_rule, Conflict):
            assert answer[0] == b"refused"
            same = refused(answer[1].decode(), answer[2].decode())
            assert (same.code, same.message, same.param) == (by_rule.code, by_rule.message, by_rule.param)
        else:
            _, index, reused, raced, _, flag, _ = answer
            flags = ("racing",) * raced + (flag.decode(),) * bool(flag)
            assert Claim(int(index), flags, bool(reused)) == by_rule
            self.claims.append([step.identity, by_rule.index, token, False, ask.raw])

    async def complete(self, claim: list[Any]) -> None:
        claim[3] = True
        raced = self.scopes[claim[0]].complete(claim[1])
        for _ in range(2):  # told twice, it is so once
            assert await self.call(scripts.COMPLETE, next(self.numbers), claim[2]) == [b"done", raced]

    async def settle(self, claim: list[Any], used: bool) -> None:
        self.claims.remove(claim)
        released = self.scopes[claim[0]].settle(claim[1], used=used)
        words = (claim[2], int(used), scope_name("s", claim[0]), claim[1], claim[4])
        assert await self.call(scripts.SETTLE, next(self.numbers), *words) == [b"done", released]
        assert (await self.call(scripts.SETTLE, next(self.numbers), *words))[0] == b"gone"

    async def call(self, script: Any, *words: Any) -> Any:
        assert self.part.connection is not None
        return await self.link.call(script, self.part.keys, ("g", self.part.connection, *words))


@pytest.fixture(scope="module")
def table() -> Iterator[tuple[asyncio.Runner, Link]]:
    with asyncio.Runner() as runner:
        server = RedisServer()

        async def begin() -> tuple[Link, asyncio.Task[None]]:
            await server.start()
            await server.meet()
            link = Link(parse(server.url), 5.0)
            return link, start(link.run(), "link")

        link, running = runner.run(begin())
        yield runner, link
        runner.run(stop(running))
        server.close()


runs = count()


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps)
def test_the_scripts_do_what_the_rule_does(table: tuple[asyncio.Runner, Link], story: list[Step]) -> None:
    runner, link = table

    async def play() -> None:
        part = Part(link, f"run-{next(runs)}", Terms("g", b"{}", 10.0, 3.0, 3600.0), Nothing())
        life = start(part.live(), "part")
        await part.join()
        both = Both(link, part)
        for step in story:
            await both.does(step)
        await stop(life)
        await part.end()

    runner.run(play())
