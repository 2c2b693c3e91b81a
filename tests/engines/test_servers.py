"""Starting, awaiting and ending servers, with small programs in an engine's place."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ports
from tests.engines import servers
from tests.engines.servers import DidNotStart, Server, Spec

READY_LATER = """
import http.server, sys, time
time.sleep(0.3)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def running(program: str, log: Path) -> Server:
    """A program as a server that has just been started."""
    port = ports.free()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(port)], stdout=output, stderr=output, start_new_session=True
        )
    return Server(Spec("vllm"), f"http://127.0.0.1:{port}", log, process)


def test_a_server_is_awaited_and_ended(tmp_path: Path) -> None:
    server = running(READY_LATER, tmp_path / "log")
    servers.wait_ready(server, time.monotonic() + 30)
    assert servers.answers(server.url + "/health")
    servers.stop([server])
    assert server.process.returncode == -15
    assert not servers.answers(server.url + "/health")


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    server = running("raise SystemExit('no such model')", tmp_path / "log")
    with pytest.raises(DidNotStart, match=r"ended with 1:\nno such model"):
        servers.wait_ready(server, time.monotonic() + 30)


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    server = running("import time; time.sleep(60)", tmp_path / "log")
    with pytest.raises(DidNotStart, match="was not ready"):
        servers.wait_ready(server, time.monotonic() + 0.5)
    servers.stop([server])


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.2)
    server = running(STUBBORN, tmp_path / "log")
    while not server.log_end().strip():
        assert server.process.poll() is None
        time.sleep(0.01)
    child = Path("/proc") / server.log_end().strip()
    assert child.exists()
    servers.stop([server])
    assert server.process.returncode == -9
    deadline = time.monotonic() + 10
    while child.exists() and (child / "stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_models_name_tells_its_server() -> None:
    assert servers.spec("vllm", "mid-llm").options == servers.VLLM.options
    assert "--is-embedding" in servers.spec("sglang", "mid-rm").options
    assert servers.spec("sglang", "tiny-llm").deterministic
