"""Where settings come from: a YAML file, the environment, flags, in growing strength."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource

from gateway.settings.messages import InvalidSettings, Loc, nearest

PREFIX = "DETGATE_"
SHORT = ("engine", "worker_urls")
"""The short form of one pool, in the environment and in flags."""

Layer = dict[str, Any]

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(?=https?://)")
_SERVICE_LINK = re.compile(r"DETGATE_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)")
"""What Kubernetes puts into each container of a namespace that has a service named detgate."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `off` is a word, `010` no octal number, a date a text; a key, once, too."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        made = super().construct_mapping(node, deep)
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is no text", problem_mark=key.start_mark
                )
        return made


_Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"), list(first))


def from_text(text: str, name: str) -> Any:
    """The value of a YAML text. Raises InvalidSettings that names line and column as `name:line:column`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise InvalidSettings([f"{place}: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        raise InvalidSettings([f"{name}: {str(error).splitlines()[0]}"]) from None


def from_file(path: Path) -> Layer:
    """The settings of a YAML file; an empty file has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidSettings([f"{path}: is not UTF-8"]) from None
    except OSError as error:
        raise InvalidSettings([f"{path}: {error.strerror}"]) from None
    value = from_text(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidSettings([f"{path}:1:1: a mapping of settings is needed"])
    return value


class _Environment(EnvSettingsSource):
    """The environment as it was given, not the process's own; lists and mappings in it are JSON."""

    def __init__(self, model: type[BaseSettings], env: Mapping[str, str]) -> None:
        super().__init__(model, case_sensitive=False)
        self.env_vars = {name.lower(): None if value == "null" else value for name, value in env.items()}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """A text that is no JSON stays what it is: it may be words, else the schema refuses it."""
        with suppress(ValueError):
            if value.lstrip().startswith(("[", "{")):
                return super().decode_complex_value(field_name, field, value)
        return value


def from_environment(model: type[BaseSettings], env: Mapping[str, str]) -> Layer:
    """The `DETGATE_*` settings in `env`, nested by `__`; an empty variable counts as absent."""
    ours = {name: value for name, value in env.items() if value and _is_setting(name, value)}
    known = (*model.model_fields, *SHORT)
    strange = [name for name in ours if _head(name) not in known]
    if strange:
        raise InvalidSettings(
            f"{name}: unknown setting; {nearest(name, (variable((key,)) for key in known))}" for name in strange
        )
    heads = {name: _head(name) for name in ours if "__" in name.removeprefix(PREFIX)}
    astray = {name: head for name, head in heads.items() if not _is_section(model, head)}
    if astray:
        raise InvalidSettings(f"{name}: {head} is no section; set {variable((head,))}" for name, head in astray.items())
    if not ours:
        return {}
    short = {key: ours[variable((key,))] for key in SHORT if variable((key,)) in ours}
    return {**_Environment(model, ours)(), **short}


def variable(loc: Loc) -> str:
    """The environment variable of a setting: `("routing", "slack")` is `DETGATE_ROUTING__SLACK`."""
    return PREFIX + "__".join(str(part) for part in loc).upper()


def origin(env: Mapping[str, str], flags: Mapping[str, Any], loc: Loc) -> str | None:
    """The variable in `env` that gave the value at `loc`; None where it came from a flag or the file."""
    if loc and loc[0] in flags:
        return None
    variables = (variable(loc[:depth]) for depth in range(len(loc), 0, -1))
    return next((name for name in variables if env.get(name)), None)


def _is_setting(name: str, value: str) -> bool:
    linked = _SERVICE_LINK.fullmatch(name) or (name == "DETGATE_PORT" and "://" in value)
    return name.startswith(PREFIX) and not linked


def _is_section(model: type[BaseSettings], key: str) -> bool:
    field = model.model_fields.get(key)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _head(name: str) -> str:
    return name.removeprefix(PREFIX).split("__")[0].lower()


def merged(*layers: Layer) -> Layer:
    """One layer of several, the weakest first; mappings are merged, all else is replaced.

    The short form becomes the pools where no stronger layer, nor its own, lists pools.
    """
    total: Layer = {}
    for layer in layers:
        if "pools" in layer and "worker_urls" in layer:
            raise InvalidSettings(["pools: given twice, as pools and as worker URLs; leave one out"])
        if "pools" in layer:
            total.pop("worker_urls", None)
        total = _over(total, layer)
        if "worker_urls" in layer:
            total.pop("pools", None)
    engine, urls = (total.pop(key, None) for key in SHORT)
    if urls is not None:
        total["pools"] = [_pool(engine or "vllm", urls)]
    elif engine is not None and "pools" not in total:
        raise InvalidSettings(["engine: says what runs at the worker URLs; name those too, or list pools in a file"])
    return total


def nested(pairs: Iterable[tuple[str, Any]]) -> Layer:
    """Dotted keys as a layer, later over earlier: `routing.slack` is `slack` in the mapping `routing`."""
    total: Layer = {}
    for key, value in pairs:
        for part in reversed(key.split(".")):
            value = {part: value}
        total = _over(total, value)
    return total


def _over(weak: Layer, strong: Layer) -> Layer:
    total = dict(weak)
    for key, value in strong.items():
        below = total.get(key)
        total[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return total


def _pool(engine: str, urls: str | list[str]) -> Layer:
    words = re.split(r"[\s,]+", urls.strip()) if isinstance(urls, str) else urls
    return {
        "name": "default",
        "engine": engine,
        "replicas": [_replica(k, word) for k, word in enumerate(words)],
    }


def _replica(position: int, word: str) -> Layer:
    named = _NAMED.match(word)
    if named:
        return {"name": named[1], "url": word[named.end() :]}
    return {"name": f"default-{position}", "url": word}
