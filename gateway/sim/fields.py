"""A request's JSON, read as leniently as the engines do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

INT64 = 2**63


class Refused(Exception):
    """The engine refuses the request: a status, what it says, and the field that it blames.

    `schema` says that the body does not even have the right form, which engines tell in another tone.
    """

    def __init__(self, status: int, message: str, param: str | None = None, *, schema: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.schema = schema


@dataclass(frozen=True)
class Fields:
    """The members of a JSON object; of two equal keys the last counts. Every reader raises Refused (400)."""

    members: Mapping[str, Any]

    @classmethod
    def parse(cls, body: bytes) -> "Fields":
        try:
            members = json.loads(body)
        except json.JSONDecodeError as error:
            raise Refused(400, f"JSON decode error: {error.msg}", str(error.pos), schema=True) from error
        except ValueError as error:
            raise Refused(400, f"JSON decode error: {error}", schema=True) from error
        if not isinstance(members, dict):
            raise Refused(400, "Input should be a valid dictionary", schema=True)
        return cls(members)

    def get(self, name: str) -> Any:
        """The member as it is; null and absent are the same."""
        return self.members.get(name)

    def integer(self, name: str, default: int | None = None, low: int = -INT64, high: int = INT64 - 1) -> int | None:
        """An integer within the bounds; "7", 7.0 and true are taken for one."""
        value = self.get(name)
        if value is None:
            return default
        return int(_within(name, _lax_integer(name, value), low, high))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        try:
            return float(_within(name, float(value), low, high))
        except (TypeError, ValueError) as error:
            raise Refused(400, f"{name} must be a number, got {value!r}", name, schema=True) from error

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Refused(400, f"{name} must be a boolean, got {value!r}", name, schema=True)
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise Refused(400, f"{name} must be a string, got {type(value).__name__}", name, schema=True)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self.get(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        return tuple(_each(name, found, lambda item: isinstance(item, str)))

    def integers(self, name: str) -> list[int]:
        value = self.get(name)
        return [] if value is None else list(_each(name, value, is_integer))

    def inner(self, name: str) -> "Fields":
        """An object in the object; absent: an empty one."""
        value = self.get(name)
        if value is None:
            return Fields({})
        if not isinstance(value, dict):
            raise Refused(400, f"{name} must be an object", name, schema=True)
        return Fields(value)


def is_integer(value: object) -> bool:
    """A JSON integer, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _each(name: str, value: Any, holds: Callable[[Any], bool]) -> list[Any]:
    if not isinstance(value, list) or not all(map(holds, value)):
        raise Refused(400, f"{name} has a wrong type", name, schema=True)
    return value


def _lax_integer(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise Refused(400, f"{name} must be a valid integer, got {value!r}", name, schema=True)


def _within(name: str, value: Any, low: Any, high: Any) -> Any:
    if not low <= value <= high:
        raise Refused(400, f"{name} must be between {low} and {high}, got {value}", name)
    return value
