"""Compose files put together as `docker compose -f … -f …` does it, as far as this project's files need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


class Overriding(dict[str, Any]):
    """A mapping tagged `!override`: it takes the place of the one below."""


class _Loader(yaml.SafeLoader):
    pass


def _overriding(loader: yaml.SafeLoader, node: yaml.Node) -> Overriding:
    assert isinstance(node, yaml.MappingNode)
    return Overriding((str(key), value) for key, value in loader.construct_mapping(node, deep=True).items())


_Loader.add_constructor("!override", _overriding)


class Missing(Exception):
    """A variable that must be set is not."""


def together(names: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """The files merged and filled in; services of profiles are left out, and what begins with `x-`."""
    total: dict[str, Any] = {}
    for name in names:
        total = _merged(total, _filled(yaml.load((ROOT / name).read_text(), _Loader), variables), "")
    services = {name: service for name, service in total["services"].items() if not service.get("profiles")}
    return {key: value for key, value in total.items() if not key.startswith("x-")} | {"services": services}


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, Overriding):
        return Overriding({key: _filled(each, variables) for key, each in value.items()})
    if isinstance(value, dict):
        return {key: _filled(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, variables) for each in value]
    return _text(value, variables) if isinstance(value, str) else value


def _text(text: str, variables: Mapping[str, str]) -> str:
    def fill(found: re.Match[str]) -> str:
        name, operator, rest = found[1], found[2], found[3] or ""
        if variables.get(name):
            return variables[name]
        if operator == ":?":
            raise Missing(f"{name}: {rest}")
        assert operator == ":-", found[0]
        return rest

    filled = re.sub(r"\$\{(\w+)(:[-?])?([^}]*)\}", fill, text)
    assert "$" not in filled, text
    return filled


_REPLACED = ("command", "entrypoint", "test")
"""Sequences that a later file replaces; others are appended to."""


def _merged(low: Any, high: Any, key: str) -> Any:
    if isinstance(high, Overriding) or low is None:
        return high
    if isinstance(low, dict) and isinstance(high, dict):
        return low | {name: _merged(low.get(name), value, name) for name, value in high.items()}
    if isinstance(low, list) and isinstance(high, list) and key not in _REPLACED:
        if key == "volumes":
            taken = {_target(each) for each in high}
            return [each for each in low if _target(each) not in taken] + high
        return [*low, *(each for each in high if each not in low)]
    return high


def _target(volume: str) -> str:
    return volume.split(":")[1]


def seconds(duration: str) -> float:
    """A compose duration, such as `1m30s`."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", duration))
