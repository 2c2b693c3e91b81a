"""How an engine is started so that it can keep the gateway's promise: flags and environment, each with its reason and
its source.

A file of this folder is an engine. A profile is a pure function of what is asked, so the command line, the compose
overlays, the chart and the documents all say the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Literal, Protocol, cast

Role = Literal["generate", "reward"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag or variable. `value` is None for a flag that stands alone."""

    name: str
    value: str | None
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be started. `tensor_parallel` counts the GPUs of one replica."""

    hardware: str
    role: Role = "generate"
    model: str = "MODEL"
    host: str = "0.0.0.0"
    port: int = 8000
    tensor_parallel: int = 1
    prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """How one engine is started on one kind of hardware."""

    engine: str
    wish: Wish
    since: str
    """The least version that is said to be deterministic there and has all the flags."""
    claim: str
    """What the engine's makers say, and where."""
    command: tuple[str, ...]
    """The program, the model, and where it listens."""
    environment: tuple[Setting, ...]
    flags: tuple[Setting, ...]
    remarks: tuple[str, ...]
    """What the profile cannot give."""

    @property
    def hardware(self) -> str:
        return self.wish.hardware

    @property
    def role(self) -> Role:
        return self.wish.role

    def check(self, version: str | None) -> None:
        """Raises `LookupError` if an engine of this version is older than the mode. None: not known, so not checked."""
        if version is not None and _numbers(version) < _numbers(self.since):
            raise LookupError(
                f"{self.engine} {version} is not said to be deterministic on {self.hardware} with these flags: "
                f"{self.since} or newer is."
            )

    @property
    def arguments(self) -> list[str]:
        """The words of the whole command line."""
        given = ([flag.name] if flag.value is None else [flag.name, flag.value] for flag in self.flags)
        return [*self.command, *(word for words in given for word in words)]

    @property
    def variables(self) -> dict[str, str]:
        """The environment, by name."""
        return {setting.name: setting.value or "" for setting in self.environment}


def _numbers(version: str) -> list[int]:
    """The parts of a version that count, as numbers: 0.11.1rc2 is 0.11.1."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if found is None:
        raise LookupError(f"{version!r} is no version, such as 0.32.0")
    return [int(part) for part in found[1].split(".")]


class Engine(Protocol):
    """What a file of this folder holds."""

    HARDWARE: Sequence[str]
    """The kinds of hardware that there are profiles for."""
    VERSION: str
    """The version whose flags these are; they were read by that version's own parser in tests."""

    def profile(self, wish: Wish) -> Profile:
        """How to start it. Raises `LookupError` where it cannot be deterministic on that hardware."""


def names() -> list[str]:
    """Every engine there are profiles for, sorted."""
    return sorted(module.name for module in iter_modules(__path__) if module.name != "formats")


def load(name: str) -> Engine:
    """The profiles of an engine. Raises `LookupError` that lists those there are."""
    if name not in names():
        raise LookupError(f"there is no launch profile for {name!r}: use one of {', '.join(names())}")
    return cast(Engine, import_module(f"{__name__}.{name}"))
