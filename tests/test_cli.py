import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from gateway import __version__, cli
from gateway.cli import main
from gateway.settings import Settings
from tests import ports

POOL = """
pools:
  - name: policy
    engine: vllm
    replicas: [{name: policy-0, url: "http://10.0.0.1:8000"}]
"""


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("DETGATE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "gateway.yaml"
    file.write_text(POOL)
    return file


def detgate(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, with nothing but `env` set for it."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("DETGATE_")}
    command = [sys.executable, "-m", "gateway", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**base, **env}, timeout=60, check=False)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("redirection", "status"),
    [("> /dev/full", 2), (">&-", 0), ("| (exec <&-)", 0)],
)
def test_what_cannot_be_written_is_no_status_of_another_meaning(
    config: Path, buffered: bool, redirection: str, status: int
) -> None:
    """Where 1 says that two runs differ, or that strict would refuse."""
    base = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = f'set -o pipefail; "$1" -m gateway config --config "$2" {redirection}'
    told = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, str(config)],
        capture_output=True, text=True, env=base if buffered else {**base, "PYTHONUNBUFFERED": "1"}, timeout=60,
    )  # fmt: skip
    assert told.returncode == status
    said = told.stderr + told.stdout
    assert said == ("detgate: cannot be written: No space left on device\n" if status else "")


