"""What is kept with a run beside its records, read in one way: whole and sound, or it is said what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

OPEN, ENDED, SHARED = "open", "ended", "shared"

ABOUT: dict[str, tuple[type, ...]] = {
    "run": (str,),
    "named": (bool,),
    "started": (float, int),
    "deciding": (dict,),
    "reloaded": (dict,),
    "state": (str,),
}
"""What `run.json` holds, and of which type. One that was moved here to be looked at may have less."""


class Broken(Exception):
    """A file that cannot be made out."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file}: {why}")
        self.file = file
        self.why = why


def about(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says of a run; None where there is none. Raises `Broken`."""
    file = folder / "run.json"
    told = read(file)
    if told is None:
        return None
    if not isinstance(told, dict):
        raise Broken(file, "it is no JSON object")
    for name, types in ABOUT.items():
        if name in told and type(told[name]) not in types:
            raise Broken(file, f"{name} is of another type")
    if told.get("state", OPEN) not in (OPEN, ENDED, SHARED):
        raise Broken(file, "state is none that a run has")
    return told


def read(file: Path) -> Any:
    """What a file of JSON says; None where there is no such file. Raises `Broken`."""
    try:
        return orjson.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Broken(file, error.strerror or "it cannot be read") from error
    except orjson.JSONDecodeError:
        raise Broken(file, "it is no JSON") from None
