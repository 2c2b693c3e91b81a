"""A gateway's state under a million sessions, prompts without a session, and keys: memory stays flat.

    python -m tests.soak [REQUESTS]

What a request does to state, without the sockets: an index claimed in the store, records written to a ledger, the index
settled. Then the ledger is read back, as after a crash.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.core.indexing import Ask
from gateway.runs import Run
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.stores import ScopeKey
from gateway.stores.memory import MemoryStore

RUN = "r"
ALLOWED_MIB = 2.0
"""What memory may grow by after the first tenth."""


def resident() -> float:
    """MiB of memory that this process has."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """One run whose store takes requests."""

    def __init__(self, folder: Path) -> None:
        pools = [{"name": "p", "engine": "vllm", "replicas": [{"name": "p-0", "url": "http://127.0.0.1:9"}]}]
        given = {"run": RUN, "ledger": {"path": str(folder)}, "pools": pools}
        self.settings = Settings.load(None, {}, given)
        self.store = MemoryStore(self.settings.limits.scopes)
        self.sessions = Sessions(self.settings, self.store)
        self.run = Run(self.settings, RUN, self.store, self.sessions, lambda: None, named=True)

    async def request(self, session: str, identity: str, ask: Ask) -> None:
        """One request, from its claim to its end."""
        key = ScopeKey(RUN, session, identity)
        claim = await self.store.claim(key, ask, 1.0)
        names = {"run": RUN, "session": session, "identity": identity, "index": claim.index}
        self.run.ledger.claimed(
            {
                "event": "opened", **names, "time": time.time(), "epoch": 0, "ordinal": 0, "group": None,
                "member": None, "order": ask.kind, "digest": ask.raw.hex(), "content": ask.content, "key": ask.key,
                "repeat": ask.repeat, "seed": 1, "seed_source": "derived", "scheme": "v1",
                "request_id": f"{identity}:{claim.index}", "route": "/v1/chat/completions", "kind": "sample",
                "pool": "p", "model": "m", "stream": False, "n": 1, "config": "0" * 64, "flags": claim.flags,
            }
        )  # fmt: skip
        await self.store.complete(key, claim.index)
        await self.store.settle(key, claim.index, used=True)
        self.run.ledger.closed(
            {
                "event": "closed", **names, "time": time.time(), "outcome": "delivered", "used": True, "racing": False,
                "status": 200, "error": None, "replica": "p-0", "replicas": ["p-0"], "candidates": ["p-0"],
                "loads": {"p-0": 0}, "attempt": 1, "attempts": [{"replica": "p-0", "outcome": "answered"}],
                "engine": "0" * 16, "flags": [], "sticky": False, "lane_wait": 0.0, "finish_reasons": ["stop"],
                "usage": {"prompt_tokens": 3}, "answer": "0" * 32, "answer_id": "x", "weight_version": None,
                "first_byte_seconds": 0.1, "seconds": 0.1,
            }
        )  # fmt: skip


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def a_session(soak: Soak, number: int) -> None:
    await soak.request(f"s{number}", f"s{number}", Ask("arrival", digest(number)))


async def a_prompt(soak: Soak, number: int) -> None:
    await soak.request("anonymous", f"anonymous/{number:016x}", Ask("content", digest(number), f"{number:032x}"))


async def a_key(soak: Soak, number: int) -> None:
    session = f"k{number % 7}"
    await soak.request(session, session, Ask("arrival", digest(number), f"{number:032x}", None, f"key-{number}"))


async def a_turn(soak: Soak, number: int) -> None:
    await soak.request("long", "long", Ask("arrival", digest(number)))


KINDS: dict[str, Callable[[Soak, int], Awaitable[None]]] = {
    "sessions": a_session,
    "prompts without a session": a_prompt,
    "keys of seven sessions": a_key,
    "requests of one session": a_turn,
}


async def grown(soak: Soak, kind: str, requests: int) -> tuple[float, float]:
    """MiB after a tenth of the requests, and what came on top by the last."""
    one, before = KINDS[kind], 0.0
    for number in range(requests):
        await one(soak, number)
        if number % 64 == 0:
            await asyncio.sleep(0)
        if number + 1 == requests // 10:
            before = resident()
    return before, resident() - before


def written(folder: Path) -> int:
    """Bytes of all segments."""
    return sum(file.stat().st_size for file in folder.rglob("*.jsonl"))


async def soaked(kind: str, requests: int) -> bool:
    """Soak in this process, which knows nothing yet. Whether memory stayed flat."""
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        since = time.process_time()
        before, more = await grown(soak, kind, requests)
        spent = (time.process_time() - since) / requests * 1e6
        soak.run.ledger.flush()
        bytes_written = written(Path(folder))
        told = {
            "MiB after a tenth": round(before, 1),
            "MiB more at the end": round(more, 2),
            "µs a request": round(spent, 1),
            "MiB of segments": round(bytes_written / 2**20),
        }
    print(f"{kind}:", json.dumps(told, ensure_ascii=False), flush=True)
    return more <= ALLOWED_MIB


async def read_back(kind: str, requests: int) -> bool:
    """Write half as many requests, which have two records each, and read them back as after a crash."""
    with tempfile.TemporaryDirectory() as folder:
        writer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak", str(requests // 2), "write", kind, folder)
        )
        assert await writer.wait() == 0
        before, since = resident(), time.process_time()
        soak = Soak(Path(folder))
        seconds, more = time.process_time() - since, resident() - before
        soak.run.close()
    print(f"{requests} records of {kind} read back in {seconds:.1f} s, {more:.1f} MiB", flush=True)
    return more < 64


async def write(kind: str, requests: int, folder: Path) -> bool:
    """Write so many requests, and die."""
    soak = Soak(folder)
    for number in range(requests):
        await KINDS[kind](soak, number)
    soak.run.ledger.flush()
    os._exit(0)


async def main() -> int:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    match sys.argv[2:]:
        case ["soak", kind]:
            return int(not await soaked(kind, requests))
        case ["read", kind]:
            return int(not await read_back(kind, requests))
        case ["write", kind, folder]:
            return int(not await write(kind, requests, Path(folder)))
    failed = 0
    for step in ("soak", "read"):
        for kind in KINDS:
            part = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.soak", str(requests), step, kind)
            )
            failed |= await part.wait()
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
