"""The memory store, as the contract's tests need it: so short of memory that nearly all it knows is on the shelf."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

from gateway.stores import memory
from gateway.stores.memory import MemoryStore

RUN = "run"


@asynccontextmanager
async def opened() -> AsyncIterator[MemoryStore]:
    """A store that knows nothing."""
    with tempfile.TemporaryDirectory() as folder, patch.object(memory, "ENTRIES", 1):
        store = MemoryStore(scopes=1)
        store.restore(RUN, Path(folder), [])
        yield store
        store.close(RUN)


async def quiet(store: MemoryStore) -> None:
    """Until everyone who can be served has been."""
    for _ in range(3):
        await asyncio.sleep(0)


def waiting(store: MemoryStore) -> int:
    """How many claims the store holds as waiting."""
    return sum(len(waiters) for waiters in store._waiters.values())
