"""A simulated engine and a client of it, for one test."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.sim import SimServer, SimSettings

# Made once: it costs more than all else that a client needs.
TLS = ssl.create_default_context()


@asynccontextmanager
async def serving(engine: str, **settings: Any) -> AsyncIterator[tuple[SimServer, httpx.AsyncClient]]:
    """Serves on a free port; steps take no time unless the test says so."""
    told = SimSettings(engine=engine, **{"token_seconds": 0.0, **settings})  # type: ignore[arg-type]
    async with SimServer(told) as server, connect(server.url) as client:
        yield server, client


def connect(url: str) -> httpx.AsyncClient:
    """A client of the server at that address."""
    return httpx.AsyncClient(base_url=url, timeout=10, verify=TLS)
