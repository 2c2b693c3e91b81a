"""The programs of a measurement: the fake engine, the load, nginx, and the gateway as `detgate serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests import ports
from tests.bench import machine

HERE = Path(__file__).parent
MODEL = "fake-model"
ENGINES = (17821, 17822)
"""Where the fake engine listens for a gateway that others started: its replicas. Else on ports that are free."""
CORES = sorted(os.sched_getaffinity(0))
GATEWAY_CORES, LOAD_CORES = ({CORES[0]}, set(CORES[1:])) if len(CORES) > 1 else (set(CORES), set(CORES))
WORDS = (
    "the",
    "gateway",
    "hands",
    "a",
    "batch",
    "to",
    "its",
    "replica",
    "and",
    "a",
    "kernel",
    "sums",
    "in",
    "one",
    "order",
)


@dataclass(frozen=True)
class Target:
    """What takes the load. `pid`: whose CPU time is measured; None for the engine itself."""

    name: str
    port: int
    pid: int | None


class Bench:
    """A folder of built programs and bodies, and the engine."""

    def __init__(self, folder: Path, engines: Sequence[int]) -> None:
        self.folder = folder
        self.engines = list(engines)
        for program in ("engine", "load"):
            command = ["cc", "-O2", "-o", str(folder / program), str(HERE / f"{program}.c")]
            subprocess.run(command, check=True)
        for name, size in (("small", 600), ("64k", 64 << 10), ("1m", 1 << 20)):
            for stream in (False, True):
                path = folder / f"{name}{'-stream' * stream}.json"
                path.write_text(json.dumps(body(size, stream=stream), separators=(",", ":")))

    def set(self, **what: int) -> None:
        """Change what the engine does, and set its counts to nothing."""
        get(self.engines[0], "/_set?" + "&".join(f"{name}={value}" for name, value in what.items()))

    def told(self) -> dict[str, int]:
        """The engine's counts."""
        told: dict[str, int] = json.loads(get(self.engines[0], "/_told"))
        return told

    @contextmanager
    def load(self, target: Target, body: str, **how: float | str) -> Iterator[subprocess.Popen[str]]:
        """The load, while it runs."""
        command = [str(self.folder / "load"), str(target.port), str(self.folder / f"{body}.json")]
        command += [str(each) for pair in how.items() for each in pair]
        with started(command, cores=LOAD_CORES) as process:
            yield process

    def loaded(self, target: Target, body: str, **how: float | str) -> dict[str, Any]:
        """What the load tells at its end. Raises `AssertionError` where an answer was not right."""
        with self.load(target, body, **how) as process:
            return result(process)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a load tells at its end. Raises `AssertionError` where an answer was not right."""
    out, _ = process.communicate(timeout=3600)
    told: dict[str, Any] = json.loads(out)
    assert told["ok"] == told["requests"] > 0 == told["broken"], told
    return told


def body(size: int, *, stream: bool) -> dict[str, Any]:
    """A chat whose last message has about so many bytes, and a place for the request's number."""
    text = " ".join(WORDS[(at * 7) % len(WORDS)] for at in range(size // 5))[:size]
    given = {"stream": True} if stream else {}
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"Request {'@' * 16}: {text}"},
    ]
    return {"model": MODEL, **given, "messages": messages, "temperature": 0.7, "max_tokens": 200}


