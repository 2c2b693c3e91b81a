"""README, tutorial and how-tos do what they say: each command is typed, each output compared."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.sim import SimServer, SimSettings
from tests import ports
from tests.harness import MODEL, FakeWorker, gateway, pool
from tests.processes import serving
from tests.terminals import ROOT, Fence, Folder, fences, stands_in

pytestmark = pytest.mark.first

README = ROOT / "README.md"


def blocks(document: Path) -> list[Fence]:
    return list(fences(document.read_text()))


def is_server(block: Fence) -> bool:
    """Whether it starts gateways before addresses that only the reader has."""
    return block.code.startswith("detgate serve")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_each_command_does_what_the_document_says(name: str, tmp_path: Path) -> None:
    steps = [block for block in blocks(ROOT / name) if not is_server(block)]
    assert {block.language for block in steps} >= {"sh", "text", "python"}
    with Folder(tmp_path, ports.free()) as folder:
        folder.follow(steps)
        folder.stop()


def test_an_output_that_differs_is_seen() -> None:
    printed = "a\nequal: 12 requests  \n\nb: 7\n"
    assert stands_in("equal: 12 requests\n\nb: …\n", printed)
    assert not stands_in("equal: 12\n", printed)
    assert not stands_in("equal: 12 requests\nc: …\n", printed)


def served() -> Iterator[str]:
    """The command lines of the README that start a gateway."""
    for block in blocks(README):
        if is_server(block):
            yield from block.code.splitlines()


@pytest.mark.parametrize("line", list(served()))
async def test_the_gateways_of_the_readme_start_and_are_ready(line: str, tmp_path: Path) -> None:
    (file,) = (block.code for block in blocks(README) if block.title == "gateway.yaml")
    async with AsyncExitStack() as stack:
        policy = SimSettings(engine="vllm", model="policy")
        reward = SimSettings(engine="vllm", role="reward", model="reward", prefix_cache=False)
        for number, settings in enumerate((policy, policy, reward), 1):
            url = (await stack.enter_async_context(SimServer(settings))).url
            line, file = (text.replace(f"http://10.0.0.{number}:8000", url) for text in (line, file))
        assert "10.0.0." not in line + file
        program, command, *flags = shlex.split(line)
        assert (program, command) == ("detgate", "serve")
        if flags == ["--config", "gateway.yaml"]:
            flags = []
        else:
            file = "{}"
        async with serving(tmp_path, file, *flags) as gate:
            told = (await gate.http.get("/readyz")).json()
            states = [replica["state"] for each in told["pools"].values() for replica in each["replicas"].values()]
            assert set(states) == {"up"}
            gate.signal(signal.SIGTERM)
            assert await gate.ended() == 0


def programs() -> list[tuple[str, Fence]]:
    return [
        (str(document.relative_to(ROOT)), block)
        for document in sorted((ROOT / "docs" / "how-to").glob("*.md"))
        for block in blocks(document)
        if block.language == "python"
    ]


@pytest.mark.parametrize(("name", "block"), programs(), ids=[name for name, _ in programs()])
async def test_the_programs_of_the_how_tos_run(name: str, block: Fence) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        code = block.code.replace("http://127.0.0.1:8000", gate.url).replace("sim-model", MODEL)
        command = [sys.executable, "-W", "error", "-c", code]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        seeds = {record["seed"] for record in gate.records() if record["event"] == "opened"}
        assert len(printed.splitlines()) == len(seeds) > 3
        assert {seen.json["seed"] for seen in worker.seen} == seeds


def test_both_readmes_say_the_same() -> None:
    english, chinese = (ROOT / name for name in ("README.md", "README.zh.md"))
    assert blocks(chinese) == blocks(english)
    one, other = english.read_text(), chinese.read_text()
    assert shape(other) == shape(one)
    assert set(links(other)) ^ set(links(one)) == {"README.md", "README.zh.md"}


def shape(text: str) -> list[str]:
    """Levels of headings, and the first words of tables' rows but for their heads, in order."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^\|.*\|\n(?=\|---)", "", text, flags=re.M)
    return re.findall(r"^#+(?= )|^\| \S+", text, re.M)


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)
