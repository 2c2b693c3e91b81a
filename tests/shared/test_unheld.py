"""What a store that forgets is told of requests that have no index: given in vain, or waited for in vain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import Conflict, StoreFault
from gateway.core.indexing import MANY, Ask, Claim
from gateway.ledger.writer import Ledger
from gateway.shared import scripts
from gateway.shared.deeds import scope_name
from gateway.stores.redis import RedisStore
from gateway.tasks import stop
from tests.harness import FakeWorker
from tests.redis_server import RedisServer
from tests.shared.test_epochs import LEASE, ME, ask, joined, served
from tests.shared.test_gateways import Held, gateways, index, ready
from tests.shared.test_gateways import ask as asks
from tests.shared.test_scripts import EXAMPLES
from tests.stores.redis import quiet, store, terms
from tests.waiting import until

SEEDS = max(8, EXAMPLES // 15)


class Recorded:
    """A gateway's store, and the ledger in which the gateway would note what it serves."""

    def __init__(self, kept: RedisStore, ledger: Ledger) -> None:
        self.kept = kept
        self.ledger = ledger
        self.closed = False

    async def claim(self, asked: Ask, seconds: float = 60.0) -> Claim:
        claim = await self.kept.claim(ME, asked, seconds)
        record = {"event": "opened", "gateway": self.kept.gateway, **ME._asdict(), "index": claim.index}
        record |= {"order": asked.kind, "digest": asked.raw.hex(), "content": asked.content, "key": None}
        self.ledger.claimed(record | {"repeat": asked.repeat, "flags": claim.flags})
        return claim

    async def end(self, index: int, *, used: bool) -> None:
        raced = await self.kept.complete(ME, index)
        self.ledger.closed({"event": "closed", **ME._asdict(), "index": index, "used": used, "racing": raced})
        await self.kept.settle(ME, index, used=used)

    def close(self) -> None:
        """As when its process ends."""
        if not self.closed:
            self.closed = True
            self.kept.close("run")
            self.kept.leave("run")
            self.ledger.close()

    async def served(self, asked: Ask, *, used: bool = True) -> Claim:
        claim = await self.claim(asked)
        await self.end(claim.index, used=used)
        return claim


@asynccontextmanager
async def recorded(url: str, folder: Path) -> AsyncIterator[Recorded]:
    async with store(url, terms(lease=LEASE)) as kept:
        ledger = Ledger(folder)
        kept.serve("run", folder, ledger)
        await joined(kept)
        made = Recorded(kept, ledger)
        yield made
        made.close()


@asynccontextmanager
async def forgotten(server: RedisServer, folder: Path, now: Recorded, how: str) -> AsyncIterator[Recorded]:
    """After the store has forgotten all: the same gateway, or one that goes on from its ledger."""
    now.ledger.flush()
    if how == "memory":
        await server.ask("FLUSHALL")
        await joined(now.kept, 1)
        yield now
        return
    server.kill()
    now.close()
    await server.start()
    async with recorded(server.url, folder) as again:
        yield again


async def in_the_moment(now: Recorded, patch: pytest.MonkeyPatch) -> None:
    """It leaves in the turn in which the answer to its wait came."""
    first = await now.claim(ask("first", strict=True))
    leaves = asyncio.create_task(now.kept.claim(ME, ask("leaves", strict=True), 60))
    await quiet(now.kept)
    run = now.kept._runs["run"]
    outcome = run._outcome

    def given(*words: Any) -> Claim:
        asyncio.get_running_loop().call_soon(leaves.cancel)
        return outcome(*words)

    patch.setattr(run, "_outcome", given)
    await now.end(first.index, used=True)
    await asyncio.wait({leaves})
    patch.undo()
    assert leaves.cancelled()


async def while_it_asks_again(now: Recorded, patch: pytest.MonkeyPatch) -> None:
    """It leaves while the store is asked for it once more."""
    first = await now.claim(ask("first", strict=True))
    leaves = asyncio.create_task(now.kept.claim(ME, ask("leaves", strict=True), 60))
    await quiet(now.kept)
    await now.kept.complete(ME, first.index)
    leaves.cancel()
    await asyncio.wait({leaves})
    await now.end(first.index, used=True)
    assert leaves.cancelled()


async def while_it_asks(now: Recorded, patch: pytest.MonkeyPatch) -> None:
    """It leaves while the store is asked for it."""
    await now.served(ask("first"))
    leaves = asyncio.create_task(now.kept.claim(ME, ask("leaves"), 60))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait({leaves})
    assert leaves.cancelled()


async def unheard(now: Recorded, patch: pytest.MonkeyPatch) -> None:
    """The store's answer is lost, and it leaves before it asks again."""
    await now.served(ask("first"))
    send, loop = now.kept.link.send, asyncio.get_running_loop()

    def lossy(script: Any, *words: Any) -> asyncio.Future[Any]:
        sent = send(script, *words)
        if script is not scripts.CLAIM:
            return sent
        lost: asyncio.Future[Any] = loop.create_future()

        def lose(answer: asyncio.Future[Any]) -> None:
            loop.call_soon(leaves.cancel)
            lost.set_exception(StoreFault("lost"))

        sent.add_done_callback(lose)
        return lost

    patch.setattr(now.kept.link, "send", lossy)
    leaves = asyncio.create_task(now.kept.claim(ME, ask("leaves"), 60))
    await asyncio.wait({leaves})
    patch.undo()
    assert leaves.cancelled()


