"""What the image does, without a container engine: its build commands run, and its start command in what they made.

Started by `make test-image`, since it installs a whole environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from tests.deploy import image
from tests.harness import MODEL, FakeWorker

ROOT = image.ROOT
BUILD, RUN = image.stages()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage makes."""
    return image.build(tmp_path_factory.mktemp("image"))


@asynccontextmanager
async def container(environment: Path, folder: Path, **told: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The start command with the image's variables and those of `docker run --env`, in an empty folder."""
    variables = image.environment(RUN) | {"DETGATE_LEDGER__PATH": str(folder / "ledger")} | told
    variables["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *image.command(RUN), cwd=folder, env=variables, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


async def healthy(port: int) -> None:
    """Wait until the image's own health check passes."""
    check = json.loads(re.sub(r"^.*CMD (?=\[)", "", image.of(RUN, "HEALTHCHECK")[0]))
    check[0] = sys.executable
    async with asyncio.timeout(30):
        while True:
            asked = await asyncio.create_subprocess_exec(
                *check, env={"DETGATE_PORT": str(port)}, stderr=asyncio.subprocess.DEVNULL
            )
            if await asked.wait() == 0:
                return
            await asyncio.sleep(0.1)


async def test_it_starts_answers_a_dummy_key_and_drains(environment: Path, tmp_path: Path) -> None:
    port = free_port()
    async with FakeWorker() as worker:
        told = {"DETGATE_PORT": str(port), "DETGATE_WORKER_URLS": worker.url, "DETGATE_INSECURE": "true"}
        async with container(environment, tmp_path, **told) as process:
            await healthy(port)
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="dummy", max_retries=10)
            async with client:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hello"}]
                )
            assert answer.choices
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/admin/replicas")).status_code == 403
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 15) == 0
    assert {entry.partition("/")[0] for entry in written(tmp_path)} == {"ledger"}
    assert any(entry.endswith(".jsonl") for entry in written(tmp_path))


def written(folder: Path) -> list[str]:
    """The files in a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


async def test_without_keys_it_refuses_to_listen_and_says_why(environment: Path, tmp_path: Path) -> None:
    async with container(environment, tmp_path, DETGATE_WORKER_URLS="http://127.0.0.1:1") as process:
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    assert "auth.api_keys" in said
    assert "insecure" in said


def test_nothing_but_the_lock_is_installed(environment: Path) -> None:
    listed = subprocess.run(
        [environment / "bin" / "python", "-c", LIST], capture_output=True, text=True, check=True, cwd=environment
    ).stdout
    installed = dict(line.split("==") for line in listed.split())
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / "requirements" / "lock.txt").read_text(), re.M))
    assert installed.pop("detgate")
    assert installed.items() <= locked.items()


LIST = """
from importlib.metadata import distributions
for each in distributions():
    print(each.name.lower().replace("_", "-") + "==" + each.version)
"""
