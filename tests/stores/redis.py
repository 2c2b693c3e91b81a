"""The Redis store, as the contract's tests need it: before a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from gateway.shared.address import parse
from gateway.shared.link import Link
from gateway.shared.part import Terms
from gateway.stores.redis import RedisStore
from gateway.tasks import start, stop
from tests.redis_server import RedisServer

_names = count()


def terms(gateway: str = "", **given: float) -> Terms:
    """Terms on which gateways of a test meet: a gateway of a name that none had."""
    lease = given.get("lease", 10.0)
    gateway = gateway or f"g{next(_names)}"
    return Terms(gateway, b'{"seed":42}', lease, given.get("grace", lease * 0.3), given.get("retention", 3600.0))


@asynccontextmanager
async def store(
    url: str, given: Terms | None = None, *, strict: bool = True, seconds: float = 2.0
) -> AsyncIterator[RedisStore]:
    """A gateway's store, until it leaves."""
    made = RedisStore(Link(parse(url), seconds), given or terms(), strict=strict)
    running = start(made.run(), "store")
    try:
        yield made
    finally:
        await made.stop()
        await stop(running)


@asynccontextmanager
async def opened() -> AsyncIterator[RedisStore]:
    """A store that knows nothing."""
    async with RedisServer() as server:
        await server.meet()
        async with store(server.url) as made:
            yield made


async def quiet(kept: RedisStore) -> None:
    """Until everyone who can be served has been."""
    wire = kept.link._wire
    assert wire is not None
    for _ in range(5):
        await asyncio.sleep(0)
        while wire._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def waiting(kept: RedisStore) -> int:
    """How many claims the store holds as waiting."""
    return sum(run.waiting for run in kept._runs.values())
