"""The gateway as its users run it: `python -m gateway serve --config …`, a process of its own before real servers.

Its ledger, configuration and log lie in a folder that the caller gives. What it logged last is part of the error
when it does not become ready.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import matrix, ports

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 60.0
END_SECONDS = 30.0


class NotReady(Exception):
    """The gateway ended, or was not ready in time; the message holds the end of its log."""


@dataclass(frozen=True)
class Gate:
    """A gateway that serves."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        """All that it logged so far."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_logged(self, words: str, seconds: float = 10.0) -> None:
        """Wait until it has logged these words; `AssertionError` where it has not in time."""
        deadline = time.monotonic() + seconds
        while words not in self.log():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)

    def records(self, event: str) -> list[dict[str, Any]]:
        """The ledger's records of this event, `opened` or `closed`, in the order in which they were written."""
        files = sorted((self.folder / "ledger").rglob("*.jsonl"))
        records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [record for record in records if record["event"] == event]

    def replicas(self, route: str = "/determinism") -> dict[str, dict[str, Any]]:
        """What the gateway tells of each replica there, or at `/readyz`; by name, over all pools."""
        pools = httpx.get(self.url + route).json()["pools"]
        return {name: told for pool in pools.values() for name, told in pool["replicas"].items()}


def pool(name: str, engine: str, urls: Sequence[str], **settings: Any) -> dict[str, Any]:
    """A pool's configuration: replicas `{name}-0`, `{name}-1` … at these URLs."""
    replicas = [{"name": f"{name}-{number}", "url": url} for number, url in enumerate(urls)]
    return {"name": name, "engine": engine, "replicas": replicas} | settings


@contextmanager
def gateway(
    folder: Path, *pools: dict[str, Any], hash_seed: int = 0, up: Sequence[str] | None = None, **settings: Any
) -> Iterator[Gate]:
    """Start a gateway, give it once every replica is up, or those named `up`; end it on leaving.

    `hash_seed`: its PYTHONHASHSEED.

    Raises `NotReady`, and on leaving `AssertionError` where it does not end with status 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = ports.free()
    configuration = {"pools": list(pools), "port": port, "ledger": {"path": str(folder / "ledger")}} | settings
    file = folder / "gateway.yaml"
    file.write_text(json.dumps(configuration))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DETGATE_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--config", str(file)],
            cwd=ROOT,
            env={**environment, "PYTHONHASHSEED": str(hash_seed)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    gate = Gate(f"http://127.0.0.1:{port}", folder, process)
    try:
        wait_ready(gate, up)
        yield gate
    finally:
        end(gate)
    assert process.returncode == 0, gate.log()[-4000:]


def wait_ready(gate: Gate, up: Sequence[str] | None = None) -> None:
    """Poll until every replica of every pool is up, or those of these names."""
    deadline = time.monotonic() + READY_SECONDS
    while not all_up(gate, up):
        if gate.process.poll() is not None:
            raise NotReady(f"ended with {gate.process.returncode}:\n{gate.log()[-4000:]}")
        if time.monotonic() > deadline:
            raise NotReady(f"not ready in {READY_SECONDS:g} s:\n{gate.log()[-4000:]}")
        time.sleep(0.1)


def wait(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds; `AssertionError` where it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


def all_up(gate: Gate, names: Sequence[str] | None = None) -> bool:
    """Whether the gateway answers and finds all its replicas up, or those of these names."""
    try:
        told = gate.replicas("/readyz")
    except httpx.TransportError:
        return False
    return all(replica["state"] == "up" for name, replica in told.items() if names is None or name in names)


def end(gate: Gate) -> None:
    """SIGTERM; SIGKILL where that did not end it in time."""
    gate.process.send_signal(signal.SIGTERM)
    try:
        gate.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        gate.process.kill()
        gate.process.wait()


def matrix_of(
    folder: Path, engine: str, urls: Mapping[str, str], models: Mapping[str, str], only: Sequence[str] | None = None
) -> matrix.Found:
    """What holds by route before real servers: `urls` and `models` by role. `only`: these routes."""
    pools = [
        pool(role, engine, [url], role=role, models=[models[role]], deterministic="declared")
        for role, url in urls.items()
    ]
    # No probe comes while the others ask: in strict a replica that has others' requests is refused.
    strictly: dict[str, Any] = {"profile": "strict", "guards": {"clones": "warn"}, "health": {"interval": 600}}

    async def ask(places: Sequence[Gate]) -> matrix.Found:
        async with AsyncExitStack() as stack:
            first, second, strict = [
                await stack.enter_async_context(httpx.AsyncClient(base_url=place.url, timeout=120)) for place in places
            ]
            found: matrix.Found = {}
            for role in urls:
                found |= await matrix.ask_all(engine, (first, second), strict, models, role, only)
            return found

    with (
        gateway(folder / "first", *pools, hash_seed=1) as first,
        gateway(folder / "second", *pools, hash_seed=2) as second,
        gateway(folder / "strict", *pools, **strictly) as strict,
    ):
        return asyncio.run(ask([first, second, strict]))
