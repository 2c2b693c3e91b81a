"""gunicorn's corpus of requests: what its parser takes is answered, what it refuses is refused."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conformance import sources
from tests.conformance.outcome import Outcome
from tests.harness import FakeWorker, gateway, pool
from tests.hostile.answers import Answer, parse

UNREAD = {400, 408, 414, 431, 501, 505}
"""Statuses of a request whose head or framing is refused."""

_CODING = "the only transfer coding that is read is chunked"
MEANT = {
    "valid/009": "a length beside a Transfer-Encoding is refused, whatever the coding",
    "valid/013": "no spaces are read between a chunk's size and its extensions",
    "valid/022": "on the control plane an HTTP/1.0 connection ends with its first answer",
    "valid/025": _CODING,
    "valid/025_line": _CODING,
    "valid/027": "a target has no bytes above 127, which are percent-encoded",
    "valid/029": _CODING,
    "valid/030": _CODING,
    "valid/031": "methods that nobody knows are not read",
    "valid/rfc9112_smuggle_gzip_chunked_01": _CODING,
    "valid/rfc9112_smuggle_te_identity_chunked_01": _CODING,
    "valid/rfc9112_target_absolute_userinfo_01": "a target with a user is refused, as RFC 9110 asks (section 4.2.4)",
    "invalid/009": "fields are bounded by their bytes, not by their number",
    "invalid/rfc9112_chunked_missing_final_crlf_01": "a path that is no route is answered before its body has ended",
}
"""Cases that come out otherwise than at gunicorn."""

HEAD_BYTES = 4094
"""gunicorn's own bound, of which some cases are."""


class _Settings:
    """Stands for gunicorn's configuration: only whether anything is set counts."""

    def __init__(self) -> None:
        self.changed = False

    def set(self, name: str, value: Any) -> None:
        self.changed = True

    def __getattr__(self, name: str) -> Any:
        return None


class _Names(ModuleType):
    """Stands for gunicorn's modules: every name is itself."""

    Config = _Settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextmanager
def _gunicorn() -> Iterator[None]:
    names = ["gunicorn", "gunicorn.config", "gunicorn.http", "gunicorn.http.errors"]
    sys.modules.update({name: _Names(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def expectation(file: Path) -> tuple[Any, bool]:
    """What a case expects, and whether it changes gunicorn's settings."""
    given: dict[str, Any] = {"uri": str, "cfg": _Settings()}
    with _gunicorn():
        exec(file.read_text(), given)
    return given["request"], given["cfg"].changed


def sent(file: Path) -> bytes:
    """The bytes that a case sends: the corpus writes line ends and control characters as escapes."""
    text = file.read_bytes().replace(b"\n", b"")
    known = {b"r": b"\r", b"n": b"\n", b"t": b"\t", b"0": b"\x00"}
    return re.sub(
        rb"\\(x[0-9A-Fa-f]{2}|[rnt0])",
        lambda found: known.get(found[1]) or bytes([int(found[1][1:], 16)]),
        text,
    )


def with_hosts(data: bytes, requests: list[dict[str, Any]]) -> bytes:
    """The same with a Host where HTTP/1.1 wants one and the case has none: it is about something else."""
    if any(name.upper() == "HOST" for request in requests for name, _ in request["headers"]):
        return data
    return data.replace(b" HTTP/1.1\r\n", b" HTTP/1.1\r\nHost: added\r\n")


async def answers(port: int, data: bytes) -> list[Answer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = b""
    try:
        async with asyncio.timeout(0.5):
            while piece := await reader.read(65536):
                got += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    method = data.lstrip().partition(b" ")[0].decode("latin-1")
    return parse(got, [method] * 50)


async def run() -> Outcome:
    """The whole corpus. Raises `sources.Missing`."""
    folder = sources.tree("gunicorn") / "tests" / "requests"
    outcome = Outcome(f"gunicorn's corpus ({sources.version('gunicorn')})")
    limits = {"head_bytes": HEAD_BYTES}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=limits) as gate:
        await gate.http.get("/livez")
        for kind in ("valid", "invalid"):
            for file in sorted((folder / kind).glob("*.http")):
                expected, own = expectation(file.with_suffix(".py"))
                if own:
                    outcome.aside += 1
                    continue
                requests = expected if isinstance(expected, list) else [expected]
                data = sent(file)
                got = [
                    answer.status
                    for answer in await answers(gate.port, with_hosts(data, requests) if kind == "valid" else data)
                ]
                if kind == "valid":
                    right = len(got) == len(requests) and UNREAD.isdisjoint(got)
                else:
                    right = not got or got[-1] in UNREAD
                name = f"{kind}/{file.stem}"
                if right:
                    outcome.passed += 1
                elif name in MEANT:
                    outcome.explained[name] = MEANT[name]
                else:
                    outcome.failed.append(f"{name}: {got} for {data[:160]!r}, expected {str(expected)[:80]}")
    return outcome
