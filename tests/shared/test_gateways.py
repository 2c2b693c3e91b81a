"""Several gateways on one store: one counter, whatever happens to the store or to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.errors import StoreFault
from gateway.core.indexing import Ask
from gateway.settings import InvalidSettings
from gateway.stores import ScopeKey
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool
from tests.redis_server import Front, RedisServer
from tests.stores.redis import store
from tests.waiting import until

CHAT = "/v1/chat/completions"
SLOW = {"gateway": 2.0, "store": 0.5, "settle": 0.5}
SHORT = {"gateway": 2.0, "store": 1.0, "settle": 0.5}


async def ask(gate: Gate, text: str = "hello", session: str = "s", **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gate.http.post(CHAT, json=chat(text), headers={"X-Session-ID": session, **given})


def index(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-detgate-index"])


@asynccontextmanager
async def gateways(number: int, url: str, worker: FakeWorker, **settings: Any) -> AsyncIterator[list[Gate]]:
    """Gateways of one run, ready, each with a ledger of its own."""
    given: dict[str, Any] = {"run": "r", "state": url, "timeouts": SHORT} | settings
    async with AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(gateway(pool("policy", worker.url), **given)) for _ in range(number)]
        for gate in gates:
            await ready(gate)
        yield gates


async def ready(gate: Gate, status: int = 200, words: str = "") -> dict[str, Any]:
    """Wait until it says that it is, or is not, and why."""
    async with asyncio.timeout(20):
        while True:
            answer = await gate.http.get("/readyz")
            told: dict[str, Any] = answer.json()
            if answer.status_code == status and words in str(told["why"]):
                return told
            await asyncio.sleep(0.01)


class Held:
    """A worker's script that answers when it is let."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        await self.go.wait()
        reply.json(completion())


async def test_gateways_share_one_counter_and_say_which_of_them_it_was() -> None:
    async with RedisServer() as server, FakeWorker() as worker, gateways(2, server.url, worker) as (one, two):
        assert [index(await ask(gate, str(number))) for number, gate in enumerate([one, two, one, two])] == [0, 1, 2, 3]
        opened = [record for record in one.records() if record["event"] == "opened"]
        assert [(record["index"], record["epoch"]) for record in opened] == [(0, 0), (2, 0)]
        others = [record for record in two.records() if record["event"] == "opened"]
        assert opened[0]["gateway"] != others[0]["gateway"]


async def test_at_once_through_many_gateways_no_index_is_given_twice() -> None:
    async with RedisServer() as server, FakeWorker() as worker, gateways(3, server.url, worker) as gates:
        answers = await asyncio.gather(*(ask(gates[number % 3], f"text {number}") for number in range(90)))
        assert sorted(map(index, answers)) == list(range(90))


async def test_a_retry_at_another_gateway_keeps_index_and_seed() -> None:
    failing = True

    async def script(seen: Seen, reply: Reply) -> None:
        if failing:
            reply.json({"error": {"message": "no", "type": "x", "code": "x", "param": None}}, 500)
        else:
            reply.json(completion())

    async with RedisServer() as server, FakeWorker(script) as worker, gateways(2, server.url, worker) as (one, two):
        first = await ask(one)
        assert first.status_code == 500
        failing = False
        second = await ask(two, X_Stainless_Retry_Count="1")
        names = ("x-detgate-index", "x-detgate-seed", "x-detgate-request-id")
        assert [first.headers[name] for name in names] == [second.headers[name] for name in names]


