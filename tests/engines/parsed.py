"""The flags of launch profiles, read by the engines' own parsers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gateway.launch import Profile, Role, Wish, load
from tests.engines import install

ROLES: tuple[Role, ...] = ("generate", "reward")


def profiles(engine: str) -> list[Profile]:
    """Every profile of an engine, with one GPU and with two."""
    return [
        load(engine).profile(Wish(hardware, role, tensor_parallel=gpus))
        for hardware in load(engine).HARDWARE
        for role in ROLES
        for gpus in ((1, 2) if hardware != "cpu" else (1,))
    ]


def parsed(engine: str, flags: list[list[str]]) -> list[dict[str, Any]]:
    """What the engine's own parser makes of each list. Raises `CalledProcessError` for a flag that it does not know."""
    script = Path(__file__).parent / "flags.py"
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [install.install(engine), script, engine, json.dumps(flags)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def words(profile: Profile) -> list[str]:
    """The flags alone."""
    return profile.arguments[len(profile.command) :]
