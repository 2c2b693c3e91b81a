"""A gateway of one's own, as a process, for as long as it is needed."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from gateway.evidence.ledgers import Unusable

READY_SECONDS = 120.0
"""How long it may take until it is ready."""

LOOK_SECONDS = 0.1


@asynccontextmanager
async def gateway(config: Path | None, run: str) -> AsyncIterator[str]:
    """`detgate serve` with this file, or the environment alone, ready to serve this run: its URL.

    It is ended by SIGTERM, and drains. Raises `Unusable` where it does not come up.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ("--host", "127.0.0.1", "--port", str(port))
    file = () if config is None else ("--config", str(config))
    arguments = ("serve", *file, "--run", run, "--resume", *place)
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *arguments, stdout=said, stderr=said, start_new_session=True
        )
        try:
            await _ready(process, f"http://127.0.0.1:{port}", said)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _ready(process: asyncio.subprocess.Process, url: str, said: IO[bytes]) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while process.returncode is None:
                    with suppress(httpx.TransportError):
                        if (await http.get("/readyz")).status_code == 200:
                            return
                    await asyncio.sleep(LOOK_SECONDS)
    said.seek(0)
    raise Unusable(f"the gateway did not become ready: {said.read()[-2000:].decode(errors='replace')}")