@pytest.mark.parametrize("deaf", [False, True])
async def test_in_strict_who_races_at_another_gateway_waits_and_is_woken(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not deaf:
        monkeypatch.setattr("gateway.stores.redis.POLL", 1000.0)
    held = Held()
    async with RedisServer() as server, FakeWorker(held) as worker:
        timeouts = SHORT | {"settle": 30.0}
        async with gateways(2, server.url, worker, profile="strict", timeouts=timeouts) as (one, two):
            if deaf:  # a message that is lost costs time, and nothing else
                for gate in (one, two):
                    kept: Any = gate.gateway._store
                    kept.link._wire._hear = lambda message: None
            first = asyncio.create_task(ask(one, "first"))
            await one.until(lambda: len(worker.seen) == 1)
            second = asyncio.create_task(ask(two, "second"))
            store: Any = two.gateway._store
            await two.until(lambda: store._runs["r"].waiting == 1)
            held.go.set()
            assert index(await first) == 0
            answer = await second
            assert index(answer) == 1
            assert "racing" in answer.headers["x-detgate-guarantee"]


async def test_a_store_that_is_down_at_the_start_is_waited_for() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        server.kill()
        async with gateway(pool("policy", worker.url), run="r", state=server.url, timeouts=SHORT) as gate:
            assert (await gate.http.get("/livez")).status_code == 200
            told = await ready(gate, 503)
            assert "the store does not answer" in told["why"][0]
            refused = await ask(gate)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert refused.headers["retry-after"] == "1"
            assert await gate.gauge("detgate_store_errors_total") >= 1
            await server.start()
            await ready(gate)
            assert index(await ask(gate)) == 0


async def test_a_store_that_stands_still_is_refused_in_bounded_time_and_gives_no_index_twice() -> None:
    async with (
        RedisServer() as server,
        FakeWorker() as worker,
        gateways(2, server.url, worker, timeouts=SLOW) as gates,
    ):
        loop = asyncio.get_running_loop()
        got: list[int] = []
        refusals = 0

        async def client(number: int) -> None:
            nonlocal refusals
            for turn in range(30):
                before = loop.time()
                answer = await ask(gates[(number + turn) % 2], f"{number} {turn}")
                assert loop.time() - before < 5
                if answer.status_code == 200:
                    got.append(index(answer))
                else:
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                    refusals += 1
                    await asyncio.sleep(0.05)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await gates[0].until(lambda: len(got) > 40)
        server.freeze()
        await gates[0].until(lambda: refusals > 8, 10)
        server.thaw()
        await asyncio.gather(*clients)
        assert len(set(got)) == len(got)
        for gate in gates:
            await ready(gate)
            store: Any = gate.gateway._store
            await gate.until(lambda store=store: store.owed == 0)  # type: ignore[misc]
            assert await gate.gauge("detgate_store_owed") == 0
        after = await ask(gates[0], "after")
        assert "racing" not in after.headers["x-detgate-guarantee"]
        assert index(after) not in got


async def test_a_claim_whose_answer_is_lost_loses_no_index() -> None:
    async with RedisServer() as server, Front(server.port) as front, FakeWorker() as worker:
        async with gateways(1, front.url, worker) as (gate,):
            assert index(await ask(gate, "a")) == 0
            front.lose = b'["s","s"]'
            assert index(await ask(gate, "b")) == 1
            assert front.lose is None
            assert index(await ask(gate, "c")) == 2
            kept: Any = gate.gateway._store
            await gate.until(lambda: kept.owed == 0)


async def test_a_store_that_refuses_to_write_is_asked_now_and_then_and_in_bounded_time() -> None:
    async with RedisServer() as server, store(server.url, seconds=1.0) as kept:
        key, loop = ScopeKey("r", "s", "s"), asyncio.get_running_loop()
        first = await kept.claim(key, Ask("arrival", b"x" * 16), 1.0)
        await kept.complete(key, first.index)
        await kept.settle(key, first.index, used=True)

        async def commands() -> int:
            _, _, told = (await server.ask("INFO", "stats")).partition(b"total_commands_processed:")
            return int(told.split()[0])

        await server.ask("CONFIG", "SET", "maxmemory", 1)
        before, since = await commands(), loop.time()
        with pytest.raises(StoreFault):
            await kept.claim(key, Ask("arrival", b"y" * 16), 1.0)
        assert 0.9 < loop.time() - since < 1.5
        since = loop.time()
        for _ in range(20):
            with pytest.raises(StoreFault):
                await kept.claim(key, Ask("arrival", b"y" * 16), 1.0)
        assert loop.time() - since < 0.2
        assert await commands() - before < 500
        assert (kept.why_down("r") or "").startswith("the store refuses what it is asked: OOM")
        await server.ask("CONFIG", "SET", "maxmemory", 0)
        await until(lambda: kept.why_down("r") is None)
        assert (await kept.claim(key, Ask("arrival", b"y" * 16), 1.0)).index == 1
        await until(lambda: kept.owed == 0)


async def test_while_its_scripts_are_refused_a_gateway_is_not_ready_and_is_again_when_they_are_run() -> None:
    async with RedisServer() as server, FakeWorker() as worker, gateways(1, server.url, worker) as (gate,):
        assert index(await ask(gate, "a")) == 0
        await server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
        # Nobody asks anything: the gateway finds out by itself.
        told = await ready(gate, 503, "the store refuses what it is asked: NOREPLICAS")
        assert len(told["why"]) == 1
        refused = await ask(gate, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "(NOREPLICAS)" in refused.json()["error"]["message"]
        await server.ask("CONFIG", "SET", "min-replicas-to-write", 0)
        await ready(gate)
        assert index(await ask(gate, "b")) == 1


async def test_a_run_whose_keys_alone_are_refused_is_not_served_and_others_are() -> None:
    async with RedisServer() as server, FakeWorker() as worker, gateways(1, server.url, worker) as (gate,):
        assert index(await ask(gate, "a")) == 0
        assert index(await ask(gate, "a", X_Detgate_Run="other")) == 0
        keys = ("~detgate:{other}:*", "~detgate:server", "~detgate:trial")
        await server.ask("ACL", "SETUSER", "default", "resetkeys", *keys)
        await ready(gate, 503, "refuses what it is asked (NOPERM)")
        loop = asyncio.get_running_loop()
        since = loop.time()
        refused = await ask(gate, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert loop.time() - since < SHORT["store"] / 2
        assert index(await ask(gate, "b", X_Detgate_Run="other")) == 1
        await server.ask("ACL", "SETUSER", "default", "allkeys")
        await ready(gate)
        assert index(await ask(gate, "b")) == 1


async def test_keys_that_a_server_throws_away_are_told_of() -> None:
    async with RedisServer() as server, FakeWorker() as worker, gateways(1, server.url, worker) as (gate,):
        assert (await ready(gate))["warnings"] == []
        await server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
        for number in range(100):
            await server.ask("SET", f"tenant:{number}", b"x" * 10_000, "EX", 10)
        used = (await server.ask("INFO", "memory")).partition(b"used_memory:")[2].split()[0]
        await server.ask("CONFIG", "SET", "maxmemory", int(used) - 100_000)
        link = gate.gateway._store.link  # type: ignore[attr-defined]
        await until(lambda: link.evicted > 0)
        assert "maybe of a run" in str((await ready(gate))["warnings"])
        link._wire.drop("the test wants it")
        await until(lambda: link.generation == 2)
        assert "maxmemory-policy volatile-ttl" in str((await ready(gate))["warnings"])


async def test_the_user_of_the_guide_may_all_that_a_gateway_does() -> None:
    guide = Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"
    words = next(line for line in guide.read_text().splitlines() if line.startswith("ACL SETUSER")).split()
    async with RedisServer() as server, FakeWorker() as worker:
        await server.ask(*words)
        url = server.url.replace("//", "//gateway:password@")
        async with gateways(2, url, worker, sessions={"weights": "hold"}) as (one, two):
            assert [index(await ask(gate, "a")) for gate in (one, two)] == [0, 1]
            made = (await one.http.post("/sessions", json={"identity": "e"})).json()
            key = {"Authorization": f"Bearer {made['api_key']}"}
            assert (await two.http.post(CHAT, json=chat("x"), headers=key)).status_code == 200
            assert (await two.http.post("/admin/weights", json={"version": "w1"})).status_code == 200
            assert (await one.http.delete("/sessions/e")).status_code == 200
        denied = [entry[entry.index(b"object") + 1] for entry in await server.ask("ACL", "LOG")]
        assert denied == []


async def test_settings_that_decide_are_kept_with_the_run() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(1, server.url, worker) as (one,):
            assert index(await ask(one)) == 0
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), seed=43, scheme="areal", **given) as other:
            await ready(other, 503, "other settings: scheme, seed")
            refused = await ask(other)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "run_differs")
            assert "scheme, seed" in refused.json()["error"]["message"]