@contextmanager
def started(
    command: Sequence[str], cores: set[int] | None = None, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process on some of the cores, ended at the end."""
    errors = log.open("w") if log else None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    os.sched_setaffinity(process.pid, cores or set(CORES))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        process.communicate()
        if errors:
            errors.close()


@contextmanager
def bench(engines: Sequence[int] = ()) -> Iterator[Bench]:
    """The engine, and all that a load needs. `engines`: its ports; two that are free if none are named.

    What was started ends with this program, also when that is asked to end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    engines = engines or [ports.free(), ports.free()]
    with tempfile.TemporaryDirectory(prefix="detgate-bench-") as name:
        made = Bench(Path(name), engines)
        with started([str(made.folder / "engine"), *map(str, engines)], cores=LOAD_CORES) as engine:
            for port in (engines[0], engines[-1]):
                answers(port, "/health")
            if engine.poll() is not None:
                raise OSError(f"the engine has ended: are ports {engines[0]} to {engines[-1]} free?")
            yield made


@contextmanager
def nginx(bench: Bench) -> Iterator[Target]:
    """nginx as a plain proxy, one process. Raises `FileNotFoundError` where it is not installed."""
    if not (program := shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")):
        raise FileNotFoundError("nginx is not installed (apt-get install nginx-light)")
    port, folder = ports.free(), Path(tempfile.mkdtemp(prefix="nginx-", dir=bench.folder))
    servers = " ".join(f"server 127.0.0.1:{engine};" for engine in bench.engines)
    (folder / "nginx.conf").write_text(
        f"""daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log crit;
        worker_rlimit_nofile 20000; events {{ worker_connections 16384; }}
        http {{
            access_log off; client_max_body_size 64m; client_body_buffer_size 2m; keepalive_requests 1000000000;
            client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
            uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
            upstream engines {{ {servers} keepalive 2048; keepalive_requests 1000000000; }}
            server {{
                listen 127.0.0.1:{port} backlog=8192;
                location / {{
                    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_buffering off; proxy_read_timeout 600;
                }}
            }}
        }}"""
    )
    command = [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", str(folder / "error.log")]
    with started(command, cores=GATEWAY_CORES) as process:
        answers(port, "/health")
        yield Target("nginx", port, process.pid)


@contextmanager
def gateway(
    bench: Bench,
    name: str = "detgate",
    plant: str | None = None,
    cores: set[int] | None = None,
    **settings: Any,
) -> Iterator[Target]:
    """`detgate serve` with everything on, in front of all ports of the engine. Waits until it is ready.

    `plant`: what more it shall cost, as in `tests.bench.planted`.
    """
    port, folder = ports.free(), Path(tempfile.mkdtemp(prefix="gateway-", dir=bench.folder))
    replicas = [
        {"name": f"policy-{at}", "url": f"http://127.0.0.1:{engine}"} for at, engine in enumerate(bench.engines)
    ]
    given = {"seed": 42, "pools": [{"name": "policy", "engine": "vllm", "models": [MODEL], "replicas": replicas}]}
    given |= {"ledger": {"path": str(folder / "ledger")}, **settings}
    (folder / "gateway.yaml").write_text(yaml.safe_dump(given))
    command = [
        sys.executable,
        "-m",
        "tests.bench.planted" if plant else "gateway",
        "serve",
        "--config",
        str(folder / "gateway.yaml"),
        "--port",
        str(port),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("DETGATE_")}
    env |= {"PLANTED": plant} if plant else {}
    with started(command, cores=cores or GATEWAY_CORES, env=env, log=folder / "log") as process:
        try:
            answers(port, "/readyz")
        except TimeoutError:
            raise TimeoutError((folder / "log").read_text()[-4000:]) from None
        yield Target(name, port, process.pid)
    shutil.rmtree(folder)


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        told: bytes = answer.read()
        return told


def answers(port: int, path: str, seconds: float = 60) -> None:
    """Wait until a route answers 200. Raises `TimeoutError`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError, urllib.error.URLError):
            get(port, path)
            return
        time.sleep(0.05)
    raise TimeoutError(f"port {port} does not answer {path}")


def serves(bench: Bench, target: Target, seconds: float = 60) -> None:
    """Wait until a gateway that others started has found the engine. Raises `AssertionError`."""
    until = time.monotonic() + seconds
    while True:
        try:
            bench.loaded(target, "small", requests=1)
            return
        except AssertionError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


def spent(target: Target) -> float:
    """CPU seconds of a target so far; 0 where none are measured."""
    return 0.0 if target.pid is None else machine.cpu_seconds(target.pid)
