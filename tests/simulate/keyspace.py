"""What a Redis server keeps, as far as the gateway's scripts use it. Held to a real one by test_keyspace.py.

Each command takes bytes and gives what the server would: bytes, int, None, a list, or `OK`. What it does not know it
refuses, so that nobody takes it for more than it is.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Any

WRONG_KIND = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Refused(Exception):
    """The server's error reply."""


class Status(bytes):
    """A reply that is no value."""


OK = Status(b"OK")


class Sorted:
    """A sorted set."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def __bool__(self) -> bool:
        return bool(self.scores)

    def add(self, member: bytes, score: float) -> int:
        before = self.scores.get(member)
        if before == score:
            return 0
        if before is not None:
            self.order.pop(bisect_left(self.order, (before, member)))
        self.scores[member] = score
        insort(self.order, (score, member))
        return int(before is None)

    def remove(self, member: bytes) -> int:
        score = self.scores.pop(member, None)
        if score is None:
            return 0
        self.order.pop(bisect_left(self.order, (score, member)))
        return 1


class Stream:
    """Entries by their ids, the last given id kept."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[int, int], list[bytes]]] = []
        self.last = (0, 0)

    def __bool__(self) -> bool:
        return True


class Keyspace:
    """One database. `clock` gives its time in microseconds; `publish` is given each message."""

    def __init__(self, clock: Callable[[], int], publish: Callable[[bytes, bytes], int], info: dict[str, str]) -> None:
        self._clock = clock
        self._publish = publish
        self.info = info
        """What INFO tells, by section."""
        self.data: dict[bytes, Any] = {}
        self.ends: dict[bytes, int] = {}
        """When a key ends, in milliseconds."""

    def copied(self) -> tuple[dict[bytes, Any], dict[bytes, int]]:
        """All that it keeps, as it is now."""
        return copy.deepcopy(self.data), dict(self.ends)

    def run(self, name: bytes, *args: bytes) -> Any:
        """One command. Raises `Refused`."""
        command = _COMMANDS.get(name.upper())
        if command is None:
            raise Refused(f"ERR unknown command '{name.decode()}'")
        try:
            return command(self, *args)
        except TypeError as error:
            raise Refused(f"ERR wrong number of arguments for '{name.decode().lower()}' command ({error})") from error

    # --- keys
    @property
    def now_ms(self) -> int:
        return self._clock() // 1000

    def _get(self, key: bytes, kind: type) -> Any:
        end = self.ends.get(key)
        if end is not None and end <= self.now_ms:
            self._drop(key)
        value = self.data.get(key)
        if value is not None and type(value) is not kind:
            raise Refused(WRONG_KIND)
        return value

    def _own(self, key: bytes, kind: type) -> Any:
        value = self._get(key, kind)
        if value is None:
            value = self.data[key] = kind()
        return value

    def _has(self, key: bytes) -> bool:
        end = self.ends.get(key)
        if end is not None and end <= self.now_ms:
            self._drop(key)
        return key in self.data

    def _drop(self, key: bytes) -> None:
        self.data.pop(key, None)
        self.ends.pop(key, None)

    def _tidy(self, key: bytes, value: Any) -> None:
        """A collection without members is no key."""
        if not value:
            self._drop(key)

    def delete(self, *keys: bytes) -> int:
        found = [key for key in dict.fromkeys(keys) if self._has(key)]
        for key in found:
            self._drop(key)
        return len(found)

    def exists(self, *keys: bytes) -> int:
        return sum(self._has(key) for key in keys)

    def rename(self, key: bytes, new: bytes) -> Status:
        if not self._has(key):
            raise Refused("ERR no such key")
        value, end = self.data.pop(key), self.ends.pop(key, None)
        self._drop(new)
        self.data[new] = value
        if end is not None:
            self.ends[new] = end
        return OK

    def pexpireat(self, key: bytes, at: bytes) -> int:
        if not self._has(key):
            return 0
        self.ends[key] = _whole(at)
        self._has(key)
        return 1

    def pexpire(self, key: bytes, ms: bytes) -> int:
        return self.pexpireat(key, b"%d" % (self.now_ms + _whole(ms)))

    def pttl(self, key: bytes) -> int:
        if not self._has(key):
            return -2
        return self.ends[key] - self.now_ms if key in self.ends else -1

    # --- texts
    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._get(key, bytes)
        return value

    def set(self, key: bytes, value: bytes, *options: bytes) -> Status:
        self._drop(key)
        self.data[key] = value
        if options:
            unit, number = options
            self.ends[key] = self.now_ms + _whole(number) * {b"EX": 1000, b"PX": 1}[unit.upper()]
        return OK

    def incr(self, key: bytes) -> int:
        number = _whole(self._get(key, bytes) or b"0") + 1
        self.data[key] = b"%d" % number
        return number

    # --- hashes
    def hset(self, key: bytes, *pairs: bytes) -> int:
        if not pairs or len(pairs) % 2:
            raise Refused("ERR wrong number of arguments for 'hset' command")
        value = self._own(key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - before

    def hsetnx(self, key: bytes, field: bytes, text: bytes) -> int:
        value = self._own(key, dict)
        if field in value:
            return 0
        value[field] = text
        return 1

    def hget(self, key: bytes, field: bytes) -> bytes | None:
        value: dict[bytes, bytes] | None = self._get(key, dict)
        return None if value is None else value.get(field)

    def hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        value = self._get(key, dict) or {}
        return [value.get(field) for field in fields]

    def hexists(self, key: bytes, field: bytes) -> int:
        return int(field in (self._get(key, dict) or ()))

    def hdel(self, key: bytes, *fields: bytes) -> int:
        value = self._get(key, dict)
        if value is None:
            return 0
        gone = sum(value.pop(field, None) is not None for field in dict.fromkeys(fields))
        self._tidy(key, value)
        return gone

    def hlen(self, key: bytes) -> int:
        return len(self._get(key, dict) or ())

    def hkeys(self, key: bytes) -> list[bytes]:
        return list(self._get(key, dict) or ())

    def hvals(self, key: bytes) -> list[bytes]:
        return list((self._get(key, dict) or {}).values())

    def hgetall(self, key: bytes) -> list[bytes]:
        return [word for pair in (self._get(key, dict) or {}).items() for word in pair]

    def hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        value = self._get(key, dict)
        try:
            number = _whole((value or {}).get(field, b"0")) + _whole(by)
        except Refused:
            raise Refused("ERR hash value is not an integer") from None
        self._own(key, dict)[field] = b"%d" % number
        return number

    def hscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[Any]:
        return [b"0", self.hgetall(key)]

    # --- sets
    def sadd(self, key: bytes, *members: bytes) -> int:
        value = self._own(key, _Set)
        before = len(value)
        value.update(dict.fromkeys(members))
        return len(value) - before

    def srem(self, key: bytes, *members: bytes) -> int:
        value = self._get(key, _Set)
        if value is None:
            return 0
        before = len(value)
        for member in members:
            value.pop(member, None)
        gone = before - len(value)
        self._tidy(key, value)
        return gone

    def scard(self, key: bytes) -> int:
        return len(self._get(key, _Set) or ())

    def smembers(self, key: bytes) -> list[bytes]:
        return list(self._get(key, _Set) or ())

    # --- sorted sets
    def zadd(self, key: bytes, *words: bytes) -> int:
        only_old = words[0].upper() == b"XX"
        pairs = words[1:] if only_old else words
        if not pairs or len(pairs) % 2:
            raise Refused("ERR syntax error")
        scores = [_number(score) for score in pairs[::2]]
        if only_old and self._get(key, Sorted) is None:
            return 0
        value = self._own(key, Sorted)
        added = 0
        for score, member in zip(scores, pairs[1::2], strict=True):
            if not only_old or member in value.scores:
                added += value.add(member, score)
        return added

    def zrem(self, key: bytes, *members: bytes) -> int:
        value = self._get(key, Sorted)
        if value is None:
            return 0
        gone: int = sum(value.remove(member) for member in members)
        self._tidy(key, value)
        return gone

    def zscore(self, key: bytes, member: bytes) -> bytes | None:
        value = self._get(key, Sorted)
        score = None if value is None else value.scores.get(member)
        return None if score is None else _written(score)

    def zrange(self, key: bytes, first: bytes, last: bytes) -> list[bytes]:
        value = self._get(key, Sorted)
        order = [] if value is None else [member for _, member in value.order]
        start, stop = _whole(first), _whole(last)
        start = max(0, start + len(order)) if start < 0 else start
        stop = stop + len(order) if stop < 0 else stop
        return order[start : stop + 1] if stop >= 0 else []

    def zrangebyscore(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> list[bytes]:
        value = self._get(key, Sorted)
        low, high = _bound(least), _bound(most)
        order = [] if value is None else value.order
        found = [
            member
            for score, member in order
            if (score > low[0] or (score == low[0] and not low[1]))
            and (score < high[0] or (score == high[0] and not high[1]))
        ]
        return _limited(found, limit)

    def zrangebylex(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> list[bytes]:
        value = self._get(key, Sorted)
        if value is None:
            return []
        if least[:1] not in b"[(" or most[:1] not in b"[(" or not (least and most):
            raise Refused("ERR min or max not valid string range item")
        score = value.order[0][0]
        low, high = (score, least[1:]), (score, most[1:])
        start = bisect_left(value.order, low) if least[:1] == b"[" else bisect_right(value.order, low)
        stop = bisect_right(value.order, high) if most[:1] == b"[" else bisect_left(value.order, high)
        return _limited([member for _, member in value.order[start:stop]], limit)

    def zpopmin(self, key: bytes) -> list[bytes]:
        value = self._get(key, Sorted)
        if value is None:
            return []
        score, member = value.order[0]
        value.remove(member)
        self._tidy(key, value)
        return [member, _written(score)]

    # --- lists
    def rpush(self, key: bytes, *values: bytes) -> int:
        value = self._own(key, list)
        value += values
        return len(value)

    def lpop(self, key: bytes) -> bytes | None:
        value = self._get(key, list)
        if value is None:
            return None
        first: bytes = value.pop(0)
        self._tidy(key, value)
        return first

    def llen(self, key: bytes) -> int:
        return len(self._get(key, list) or ())

    # --- streams
    def xadd(self, key: bytes, maxlen: bytes, about: bytes, most: bytes, name: bytes, *pairs: bytes) -> bytes:
        if (maxlen.upper(), about) != (b"MAXLEN", b"~") or not pairs or len(pairs) % 2:
            raise Refused("ERR syntax error")
        stream = self._get(key, Stream)
        number = _entry(name)
        if number <= (stream.last if stream is not None else (0, 0)):
            raise Refused("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream = self._own(key, Stream)
        stream.entries.append((number, list(pairs)))
        stream.last = number
        # "About": a real server keeps some more than asked for.
        if len(stream.entries) > _whole(most) + 100:
            del stream.entries[: len(stream.entries) - _whole(most)]
        return b"%d-%d" % number

    def xrange(self, key: bytes, first: bytes, last: bytes, *count: bytes) -> list[Any]:
        stream = self._get(key, Stream)
        if stream is None:
            return []
        low = (0, 0) if first == b"-" else _entry(first)
        high = (math.inf, math.inf) if last == b"+" else _entry(last)
        found = [[b"%d-%d" % number, list(pairs)] for number, pairs in stream.entries if low <= number <= high]
        return found[: _whole(count[1])] if count else found

    # --- the server
    def time(self) -> list[bytes]:
        now = self._clock()
        return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]

    def tell(self, section: bytes) -> bytes:
        return self.info[section.decode()].encode()

    def publish(self, channel: bytes, message: bytes) -> int:
        return self._publish(channel, message)

    def flushall(self) -> Status:
        self.data.clear()
        self.ends.clear()
        return OK


class _Set(dict[bytes, None]):
    """A set whose order is that in which its members came."""


_NAMES = {"DEL": "delete", "INFO": "tell"}
_ALL = """
    DEL EXISTS RENAME PEXPIREAT PEXPIRE PTTL GET SET INCR HSET HSETNX HGET HMGET HEXISTS HDEL HLEN HKEYS HVALS HGETALL
    HINCRBY HSCAN SADD SREM SCARD SMEMBERS ZADD ZREM ZSCORE ZRANGE ZRANGEBYSCORE ZRANGEBYLEX ZPOPMIN RPUSH LPOP LLEN
    XADD XRANGE TIME INFO PUBLISH FLUSHALL
"""
_COMMANDS: dict[bytes, Callable[..., Any]] = {
    name.encode(): getattr(Keyspace, _NAMES.get(name, name.lower())) for name in _ALL.split()
}


def _whole(text: bytes) -> int:
    if not re.fullmatch(rb"-?(0|[1-9]\d*)", text):
        raise Refused("ERR value is not an integer or out of range")
    return int(text)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refused("ERR value is not a valid float") from None


def _written(score: float) -> bytes:
    return b"%d" % int(score) if score == int(score) else repr(score).encode()


def _bound(text: bytes) -> tuple[float, bool]:
    """A score, and whether it is left out itself."""
    apart = text.startswith(b"(")
    return _number(text[1:] if apart else text), apart


def _limited(found: list[bytes], limit: Sequence[bytes]) -> list[bytes]:
    if not limit:
        return found
    offset, count = _whole(limit[1]), _whole(limit[2])
    return found[offset:] if count < 0 else found[offset : offset + count]


def _entry(text: bytes) -> tuple[int, int]:
    first, _, second = text.partition(b"-")
    return _whole(first), _whole(second or b"0")
