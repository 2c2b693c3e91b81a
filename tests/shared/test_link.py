"""The connection to the store, against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from gateway.core.errors import StoreFault
from gateway.shared.link import Link, Script
from tests.redis_server import Front, RedisServer, linked

ECHO = Script("return ARGV[1]")
COUNT = Script("return redis.call('INCR', KEYS[1])")
BROKEN = Script("return redis.call('NO SUCH COMMAND')")


async def up(link: Link, generation: int = 1) -> None:
    """Wait until the store answers, by this connection or a later one."""
    async with asyncio.timeout(10):
        while link.why_down is not None or link.generation < generation:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_calls_made_together_are_run_in_their_order() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        assert await link.call(ECHO, (), (b"\xff\x00",)) == b"\xff\x00"
        assert await asyncio.gather(*(link.call(COUNT, ("n",), ()) for _ in range(500))) == list(range(1, 501))


async def test_calls_made_together_leave_in_one_write() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        await link.call(COUNT, ("n",), ())
        writes = 0

        def counted(data: bytes) -> None:
            nonlocal writes
            writes += 1
            transport.__class__.write(transport, data)

        assert link._wire is not None
        transport: Any = link._wire._transport

        class Watched:
            write = staticmethod(counted)
            abort = transport.abort

        link._wire._transport = Watched()  # type: ignore[assignment]
        await asyncio.gather(*(link.call(COUNT, ("n",), ()) for _ in range(100)))
        assert writes == 1


async def test_without_a_server_calls_fail_in_bounded_time_and_then_at_once() -> None:
    failed: list[None] = []
    async with RedisServer() as server:
        server.kill()
        async with linked(server.url, 0.2, lambda: failed.append(None)) as link:
            loop = asyncio.get_running_loop()
            for _ in range(3):
                with pytest.raises(StoreFault) as fault:
                    await link.call(ECHO, (), ("x",))
                assert (fault.value.status, fault.value.retry_after) == (503, 1)
            before = loop.time()
            with pytest.raises(StoreFault):
                await link.call(ECHO, (), ("x",))
            assert loop.time() - before < 0.1
            assert len(failed) == 4
            await server.start()
            await up(link)
            assert await link.call(ECHO, (), ("x",)) == b"x"


async def test_a_server_that_stands_still_fails_all_that_wait_and_the_next_connection_serves() -> None:
    async with RedisServer() as server, linked(server.url, 0.3) as link:
        await link.call(ECHO, (), ("x",))
        assert link.generation == 1
        server.freeze()
        outcomes = await asyncio.gather(*(link.call(ECHO, (), ("x",)) for _ in range(50)), return_exceptions=True)
        assert all(isinstance(outcome, StoreFault) for outcome in outcomes)
        assert link.why_down is not None
        server.thaw()
        await up(link)
        assert await link.call(ECHO, (), ("y",)) == b"y"
        assert link.generation == 2


async def test_an_outage_is_two_lines_in_the_log() -> None:
    async with RedisServer() as server, Front(server.port) as front:
        with structlog.testing.capture_logs() as lines:
            async with linked(front.url, 0.2) as link:
                await link.call(ECHO, (), ("x",))
                server.kill()
                front.cut()
                for _ in range(100):
                    with pytest.raises(StoreFault):
                        await link.call(ECHO, (), ("x",))
                await server.start()
                await up(link)
        assert [line["event"] for line in lines] == ["the store does not answer", "the store answers again"]


async def test_a_script_that_fails_fails_its_call_alone() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        bad, good = link.call(BROKEN, (), ()), link.call(ECHO, (), ("x",))
        outcomes = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(outcomes[0], StoreFault)
        assert outcomes[1] == b"x"
        assert link.generation == 1


async def test_scripts_that_the_server_forgot_are_loaded_again() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        await link.call(ECHO, (), ("x",))
        await server.ask("SCRIPT", "FLUSH")
        with pytest.raises(StoreFault):
            await link.call(ECHO, (), ("x",))
        assert await link.call(ECHO, (), ("x",)) == b"x"


async def test_a_primary_that_became_a_replica_is_left() -> None:
    async with RedisServer() as primary, RedisServer() as other, Front(primary.port) as front:
        async with linked(front.url) as link:
            await link.call(COUNT, ("n",), ())
            await primary.ask("REPLICAOF", "127.0.0.1", other.port)
            front.target = other.port
            with pytest.raises(StoreFault):
                await link.call(COUNT, ("n",), ())
            assert await link.call(COUNT, ("n",), ()) == 1


async def test_messages_are_heard_after_a_reconnect_too() -> None:
    async with RedisServer() as server, Front(server.port) as front, linked(front.url) as link:
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        link.subscribe(b"news", heard.put_nowait)
        await link.call(ECHO, (), ("x",))
        await server.ask("PUBLISH", "news", "one")
        assert await heard.get() == b"one"
        front.cut()
        await up(link, 2)
        await link.call(ECHO, (), ("x",))
        await server.ask("PUBLISH", "news", "two")
        assert await heard.get() == b"two"
        link.unsubscribe(b"news", heard.put_nowait)
        await link.call(ECHO, (), ("x",))
        assert await server.ask("PUBLISH", "news", "three") == 0


async def test_a_call_that_nobody_waits_for_keeps_its_place() -> None:
    async with RedisServer() as server, linked(server.url) as link:
        await link.call(COUNT, ("n",), ())
        gone = asyncio.create_task(link.call(COUNT, ("n",), ()))
        await asyncio.sleep(0)
        gone.cancel()
        assert await link.call(COUNT, ("n",), ()) == 3


@pytest.mark.parametrize("right", [True, False])
async def test_a_password_is_sent_and_never_logged(right: bool) -> None:
    async with RedisServer("--user", "gate", "on", ">s-open", "~*", "+@all", "&*") as server:
        word = "s-open" if right else "s-shut"
        with structlog.testing.capture_logs() as lines:
            async with linked(f"redis://gate:{word}@127.0.0.1:{server.port}", 0.3) as link:
                if right:
                    assert await link.call(ECHO, (), ("x",)) == b"x"
                else:
                    with pytest.raises(StoreFault):
                        await link.call(ECHO, (), ("x",))
                    assert "WRONGPASS" in (link.why_down or "")
                said = str(lines) + str(link.address) + repr(link.address) + str(link.why_down)
        assert word not in said