@pytest.mark.parametrize("how", ["memory", "ledger"])
@pytest.mark.parametrize("leave", [in_the_moment, while_it_asks_again, while_it_asks, unheard])
async def test_an_index_that_was_given_to_one_that_had_left_is_told(
    leave: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RedisServer() as server, recorded(server.url, tmp_path) as now:
        await leave(now, monkeypatch)
        await until(lambda: not now.kept.owed)
        assert (await now.served(ask("behind"))).index == 2
        async with forgotten(server, tmp_path, now, how) as then:
            assert [(await then.served(ask(text))).index for text in ("new", "leaves")] == [3, 1]


@pytest.mark.parametrize("how", ["memory", "ledger"])
async def test_after_a_loss_no_retry_of_who_waited_in_vain_is_taken_for_another_request(
    how: str, tmp_path: Path
) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        given = {"profile": "strict", "ledger": {"path": str(tmp_path)}}
        async with gateways(1, server.url, worker, **given) as (gate,):
            assert index(await asks(gate, "twin")) == 0
            held = Held()
            worker.script = held
            rival = asyncio.create_task(asks(gate, "rival"))
            await gate.until(lambda: gate.in_flight("policy-0") == 1)
            assert (await asks(gate, "twin")).json()["error"]["code"] == "racing_index"
            held.go.set()
            assert index(await rival) == 1
            if how == "memory":
                await server.ask("FLUSHALL")
                await ready(gate)
                await _is_another(gate)
                return
        server.kill()
        await server.start()
        async with gateways(1, server.url, worker, **given) as (gate,):
            await _is_another(gate)


async def _is_another(gate: Any) -> None:
    answer = await asks(gate, "twin", X_Stainless_Retry_Count="1")
    assert (index(answer), "retry-unmatched" in answer.headers["x-detgate-guarantee"]) == (2, True)


async def known(server: RedisServer) -> tuple[dict[bytes, int], tuple[Any, ...]]:
    """What the store has of the counter: what bytes stand for; the next number, the released and those that raced."""
    scope = scope_name(ME.session, ME.identity)
    flat = await server.ask("HGETALL", "detgate:{run}:state")
    fields = {name[16:]: value for name, value in zip(flat[::2], flat[1::2], strict=True) if name[:16] == scope}
    asked = {name[1:]: int(value.split(b",")[0]) for name, value in fields.items() if name[:1] == b"a"}
    free = await server.ask("ZRANGE", "detgate:{run}:released", 0, -1)
    return asked, (fields.get(b"", b"0").split(b",")[0], free, {name for name in fields if name[:1] in (b"r", b"h")})


async def story(seed: int, server: RedisServer, folder: Path, how: str) -> tuple[Any, Any]:
    """What a store has before and after a loss, after some requests of which several waited for a rival."""
    draw = random.Random(seed)
    async with recorded(server.url, folder) as now:
        live: list[int] = []
        waiting: list[asyncio.Task[None]] = []
        latest = dict.fromkeys("xyz", -1)

        async def claims(asked: Ask) -> None:
            live.append((await now.claim(asked)).index)

        for _ in range(draw.randrange(3, 12)):
            chance = draw.random()
            if chance < 0.5:
                text = draw.choice("xyz")
                repeat = 0 if draw.random() < 0.6 else latest[text] + 1
                latest[text] = max(latest[text], repeat)
                waiting.append(asyncio.create_task(claims(ask(text, repeat=repeat, strict=True))))
            elif chance < 0.7 and waiting:
                draw.choice(waiting).cancel()
            elif live:
                await now.end(live.pop(draw.randrange(len(live))), used=draw.random() < 0.6)
            for _ in range(draw.randrange(3)):
                await quiet(now.kept)
        await stop(*waiting)
        for number in live:
            await now.end(number, used=True)
        await until(lambda: not now.kept.owed)
        before = await known(server)
        async with forgotten(server, folder, now, how):
            return before, await known(server)


@pytest.mark.parametrize("how", ["memory", "ledger"])
async def test_a_store_that_forgets_is_told_all_that_it_knew(how: str, tmp_path: Path) -> None:
    """At most of one request it is told that it could be several: where two sendings of it had waited at once."""
    same = 0
    for seed in range(SEEDS):
        (folder := tmp_path / f"{seed}").mkdir()
        async with RedisServer() as server:
            (asked, counted), (asked_then, counted_then) = await story(seed, server, folder, how)
        assert counted_then == counted, seed
        same += asked_then == asked
        assert asked.keys() == asked_then.keys(), seed
        for raw, one in asked.items():
            assert asked_then[raw] in (one, MANY), seed
    assert same >= SEEDS * 0.9


@pytest.mark.parametrize("first", [0, 1])
async def test_a_vain_wait_at_one_gateway_and_an_index_of_the_same_bytes_at_another_are_two_requests(
    first: int,
) -> None:
    async with (
        RedisServer() as server,
        store(server.url, terms(lease=LEASE)) as one,
        store(server.url, terms(lease=LEASE)) as two,
    ):
        rival = await two.claim(ME, ask("rival", strict=True), 0)
        with pytest.raises(Conflict):
            await one.claim(ME, ask("twin", strict=True), 0.05)
        await two.complete(ME, rival.index)
        await two.settle(ME, rival.index, used=True)
        await served(two, ME, ask("twin"))
        await server.ask("FLUSHALL")
        order = (one, two) if first == 0 else (two, one)
        for kept in order:
            kept._run("run").part.leave()
            await kept.link.call(scripts.SETTLED, scripts.MEETING, ())
        for kept in order:
            await joined(kept, 1)
        claim = await one.claim(ME, ask("twin", repeat=1), 0)
        assert (claim.index, claim.flags) == (2, ("retry-unmatched",))
