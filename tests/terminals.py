"""The commands of a document, run as its reader would type them, and their output as it is printed there.

    with Folder(path, port) as folder:
        folder.follow(fences(text))

A block of `sh` is typed into one shell that stays open; with `title="first terminal"` it is the gateway's, which the
next such block ends by CTRL-C. A block of `text` must stand in the output of the block before it, line by line; `…`
stands for anything within a line. Any other block is a file to save by its title.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[1]

FIRST = "first terminal"
_END = "=== that was all:"


@dataclass(frozen=True)
class Fence:
    """A code block of a document."""

    language: str
    title: str
    code: str


def fences(text: str) -> Iterator[Fence]:
    """The code blocks of a document, in order."""
    for language, title, code in re.findall(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', text, re.M | re.S):
        yield Fence(language, title, code)


class Folder:
    """A fresh clone as far as the commands can tell, with a gateway at `port` where the documents say 8000."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        self.port = port
        self.output = ""
        self._server: subprocess.Popen[str] | None = None
        (path / "Makefile").symlink_to(ROOT / "Makefile")
        (path / ".venv").symlink_to(sys.prefix)
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(("DETGATE_", "MAKE"))}
        self._env = {**theirs, "DETGATE_PORT": str(port), "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=self.path,
            env=self._env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (self._server, self._shell):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def follow(self, blocks: Iterable[Fence]) -> None:
        """Do what the blocks say, in order."""
        for block in blocks:
            code = self.here(block.code)
            if block.language == "text":
                assert stands_in(code, self.output), f"{block.code}\nis not in\n{self.output}"
            elif block.language == "sh" and block.title == FIRST:
                self.stop()
                self.start(code)
            elif block.language == "sh":
                self.output = self.type(code)
            else:
                (self.path / block.title).write_text(code)

    def here(self, text: str) -> str:
        """What the document says of port 8000, for the port of this folder."""
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    def type(self, code: str) -> str:
        """What these commands print in the second terminal. They must succeed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{{\n{code}\n}}; echo; echo '{_END}' $?\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(_END):
                assert line.split()[-1] == "0", (code, lines)
                return "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell ended: {lines}")

    def start(self, code: str) -> None:
        """Start a server in the first terminal, and wait until it is ready."""
        # What is to be built was built by whoever started these tests.
        command = re.sub(r"^make ", "exec make -o .venv/run.stamp ", code)
        self._server = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.path,
            env=self._env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not self._ready():
            assert self._server.poll() is None, self._server.communicate()
            assert time.monotonic() < deadline, code
            time.sleep(0.05)

    def stop(self) -> None:
        """CTRL-C in the first terminal."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGINT)
            self._server.communicate(timeout=30)
            self._server = None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


def stands_in(told: str, output: str) -> bool:
    """Whether these lines stand in the output, one after the other."""
    lines = (".*".join(map(re.escape, line.rstrip().split("…"))) for line in told.strip("\n").splitlines())
    pattern = r"\s*\n".join(lines)
    return re.search(rf"^{pattern}\s*$", output, re.M) is not None
