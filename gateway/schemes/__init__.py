"""Seed schemes: a file of this folder is a scheme, by the name that the configuration gives.

A scheme is a pure function with golden vectors in `tests/vectors/schemes/{name}.json`; tests want both of each file.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast


class Scheme(Protocol):
    """What a file of this folder holds."""

    def seed(self, master: int, identity: str, index: int, member: int | None) -> int:
        """The seed of one request.

        `master` is the run's seed or what takes its place, `identity` the effective identity, `index` the
        request index, `member` the session's place in its group, None outside of groups.
        """


@cache
def names() -> tuple[str, ...]:
    """Every scheme there is, sorted."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def load(name: str) -> Scheme:
    """The scheme of this name. Raises `LookupError` that lists those there are."""
    if name not in names():
        raise LookupError(f"there is no seed scheme {name!r}: use one of {', '.join(names())}")
    return cast(Scheme, import_module(f"{__name__}.{name}"))
