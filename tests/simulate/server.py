"""A store's server in the simulation: the gateway's own scripts, run by Lua 5.1 as Redis runs them, on a keyspace.

It speaks the protocol that the gateway's own connection speaks. A *failover* is another server in its place, which has
what the first had, or had some time ago, or nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import hiredis
from lupa import lua51  # type: ignore[import-untyped]

from tests.simulate.keyspace import Keyspace, Refused, Status

# --- scripts


class Scripts:
    """An interpreter, for any number of keyspaces."""

    def __init__(self) -> None:
        self._lua: Any = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._compiled: dict[bytes, Any] = {}
        self._keyspace: Keyspace | None = None
        lua, names = self._lua, self._lua.globals()
        names[b"redis"] = lua.table_from({b"call": self._call})
        names[b"struct"] = lua.table_from({b"pack": _pack, b"unpack": None})
        names[b"struct"][b"unpack"] = lua.eval(b"function(f) return function(...) return unpack(f(...)) end end")(
            lambda form, text: self._table(_unpack(form, text))
        )
        names[b"cmsgpack"] = lua.table_from({b"pack": _packed})
        names[b"cmsgpack"][b"unpack"] = lua.eval(b"function(f) return function(t) return unpack(f(t)) end end")(
            lambda text: self._table(_unpacked(text))
        )
        names[b"cjson"] = lua.table_from({b"encode": _encoded, b"decode": lambda text: self._lua_of(json.loads(text))})

    def run(self, source: bytes, keyspace: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
        """One script as one step; its reply as the protocol has it. Raises `Refused`."""
        script = self._compiled.get(source)
        if script is None:
            script = self._compiled[source] = self._lua.compile(source)
        names = self._lua.globals()
        names[b"KEYS"], names[b"ARGV"] = self._table(keys), self._table(args)
        self._keyspace = keyspace
        try:
            return self._reply(script())
        except lua51.LuaError as error:
            raise Refused(f"ERR {error}") from error

    def _call(self, name: bytes, *args: Any) -> Any:
        assert self._keyspace is not None
        reply = self._keyspace.run(name, *[each if type(each) is bytes else _argument(each) for each in args])
        return reply if type(reply) is bytes or type(reply) is int else self._lua_of(reply)

    def _table(self, values: Any) -> Any:
        return self._lua.table_from(values)

    def _lua_of(self, value: Any) -> Any:
        """A reply as a script sees it: nothing is false."""
        if value is None:
            return False
        if isinstance(value, Status):
            return self._lua.table_from({b"ok": bytes(value)})
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, list):
            return self._lua.table_from([self._lua_of(each) for each in value])
        return value

    def _reply(self, value: Any) -> Any:
        """A script's result as the protocol has it: numbers are whole, false is nothing, a list ends at a nil."""
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, bytes):
            return value
        if value[b"err"] is not None:
            raise Refused(value[b"err"].decode())
        if value[b"ok"] is not None:
            return Status(value[b"ok"])
        told, at = [], 1
        while (each := value[at]) is not None:
            told.append(self._reply(each))
            at += 1
        return told


