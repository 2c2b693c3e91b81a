"""The Dockerfile, read: `make test-image` runs what it says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.deploy import image
from tests.harness import FakeWorker, gateway, pool

ROOT = image.ROOT
BUILD, RUN = image.stages()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    ended = subprocess.run([hadolint, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True)
    assert ended.returncode == 0, ended.stdout.decode()


def test_it_is_slim_pinned_and_runs_as_nobody() -> None:
    for stage in (BUILD, RUN):
        [base] = image.of(stage, "FROM")
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+( AS \w+)?", base), base
    [user] = image.of(RUN, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be checked"
    assert image.of(RUN, "STOPSIGNAL") == ["SIGTERM"]
    assert "pip install" not in " ".join(image.of(RUN, "RUN"))


@pytest.mark.parametrize("tls", [False, True])
async def test_its_health_check_passes_on_what_lives_and_on_nothing_else(tls: bool) -> None:
    certificate = ROOT / "tests" / "shared" / "tls" / "certificate.pem"
    files = {"cert": str(certificate), "key": str(certificate.with_name("key.pem"))} if tls else {}

    async def passes(port: int) -> bool:
        env = {"DETGATE_PORT": str(port)} | ({"DETGATE_TLS__CERT": files["cert"]} if tls else {})
        [_, *words] = image.health_check()
        asked = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, stderr=asyncio.subprocess.DEVNULL)
        return await asked.wait() == 0

    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tls=files) as gate:
        async with asyncio.timeout(30):
            # On a busy machine it may be late, as any health check.
            while not await passes(gate.port):
                pass
    assert not await passes(ports.free())


def test_only_what_the_package_needs_is_sent_to_the_builder() -> None:
    sent = image.context()
    assert {"gateway/cli.py", "requirements/lock.txt", "pyproject.toml", "README.md", "LICENSE"} <= sent
    assert {name.partition("/")[0] for name in sent} == {
        *("gateway", "requirements", "pyproject.toml", "README.md", "LICENSE")
    }
