"""The golden vectors, recomputed by a script in another language, which shares no code with the gateway."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.json"))


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", FOLDER / "check.mjs", folder], capture_output=True, text=True, timeout=60, check=False
    )


def test_another_implementation_finds_the_same() -> None:
    done = check(FOLDER)
    assert done.returncode == 0, done.stderr
    values = sum(_claims(file) * len(json.loads((FOLDER / file).read_text())) for file in FILES)
    assert done.stdout == f"{values} values checked, 0 wrong\n"


def _claims(file: Path) -> int:
    """How many values each vector of a file claims."""
    return {"ids.json": 2, "content.json": 2}.get(file.name, 1)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_it_finds_a_wrong_vector(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    vectors = json.loads((folder / file).read_text())
    names = {
        "segments.json": "segment",
        "samples.json": "seeds",
        "ids.json": "engine_id",
        "content.json": "digest",
        "routing.json": "score",
    }
    name = names.get(file.name, "seed")
    vectors[0][name] = vectors[1][name]
    (folder / file).write_text(json.dumps(vectors))
    done = check(folder)
    assert done.returncode == 1
    assert f"{file}[0].{name}: " in done.stderr
    assert done.stdout.endswith(" values checked, 1 wrong\n")