async def test_a_run_is_joined_and_goes_on_where_it_was() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(1, server.url, worker) as (one,):
            assert index(await ask(one, "a")) == 0
        async with gateways(1, server.url, worker) as (two,):
            assert index(await ask(two, "b")) == 1
            assert index(await ask(two, "b", X_Detgate_Run="other")) == 0


async def ends(server: RedisServer) -> dict[str, int]:
    """When each key of the run ends, but for the word that it is over."""
    keys = [name.decode() for name in await server.ask("KEYS", "detgate:{r}:*")]
    told = {name.removeprefix("detgate:{r}:"): await server.ask("PEXPIRETIME", name) for name in keys}
    assert told.pop("over") > max(told.values())
    return told


async def test_all_keys_of_a_run_end_together_whatever_its_sessions_do() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(1, server.url, worker, timeouts=SHORT | {"run": 60.0}) as (gate,):
            assert index(await ask(gate)) == 0
            made = (await gate.http.post("/sessions", json={"identity": "e"})).json()
            key = {"Authorization": f"Bearer {made['api_key']}"}
            assert (await gate.http.post(CHAT, json=chat("x"), headers=key)).status_code == 200
            assert (await gate.http.post("/rl/set_reward", json={"reward": 1.0}, headers=key)).status_code == 200
            first = await ends(server)
            assert {"state", "released", "sessions:all", "sessions:about", "sessions:idle"} <= first.keys()
            assert len(set(first.values())) == 1, first

            sessions: Any = gate.gateway.sessions
            sessions._touch(sessions._sessions["r", "e"])
            await sessions._sweep("r", 100)
            await sessions.prepared("r", b"sk-other")
            assert await ends(server) == first

            await server.ask("HSET", "detgate:{r}:state", "@until", 1)  # as if much time had passed
            assert (await gate.http.post("/sessions", json={"identity": "f"})).status_code == 201
            second = await ends(server)
            about_all = {name: end for name, end in second.items() if not name.startswith("session:")}
            assert len(set(about_all.values())) == 1
            assert second["state"] > first["state"]


