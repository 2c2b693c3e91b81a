"""Real inference servers for tests and scripts: started together on free ports, awaited, and ended.

    python -m tests.engines.servers vllm tiny-llm tiny-llm      prints their URLs; ctrl-C ends them

Environments and models are made first where they are missing (`install.py`, `models.py`). A server binds to
loopback, in a process group of its own, and writes to a log file; what it logged last is part of the error
when it does not come up.
"""

import argparse
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tests import ports
from tests.engines import install

HERE = Path(__file__).resolve().parent
READY_PATH = {"vllm": "/health", "sglang": "/ready"}
START_SECONDS = 240.0
STOP_SECONDS = 20.0


class DidNotStart(Exception):
    """A server ended, or was not ready in time; the message holds the end of its log."""


@dataclass(frozen=True)
class Spec:
    """One server to start: the engine, the model's name in the cache, the engine's options and environment.

    `deterministic` is for SGLang alone, which ignores seeds without it; vLLM has no such mode on a CPU.
    """

    engine: Literal["vllm", "sglang"]
    model: str = "tiny-llm"
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = False


VLLM = Spec("vllm", options=("--enable-request-id-headers",))
VLLM_REWARD = Spec("vllm", "tiny-rm", ("--runner", "pooling", "--no-enable-prefix-caching"))
SGLANG = Spec("sglang", options=("--enable-metrics",), deterministic=True)
SGLANG_REWARD = Spec("sglang", "tiny-rm", ("--is-embedding", "--disable-radix-cache"))
# By engine and whether the model generates.
KINDS = {
    ("vllm", True): VLLM,
    ("vllm", False): VLLM_REWARD,
    ("sglang", True): SGLANG,
    ("sglang", False): SGLANG_REWARD,
}


def spec(engine: str, model: str) -> Spec:
    """The usual server of this engine for a model, which generates if its name says so."""
    return replace(KINDS[engine, model.endswith("-llm")], model=model)


@dataclass(frozen=True)
class Server:
    """A started server."""

    spec: Spec
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def log_end(self, characters: int = 4000) -> str:
        """The last of what the server wrote."""
        return self.log.read_text(errors="replace")[-characters:]


@contextmanager
def running(specs: Sequence[Spec], logs: Path) -> Iterator[list[Server]]:
    """Start the servers side by side, give them once all are ready, end them on leaving.

    Raises `DidNotStart`, and what `install.install` raises.
    """
    prepare(specs)
    servers: list[Server] = []
    try:
        for number, spec in enumerate(specs):
            servers.append(start(spec, logs / f"{spec.engine}-{spec.model}-{number}.log"))
        deadline = time.monotonic() + START_SECONDS
        for server in servers:
            wait_ready(server, deadline)
        yield servers
    finally:
        stop(servers)


def prepare(specs: Sequence[Spec]) -> None:
    """Make the environments and models that the servers need and that do not stand yet."""
    for engine in sorted({spec.engine for spec in specs}):
        interpreter = install.install(engine)
        size = ["--mid"] if any(spec.model.startswith("mid-") for spec in specs) else []
        with install.locked("models"):
            command = [str(interpreter), str(HERE / "models.py"), str(models()), *size]
            subprocess.run(command, check=True, capture_output=True)


def models() -> Path:
    """The folder of the models."""
    return install.cache() / "models"


def start(spec: Spec, log: Path) -> Server:
    """Start one server on a free port and do not wait for it."""
    port = ports.free()
    script = HERE / f"start_{spec.engine}.sh"
    command = [
        str(script),
        str(install.python(spec.engine)),
        str(models() / spec.model),
        str(port),
        *spec.options,
    ]
    environment = {**os.environ, **spec.environment, "DET": "1" if spec.deterministic else "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return Server(spec, f"http://127.0.0.1:{port}", log, process)


def wait_ready(server: Server, deadline: float) -> None:
    """Poll the server's ready route until it answers 200. The deadline is a reading of `time.monotonic`."""
    while not answers(server.url + READY_PATH[server.spec.engine]):
        if server.process.poll() is not None:
            raise DidNotStart(f"{server.spec} ended with {server.process.returncode}:\n{server.log_end()}")
        if time.monotonic() > deadline:
            raise DidNotStart(f"{server.spec} was not ready in {START_SECONDS:.0f} s:\n{server.log_end()}")
        time.sleep(0.25)


def answers(url: str) -> bool:
    """Whether a GET of this URL gives 200 within 5 s."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(servers: Sequence[Server]) -> None:
    """SIGTERM to all; what has not ended after `STOP_SECONDS` is killed, with all that it started."""
    for server in servers:
        server.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for server in servers:
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.0, deadline - time.monotonic()))
        kill_group(server.process.pid)
        server.process.wait()


def kill_group(leader: int) -> None:
    """Kill what is left of a server's process group: engine processes can outlive their parent."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main() -> None:
    """Run servers of one engine until ctrl-C."""
    parser = argparse.ArgumentParser(description="Run real inference servers on this machine's CPU.")
    parser.add_argument("engine", choices=READY_PATH)
    parser.add_argument("models", nargs="+", help="one server for each: tiny-llm, tiny-rm, mid-llm …")
    args = parser.parse_args()
    specs = [spec(args.engine, model) for model in args.models]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = Path(tempfile.mkdtemp(prefix="engines-"))
    with suppress(KeyboardInterrupt), running(specs, logs) as servers:
        for server in servers:
            print(server.spec.model, server.url, server.log, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
