"""The connection to the store, against a real server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway import stores
from gateway.core.errors import StoreFault
from gateway.settings import InvalidSettings, Settings
from gateway.shared.address import parse
from gateway.shared.link import Link, Script
from tests import ports
from tests.redis_server import Front, RedisServer, linked
from tests.waiting import until

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


REFUSE: dict[str, tuple[list[Any], list[Any]]] = {
    "OOM": (["CONFIG", "SET", "maxmemory", 1], ["CONFIG", "SET", "maxmemory", 0]),
    "NOREPLICAS": (["CONFIG", "SET", "min-replicas-to-write", 1], ["CONFIG", "SET", "min-replicas-to-write", 0]),
    "READONLY": (["REPLICAOF", "127.0.0.1", 1], ["REPLICAOF", "NO", "ONE"]),
    "NOPERM": (["ACL", "SETUSER", "default", "-evalsha"], ["ACL", "SETUSER", "default", "+@all"]),
    "NOPERM of keys": (["ACL", "SETUSER", "default", "resetkeys"], ["ACL", "SETUSER", "default", "allkeys"]),
    "ERR of a command": (["ACL", "SETUSER", "default", "-zadd"], ["ACL", "SETUSER", "default", "+@all"]),
    "ERR of messages": (["ACL", "SETUSER", "default", "resetchannels"], ["ACL", "SETUSER", "default", "allchannels"]),
}
WRITE = Script("return redis.call('ZADD', KEYS[1], ARGV[1], 'x') + redis.call('PUBLISH', KEYS[1], '')")


@pytest.mark.parametrize("kind", REFUSE)
async def test_a_server_that_refuses_scripts_is_down_says_why_and_is_up_when_it_runs_them(kind: str) -> None:
    begin, end = REFUSE[kind]
    word = kind.split()[0]

    async def connections() -> int:
        _, _, told = (await server.ask("INFO", "stats")).partition(b"total_connections_received:")
        return int(told.split()[0])

    async with RedisServer() as server:
        with structlog.testing.capture_logs() as lines:
            async with linked(server.url, 0.3) as link:
                loop = asyncio.get_running_loop()
                await link.call(WRITE, ("z",), (1,))
                await server.ask(*begin)
                before = await connections()
                with pytest.raises(StoreFault, match=rf"refuses what it is asked \({word}\)"):
                    await link.call(WRITE, ("z",), (2,))
                assert (link.why_down or "").startswith(f"refuses what it is asked: {word} ")
                with pytest.raises(StoreFault):
                    await link.call(WRITE, ("z",), (2,))
                since = loop.time()
                for _ in range(50):
                    with pytest.raises(StoreFault):
                        await link.call(WRITE, ("z",), (2,))
                assert loop.time() - since < 0.2
                assert await connections() - before < 10
                await server.ask(*end)
                await up(link)
                assert await link.call(WRITE, ("z",), (2,)) == 0
        assert [line["event"] for line in lines] == ["the store refuses what it is asked", "the store answers again"]
        assert lines[0]["why"].startswith(word)
        assert "script" not in lines[0]["why"].partition("executing the script")[2]


async def test_a_server_that_lets_writes_wait_is_down_until_it_runs_them() -> None:
    async with RedisServer() as server:
        with structlog.testing.capture_logs() as lines:
            async with linked(server.url, 0.3) as link:
                await link.call(WRITE, ("z",), (1,))
                await server.ask("CLIENT", "PAUSE", 60_000, "WRITE")
                for _ in range(5):
                    with pytest.raises(StoreFault, match="does not answer"):
                        await link.call(WRITE, ("z",), (2,))
                assert await server.ask("PING") == b"PONG"
                assert link.generation == 1
                await server.ask("CLIENT", "UNPAUSE")
                await up(link)
                assert await link.call(WRITE, ("z",), (2,)) == 0
        assert [line["event"] for line in lines] == ["the store does not answer", "the store answers again"]


async def test_an_end_is_logged_when_scripts_are_run_and_not_when_a_server_greets() -> None:
    """A server that loads its data greets, and a former primary does."""
    async with RedisServer("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024") as server:
        await server.ask("EVAL", "for i = 1, 500 do redis.call('SET', i, string.rep('x', 100)) end", 0)
        await server.ask("SAVE")
        with structlog.testing.capture_logs() as lines:
            async with linked(server.url, 0.3) as link:
                await link.call(ECHO, (), ("x",))
                server.kill()
                starting = asyncio.create_task(server.start())
                await until(lambda: "LOADING" in (link.why_down or ""))
                await starting
                await up(link, 2)
        assert [line["event"] for line in lines] == ["the store does not answer", "the store answers again"]


async def test_a_call_that_is_refused_alone_breaks_no_other_even_where_it_is_about_messages() -> None:
    user = ("--user", "gate", "on", ">word", "~detgate:*", "~z", "resetchannels", "&detgate:*", "&z", "+@all")
    async with RedisServer(*user) as server, linked(f"redis://gate:word@127.0.0.1:{server.port}") as link:
        await link.call(ECHO, (), ("x",))
        link.subscribe(b"not mine", lambda _: None)
        refused, *others = await asyncio.gather(
            link.call(WRITE, ("not mine",), (1,)),
            *(link.call(ECHO, (), (str(number),)) for number in range(20)),
            return_exceptions=True,
        )
        assert isinstance(refused, StoreFault)
        assert "refuses what it is asked (NOPERM)" in refused.message
        assert others == [b"%d" % number for number in range(20)]
        assert (link.generation, link.why_down) == (1, None)


async def test_a_server_that_may_throw_keys_away_is_warned_of_once() -> None:
    async with RedisServer("--maxmemory-policy", "allkeys-lru") as server, Front(server.port) as front:
        with structlog.testing.capture_logs() as lines:
            async with linked(front.url) as link:
                for generation in (1, 2):
                    await up(link, generation)
                    assert link.policy == "allkeys-lru"
                    front.cut()
                await up(link, 3)
                await server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
                front.cut()
                await up(link, 4)
                assert link.policy == "noeviction"
        warned = [line for line in lines if line["event"] == "the store may throw keys of a run away"]
        assert [(line["policy"], line["log_level"]) for line in warned] == [("allkeys-lru", "warning")]


async def test_what_a_server_refuses_is_told_without_the_words_that_it_was_sent() -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `default`, `s-open`, \r\n")
        writer.close()

    server = await asyncio.start_server(old, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with structlog.testing.capture_logs() as lines:
        async with server, linked(f"redis://:s-open@127.0.0.1:{port}", 0.3) as link:
            with pytest.raises(StoreFault):
                await link.call(ECHO, (), ("x",))
            assert link.why_down == "refuses what it is asked: ERR unknown command `HELLO`"
    assert "s-open" not in str(lines)


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


async def test_who_cannot_take_in_a_message_or_a_connection_breaks_neither() -> None:
    async with RedisServer() as server, Front(server.port) as front, linked(front.url) as link:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        def fails(*_: bytes) -> None:
            raise OverflowError

        link.connected.append(fails)
        link.subscribe(b"news", fails)
        link.subscribe(b"news", heard.put_nowait)
        await link.call(ECHO, (), ("x",))
        for word in (b"one", b"two"):
            await server.ask("PUBLISH", "news", word)
            assert await heard.get() == word
        assert (link.generation, link.why_down) == (1, None)
        front.cut()
        await up(link, 2)
        assert await link.call(ECHO, (), ("x",)) == b"x"


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


@pytest.mark.parametrize("trusted", [True, False])
async def test_tls_is_spoken_with_a_server_that_is_known(trusted: bool) -> None:
    folder = Path(__file__).parent / "tls"
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    port = ports.free()
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    async with RedisServer("--tls-port", str(port), *files, "--tls-auth-clients", "no"):
        option = f"?ssl_ca_certs={certificate}" if trusted else ""
        async with linked(f"rediss://127.0.0.1:{port}/0{option}", 1.0) as link:
            if trusted:
                assert await link.call(ECHO, (), ("x",)) == b"x"
            else:
                with pytest.raises(StoreFault):
                    await link.call(ECHO, (), ("x",))
                assert "certificate verify failed" in (link.why_down or "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/x", "the database is no number"),
        ("redis://:s-1@h?colour=red", "colour is no option"),
        ("redis://h?ssl_ca_certs=f", "ssl_ options need rediss://"),
        ("rediss://h?ssl_ca_certs=/none", "a certificate cannot be read"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_secrets(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        parse(url)
    assert "s-1" not in str(refused.value)


def test_a_url_tells_where_and_who() -> None:
    address = parse("redis://me:p%40ss@[::1]:7000/3")
    assert (address.host, address.port, address.db, address.username, address.password) == (
        "::1",
        7000,
        3,
        "me",
        "p@ss",
    )
    assert str(address) == "[::1]:7000/3"
    assert parse("redis://h?password=q").password == "q"


def test_without_its_package_the_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hiredis", None)
    for name in [name for name in sys.modules if name.startswith(("gateway.shared", "gateway.stores.redis"))]:
        monkeypatch.delitem(sys.modules, name)
    settings = Settings.load(None, {}, {"run": "r", "state": "redis://h"})
    with pytest.raises(InvalidSettings, match=r"needs the package hiredis.*pip install 'detgate\[redis\]'"):
        stores.build(settings, lambda: None)
