"""An event loop whose clock jumps to the next timer when there is nothing else to do: minutes pass at once.

Sockets are real; only waiting is skipped. A socket that is ready always goes before time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now += max(timeout, 0)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test under the jumping clock."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)


def jumping(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A coroutine test under the jumping clock."""

    @wraps(test)
    def under_the_clock(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return under_the_clock
