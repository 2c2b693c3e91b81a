"""`make fuzz`: every target under atheris, which is installed in an environment of its own.

What makes a target fail is left beside the corpus, and its path is told; the corpus stays for the next time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

from tests.fuzz.targets import SEEDS, TARGETS

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "fuzz"
NEEDS = ("atheris>=2.3", "orjson", "xxhash", "structlog")
"""atheris, and what the targets import."""


def environment() -> Path:
    """Python with atheris."""
    folder = CACHE / "venv"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *NEEDS], check=True
        )
        (folder / "installed").touch()
    return folder / "bin" / "python"


def fuzz(python: Path, name: str, seconds: int) -> bool:
    """Whether the target held; its figures are printed."""
    corpus = CACHE / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [str(python), "-m", "tests.fuzz.under_atheris", name, str(seconds), str(corpus)]
    done = subprocess.run(
        command, cwd=CACHE, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    runs = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    reached = re.findall(r"cov: (\d+)", done.stderr)
    print(f"{name}: {runs[1] if runs else 'no'} runs, {reached[-1] if reached else 0} places reached", flush=True)
    if done.returncode:
        print(f"    FAILED:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}", flush=True)
    return not done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all of them, where none is named")
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    python = environment()
    held = [fuzz(python, name, given.seconds) for name in given.targets or TARGETS]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
