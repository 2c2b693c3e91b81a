"""A simulated engine and a client of it, for one test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.sim import SimServer, SimSettings


@asynccontextmanager
async def serving(
    engine: str, port: int = 0, **settings: Any
) -> AsyncIterator[tuple[SimServer, httpx.AsyncClient]]:
    """Serves on a free port; steps take no time unless the test says so."""
    told = SimSettings(engine=engine, **{"token_seconds": 0.0, **settings})  # type: ignore[arg-type]
    async with SimServer(told, port) as server, httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield server, client
