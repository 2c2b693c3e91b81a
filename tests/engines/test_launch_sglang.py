"""Launch profiles of SGLang, read by SGLang's own parser; its scripts for Hopper run on a CPU, as far as that can."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.launch import Role, Wish, load
from tests import ports
from tests.engines import gates, install, servers
from tests.engines.commands import detgate
from tests.engines.parsed import parsed, profiles, words
from tests.engines.servers import Server

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_its_parser_takes_every_flag_for_what_it_says() -> None:
    wanted = profiles("sglang")
    for profile, taken in zip(wanted, parsed("sglang", [words(profile) for profile in wanted]), strict=True):
        given = {flag.name: flag.value for flag in profile.flags}
        assert taken["enable_deterministic_inference"] is True
        assert taken["attention_backend"] == given["--attention-backend"]
        assert taken["sampling_backend"] == "pytorch"
        assert taken["sampling_defaults"] == "openai"
        assert taken["random_seed"] == 0
        assert taken["disable_radix_cache"] is True
        assert taken["tp_size"] == profile.wish.tensor_parallel
        assert taken["is_embedding"] is (profile.role == "reward")
        assert taken["max_running_requests"] == (1 if profile.role == "reward" else None)


def test_its_parser_refuses_what_is_no_flag() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        parsed("sglang", [["--enable-determinism"]])


# --- started


@contextmanager
def started(folder: Path, role: Role) -> Iterator[Server]:
    """The start script for Hopper on a CPU, ready. What a CPU cannot do gives way to what is said after it."""
    spec = servers.SGLANG if role == "generate" else servers.SGLANG_REWARD
    servers.prepare([spec])
    # SGLang starts on a CPU by another program than its module.
    program = folder / "python3"
    launch = HERE / "sglang_cpu" / "launch.py"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m sglang.launch_server" ] || exit 9\nshift 2\n'
                       f'exec {install.python("sglang")} {launch} "$@"\n')  # fmt: skip
    program.chmod(0o755)
    script = ROOT / "deploy" / "engines" / ("sglang-hopper.sh" if role == "generate" else "sglang-hopper-reward.sh")
    port = ports.free()
    log = folder / "sglang.log"
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [script, servers.models() / spec.model, str(port), *ON_A_CPU],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    server = Server(spec, f"http://127.0.0.1:{port}", log, process)
    try:
        servers.wait_ready(server, time.monotonic() + servers.START_SECONDS)
        yield server
    finally:
        servers.stop([server])


ON_A_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--skip-server-warmup"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.5", "--context-length", "2048"),
)
SAMPLING = {"max_new_tokens": 16, "temperature": 1, "sampling_seed": 3}
ASKED: dict[Role, tuple[str, str, dict[str, Any]]] = {
    "generate": ("/generate", "output_ids", {"text": "One day", "sampling_params": SAMPLING}),
    "reward": ("/classify", "embedding", {"text": "One day"}),
}
NOT_TRIED = {"--attention-backend"}
"""Flags of the profile that a CPU cannot obey."""


@pytest.mark.parametrize("role", ["generate", "reward"])
def test_the_script_runs_and_each_flag_is_in_force(role: Role, tmp_path: Path) -> None:
    profile = load("sglang").profile(Wish("hopper", role))
    with started(tmp_path, role) as server:
        says = httpx.get(f"{server.url}/server_info").json()
        for flag in profile.flags:
            if flag.name not in NOT_TRIED:
                name = flag.name.removeprefix("--").replace("-", "_")
                assert str(says[name]) == (flag.value or "True"), flag.name
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
        for name, value in profile.variables.items():
            assert f"{name}={value}".encode() in environment
        path, field, body = ASKED[role]

        def answer(_: int) -> Any:
            return httpx.post(server.url + path, json=body, timeout=60).json()[field]

        # What `doctor` finds is what gave way to the CPU, and nothing else: of scoring the mode asks nothing.
        expected = {"attention-backend"} if role == "generate" else set()
        told = detgate("doctor", tmp_path, gates.pool("p", "sglang", [server.url], role=role), "--json")
        assert (told.status, {finding["id"] for finding in told.findings("p")}) == (0, expected), told.text
        alone = answer(0)
        with ThreadPoolExecutor(8) as crowd:
            assert all(each == alone for each in crowd.map(answer, range(16)))