async def test_a_run_that_was_idle_for_too_long_is_gone() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(1, server.url, worker, timeouts=SHORT | {"run": 60.0}) as (gate,):
            assert index(await ask(gate)) == 0
            made = (await gate.http.post("/sessions", json={"identity": "e"})).json()
            for name in await ends(server):  # as if that time had passed
                await server.ask("DEL", "detgate:{r}:" + name)
            await server.ask("SET", "detgate:{r}:over", 1)
            answer = await ask(gate)
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "run_gone")
            assert answer.headers["x-should-retry"] == "false"
            for again in ("e", "f"):
                answer = await gate.http.post("/sessions", json={"identity": again})
                assert (answer.status_code, answer.json()["error"]["code"]) == (410, "run_gone")
            key = {"Authorization": f"Bearer {made['api_key']}"}
            assert (await gate.http.post(CHAT, json=chat("x"), headers=key)).status_code == 410
            assert await server.ask("KEYS", "detgate:{r}:*") == [b"detgate:{r}:over"]
            await ready(gate, 503, "had no request for so long")
        given: dict[str, Any] = {"run": "r", "state": server.url, "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), **given) as late:
            await ready(late, 503, "had no request for so long")
            answer = await late.http.post("/sessions", json={"identity": "g"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "run_gone")


async def test_what_a_dead_gateway_had_in_flight_is_released_by_whoever_notices() -> None:
    held = Held()
    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        given: dict[str, Any] = {"run": "r", "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), state=front.url, **given) as doomed:
            await ready(doomed)
            async with gateways(1, server.url, worker) as (other,):
                lost = asyncio.create_task(ask(doomed, "x"))
                await doomed.until(lambda: len(worker.seen) == 1)
                front.close()  # as far as the others can tell, it is dead
                await other.until(lambda: any("gateway-lost" in str(record) for record in other.records()), 10)
                record = next(record for record in other.records() if record.get("error") == "gateway-lost")
                assert (record["index"], record["outcome"], record["used"]) == (0, "failed", False)
                held.go.set()
                assert index(await ask(other, "x")) == 0
                answer = await lost  # the store cannot be asked whether it is its own yet
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_session_whose_last_request_died_with_its_gateway_has_failed() -> None:
    held = Held()
    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        given: dict[str, Any] = {"run": "r", "timeouts": SHORT}
        async with gateway(pool("policy", worker.url), state=front.url, **given) as doomed:
            await ready(doomed)
            async with gateways(1, server.url, worker) as (other,):
                keys = {}
                for name in ("last", "again", "later"):
                    keys[name] = (await other.http.post("/sessions", json={"identity": name})).json()["api_key"]

                def asking(gate: Gate, name: str, text: str = "x") -> asyncio.Task[Any]:
                    headers = {"authorization": f"Bearer {keys[name]}"}
                    path = "/v1/chat/completions"
                    return asyncio.create_task(gate.http.post(path, json=chat(text), headers=headers))

                lost = [asking(doomed, name) for name in keys]
                await doomed.until(lambda: len(worker.seen) == len(keys))
                front.close()
                after = asking(other, "later", "y")
                await other.until(lambda: len(worker.seen) == len(keys) + 1)
                held.go.set()
                assert (await after).status_code == 200
                await other.until(lambda: sum("gateway-lost" in str(record) for record in other.records()) == 3, 10)
                assert (await asking(other, "again")).status_code == 200
                told = {name: (await other.http.delete(f"/sessions/{name}")).json() for name in keys}
                assert {name: each["state"] for name, each in told.items()} == {
                    "last": "failed",
                    "again": "ended",
                    "later": "ended",
                }
                assert told["last"]["why"] == "its last request was not delivered: gateway-lost"
                await asyncio.gather(*lost)


async def test_a_run_must_be_named() -> None:
    with pytest.raises(InvalidSettings, match="run: a name is needed with redis"):
        async with gateway(pool("policy", "http://127.0.0.1:1"), state="redis://127.0.0.1:1"):
            pass


async def test_a_url_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="state: the database is no number") as refused:
        async with gateway(pool("policy", "http://127.0.0.1:1"), run="r", state="redis://:s-1@127.0.0.1:1/x"):
            pass
    assert "s-1" not in str(refused.value)


async def failing_on_demand(seen: Seen, reply: Reply) -> None:
    """Fails where the prompt says so."""
    if "fail" in seen.body.decode():
        reply.json({"error": {"message": "no", "type": "x", "code": "x", "param": None}}, 500)
    else:
        reply.json(completion())


async def test_what_a_store_forgot_while_nobody_served_the_ledger_tells(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker(failing_on_demand) as worker:
        kept = {"ledger": {"path": str(tmp_path)}}
        async with gateways(1, server.url, worker, **kept) as (one,):
            assert index(await ask(one, "a")) == 0
            failed = await ask(one, "fail")
            assert (failed.status_code, failed.headers["x-detgate-index"]) == (500, "1")
            assert index(await ask(one, "b", Idempotency_Key="K")) == 2
        await server.ask("FLUSHALL")
        async with gateways(1, server.url, worker, **kept) as (two,):
            answer = await ask(two, "c", session="other")
            assert index(answer) == 0
            assert index(await ask(two, "b", Idempotency_Key="K")) == 2
            again = await ask(two, "fail")
            assert again.headers["x-detgate-index"] == "1"
            assert index(await ask(two, "c")) == 3
            records = [record for record in two.records() if record["event"] == "opened"]
            assert [record["epoch"] for record in records] == [0, 0, 0, 1, 1, 1, 1]


async def test_who_shares_the_ledger_tells_for_those_that_have_left(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        kept = {"ledger": {"path": str(tmp_path)}, "profile": "strict"}
        async with gateways(1, server.url, worker, **kept) as (one,):
            async with gateways(1, server.url, worker, **kept) as (two,):
                assert index(await ask(one, "a")) == 0
                assert index(await ask(two, "b")) == 1
                store: Any = one.gateway._store
                await one.until(lambda: len(store._run("r").part.peers) == 2)
            await server.ask("FLUSHALL")
            assert index(await ask(one, "c")) == 2
            assert await server.ask("SCARD", "detgate:{r}:missing") == 0


async def test_what_is_no_more_in_memory_the_ledger_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.stores.redis.RECENT", 3)
    held = Held()

    async def script(seen: Seen, reply: Reply) -> None:
        if "held" in seen.body.decode():
            await held(seen, reply)
        else:
            await failing_on_demand(seen, reply)

    async with RedisServer() as server, FakeWorker(script) as worker, gateways(1, server.url, worker) as (gate,):
        assert index(await ask(gate, "a")) == 0
        assert (await ask(gate, "fail")).status_code == 500
        assert index(await ask(gate, "b", Idempotency_Key="K")) == 2
        live = asyncio.create_task(ask(gate, "held"))
        await gate.until(lambda: any("held" in seen.body.decode() for seen in worker.seen))
        await server.ask("FLUSHALL")
        after = await ask(gate, "c")
        assert index(after) == 4
        assert "racing" in after.headers["x-detgate-guarantee"]
        assert index(await ask(gate, "b", Idempotency_Key="K")) == 2
        held.go.set()
        answer = await live
        assert index(answer) == 3
        assert "racing" in answer.headers["x-detgate-guarantee"]
        assert (await ask(gate, "fail")).headers["x-detgate-index"] == "1"
        assert index(await ask(gate, "held")) == 5
