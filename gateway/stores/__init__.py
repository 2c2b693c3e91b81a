"""Where indices are claimed. One file is one store; each passes tests/stores/test_contract.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from gateway.core.indexing import Ask, Claim
from gateway.ledger.writer import Ledger
from gateway.settings import InvalidSettings, Settings


class ScopeKey(NamedTuple):
    """Names one counter."""

    run: str
    session: str
    identity: str


class Store(Protocol):
    """Owns the counters of runs. Each call is atomic; nothing else may change an index."""

    shared: bool
    """Whether other processes may serve the same run."""

    gateway: str | None
    """The name of this process among those that serve a run; None: there is no other."""

    @property
    def scopes(self) -> int:
        """Counters that are in memory."""

    @property
    def owed(self) -> int:
        """Ends of claims that could not be told yet."""

    async def claim(self, scope: ScopeKey, ask: Ask, settle_seconds: float) -> Claim:
        """Take an index; waits at most `settle_seconds` where the rule says wait. Who waits longest is first.

        Raises `Conflict` and `StoreFault`; nothing is taken then, nor when it is cancelled.
        """

    async def complete(self, scope: ScopeKey, index: int, *, sure: bool = False) -> bool:
        """The answer of one claim has ended. Says whether the index raced.

        `sure`: the answer is to be delivered. Raises a `Fault` where it must not be: the index was taken from this
        claim, or nobody can say whether it was.
        """

    async def settle(self, scope: ScopeKey, index: int, *, used: bool) -> bool:
        """One claim is over. True if the index is released now."""

    async def has_issued(self, scope: ScopeKey, index: int) -> bool:
        """Whether a request of this scope ever had this index. True also where that may have been forgotten.

        Raises `StoreFault`.
        """

    def raced(self, scope: ScopeKey, index: int) -> bool:
        """Whether an index that this process holds has raced so far, as far as this process knows."""

    async def learn(self, scope: ScopeKey) -> None:
        """Know what all processes know of a scope: whether its session has asked, and the next number.

        Raises `StoreFault`.
        """

    def knows(self, run: str, session: str) -> bool:
        """Whether a session has asked for an index, as far as this process knows."""

    def next_index(self, scope: ScopeKey) -> int | None:
        """The number that would be drawn next, as far as this process knows; None where the client numbers."""

    def restore(self, run: str, folder: Path, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Bring a run's counters to where its ledger left them. Gives an end for each request that has none."""

    def fence(self, run: str) -> None:
        """The ledger of a run lacks something."""

    def serve(self, run: str, folder: Path, ledger: Ledger) -> None:
        """This process serves a run from now on, and adds to this ledger."""

    def close(self, run: str) -> None:
        """It serves the run no more."""

    def leave(self, run: str) -> None:
        """It is no more one of those who serve the run, of which nothing is in flight here."""

    @property
    def busy(self) -> set[str]:
        """Runs in which a request has an index, or waits for one: those that cannot be left."""

    def why_down(self, run: str) -> str | None:
        """Why no request of a run can get an index now; None: it can."""

    @property
    def warnings(self) -> list[str]:
        """What may make it lose something, and be mended by whoever runs it."""

    @property
    def refused(self) -> Mapping[str, int]:
        """What is kept in it and cannot be used now, and of how many runs or pools."""

    async def run(self) -> None:
        """Whatever must go on while the process serves."""

    async def stop(self) -> None:
        """No request is in flight any more, and none comes."""


def given_back(scope: ScopeKey, ask: Ask, index: int, *, raced: bool, gateway: str | None = None) -> dict[str, Any]:
    """The record of an index that was given to a request in the moment in which that left, and is released.

    `gateway`: which of several wrote it.
    """
    return {
        "event": "given_back",
        "time": time.time(),
        **scope._asdict(),
        "index": index,
        "gateway": gateway,
        "order": ask.kind,
        "digest": ask.raw.hex(),
        "content": ask.content,
        "key": ask.key,
        "repeat": ask.repeat,
        "flags": ["racing"] if raced else [],
    }


def waited(scope: ScopeKey, raw: bytes, asked: int, repeat: int) -> dict[str, Any]:
    """The record of a request that waited for a rival and got no index: what was known of its bytes then."""
    names = scope._asdict()
    return {"event": "waited", "time": time.time(), **names, "digest": raw.hex(), "asked": asked, "repeat": repeat}


def build(settings: Settings, failed: Callable[[], None]) -> Store:
    """The store that `state` names. `failed` is called for each call to it that fails.

    Raises `InvalidSettings` where it cannot be used here.
    """
    name = "memory" if settings.state == "memory" else "redis"
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            [f"state: {name} needs the package {error.name}, which is not installed: pip install 'detgate[{name}]'"]
        ) from None
    return cast(Store, module.build(settings, failed))
