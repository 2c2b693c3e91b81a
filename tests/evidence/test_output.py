"""What commands say to people: fitted to a terminal, whole and plain where it is piped."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.padding import Padding
from rich.table import Table

from gateway.cli import main
from gateway.evidence.output import output
from gateway.sim import SimServer, SimSettings
from tests.evidence.ledger import request, write

LONG = "/".join(["a-folder-with-a-long-name"] * 8)


def test_what_is_piped_is_whole_plain_and_unpadded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table(box=None, pad_edge=False)
    for text in ("short", LONG):
        table.add_row(text, ":a:")
    with output() as console:
        console.print(f"[bold red]found[/] {LONG} at task:a:0")
        console.print(Padding(f'{{"path": "{LONG}"}}', (0, 0, 0, 2), expand=False))
        console.print(table)
        console.print()
    lines = capsys.readouterr().out.split("\n")
    cells = [f"{text:{len(LONG)}}  :a:" for text in ("short", LONG)]
    assert lines == [f"found {LONG} at task:a:0", f'  {{"path": "{LONG}"}}', "", *cells, "", ""]


@pytest.mark.parametrize("command", ["doctor", "diff", "replay"])
async def test_no_command_pads_or_breaks_its_lines(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for name, seed in (("one", 1), ("two", 2)):
        opened, closed = request("task:a:1", 0, seed=seed, digest="00" * 16, repeat=0, time=1.0)
        write(tmp_path / name, [opened, closed])
    async with SimServer(SimSettings(engine="sglang", deterministic=False)) as engine:
        said: dict[str, list[str]] = {
            "doctor": ["doctor", "--engine", "sglang", "--worker-urls", engine.url, "--ledger", str(tmp_path)],
            "diff": ["diff", str(tmp_path / "one"), str(tmp_path / "two")],
            "replay": ["replay", "plans", str(tmp_path / "one")],
        }
        assert await asyncio.to_thread(main, said[command]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > 40
    assert [line for line in lines if line != line.rstrip() or "\x1b" in line] == []
    assert command == "doctor" or any("task:a:1" in line for line in lines), "no emoji of it"


async def test_a_terminal_has_lines_of_its_width_and_colours() -> None:
    async with SimServer(SimSettings(engine="sglang", deterministic=False)) as engine:
        said = await asyncio.to_thread(_on_a_terminal, "doctor", "--engine", "sglang", "--worker-urls", engine.url)
    assert "\x1b[1;31mfatal" in said
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines())) == 80


def _on_a_terminal(*arguments: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env: dict[str, Any] = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-m", "gateway", *arguments], stdout=theirs, env=env):
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 65536):
                said += piece
        except OSError:  # how Linux tells the end of a terminal
            pass
        os.close(ours)
    return said.decode()
