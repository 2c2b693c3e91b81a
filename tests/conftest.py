"""Coroutine tests run in an event loop of their own. Properties are tried with the same examples in each run of
the suite; `--hypothesis-profile search` tries many others."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repeats", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=20_000, deadline=None)
settings.load_profile("repeats")


def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: two more processes than cores, since many tests wait for others."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else (os.cpu_count() or 1) + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: no collector need look for garbage in it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begun last, what waits long would leave the other processes without work."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
