"""The simulated store is held to a real one: the same commands and the same scripts, and the same comes of them."""

from __future__ import annotations

import random
import re
from typing import Any

import hiredis
import pytest

from gateway.shared import lanes, scripts
from tests.redis_server import RedisServer
from tests.simulate.keyspace import Keyspace, Refused
from tests.simulate.server import scripts as interpreter

FAR = 4_000_000_000_000
UNORDERED = ("HKEYS", "HVALS", "SMEMBERS")

SHAPES = """
    DEL k|EXISTS k|EXISTS k k|RENAME k k|PEXPIREAT k t|GET k|SET k v|SET k v EX 100|SET k v PX 100000|INCR k|HSET k f v
    HSET k f v f v|HSETNX k f v|HGET k f|HMGET k f f|HEXISTS k f|HDEL k f|HDEL k f f|HLEN k|HKEYS k|HVALS k|HGETALL k
    HINCRBY k f i|HSCAN k 0 COUNT 100|SADD k v|SADD k v v|SREM k v|SCARD k|SMEMBERS k|ZADD k s v|ZADD k s v s v
    ZADD k XX s v|ZREM k v|ZSCORE k v|ZRANGE k 0 -1|ZRANGE k i i|ZRANGEBYSCORE k -inf (s|ZRANGEBYSCORE k s s
    ZRANGEBYSCORE k -inf s LIMIT 0 2|ZPOPMIN k|ZADD z 0 v|ZRANGEBYLEX z [v [v LIMIT 0 1|ZRANGEBYLEX z [v (v|ZREM z v
    RPUSH k v|LPOP k|LLEN k|XADD k MAXLEN ~ 10000 n-0 e v|XRANGE k n-0 + COUNT 3|XRANGE k - +|PUBLISH c v|NONSENSE k
"""


def _words(shape: str, chance: random.Random) -> list[bytes]:
    made = {
        "k": lambda: f"k{chance.randrange(5)}",
        "f": lambda: f"f{chance.randrange(4)}",
        "v": lambda: chance.choice(["", "a", "b", "ab", "7", "-3", "\x00b"]),
        "s": lambda: chance.choice(["0", "1", "2.5", "-1", "1800000000123"]),
        "i": lambda: str(chance.randint(-3, 4)),
        "t": lambda: str(chance.choice([FAR, FAR, 1])),
        "n": lambda: str(chance.randint(1, 6)),
    }
    first, *words = shape.split()
    return [first.encode()] + [
        re.sub(r"(?<![A-Za-z])[kfvsitn](?![A-Za-z])", lambda found: made[found[0]](), word).encode() for word in words
    ]


def _like(name: bytes, reply: Any) -> Any:
    """A reply, but for an order that nobody promises."""
    if name.decode() in UNORDERED and isinstance(reply, list):
        return sorted(reply)
    if name == b"HGETALL" and isinstance(reply, list):
        return sorted(zip(reply[::2], reply[1::2], strict=True))
    if name == b"HSCAN" and isinstance(reply, list):
        return _like(b"HGETALL", reply[1])
    return reply


class Both:
    """A real server and a simulated one, asked the same."""

    def __init__(self, server: RedisServer, keyspace: Keyspace) -> None:
        self._server, self._keyspace = server, keyspace

    async def run(self, source: str, keys: list[bytes], args: list[bytes]) -> tuple[Any, Any]:
        """What a script gives on the one and on the other."""
        try:
            real: Any = await self._server.ask("EVAL", source, len(keys), *keys, *args)
        except hiredis.ReplyError as error:
            real = _kind(str(error))
        try:
            simulated = interpreter().run(source.encode(), self._keyspace, keys, args)
        except Refused as error:
            simulated = _kind(str(error))
        return real, simulated


def _kind(error: str) -> str:
    return "WRONGTYPE" if "WRONGTYPE" in error else "ERR"


async def _both(server: RedisServer) -> Both:
    info = {name: (await server.ask("INFO", name)).decode() for name in ("server", "replication")}
    seconds, micros = map(int, await server.ask("TIME"))
    return Both(server, Keyspace(lambda: seconds * 1_000_000 + micros, lambda channel, message: 0, info))


