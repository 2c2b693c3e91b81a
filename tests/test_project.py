"""What holds for the project as a whole: purity beyond the linters, lock files, documents that are true."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "gateway").rglob("*.py"))
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def imported(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_core_imports_the_standard_library_orjson_and_xxhash_alone() -> None:
    allowed = {*sys.stdlib_module_names, "orjson", "xxhash"}
    strange = [
        f"{source.name}: {name}"
        for source in SOURCES
        if source.is_relative_to(ROOT / "gateway" / "core")
        for name in imported(source)
        if name.split(".")[0] not in allowed and not re.match(r"gateway\.core(\.|$)", name)
    ]
    assert strange == []


def test_the_simulated_engine_imports_nothing_of_the_gateway() -> None:
    strange = [
        f"{source.name}: {name}"
        for source in SOURCES
        if source.is_relative_to(ROOT / "gateway" / "sim")
        for name in imported(source)
        if name.split(".")[0] == "gateway" and not re.match(r"gateway\.sim(\.|$)", name)
    ]
    assert strange == []


def test_nothing_calls_hash_which_differs_from_process_to_process() -> None:
    calls = [
        f"{source.name}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
    ]
    assert calls == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_file_pins_by_hash_and_names_no_index(lock: Path) -> None:
    text = lock.read_text()
    pins = re.findall(r"^[a-z0-9-]+==\S+(?: ; .*?)? \\\n(?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.M)
    assert pins
    assert len(pins) == len(re.findall(r"^[^#\s]", text, re.M))
    assert "://" not in text


def test_the_lock_files_hold_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime, dev = (pinned(ROOT / "requirements" / name) for name in ("lock.txt", "dev.txt"))
    assert {named(need) for need in project["dependencies"] + extras["redis"]} <= runtime.keys()
    assert {named(need) for need in extras["dev"]} <= dev.keys()
    assert runtime.items() <= dev.items()
    assert {"torch", "vllm", "sglang"}.isdisjoint(dev)


def pinned(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.M))


def named(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return found[0].lower().replace("_", "-")


def test_the_readme_names_targets_and_commands_that_there_are() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert {"run", "test"} <= set(re.findall(r"\bmake ([a-z-]+)", readme)) <= targets
    commands = set(re.findall(r'add\("([a-z-]+)", _', (ROOT / "gateway" / "cli.py").read_text()))
    assert set(re.findall(r"\bdetgate ([a-z-]+)\b", readme)) == commands
