"""Launch profiles: every setting has its reason and source, and every format says the same."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gateway import engines, launch
from gateway.cli import main
from gateway.findings import flags
from gateway.findings.versions import before
from gateway.launch import Profile, Role, Wish, formats
from tests.engines import install
from tests.launch.scripts import FOLDER, scripts

ROOT = Path(__file__).parents[2]
ROLES: tuple[Role, ...] = ("generate", "reward")
WISHES = [
    (engine, Wish(hardware, role, tensor_parallel=gpus, prefix_cache=cache))
    for engine in launch.names()
    for hardware in launch.load(engine).HARDWARE
    for role in ROLES
    for gpus in ((1, 2) if hardware != "cpu" else (1,))
    for cache in (False, True)
]

each_profile = pytest.mark.parametrize(
    "profile",
    [launch.load(engine).profile(wish) for engine, wish in WISHES],
    ids=lambda each: (
        f"{each.engine}-{each.hardware}-{each.role}-{each.wish.tensor_parallel}-{int(each.wish.prefix_cache)}"
    ),
)


def given(profile: Profile) -> dict[str, str | None]:
    return {flag.name: flag.value for flag in profile.flags}


def test_there_are_profiles_for_the_engines_that_have_a_deterministic_mode() -> None:
    assert launch.names() == sorted(set(engines.names()) - {"openai"})


def test_the_flags_are_those_of_the_versions_that_are_tried() -> None:
    for engine in launch.names():
        pins = " ".join(word for step in install.RECIPES[engine].steps for word in step)
        assert re.search(rf"{engine}(-cpu)?=={re.escape(launch.load(engine).VERSION)}\b", pins)


@each_profile
def test_every_setting_has_a_reason_and_a_source(profile: Profile) -> None:
    names = [setting.name for setting in (*profile.environment, *profile.flags)]
    assert len(set(names)) == len(names)
    for setting in (*profile.environment, *profile.flags):
        assert setting.why
        assert re.search(r"https://|(vLLM|SGLang) \d+\.\d+\.\d+", setting.source), setting
    assert "https://" in profile.claim or "seen on" in profile.claim
    assert any("verify" in remark for remark in profile.remarks)


@each_profile
def test_the_mode_is_on_wherever_there_is_one(profile: Profile) -> None:
    if profile.engine == "sglang":
        assert "--enable-deterministic-inference" in given(profile)
        assert given(profile)["--sampling-backend"] == "pytorch"
    else:
        # On a CPU this variable ends vLLM.
        assert profile.variables.get("VLLM_BATCH_INVARIANT") == (None if profile.hardware == "cpu" else "1")
    assert profile.variables["PYTHONHASHSEED"] == "0"
    nvidia = profile.hardware in ("ampere", "ada", "hopper", "blackwell")
    assert ("CUBLAS_WORKSPACE_CONFIG" in profile.variables) == nvidia
    assert ("NCCL_ALGO" in profile.variables) == (nvidia and profile.wish.tensor_parallel > 1)


@each_profile
def test_a_reward_replica_scores_one_at_a_time_and_a_cpu_samples_so_too(profile: Profile) -> None:
    alone = profile.role == "reward" or profile.hardware == "cpu"
    bound = given(profile).get("--max-num-seqs", given(profile).get("--max-running-requests"))
    assert (bound == "1") == alone


@each_profile
def test_the_prefix_cache_is_off_unless_it_is_asked_for(profile: Profile) -> None:
    off = {"--no-enable-prefix-caching", "--disable-radix-cache"} & given(profile).keys()
    if not profile.wish.prefix_cache:
        assert off
    elif profile.role == "generate":
        assert not off


def test_hopper_runs_flash_attention_2() -> None:
    profile = launch.load("vllm").profile(Wish("hopper"))
    assert given(profile)["--attention-config.flash_attn_version"] == "2"


@each_profile
def test_each_format_says_the_same(profile: Profile) -> None:
    command = "\n".join(line for line in formats.shell(profile).splitlines() if not line.startswith("#"))
    env, *words = shlex.split(command.replace("\\\n", " "))
    variables = [f"{name}={value}" for name, value in profile.variables.items()]
    assert (env, words) == ("env", [*variables, *profile.arguments])
    [service] = yaml.safe_load(formats.compose(profile))["services"].values()
    assert service["entrypoint"] + service["command"] == profile.arguments
    assert service["environment"] == profile.variables
    told = json.loads(formats.as_json(profile))
    assert told["command"] == profile.arguments
    assert {each["name"] for each in told["environment"]} == profile.variables.keys()
    for setting in (*profile.environment, *profile.flags):
        assert setting.name in formats.text(profile)
        assert setting.why in formats.text(profile)


def test_the_environment_file_is_read_by_a_shell(tmp_path: Path) -> None:
    profile = launch.load("vllm").profile(Wish("hopper", tensor_parallel=2))
    file = tmp_path / "engine.env"
    file.write_text(formats.env(profile))
    program = (
        f"set -a; . {file}; set +a; exec {sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    )
    ended = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True)
    seen = json.loads(ended.stdout)
    assert profile.variables.items() <= seen.items()
    assert shlex.split(seen["ENGINE_COMMAND"]) == profile.arguments


# --- versions and hardware


@pytest.mark.parametrize(
    ("engine", "hardware", "version", "old"),
    [
        ("vllm", "hopper", "0.12.9", True),
        ("vllm", "hopper", "v0.13.0", False),
        ("vllm", "ampere", "0.21.9", True),
        ("vllm", "ampere", "0.22.0rc1", False),
        ("vllm", "mi300", "0.31.0", True),
        ("sglang", "hopper", "0.5.3", True),
        ("sglang", "hopper", "0.5.23", False),
        ("sglang", "hopper", None, False),
    ],
)
def test_an_engine_older_than_its_mode_is_refused(engine: str, hardware: str, version: str | None, old: bool) -> None:
    profile = launch.load(engine).profile(Wish(hardware))
    if old:
        with pytest.raises(LookupError, match=profile.since.replace(".", r"\.")):
            profile.check(version)
    else:
        profile.check(version)


def test_a_word_is_no_version() -> None:
    with pytest.raises(LookupError, match="no version"):
        launch.load("vllm").profile(Wish("hopper")).check("newest")


@pytest.mark.parametrize("engine", launch.names())
def test_unknown_hardware_is_refused_with_what_there_is(engine: str) -> None:
    with pytest.raises(LookupError, match="hopper"):
        launch.load(engine).profile(Wish("abacus"))


def test_sglang_has_no_deterministic_mode_on_a_cpu() -> None:
    with pytest.raises(LookupError, match="no deterministic mode"):
        launch.load("sglang").profile(Wish("cpu"))


# --- the command


def test_the_command_prints_any_format(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["launch-profile", "vllm", "--hardware", "cpu", "--role", "reward", "--model", "m", "--port", "9"]
    wish = Wish("cpu", "reward", "m", port=9)
    profile = launch.load("vllm").profile(wish)
    for name, write in formats.FORMATS.items():
        assert main([*asked, "--format", name]) == 0
        assert capsys.readouterr().out == write(profile) + "\n"
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == profile.arguments


def test_the_command_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch-profile", "sglang", "--hardware", "cpu"]) == 2
    assert "no deterministic mode" in capsys.readouterr().err
    assert main(["launch-profile", "vllm", "--engine-version", "0.11.1"]) == 2
    assert "0.13.0" in capsys.readouterr().err


def test_no_engine_is_let_in_that_lacks_a_flag_of_its_profile() -> None:
    for engine in launch.names():
        for hardware in launch.load(engine).HARDWARE:
            profile = launch.load(engine).profile(Wish(hardware))
            needed = flags.since(engine, " ".join([*profile.arguments, *profile.variables]).replace("no ", ""))
            assert needed is not None
            assert not before(profile.since, needed), (engine, hardware, needed)


# --- the scripts


def test_the_scripts_are_current() -> None:
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.sh")}
    assert kept == scripts(), "run: python -m tests.launch.scripts"
    assert all(os.access(path, os.X_OK) for path in FOLDER.glob("*.sh"))


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    others = [ROOT / ".ci" / "run", *(ROOT / "tests").rglob("*.sh")]
    ended = subprocess.run([shellcheck, *sorted(FOLDER.glob("*.sh")), *others], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", sorted(scripts()))
def test_usage_lines_are_true(name: str, tmp_path: Path) -> None:
    [usage] = re.findall(r"^# Usage: (.*)$", (FOLDER / name).read_text(), re.M)
    assert usage == f"{name} MODEL [PORT [OPTION ...]]"
    told = tmp_path / "told"
    for program in ("vllm", "python3"):
        fake = tmp_path / program
        fake.write_text(f'#!/bin/sh\nenv > {told}.env\nprintf "%s\\n" "$@" > {told}\n')
        fake.chmod(0o755)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.run([FOLDER / name, *arguments], env=env, capture_output=True, text=True)

    alone = run()
    assert (alone.returncode, alone.stderr) == (2, f"usage: {usage}\n")
    engine, hardware, *reward = name.removesuffix(".sh").split("-")
    wish = Wish(hardware, "reward" if reward else "generate", "a model", host="127.0.0.1")
    profile = launch.load(engine).profile(wish)
    assert run("a model").returncode == 0
    assert told.read_text().splitlines() == profile.arguments[1:]
    variables = dict(line.split("=", 1) for line in Path(f"{told}.env").read_text().splitlines() if "=" in line)
    assert profile.variables.items() <= variables.items()
    assert run("a model", "9000", "--more", "x y", HOST="10.0.0.1").returncode == 0
    moved = launch.load(engine).profile(replace(wish, port=9000, host="10.0.0.1"))
    assert told.read_text().splitlines() == [*moved.arguments[1:], "--more", "x y"]
