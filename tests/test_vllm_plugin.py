"""vLLM's plugin, with stand-ins for torch and NumPy; `make test-vllm` loads it into vLLM itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway import vllm_plugin
from gateway.engines import vllm

ROOT = Path(__file__).parents[1]


class Torch(types.ModuleType):
    """What the plugin touches of torch, as a build for CUDA has it; whatever asks for a device fails."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__version__ = "2.13.0+cu130"
        self.version = types.SimpleNamespace(cuda="13.0", hip=None)
        self.backends = types.SimpleNamespace(
            cudnn=types.SimpleNamespace(version=lambda: 91900, deterministic=False, benchmark=True)
        )
        self.cuda = types.SimpleNamespace(nccl=types.SimpleNamespace(version=lambda: (2, 31, 1)))
        self.utils = types.SimpleNamespace(deterministic=types.SimpleNamespace(fill_uninitialized_memory=True))
        self.seeds: list[int] = []
        self.mode: tuple[bool, bool] = (False, False)

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def use_deterministic_algorithms(self, on: bool, *, warn_only: bool) -> None:
        self.mode = (on, warn_only)

    def are_deterministic_algorithms_enabled(self) -> bool:
        return self.mode[0]

    def is_deterministic_algorithms_warn_only_enabled(self) -> bool:
        return self.mode[1]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Torch:
    """An engine's process: torch and NumPy are there, and nothing of it in the environment."""
    there = Torch()
    numpy = types.ModuleType("numpy")
    numpy.random = types.SimpleNamespace(seed=there.seeds.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", there)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    for name in (vllm_plugin.SEED, vllm_plugin.REPORTS, *vllm_plugin.DECIDING):
        monkeypatch.delenv(name, raising=False)
    # What the plugin sets there ends with the test.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return there


def test_switches_and_seeds_are_set_and_told(torch: Torch, tmp_path: Path) -> None:
    os.environ |= {vllm_plugin.SEED: "7", vllm_plugin.REPORTS: str(tmp_path / "r"), "HF_TOKEN": "secret"}
    vllm_plugin.register()
    drawn = random.random()
    assert drawn == random.Random(7).random()
    assert torch.seeds == [7, 7]
    assert torch.mode == (True, True)
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    [file] = (tmp_path / "r").iterdir()
    told = json.loads(file.read_text())
    assert (told["torch"], told["cuda"], told["cudnn"], told["nccl"]) == ("2.13.0+cu130", "13.0", 91900, "2.31.1")
    assert told["deterministic_algorithms"] is told["warn_only"] is told["cudnn_deterministic"] is True
    assert told["cudnn_benchmark"] is False
    assert told["environment"] == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert "secret" not in file.read_text()


def test_what_the_launch_profile_set_is_kept(torch: Torch, tmp_path: Path) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    vllm_plugin.register()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_loading_it_again_changes_nothing(torch: Torch) -> None:
    vllm_plugin.register()
    first = vllm_plugin.reports()
    vllm_plugin.register()
    assert vllm_plugin.reports() == first
    assert len(first) == 1


def test_a_folder_that_cannot_be_written_does_not_end_the_engine(torch: Torch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.environ[vllm_plugin.REPORTS] = str(tmp_path / "file" / "folder")
    vllm_plugin.register()
    assert torch.mode == (True, True)


def test_reports_of_dead_processes_are_left_out(torch: Torch) -> None:
    vllm_plugin.register()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = Path(os.environ[vllm_plugin.REPORTS])
    (folder / f"{ended.pid}.json").write_text(json.dumps({"pid": ended.pid}))
    assert [each["pid"] for each in vllm_plugin.reports()] == [os.getpid()]


async def test_the_route_gives_the_reports_and_the_engines_file_reads_them(torch: Torch) -> None:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    vllm_plugin.register()
    app = FastAPI()
    vllm_plugin.Processes().attach_router(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        told = (await http.get("/detgate/processes")).json()
    assert [each["pid"] for each in told["processes"]] == [os.getpid()]
    assert "/detgate/processes" in vllm.ASKS
    facts = vllm.facts({"/detgate/processes": told})
    assert facts.deterministic is True
    assert facts.libraries == "torch 2.13.0+cu130, cuda 13.0, cudnn 91900, nccl 2.31.1"


def test_processes_that_compute_with_other_builds_are_told_apart() -> None:
    told = {"processes": [{"torch": "2.13.0", "nccl": "2.31.1"}, {"torch": "2.12.0"}, {"torch": "2.12.0"}, None]}
    assert vllm.facts({"/detgate/processes": told}).libraries == "torch 2.12.0 | torch 2.13.0, nccl 2.31.1"
    assert vllm.facts({}).libraries is None


@pytest.mark.parametrize(
    ("told", "deterministic"),
    [
        ({}, None),
        ({"/detgate/processes": {"processes": []}}, None),
        ({"/detgate/processes": {"processes": [{"environment": {}}]}}, False),
        ({"/detgate/processes": {"processes": [{"environment": {"VLLM_BATCH_INVARIANT": "1"}}, {}]}}, False),
        ({"/server_info?config_format=json": {"vllm_env": {"VLLM_BATCH_INVARIANT": False}},
          "/detgate/processes": {"processes": [{"environment": {"VLLM_BATCH_INVARIANT": "1"}}]}}, False),
    ],
)  # fmt: skip
def test_one_process_out_of_the_mode_is_enough(told: dict[str, Any], deterministic: bool | None) -> None:
    assert vllm.facts(told).deterministic is deterministic


def test_vllm_finds_it_by_its_entry_points() -> None:
    for group, attribute in (("vllm.general_plugins", "register"), ("vllm.endpoint_plugins", "Processes")):
        [point] = [each for each in importlib.metadata.entry_points(group=group) if each.name == "detgate"]
        assert point.load() is getattr(vllm_plugin, attribute)


def test_it_brings_nothing_of_the_gateway_into_the_engine() -> None:
    program = (
        "import sys, gateway.vllm_plugin; print(sorted(name for name in sys.modules if name.startswith('gateway')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert found.strip() == "['gateway', 'gateway.vllm_plugin']"
