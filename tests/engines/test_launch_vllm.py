"""Launch profiles of vLLM, read by vLLM's own parser; its script for a CPU run, with the plugin in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.engines import vllm
from tests import ports
from tests.engines import install, servers
from tests.engines.parsed import parsed, profiles, words
from tests.engines.servers import Server

ROOT = Path(__file__).parents[2]
SPEC = servers.Spec("vllm", "tiny-llm")


@pytest.mark.smoke
def test_its_parser_takes_every_flag_for_what_it_says() -> None:
    wanted = profiles("vllm")
    for profile, taken in zip(wanted, parsed("vllm", [words(profile) for profile in wanted]), strict=True):
        alone = profile.role == "reward" or profile.hardware == "cpu"
        assert taken["seed"] == 0
        assert taken["async_scheduling"] is False
        assert taken["generation_config"] == "vllm"
        assert taken["enable_prefix_caching"] is False
        assert taken["tensor_parallel_size"] == profile.wish.tensor_parallel
        assert taken["runner"] == ("pooling" if profile.role == "reward" else "auto")
        assert taken["max_num_seqs"] == (1 if alone else 128)
        assert ("flash_attn_version=2" in taken["attention_config"]) == (profile.hardware == "hopper")


def test_its_parser_refuses_what_is_no_flag() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        parsed("vllm", [["--batch-invariant"]])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which detgate is installed, for the engine's Python to find."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", folder, ROOT], check=True)
    return folder


@contextmanager
def started(folder: Path, **environment: str) -> Iterator[Server]:
    """The start script for a CPU with a small model, ready."""
    servers.prepare([SPEC])
    # The package for CPUs has no program `vllm` that starts: its name is another one.
    program = folder / "vllm"
    module = "vllm.entrypoints.openai.api_server"
    program.write_text(
        f'#!/bin/sh\nshift\nmodel=$1\nshift\nexec {install.python("vllm")} -m {module} --model "$model" "$@"\n'
    )
    program.chmod(0o755)
    port = ports.free()
    log = folder / "vllm.log"
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                ROOT / "deploy" / "engines" / "vllm-cpu.sh",
                servers.models() / SPEC.model,
                str(port),
                "--max-model-len=512",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                **offline,
                **environment,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
            start_new_session=True,
        )
    server = Server(SPEC, f"http://127.0.0.1:{port}", log, process)
    try:
        servers.wait_ready(server, time.monotonic() + servers.START_SECONDS)
        yield server
    finally:
        servers.stop([server])


@pytest.mark.smoke
def test_the_script_runs_and_the_plugin_reports_each_process(installed: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    environment = {
        "PYTHONPATH": str(installed),
        "VLLM_PLUGINS": "detgate",
        "TORCH_DETERMINISM_SEED": "7",
        "TORCH_DETERMINISM_REPORTS": str(reports),
    }
    with started(tmp_path, **environment) as server:
        told = httpx.get(f"{server.url}/detgate/processes").json()["processes"]
        assert told == sorted((json.loads(file.read_text()) for file in reports.glob("*.json")), key=lambda r: r["pid"])
        assert len(told) >= 2, "the server's process, and the engine's"
        assert server.process.pid in {each["pid"] for each in told}
        for each in told:
            assert each["vllm"].startswith("0.32.0")
            assert each["torch"]
            assert each["seed"] == 7
            assert each["deterministic_algorithms"] is True
            assert each["warn_only"] is True
            assert each["cudnn_deterministic"] is True
            assert each["cudnn_benchmark"] is False
            assert each["environment"]["PYTHONHASHSEED"] == "0"
            assert each["environment"]["OMP_NUM_THREADS"] == "1"
        assert vllm.facts({"/detgate/processes": {"processes": told}}).deterministic is False, "a CPU has no such mode"
        body = {"model": str(servers.models() / SPEC.model), "prompt": "One day", "max_tokens": 16, "seed": 3}
        body |= {"logprobs": 1, "temperature": 1}

        def answer(_: int) -> str:
            choice = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
            return json.dumps([choice["text"], choice["logprobs"]["token_logprobs"]])

        alone = answer(0)
        with ThreadPoolExecutor(8) as crowd:
            assert set(crowd.map(answer, range(16))) == {alone}


def test_without_a_folder_the_processes_share_one_of_their_own(installed: Path, tmp_path: Path) -> None:
    with started(tmp_path, PYTHONPATH=str(installed), TMPDIR=str(tmp_path)) as server:
        assert httpx.get(f"{server.url}/detgate/processes").status_code == 404
        [folder] = tmp_path.glob("detgate-vllm-*")
        assert len(list(folder.glob("*.json"))) >= 2
        assert str(folder) in server.log.read_text()
