"""What becomes of indices when the store and all gateways go down together, and some come back before others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.core.errors import Conflict
from gateway.core.indexing import Ask
from gateway.stores.redis import RedisStore
from tests.harness import FakeWorker, Gate
from tests.redis_server import Front, RedisServer
from tests.shared.test_epochs import LEASE, joined, key, served
from tests.shared.test_epochs import ask as asked
from tests.shared.test_gateways import ask, gateways, index
from tests.stores.redis import store, terms

TWICE = "indices were given twice: their sessions are fenced"


class Place:
    """A server, and gateways that keep their ledgers in folders of their own, each of which may come and go."""

    def __init__(self, server: RedisServer, worker: FakeWorker, folder: Path, profile: str) -> None:
        self.server, self.worker, self.folder, self.profile = server, worker, folder, profile

    @asynccontextmanager
    async def up(self, *names: str) -> AsyncIterator[list[Gate]]:
        async with AsyncExitStack() as stack:
            gates = []
            for name in names:
                given = {"ledger": {"path": str(self.folder / name)}, "profile": self.profile}
                gates += await stack.enter_async_context(gateways(1, self.server.url, self.worker, **given))
            yield gates

    async def restart(self, *, saved: bool = False) -> None:
        """The server goes, with all that was not saved, and comes back."""
        self.server.kill()
        if not saved:
            (self.server.folder / "dump.rdb").unlink(missing_ok=True)
        await self.server.start()


@asynccontextmanager
async def place(folder: Path, profile: str = "strict") -> AsyncIterator[Place]:
    async with RedisServer() as server, FakeWorker() as worker:
        yield Place(server, worker, folder, profile)


async def met(*gates: Gate) -> None:
    """Wait until all know of each other."""
    for gate in gates:
        store: Any = gate.gateway._store
        part = store.part("r")
        await gate.until(lambda part=part: len(part.peers) >= len(gates))  # type: ignore[misc]


def said(answer: httpx.Response) -> tuple[int, str]:
    """Its status, and the refusal's code or the reasons beside the level."""
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["code"]
    return answer.status_code, answer.headers["x-detgate-guarantee"].partition("; unverified")[0]


FENCED = {"strict": (409, "session_fenced"), "balanced": (200, "balanced; epoch")}


@pytest.mark.parametrize("profile", ["strict", "balanced"])
@pytest.mark.parametrize("remembers", ["nothing", "before", "between"])
async def test_what_one_that_is_not_back_may_have_served_is_fenced_until_it_has_told(
    profile: str, remembers: str, tmp_path: Path
) -> None:
    async with place(tmp_path, profile) as there:
        async with there.up("h") as (h,):
            assert index(await ask(h, "h", session="ours")) == 0
            if remembers == "before":
                await there.server.ask("SAVE")
            async with there.up("g") as (g,):
                await met(g, h)
                if remembers == "between":
                    await there.server.ask("SAVE")
                assert [index(await ask(g, text)) for text in "ab"] == [0, 1]
        await there.restart(saved=remembers != "nothing")
        async with there.up("h") as (h,):
            for session in ("s", "ours", "new"):
                assert said(await ask(h, "other", session=session)) == FENCED[profile]
            async with there.up("g") as (g,):
                assert index(await ask(g, "c")) == 2
                if profile == "strict":
                    assert said(await ask(h, "d")) == (200, "strict")
                    assert index(await ask(h, "i", session="ours")) == 1


