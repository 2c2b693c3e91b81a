"""The documents as a site: it builds, what it links to is there, and what is written as a list or a table is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs_tables import DOCS, ROOT

CONFIGURATION = ROOT / "zensical.toml"


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """The site of a folder that holds documents and configuration."""
    command = [str(Path(sys.prefix, "bin", "zensical")), "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def copied(folder: Path) -> Path:
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(CONFIGURATION, folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(tmp_path_factory.mktemp("site"))
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


def pages(site: Path) -> dict[str, str]:
    return {str(page.relative_to(site)): page.read_text() for page in sorted(site.rglob("*.html"))}


def test_every_document_is_a_page(site: Path) -> None:
    written = {str(document.relative_to(DOCS).with_suffix(".html")) for document in DOCS.rglob("*.md")}
    assert written <= pages(site).keys()


def test_lists_and_tables_are_rendered_as_such(site: Path) -> None:
    for name, text in pages(site).items():
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.S):
            left = re.search(r"^(?:[-*|] |\d+\. ).*", paragraph, re.M)
            assert left is None, f"{name}: a blank line is missing before {left[0]!r}"


def test_nothing_is_asked_of_other_hosts(site: Path) -> None:
    for name, text in pages(site).items():
        fetched = r"<(?:script|img|link rel=\"?stylesheet\"?)[^>]*(?:src|href)=[\"']?(https?://[^\"' >]+)"
        assert re.findall(fetched, text) == [], name


@pytest.mark.parametrize("link", ["nowhere.md", "runs.md#no-such-heading"])
def test_a_link_to_nothing_ends_the_build(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "runs.md").write_text("# Runs\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n[there]({link})\n")
    text = CONFIGURATION.read_text()
    (tmp_path / CONFIGURATION.name).write_text(re.sub(r"^nav = \[.*?^\]\n", "", text, flags=re.M | re.S))
    built = build(tmp_path)
    assert built.returncode != 0
    assert "does not exist" in re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr)


def test_every_document_has_its_place_in_the_navigation() -> None:
    placed = set(entries(tomllib.loads(CONFIGURATION.read_text())["project"]["nav"]))
    there = {str(document.relative_to(DOCS)) for document in DOCS.rglob("*.md")}
    assert placed <= there
    assert {name for name in there - placed if not name.startswith("decisions/0")} == set()


def entries(part: Any) -> list[str]:
    """The documents in a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [name for inner in (part.values() if isinstance(part, dict) else part) for name in entries(inner)]
