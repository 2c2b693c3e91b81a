"""Where the suites are had from: a git URL or a folder for each, named by the user or the project's own."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "conformance"
URLS = {
    "h1spec": "https://github.com/uNetworking/h1spec",
    "gunicorn": "https://github.com/benoitc/gunicorn",
    "smuggler": "https://github.com/defparam/smuggler",
}
"""Each may be given otherwise in the environment, as in `H1SPEC=/somewhere/h1spec make conformance`."""


class Missing(Exception):
    """A suite that cannot be had here. The message says why."""


def tree(name: str) -> Path:
    """The files of a suite that is a git repository. Raises `Missing`."""
    source = os.environ.get(name.upper(), URLS[name])
    folder = CACHE / name
    if not folder.exists():
        cloned = subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", source, str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if cloned.returncode:
            raise Missing(f"{source} cannot be cloned: {cloned.stderr.strip().splitlines()[-1]}")
    return folder


def version(name: str) -> str:
    """The commit that `tree` has."""
    asked = subprocess.run(
        ["git", "-C", str(CACHE / name), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=True
    )
    return asked.stdout.strip()


def installed(package: str) -> Path:
    """The folder of commands of a package from PyPI, in an environment of its own. Raises `Missing`."""
    folder = CACHE / f"{package}-venv"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        done = subprocess.run(
            [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", package],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Missing(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / "installed").touch()
    return folder / "bin"
