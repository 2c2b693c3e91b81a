"""A launch profile as text: a shell line, an environment file, a compose service, or a table with reasons."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator

import yaml

from gateway.launch import Profile, Setting


def shell(profile: Profile) -> str:
    """One command for a POSIX shell, a setting a line, the reasons above."""
    lines = [f"# {line}" for line in _reasons(profile)]
    words = [f"{name}={shlex.quote(value)}" for name, value in profile.variables.items()]
    arguments = [shlex.join(profile.command)]
    arguments += [shlex.join([flag.name, *([flag.value] if flag.value is not None else [])]) for flag in profile.flags]
    return "\n".join([*lines, " \\\n  ".join(["env", *words, *arguments])])


def env(profile: Profile) -> str:
    """An environment file for `set -a; . FILE` before srun or `ray start`, and for compose's `env_file`.

    The command line is in it as ENGINE_COMMAND, for `sh -c "$ENGINE_COMMAND"`.
    """
    lines = [f"# {line}" for line in _reasons(profile)]
    variables = {**profile.variables, "ENGINE_COMMAND": shlex.join(profile.arguments)}
    return "\n".join([*lines, *(f"{name}={shlex.quote(value)}" for name, value in variables.items())])


def script(profile: Profile) -> str:
    """A script for a POSIX shell that takes the model, the port and more options of the engine."""
    name = f"{profile.engine}-{profile.hardware}{'-reward' if profile.role == 'reward' else ''}.sh"
    given = {profile.wish.model: '"$model"', profile.wish.host: '"$host"', str(profile.wish.port): '"$port"'}
    command = " ".join(given.get(word) or shlex.quote(word) for word in profile.command)
    flags = [shlex.join([flag.name, *([flag.value] if flag.value is not None else [])]) for flag in profile.flags]
    lines = [
        "#!/bin/sh",
        f"# Usage: {name} MODEL [PORT [OPTION ...]]",
        "# HOST is the address to listen on, 127.0.0.1 where it is not set.",
        "#",
        *(f"# {line}" for line in _reasons(profile)),
        "set -eu",
        "if [ $# -eq 0 ]; then",
        f"  echo 'usage: {name} MODEL [PORT [OPTION ...]]' >&2",
        "  exit 2",
        "fi",
        "model=$1 port=${2:-8000} host=${HOST:-127.0.0.1}",
        "shift",
        "if [ $# -gt 0 ]; then shift; fi",
        *(f"export {name}={shlex.quote(value)}" for name, value in profile.variables.items()),
        " \\\n  ".join([f"exec {command}", *flags, '"$@"']),
    ]
    return "\n".join(lines)


def compose(profile: Profile) -> str:
    """What a service of a compose file has of it."""
    service = {
        "environment": profile.variables,
        "entrypoint": list(profile.command[: _program(profile)]),
        "command": profile.arguments[_program(profile) :],
    }
    return yaml.safe_dump({"services": {"policy-0": service}}, sort_keys=False, width=120).rstrip()


def text(profile: Profile) -> str:
    """For people: each setting with its reason and source."""
    head = f"{profile.engine} on {profile.hardware}, from version {profile.since}. {profile.claim}"
    return "\n".join([head, "", shlex.join(profile.command), *_explained(profile), "", *profile.remarks])


def as_json(profile: Profile) -> str:
    """Everything, for programs."""

    def told(settings: tuple[Setting, ...]) -> list[dict[str, str | None]]:
        return [{"name": each.name, "value": each.value, "why": each.why, "source": each.source} for each in settings]

    return json.dumps(
        {
            "engine": profile.engine,
            "hardware": profile.hardware,
            "since": profile.since,
            "claim": profile.claim,
            "environment": told(profile.environment),
            "command": profile.arguments,
            "flags": told(profile.flags),
            "remarks": list(profile.remarks),
        },
        indent=2,
    )


FORMATS: dict[str, Callable[[Profile], str]] = {
    "shell": shell,
    "script": script,
    "env": env,
    "compose": compose,
    "text": text,
}


def _program(profile: Profile) -> int:
    """How many words of the command are the program."""
    return 3 if profile.command[0] == "python3" else 2


def _explained(profile: Profile) -> Iterator[str]:
    for setting in (*profile.environment, *profile.flags):
        value = "" if setting.value is None else f"{'=' if setting in profile.environment else ' '}{setting.value}"
        yield f"  {setting.name}{value}"
        yield f"      {setting.why} [{setting.source}]"


def _reasons(profile: Profile) -> Iterator[str]:
    yield f"{profile.engine} on {profile.hardware}, from version {profile.since}. {profile.claim}"
    yield from (line.strip() for line in _explained(profile))
    yield from profile.remarks
