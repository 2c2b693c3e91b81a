"""Requests that are wrong in one or several ways, the same for the same seed.

Each asks for an answer that repeats its mark. Some hide a request of another mark in what may or may not be a body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from tests.harness import chat

BLANKS = (
    b"",
    b" ",
    b"\t",
    b"\x0b",
    b"\x0c",
    b"\r",
    b"\n",
    b"\x00",
    b"\xa0",
    b"\x85",
    b"\x7f",
    b"  ",
    b"\r\n ",
    b"\r\n\t",
)
CODINGS = (
    b"chunked",
    b"Chunked",
    b"chunkeD",
    b"xchunked",
    b"identity",
    b"gzip, chunked",
    b"chunked, identity",
    b"chunked,",
    b",chunked",
    b'"chunked"',
    b"chunked;q=1",
    b"cow",
)
LENGTHS = (b"+%d", b"-%d", b"0%d", b"%d ", b" %d", b"%d,%d", b"%d\x00", b"0x%x", b"%d;", b"%d.0", b"1e%d", b"\x0b%d")
VERSIONS = (
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"http/1.1",
    b"HTTP/1.1 ",
    b"HTTP/1.1\t",
    b"",
    b"HTTP/01.1",
)
METHODS = (b"GET", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"post", b"POST\x00", b"POSTX", b" POST", b"\r\nPOST")
TARGETS = (
    b"http://gateway%b",
    b"HTTP://other:80%b",
    b"%b#f",
    b"%b?a=b c",
    b"%b\x00",
    b"/x/..%b",
    b"//%b",
    b"%b;a",
    b"%b?\xff",
    b"*",
    b"gateway:80",
    b"/sessions/a%%2F..%b",
    b"/sessions/%%0d%%0aX:%%201%b",
    b"/sessions/%%zz%b",
)
ASIDE = (
    b"X-A: b\r\n c",
    b"X-A : b",
    b"X A: b",
    b": b",
    b"X-A",
    b"X_A: b",
    b"X-A: b\x00",
    b"X-A: \x7f",
    b"Host: other",
    b"Host:",
    b"Expect: 100-continue",
    b"Connection: content-length",
    b"Connection: transfer-encoding, host",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Keep-Alive: 5",
    b"Upgrade: h2c\r\nConnection: upgrade",
    b"TE: trailers",
    b"Trailer: Content-Length",
    b"Content_Length: 3",
    b"Content-Length\x00: 3",
    b"X-Session-ID: a\r\nX-Session-ID: b",
    b"X-A: %b" % (b"a" * 7000),
    b"X-HTTP-Method-Override: GET",
    b"Content-Encoding: gzip",
)
SIZES = (
    b"0x%x",
    b"+%x",
    b"-%x",
    b" %x",
    b"%x ",
    b"%x;a=b",
    b'%x;a="b\r\nc"',
    b"%x;\n",
    b"00%x",
    b"%x\t",
    b"%x,",
    b"%X",
    b"1%016x",
    b"%x\x00",
)


@dataclass
class Message:
    """A request in parts that can be bent one by one."""

    mark: str
    method: bytes = b"POST"
    target: bytes = b"/v1/chat/completions"
    version: bytes = b"HTTP/1.1"
    lines: list[bytes] = field(default_factory=list)
    end: bytes = b"\r\n"
    framed: bytes = b""

    def render(self) -> bytes:
        first = b"%b %b %b" % (self.method, self.target, self.version)
        return self.end.join([first, *self.lines, b"", b""]) + self.framed


def asking(mark: str) -> bytes:
    return json.dumps(chat(mark)).encode()


def messages(seed: int, count: int) -> Iterator[Message]:
    """So many messages; the last bytes of each may be those of another request."""
    random = Random(seed)
    for number in range(count):
        message = random.choice(BEGINNINGS)(random, f"m{number}", f"s{number}")
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            random.choice(BENDS)(random, message)
        yield message


def hidden(mark: str) -> bytes:
    body = asking(mark)
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _chunks(random: Random, body: bytes, size: bytes = b"%x") -> bytes:
    at = random.randrange(1, len(body))
    pieces = [body[:at], body[at:]]
    return b"".join(b"%b\r\n%b\r\n" % (size % len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _by_length(random: Random, mark: str, other: str) -> Message:
    body = asking(mark)
    return Message(mark, lines=[b"Host: gateway", b"Content-Length: %d" % len(body)], framed=body)


def _by_chunks(random: Random, mark: str, other: str) -> Message:
    return Message(mark, lines=[b"Host: gateway", b"Transfer-Encoding: chunked"], framed=_chunks(random, asking(mark)))


def _both(random: Random, mark: str, other: str) -> Message:
    """A body that ends early where chunks are read, and holds another request where its length is."""
    body = _chunks(random, asking(mark)) + hidden(other)
    lines = [b"Host: gateway", b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked"]
    return Message(mark, lines=lines, framed=body)


def _short(random: Random, mark: str, other: str) -> Message:
    """A body that ends early where its length is read."""
    body = asking(mark)
    length = random.choice((0, 1, len(body) - 1, len(body)))
    return Message(mark, lines=[b"Host: gateway", b"Content-Length: %d" % length], framed=body + hidden(other))


def _unframed(random: Random, mark: str, other: str) -> Message:
    return Message(mark, method=random.choice((b"GET", b"POST")), lines=[b"Host: gateway"], framed=hidden(other))


def _pipelined(random: Random, mark: str, other: str) -> Message:
    message = _by_length(random, mark, other)
    message.framed += hidden(other)
    return message


def _with_trailer(random: Random, mark: str, other: str) -> Message:
    message = _by_chunks(random, mark, other)
    message.framed = message.framed[:-2] + random.choice((*ASIDE, b"Content-Length: 3", b"Host: b")) + b"\r\n\r\n"
    return message


BEGINNINGS: list[Callable[[Random, str, str], Message]] = [
    _by_length,
    _by_chunks,
    _both,
    _short,
    _unframed,
    _pipelined,
    _with_trailer,
]


def _place(random: Random, message: Message, line: bytes) -> None:
    message.lines.insert(random.randint(0, len(message.lines)), line)


def _aside(random: Random, message: Message) -> None:
    _place(random, message, random.choice(ASIDE))


def _another_coding(random: Random, message: Message) -> None:
    before, behind = random.choice(BLANKS), random.choice(BLANKS)
    name = random.choice(
        (b"Transfer-Encoding", b"transfer-encoding", b"Transfer_Encoding", b"Transfer-Encoding" + random.choice(BLANKS))
    )
    _place(random, message, b"%b:%b%b%b" % (name, before, random.choice(CODINGS), behind))


def _another_length(random: Random, message: Message) -> None:
    line = random.choice(LENGTHS)
    value = random.choice((0, 3, len(message.framed)))
    _place(random, message, b"Content-Length: " + line % ((value,) * line.count(b"%")))


def _without(random: Random, message: Message) -> None:
    if message.lines:
        message.lines.pop(random.randrange(len(message.lines)))


def _twice(random: Random, message: Message) -> None:
    if message.lines:
        _place(random, message, random.choice(message.lines))


def _bent_line(random: Random, message: Message) -> None:
    if message.lines:
        at = random.randrange(len(message.lines))
        line = message.lines[at]
        cut = random.randint(0, len(line))
        message.lines[at] = line[:cut] + random.choice((*BLANKS, random.randbytes(1))) + line[cut:]


def _another_end(random: Random, message: Message) -> None:
    message.end = random.choice((b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\x00"))


def _another_version(random: Random, message: Message) -> None:
    message.version = random.choice(VERSIONS)


def _another_method(random: Random, message: Message) -> None:
    message.method = random.choice(METHODS)


def _another_target(random: Random, message: Message) -> None:
    form = random.choice(TARGETS)
    message.target = form % message.target if b"%b" in form else form


def _bent_sizes(random: Random, message: Message) -> None:
    if b"\r\n0\r\n" in message.framed:
        message.framed = _chunks(random, asking(message.mark), random.choice(SIZES))


def _bent_ends(random: Random, message: Message) -> None:
    message.framed = message.framed.replace(
        b"\r\n", random.choice((b"\n", b"\r", b"\r\n\r\n", b"")), random.randint(1, 3)
    )


def _cut(random: Random, message: Message) -> None:
    message.framed = message.framed[: random.randint(0, len(message.framed))]


BENDS: list[Callable[[Random, Message], None]] = [
    _aside,
    _aside,
    _another_coding,
    _another_coding,
    _another_length,
    _without,
    _twice,
    _bent_line,
    _bent_line,
    _another_end,
    _another_version,
    _another_method,
    _another_target,
    _bent_sizes,
    _bent_ends,
    _cut,
]