@pytest.mark.parametrize("seed", range(3))
async def test_every_command_gives_what_a_real_server_gives(seed: int) -> None:
    chance = random.Random(seed)
    shapes = [shape.strip() for line in SHAPES.splitlines() for shape in line.split("|") if shape.strip()]
    async with RedisServer() as server:
        both = await _both(server)
        for _ in range(500):
            if chance.random() < 0.02:
                await both.run("return redis.call('FLUSHALL')", [], [])
            words = _words(chance.choice(shapes), chance)
            # What begins with a number may have been of another kind before: mostly it was not.
            if len(words) > 1 and chance.random() < 0.85:
                words[1] = re.sub(rb"^k\d$", b"k" + words[0][:1].lower(), words[1])
            real, simulated = await both.run("return redis.call(unpack(ARGV))", [], words)
            assert _like(words[0], simulated) == _like(words[0], real), words


@pytest.mark.parametrize("seed", range(3))
async def test_the_scripts_give_what_they_give_on_a_real_server(seed: int) -> None:
    """Claims and lanes of two gateways, at random."""
    chance = random.Random(seed)
    async with RedisServer() as server:
        both = await _both(server)
        tokens: list[tuple[str, int]] = []
        places: list[bytes] = []

        async def same(source: str, keys: Any, *args: Any) -> Any:
            words = [each if isinstance(each, bytes) else str(each).encode() for each in args]
            real, simulated = await both.run(source, list(keys), words)
            assert simulated == real, words[:3]
            return real

        for gateway in ("a", "b"):
            told = ("{}", -1, "", "", 60000, 0, 3_600_000, 1)
            real, simulated = await both.run(
                scripts.TAKE_PART.source,
                list(scripts.keys("r", gateway)),
                [str(each).encode() for each in (gateway, 1, *told)],
            )
            assert (real[0], simulated[0], simulated[1]) == (b"open", b"open", real[1])
            await same(lanes.SCRIPT.source, [b"l:"], "enrol", gateway, 1, 60000, 2, 1, 0, 0)
        for number in range(250):
            gateway = chance.choice(["a", "b"])
            keys = scripts.keys("r", gateway)
            match chance.choice(["claim", "claim", "claim", "complete", "settle", "look", "join", "join", "leave"]):
                case "claim":
                    scope = b"scope-of-16-byte" if chance.random() < 0.8 else b"other-of-16-byte"
                    raw = b"bytes-of-16-byt%d" % chance.randrange(4)
                    key = chance.choice([b"", b"", b"k1", b"k2"])
                    reply = await same(
                        scripts.CLAIM.source, keys, gateway, "1:0", number, scope, b"session-of-16-by", "a", raw,
                        raw.hex(), "", key, chance.choice([0, 0, 1, 2]), chance.choice([0, 1, 4, 8]), b'["s","s"]',
                        3_600_000,
                    )  # fmt: skip
                    if reply[0] == b"index":
                        tokens.append((gateway, number))
                case "complete" | "settle" as what if tokens:
                    gateway, token = chance.choice(tokens)
                    keys = scripts.keys("r", gateway)
                    if what == "complete":
                        await same(scripts.COMPLETE.source, keys, gateway, "1:0", number, token)
                    else:
                        tokens.remove((gateway, token))
                        used = chance.choice([0, 1])
                        await same(scripts.SETTLE.source, keys, gateway, "1:0", number, token, used, b"", "", b"")
                case "look":
                    await same(scripts.LOOK.source, keys[:1], b"session-of-16-by", b"scope-of-16-byte")
                case "join":
                    place = f"{gateway}:{number}".encode()
                    places.append(place)
                    rank = chance.randbytes(3)
                    await same(
                        lanes.SCRIPT.source, [b"l:"], "join", gateway, 1, 60000, 2, 1, 5, "r-0", rank, "r-0", place
                    )
                case "leave" if places:
                    place = places.pop(chance.randrange(len(places)))
                    owner = place[:1].decode()
                    await same(lanes.SCRIPT.source, [b"l:"], "leave", owner, 1, 60000, 2, 1, "r-0", place, 0)
                    await same(lanes.SCRIPT.source, [b"l:"], "tally", owner, 1, 60000, 2, 1, "r-0", "r-0")
        for gateway in ("a", "b"):
            await same(scripts.LEAVE.source, scripts.keys("r", gateway), gateway, "1:0")
        state = "return redis.call('HGETALL', KEYS[1])"
        ends = [_like(b"HGETALL", each) for each in await both.run(state, [scripts.keys("r", "")[0]], [])]
        real, simulated = ([pair for pair in end if not re.match(rb"@(memory|until)", pair[0])] for end in ends)
        assert simulated == real
