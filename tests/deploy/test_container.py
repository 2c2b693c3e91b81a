"""What the image does, without a container engine: its build commands run, and its start command in what they made.

Started by `make test-image`, since it installs a whole environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from tests import ports
from tests.deploy import image
from tests.deploy.compose import together
from tests.harness import MODEL, FakeWorker

ROOT = image.ROOT
BUILD, RUN = image.stages()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage makes."""
    return image.build(tmp_path_factory.mktemp("image"))


@asynccontextmanager
async def started(
    command: list[str], folder: Path, variables: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with these variables and no others, ended with the block."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=variables, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def container(environment: Path, folder: Path, **told: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The start command with the image's variables and those of `docker run --env`, in an empty folder."""
    variables = image.environment(RUN) | {"DETGATE_LEDGER__PATH": str(folder / "ledger")} | told
    variables["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    async with started(image.command(RUN), folder, variables) as process:
        yield process


async def healthy(port: int) -> None:
    """Wait until the image's own health check passes."""
    await passing(image.health_check(), DETGATE_PORT=str(port))


async def passing(check: list[str], **variables: str) -> None:
    """Wait until a health check passes."""
    async with asyncio.timeout(30):
        while True:
            asked = await asyncio.create_subprocess_exec(
                *(sys.executable, *check[1:]), env=variables, stderr=asyncio.subprocess.DEVNULL
            )
            if await asked.wait() == 0:
                return
            await asyncio.sleep(0.1)


async def test_it_starts_answers_a_dummy_key_and_drains(environment: Path, tmp_path: Path) -> None:
    port = ports.free()
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


@asynccontextmanager
async def services(environment: Path, folder: Path) -> AsyncIterator[int]:
    """The services of docker-compose.yml as processes: each its own command, at ports of this machine. Gives the
    gateway's port when its health check passes."""
    told = together(["docker-compose.yml"], {"DETGATE_WORKERS": "2"})["services"]
    taken = {name: ports.free() for name in ("policy-0", "policy-1", "reward-0", "redis", "gateway")}
    config = (ROOT / "deploy" / "compose" / "gateway.yaml").read_text()
    commands = {"redis": [*told["redis"]["command"], "--port", str(taken["redis"]), "--dir", str(folder)]}
    for name in ("policy-0", "policy-1", "reward-0"):
        config = config.replace(f"http://{name}:8000", f"http://127.0.0.1:{taken[name]}")
        commands[name] = ["detgate", *(str(taken[name]) if word == "8000" else word for word in told[name]["command"])]
    file = folder / "gateway.yaml"
    file.write_text(config)
    service = told["gateway"]
    commands["gateway"] = ["detgate", *(str(file) if word.startswith("/etc/") else word for word in service["command"])]
    variables = image.environment(RUN) | service["environment"]
    variables |= {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "DETGATE_LEDGER__PATH": str(folder / "ledger"),
        "DETGATE_PORT": str(taken["gateway"]),
        "DETGATE_STATE": service["environment"]["DETGATE_STATE"].replace("redis:6379", f"127.0.0.1:{taken['redis']}"),
    }
    async with AsyncExitStack() as stack:
        for command in commands.values():
            await stack.enter_async_context(started(command, folder, variables))
        await passing([word.replace(":8000", f":{taken['gateway']}") for word in service["healthcheck"]["test"][1:]])
        yield taken["gateway"]


async def test_the_services_of_compose_find_each_other(environment: Path, tmp_path: Path) -> None:
    async with services(environment, tmp_path) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        await all_up(http, 3)
        body = {"model": "sim-model", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        indices = []
        for _ in range(6):
            # A connection each, so that either worker may have it.
            async with httpx.AsyncClient(base_url=http.base_url) as client:
                answer = await client.post("/sessions/s/v1/chat/completions", json=body)
            indices.append(answer.headers["x-detgate-index"])
        assert indices == ["0", "1", "2", "3", "4", "5"]
        scored = await http.post("/classify", json={"model": "sim-reward", "input": "an answer"})
        assert scored.headers["x-detgate-replica"] == "reward-0"
        assert "detgate_requests_total{" in (await http.get("/metrics")).text


async def all_up(http: httpx.AsyncClient, count: int) -> None:
    """Wait until so many replicas are up, and no other is there."""
    async with asyncio.timeout(30):
        while True:
            pools = (await http.get("/readyz")).json()["pools"].values()
            if [each["state"] for pool in pools for each in pool["replicas"].values()] == ["up"] * count:
                return
            await asyncio.sleep(0.1)


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
