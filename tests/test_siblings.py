"""The line between two processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.settings import Settings
from gateway.siblings import Line, Start, first, framed
from gateway.tasks import start, stop
from tests.harness import pool


@asynccontextmanager
async def line(heard: list[Any]) -> AsyncIterator[tuple[Line, Line, asyncio.Event]]:
    """Both ends; the second answers with twice the question, to `slow` when the event is set."""
    go = asyncio.Event()

    async def twice(question: Any) -> Any:
        if question == "slow":
            await go.wait()
        return question * 2

    ours, theirs = socket.socketpair()
    here, there = Line(ours, twice), Line(theirs, twice, heard.append)
    tasks = start(here.run(), "here"), start(there.run(), "there")
    try:
        yield here, there, go
    finally:
        await stop(*tasks)


async def test_questions_both_ways_are_answered_each_by_its_own_answer() -> None:
    heard: list[Any] = []
    async with line(heard) as (here, there, go):
        slow = start(here.ask("slow", 5), "slow")
        here.tell(b"x" * 300_000)
        told = await asyncio.gather(here.ask("a", 5), there.ask([1], 5), here.ask("b", 5))
        assert list(told) == ["aa", [1, 1], "bb"]
        assert heard == [b"x" * 300_000]
        go.set()
        assert await slow == "slowslow"


async def test_what_is_not_answered_ends_in_time_and_one_that_has_gone_is_known_to_have() -> None:
    async with line([]) as (here, there, _):
        with pytest.raises(TimeoutError):
            await here.ask("slow", 0.01)
        waiting = start(here.ask("slow", 5), "slow")
        await asyncio.sleep(0)
        there.close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await here.ask("a", 5)


def test_settings_arrive_as_they_were_sent_secrets_and_all() -> None:
    given = {
        "seed": 2**63 - 1,
        "state": "redis://:secret@host/0",
        "run": "r",
        "workers": 2,
        "profile": "strict",
        "auth": {"api_keys": ["a key"], "admin_key": "another"},
        "pools": [pool("policy", "http://a:1", api_key="upstream")],
    }
    settings = Settings.load(None, {}, given)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(framed(Start(1, settings, None, 7, resume=True, new_run=False)))
        begin: Start = first(theirs)
    assert begin.settings == settings
    assert begin.settings.digest() == settings.digest()
    assert begin.settings.auth.api_keys[0].get_secret_value() == "a key"
    assert begin.settings.pools[0].api_key == settings.pools[0].api_key
    assert (begin.number, begin.picture, begin.pictured, begin.resume, begin.new_run) == (1, None, 7, True, False)


def test_the_first_value_is_read_before_there_is_a_loop() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(framed({"a": 1}) + framed("next")[:3])
            assert first(theirs) == {"a": 1}
        with pytest.raises(EOFError):
            first(theirs)
