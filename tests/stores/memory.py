"""The memory store, as the contract's tests need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.stores.memory import MemoryStore


@asynccontextmanager
async def opened() -> AsyncIterator[MemoryStore]:
    """A store that knows nothing."""
    yield MemoryStore()


async def quiet(store: MemoryStore) -> None:
    """Until everyone who can be served has been."""
    for _ in range(3):
        await asyncio.sleep(0)


def waiting(store: MemoryStore) -> int:
    """How many claims the store holds as waiting."""
    return sum(len(waiters) for waiters in store._waiters.values())