@pytest.mark.parametrize(
    "flags", [("--max-num-seqs", "0"), ("--token-seconds", "-1"), ("--token-seconds", "nan"), ("--port", "99999")]
)
def test_an_engine_that_could_answer_nothing_is_not_simulated(flags: tuple[str, str]) -> None:
    told = detgate("sim", "--engine", "vllm", "--port", "0", *flags)
    assert told.returncode == 2
    assert f"argument {flags[0]}: " in told.stderr


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["config", "--json", *argv]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_the_version_is_printed() -> None:
    told = detgate("--version")
    assert (told.returncode, told.stdout) == (0, f"detgate {__version__}\n")


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["doctr"], ["seed", "a"], ["seed", "a", "-1"], ["seed", "a", "2147483648"]),
        *(["seed", "", "0"], ["seed", "a" * 257, "0"], ["seed", "a\n", "0"]),
        *(["sim", "--engine", "vllm", "--port", "70000"], ["sim", "--engine", "vllm", "--port", "-1"]),
    ],
)
def test_a_wrong_command_line_exits_2(argv: list[str]) -> None:
    told = detgate(*argv)
    assert told.returncode == 2
    assert told.stderr.startswith("usage: detgate")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["srve"], "srve is no command; did you mean serve?"),
        (["serve", "--profil", "strict"], "--profil is unknown here; did you mean --profile?"),
        (["replay", "plans", "x", "--jsn"], "--jsn is unknown here; did you mean --json?"),
        (["key", "new", "a", "b"], "b is unknown here"),
        ([], "a command is needed; detgate --help lists them"),
    ],
)
def test_what_may_have_been_meant_is_said(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_the_help_lists_every_command_but_the_one_that_is_not_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert re.findall(r"^    ([a-z-]+)(?: |$)", told, re.M) == list(cli._COMMANDS)
    assert "worker " not in told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lane: {scope: pool}", "lane: unknown key; did you mean timeouts.lane or pools[].lane?"),
        ("sede: 1", "sede: unknown key; did you mean seed?"),
        (POOL.replace("vllm", "vlm"), "pools[0].engine: 'vlm' is unknown; did you mean vllm?"),
        (
            POOL.replace("http:", "ftp:"),
            "pools[0].replicas[0].url: needs http:// or https:// in front (not 'ftp://10.0.0.1:8000')",
        ),
        (
            POOL + "  - {name: b, engine: vllm, replicas: [{name: policy-0, url: 'http://b'}]}",
            "pools[1].replicas[0].name: policy-0 is the name of pools[0].replicas[0] already",
        ),
        (
            POOL.replace("vllm", "openai") + "profile: strict",
            "pools[0].engine: openai promises nothing that profile strict could hold it to",
        ),
        ("seed: 1\nseed: 2", "{config}:2:1: the key seed stands twice"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_wrong_configuration_is_one_clear_line_and_exit_2(
    command: str, text: str, line: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    assert main([command, "--config", str(config)]) == 2
    assert capsys.readouterr() == ("", f"detgate: {line.replace('{config}', str(config))}\n")


def test_a_wrong_flag_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--seed", "x"]) == 2
    assert capsys.readouterr().err == "detgate: seed: a whole number is needed (not 'x')\n"


def test_a_wrong_variable_is_named_too_and_ends_the_process_with_2() -> None:
    told = detgate("config", DETGATE_PROFIL="strict")
    expected = "detgate: DETGATE_PROFIL: unknown setting; did you mean DETGATE_PROFILE?\n"
    assert (told.returncode, told.stdout, told.stderr) == (2, "", expected)


def test_serve_wants_pools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("detgate: pools: none; list them in a file")


def test_config_prints_what_is_in_force(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(POOL + "seed: 1\nprofile: strict\nport: 1\n")
    monkeypatch.setenv("DETGATE_PORT", "2")
    monkeypatch.setenv("DETGATE_AUTH__ADMIN_KEY", "secret")
    assert main(["config", "--config", str(config), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    told = yaml.safe_load(out)
    assert (told["seed"], told["port"], told["routing"]["slack"]) == (3, 2, "inf")
    assert told["auth"]["admin_key"] == "**********"
    assert "secret" not in out
    assert told == shown(capsys, "--config", str(config), "--seed", "3")


def test_config_tells_warnings_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--scheme", "offset"]) == 0
    assert capsys.readouterr().err.startswith("detgate: warning: scheme: offset gives every prompt the same seeds")


def test_every_flag_reaches_its_setting(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(
        capsys,
        *("--profile", "off", "--run", "r", "--scheme", "areal", "--index-order", "content"),
        *("--state", "redis://h", "--host", "0.0.0.0", "--port", "0", "--insecure", "--ledger", "there"),
        *("--log-level", "debug", "--engine", "sglang", "--worker-urls", "http://a:1", "b=http://b:2"),
    )
    assert (told["profile"], told["run"], told["scheme"], told["index_order"]) == (
        "off",
        "r",
        "areal",
        "content",
    )
    assert (told["state"], told["host"], told["port"], told["insecure"]) == ("redis://h", "0.0.0.0", 0, True)
    assert (told["ledger"]["path"], told["log"]["level"]) == ("there", "debug")
    (pool,) = told["pools"]
    assert (pool["engine"], [replica["name"] for replica in pool["replicas"]]) == (
        "sglang",
        ["default-0", "b"],
    )


def test_any_setting_can_be_set_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(capsys, "--set", "routing.slack=inf", "--set", "limits={queue: 1}", "--set", "auth.api_keys=[a=b]")
    assert (told["routing"]["slack"], told["limits"]["queue"]) == ("inf", 1)
    assert told["auth"]["api_keys"] == ["**********"]


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("routing.slak=1", "routing.slak: unknown key; did you mean slack?"),
        ("limits=[", "--set limits:1:2: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_wrong_assignment_is_named(assignment: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", assignment]) == 2
    assert capsys.readouterr().err == f"detgate: {line}\n"


@pytest.mark.parametrize("assignment", ["routing.slack", "=1", " =1"])
def test_an_assignment_without_a_key_or_a_value_is_refused(assignment: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["config", "--set", assignment])
    assert "KEY=VALUE is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "seed"),
    [
        (["17:3", "0", "--scheme", "areal"], 1152644103),
        (["17:3", "1", "--scheme", "areal", "--seed", "9"], 817236710),
        (["17", "2", "--scheme", "offset", "--seed", "7", "--member", "3"], 7 + 3 + 2 * 1_000_003),
        (["17", "0", "--scheme", "offset"], 42),
        ([f"{'a' * 256}/0123456789abcdef/0.0", "0", "--scheme", "offset"], 42),
    ],
)
def test_seed_prints_what_a_request_gets(argv: list[str], seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seed", *argv]) == 0
    assert capsys.readouterr().out == f"{seed}\n"


def test_a_seed_is_the_same_in_every_process() -> None:
    told = {detgate("seed", "17:3", "0", PYTHONHASHSEED=str(k)).stdout for k in range(2)}
    assert len(told) == 1
    assert 1 <= int(told.pop()) < 2**31


def test_seed_tells_what_it_follows_from(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("seed: 5\nscheme: areal\n")
    assert main(["seed", "17:3", "0", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "seed": 1152644103,
        "scheme": "areal",
        "master_seed": 5,
        "identity": "17:3",
        "index": 0,
        "member": None,
    }


def test_seed_loads_no_server() -> None:
    code = (
        "import sys; from gateway.cli import main; main(['seed', 'a', '0']);"
        "print({'fastapi', 'uvicorn', 'httpx', 'rich'} & {*sys.modules})"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.splitlines()[1] == "set()"


@contextmanager
def started(*argv: str, log: IO[str] | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A command that serves, as a process of its own, and the address that it prints. `log`: for its standard error."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gateway", *argv],
        stdout=subprocess.PIPE,
        stderr=log or subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout
        urls = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)
        yield next(url[0] for url in urls if url), process
    finally:
        process.kill()
        process.communicate()


def test_sim_serves_the_engine_that_its_flags_describe() -> None:
    with started("sim", "--engine", "sglang", "--model", "m", "--no-deterministic", "--port", "0") as (
        url,
        sim,
    ):
        with urllib.request.urlopen(f"{url}/server_info", timeout=30) as answer:
            told = json.load(answer)
        assert (told["served_model_name"], told["enable_deterministic_inference"]) == ("m", False)
        sim.send_signal(signal.SIGINT)
        assert sim.wait(timeout=30) == 130


def test_sim_says_where_it_cannot_listen(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["sim", "--engine", "vllm", "--port", str(port)]) == 2
    why = f"port: cannot listen on 127.0.0.1:{port}: address already in use; choose another port"
    assert capsys.readouterr().err == f"detgate: {why}\n"


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/readyz", timeout=30):
            return
    pytest.fail("not ready within 30 s")


def test_the_demo_is_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--state", "redis://127.0.0.1:1/0", "--run", "r", "--set", "workers=2"]) == 2
    assert capsys.readouterr().err == "detgate: workers: the demo is one process, not 2; use detgate serve\n"


WORKERS = ["--set", "workers=2", "--state", "redis://127.0.0.1:1/0", "--run", "r"]


@pytest.mark.parametrize("command", ["serve", "workers", "demo"])
@pytest.mark.parametrize("key", ["port", "admin_port"])
def test_a_port_that_is_taken_is_one_clear_line_and_no_run_is_begun(
    command: str, key: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where whoever has it would share it, as another gateway's workers do."""
    flags = [] if command == "demo" else ["--config", str(config)]
    if command == "workers":
        command, flags = "serve", flags + WORKERS
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        if key == "admin_port":
            flags += ["--set", f"port={ports.free()}"]
        flags += ["--ledger", str(tmp_path / "ledger"), "--set", f"{key}={port}"]
        assert main([command, *flags]) == 2
    line = f"{key}: cannot listen on 127.0.0.1:{port}: address already in use; choose another port"
    assert capsys.readouterr().err.endswith(f"detgate: {line}\n")
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize("more", [[], WORKERS])
@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["host=no.such.host.invalid", "insecure=true"], "host: nobody has the name no.such.host.invalid: "),
        (["host=192.0.2.1", "insecure=true"], "host: 192.0.2.1 is no address of this machine"),
        (["admin_host=192.0.2.1", "admin_port=1", "insecure=true"], "admin_host: 192.0.2.1 is no address of this"),
        (["tls.cert=FILE"], "tls.cert: "),
    ],
)
def test_where_nothing_can_listen_no_run_is_begun(
    assignments: list[str],
    said: str,
    more: list[str],
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--config", str(config), "--ledger", str(tmp_path / "ledger"), "--port", "0", *more]
    for assignment in assignments:
        flags += ["--set", assignment.replace("FILE", str(config))]
    assert main(["serve", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"detgate: {said}")
    assert not (tmp_path / "ledger").exists()


def test_demo_serves_and_gives_the_seed_that_seed_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "sim-model", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    log = tmp_path / "log"
    with (
        log.open("w") as to,
        started("demo", "--port", "0", "--seed", "7", "--ledger", str(tmp_path), log=to) as (
            url,
            demo,
        ),
    ):
        wait_until_ready(url)
        request = urllib.request.Request(
            f"{url}/sessions/17:3/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            seed = answer.headers["X-Detgate-Seed"]
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=30) == 130
    (run,) = tmp_path.glob("*/run.json")
    assert json.loads(run.read_text())["state"] == "ended"
    told = [json.loads(line) for line in log.read_text().splitlines()]
    life = [line["event"] for line in told if line["event"] in ("run", "listening", "draining", "ended")]
    assert life == ["run", "listening", "draining", "ended"]
    assert main(["seed", "17:3", "0", "--seed", "7"]) == 0
    assert capsys.readouterr().out == f"{seed}\n"


def test_ctrl_c_ends_quietly_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> Settings:
        raise KeyboardInterrupt

    monkeypatch.setattr(Settings, "load", interrupted)
    assert main(["config"]) == 130
    assert capsys.readouterr() == ("", "")