async def test_one_that_has_told_all_by_its_ledger_does_not_fence_itself(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        for _ in range(2):
            async with there.up("h", "h") as gates:
                await met(*gates)
        async with there.up("h") as (h,):
            assert index(await ask(h, "a")) == 0
        for number in (1, 2):
            await there.restart()
            async with there.up("h") as (h,):
                answer = await ask(h, f"after {number}")
                assert (index(answer), said(answer)) == (number, (200, "strict"))


async def test_one_that_ended_when_all_was_told_is_not_waited_for(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        async with there.up("g", "h") as (g, h):
            await met(g, h)
            assert index(await ask(g, "a")) == 0
        async with there.up("h") as (h,):
            assert (await ask(h, "b")).headers["x-detgate-request-id"] == "s:1"
        await there.restart()
        async with there.up("h") as (h,):
            assert said(await ask(h, "c", session="new"))[0] == 409
            async with there.up("g"):
                pass
            assert said(await ask(h, "c", session="new")) == (200, "strict")
            assert index(await ask(h, "c")) == 2
        async with there.up("h") as (h,):
            assert index(await ask(h, "d")) == 3


@pytest.mark.parametrize("profile", ["strict", "balanced"])
@pytest.mark.parametrize("saved", [False, True])
async def test_where_nobody_could_know_an_index_that_was_given_twice_fences_its_session(
    profile: str, saved: bool, tmp_path: Path
) -> None:
    async with place(tmp_path, profile) as there:
        async with there.up("g") as (g,):
            if saved:
                await there.server.ask("SAVE")
            assert [index(await ask(g, text)) for text in "ab"] == [0, 1]
            assert index(await ask(g, "same", session="alike")) == 0
        await there.restart(saved=saved)
        async with there.up("elsewhere") as (h,):
            assert said(await ask(h, "other")) == (200, profile)
            assert said(await ask(h, "same", session="alike")) == (200, profile)
            with capture_logs() as lines:
                async with there.up("g") as (g,):
                    await g.until(lambda: any(record["event"] == "fenced" for record in g.records()))
                    for gate in (g, h):
                        assert said(await ask(gate, "then")) == FENCED[profile]
                        assert said(await ask(gate, "then", session="alike")) == (200, profile)
                    fenced = [record for record in g.records() if record["event"] == "fenced"]
                    assert [(record["session"], record["index"]) for record in fenced] == [("s", 0)]
                    numbers = (await g.http.get("/metrics")).text.splitlines()
                    assert "detgate_fenced_sessions_total 1.0" in numbers
            told = [line for line in lines if line["event"] == TWICE]
            assert [(line["sessions"], line["first"]["session"]) for line in told] == [(1, "s")]
        # A server that forgets it is told by the ledger.
        await there.restart()
        async with there.up("g", "elsewhere") as (g, h):
            assert said(await ask(g, "later")) == FENCED[profile]
            assert said(await ask(h, "later", session="alike"))[0] == 200
            assert [record["index"] for record in g.records() + h.records() if record["event"] == "fenced"] == [0]


# --- what of two histories is found to be of two requests

Told = list[Ask]


@pytest.mark.parametrize(
    ("before", "after", "twice"),
    [
        ([asked("a"), asked("b")], [asked("a")], False),
        ([asked("a")], [asked("a"), asked("b")], False),
        ([asked("a"), asked("a")], [asked("a"), asked("a")], False),
        ([asked("a"), asked("b")], [asked("a"), asked("c")], True),
        ([asked("a"), asked("a")], [asked("b"), asked("a"), asked("a")], True),
        ([asked("a", "K")], [asked("a", "K")], False),
        ([asked("a", "K")], [asked("b", "L")], True),
        ([asked("a", "K"), asked("b", "L")], [asked("a", "K"), asked("x", "X"), asked("b", "L")], True),
        ([asked("a", number=4)], [asked("a", number=4), asked("b", number=2)], False),
        ([asked("a", number=4)], [asked("b", number=4)], True),
    ],
)
async def test_an_index_of_two_requests_is_found(before: Told, after: Told, twice: bool) -> None:
    async with RedisServer() as server, Front(server.port) as front:
        async with store(front.url, terms(lease=LEASE), seconds=0.3) as late:
            assert len(await served(late, key("s"), *before)) == len(before)
            front.target = 1
            front.cut()
            await server.ask("FLUSHALL")
            await server.meet()
            async with store(server.url, terms(lease=LEASE), seconds=5) as fresh:
                assert len(await served(fresh, key("s"), *after)) == len(after)
                front.target = server.port
                await joined(late, 1)
                await joined(fresh, 1)
                then = asked("then", number=None if before[0].number is None else 9)
                assert [await fenced(kept, then) for kept in (late, fresh)] == [twice, twice]


async def fenced(kept: RedisStore, then: Ask) -> bool:
    """Whether the session is refused."""
    try:
        await served(kept, key("s"), then)
    except Conflict as conflict:
        return conflict.code == "session_fenced"
    return False
