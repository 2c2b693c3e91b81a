"""The Dockerfile, read as far as its tests need it, and the environment that its commands build."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word, and what follows on one line."""

    word: str
    text: str


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found: list[list[Instruction]] = []
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        found[-1].append(Instruction(word, rest.strip()))
    return found


def of(stage: list[Instruction], word: str) -> list[str]:
    """What the instructions of a word say."""
    return [each.text for each in stage if each.word == word]


def environment(stage: list[Instruction]) -> dict[str, str]:
    """The variables that a stage sets."""
    return dict(pair.split("=", 1) for text in of(stage, "ENV") for pair in shlex.split(text))


def command(stage: list[Instruction]) -> list[str]:
    """What a container runs when it is told nothing."""
    words = [*json.loads(of(stage, "ENTRYPOINT")[-1]), *json.loads(of(stage, "CMD")[-1])]
    return [str(word) for word in words]


def health_check() -> list[str]:
    """What a container is asked by, whether it is well."""
    [said] = of(stages()[1], "HEALTHCHECK")
    words: list[str] = json.loads(re.sub(r"^.*CMD (?=\[)", "", said))
    return words


def context() -> set[str]:
    """The tracked and new files that .dockerignore lets into the image's build."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    patterns = (ROOT / ".dockerignore").read_text().split()
    return {name for name in filter(None, listed) if (ROOT / name).is_file() and _let_in(name, patterns)}


def _let_in(name: str, patterns: list[str]) -> bool:
    """The last pattern that fits decides; it stands for a file, or for a folder and all in it."""
    folders = [name[: match.start()] for match in re.finditer("/", name)]
    inside = True
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        anywhere = bare.startswith("**/")
        paths = [path.rpartition("/")[2] if anywhere else path for path in (name, *folders)]
        if any(fnmatch(path, bare.removeprefix("**/")) for path in paths):
            inside = pattern.startswith("!")
    return inside


def build(folder: Path) -> Path:
    """Run the build stage's own commands with `folder` as the root, by this Python. Gives the environment."""
    [stage, _] = stages()
    source = folder / "src"
    for each in stage:
        if each.word == "COPY":
            *names, to = each.text.split()
            _copy(names, source / to)
        elif each.word == "RUN":
            _run(each.text, folder, source)
    return folder / "opt" / "detgate"


def _copy(names: list[str], to: Path) -> None:
    for name in names:
        for file in sorted(context()):
            if file == name:
                target = to if file == to.name or "." in to.name else to / Path(file).name
            elif file.startswith(f"{name}/"):
                target = to / file.removeprefix(f"{name}/")
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, target)


def _run(text: str, folder: Path, source: Path) -> None:
    """One RUN. The builder is this environment: it holds what build.txt pins, so installing that changes nothing."""
    text = text.replace("/opt/", f"{folder}/opt/").replace("/wheels", f"{folder}/wheels")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ended = subprocess.run(["sh", "-ec", text], cwd=source, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
