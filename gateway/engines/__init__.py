"""What the gateway knows of each engine. One file is one engine; its name is a pool's `engine` in the
configuration.

An engine's file says for each route where seed, n and id stand and what the engine does with them, which
values it must never see, and how it is probed and told to abort. It holds no logic of the request path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Protocol, cast

from gateway.core.document import Document, Edit
from gateway.core.types import Facts, Handling, Headers

Abort = tuple[str, Callable[[str], bytes]]
"""The route that takes an abort, and what makes its body of an engine id."""


class Engine(Protocol):
    """What the module of an engine gives."""

    NAME: str
    ROUTES: Mapping[str, Handling]
    """By path, exactly as the client sends it after the gateway's own prefixes."""
    PROBE: str
    """A route that tells whether the server lives and generates nothing."""
    ABORT: Abort | None
    """None: closing the connection is the abort."""

    ASKS: tuple[str, ...]
    """Routes, with their query, that say what a server is, asked when it comes up."""

    PREEMPTIONS: tuple[str, str] | None
    """Route and series that count the requests put back to be computed anew; None where that changes no answer, or
    nothing tells."""

    POSITIONAL: bool
    """With the same seed a prompt and the tokens drawn so far go on as they would have: noise follows from seed and
    position."""

    HIGHER_FIRST: bool
    """Of the numbers in a body's `priority` the higher one goes first; else the lower one."""

    LOAD: str | None
    """A route that says how many requests are in it now; None where none does."""

    PREFIX_CACHE: tuple[str, str] | None
    """Series and label of what `LOAD` answers that tell whether prefixes are cached; None where `facts` tells, or
    nothing."""

    @staticmethod
    def running(told: str) -> float | None:
        """The requests that run and wait in it, from what `LOAD` answered; None where that does not say."""

    EXACT: bool
    """`done` counts requests; else it grows by some amount with each."""

    @staticmethod
    def done(told: str) -> float | None:
        """What it has scored since its start, from what `LOAD` answered; None where that does not say."""

    @staticmethod
    def facts(told: Mapping[str, Any]) -> Facts:
        """What the answers to `/v1/models` and `ASKS` say, by route: JSON objects, text where it is none, and the
        status where it was refused."""

    @staticmethod
    def check(path: str, document: Document, facts: Facts, n: int) -> None:
        """Raise `CallerFault` for what kills or fools this engine. `n`: samples that the request asks for."""

    @staticmethod
    def extra(path: str, document: Document, facts: Facts) -> tuple[Edit, ...]:
        """Harmless values that keep this engine safe. `document` is that of the `Call`, not the client's."""

    @staticmethod
    def id_headers(engine_id: str) -> Headers:
        """Headers by which this engine takes the id of a request; none where it reads a body field."""


@cache
def names() -> tuple[str, ...]:
    """The engines there are: the files of this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def load(name: str) -> Engine:
    """The engine of that name; `ValueError` tells those there are."""
    if name not in names():
        raise ValueError(f"unknown engine {name!r}: choose one of {', '.join(names())}")
    return cast(Engine, import_module(f"gateway.engines.{name}"))