def _argument(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("ERR Lua redis lib command arguments must be strings or integers")
    return b"%d" % value if value == int(value) else b"%.17g" % value


def _format(form: bytes) -> str:
    return form.decode().replace("I4", "I")


def _pack(form: bytes, *values: float) -> bytes:
    return struct.pack(_format(form), *map(int, values))


def _unpack(form: bytes, text: bytes) -> list[Any]:
    form_of = struct.Struct(_format(form))
    return [*form_of.unpack(text[: form_of.size]), form_of.size + 1]


def _packed(*values: Any) -> bytes:
    return json.dumps([each.decode("latin-1") if isinstance(each, bytes) else int(each) for each in values]).encode()


def _unpacked(text: bytes) -> list[Any]:
    return [each.encode("latin-1") if isinstance(each, str) else each for each in json.loads(text)]


def _encoded(text: bytes) -> bytes:
    return json.dumps(text.decode()).replace("/", "\\/").encode()


@cache
def scripts() -> Scripts:
    """The interpreter of this process."""
    return Scripts()


# --- the server


class Server:
    """One server. `clock` gives microseconds."""

    def __init__(self, number: int, clock: Callable[[], int], before: Server | None = None) -> None:
        self.run_id, self.replid = f"{number:040x}", f"{number + 0xABC000:040x}"
        self.former = "0" * 40 if before is None else before.replid
        info = {
            "server": f"redis_version:7.2.0\r\nrun_id:{self.run_id}\r\n",
            "memory": "maxmemory_policy:noeviction\r\n",
            "stats": "evicted_keys:0\r\n",
            "replication": f"role:master\r\nmaster_replid:{self.replid}\r\nmaster_replid2:{self.former}\r\n",
        }
        self.keyspace = Keyspace(clock, self._publish, info)
        self.loaded: dict[bytes, bytes] = {}
        self.subscribers: dict[bytes, list[Connection]] = {}
        self.up = True
        self.fail: list[bytes] = []
        """Errors that the next calls are answered with, instead of being run."""
        self.ran: Callable[[bytes, list[bytes], Any], None] = lambda source, args, reply: None
        """Told of each script that was run: its source, its arguments, its reply."""

    def accept(self) -> asyncio.Protocol:
        return Connection(self)

    def _publish(self, channel: bytes, message: bytes) -> int:
        hearers = self.subscribers.get(channel, [])
        for hearer in hearers:
            hearer.push([b"message", channel, message])
        return len(hearers)


class Connection(asyncio.Protocol):
    """One gateway's connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = hiredis.Reader()
        self._out: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._out = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._out = None
        for hearers in self._server.subscribers.values():
            if self in hearers:
                hearers.remove(self)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        answers = []
        while (command := self._reader.gets()) is not False:
            answers.append(self._answer(command))
        if self._out is not None:
            self._out.write(b"".join(answers))

    def push(self, words: list[bytes]) -> None:
        """A message beside the replies."""
        if self._out is not None:
            self._out.write(_written(words, b">"))

    def _answer(self, command: list[bytes]) -> bytes:
        name, *args = command
        server = self._server
        match name.upper():
            case b"HELLO":
                return b"%1\r\n+server\r\n+redis\r\n"
            case b"SELECT":
                return b"+OK\r\n"
            case b"SCRIPT":
                sha = hashlib.sha1(args[1], usedforsecurity=False).hexdigest().encode()
                server.loaded[sha] = args[1]
                return _written(sha)
            case b"SUBSCRIBE" | b"UNSUBSCRIBE":
                return b"".join(self._subscribe(name.upper() == b"SUBSCRIBE", channel) for channel in args)
            case b"EVALSHA":
                return self._run(args)
        return b"-ERR unknown command\r\n"

    def _subscribe(self, wanted: bool, channel: bytes) -> bytes:
        hearers = self._server.subscribers.setdefault(channel, [])
        if self in hearers:
            hearers.remove(self)
        if wanted:
            hearers.append(self)
        return _written([b"subscribe" if wanted else b"unsubscribe", channel, 1], b">")

    def _run(self, args: list[bytes]) -> bytes:
        server, count = self._server, int(args[1])
        if server.fail:
            return b"-" + server.fail.pop() + b"\r\n"
        source = server.loaded.get(args[0])
        if source is None:
            return b"-NOSCRIPT No matching script.\r\n"
        try:
            reply = scripts().run(source, server.keyspace, args[2 : 2 + count], args[2 + count :])
        except Refused as error:
            return b"-" + str(error).replace("\r", " ").replace("\n", " ").encode() + b"\r\n"
        server.ran(source, args[2 + count :], reply)
        return _written(reply)


def _written(reply: Any, mark: bytes = b"*") -> bytes:
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, Status):
        return b"+" + reply + b"\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    return mark + b"%d\r\n" % len(reply) + b"".join(map(_written, reply))
