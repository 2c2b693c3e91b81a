"""The one place that starts tasks: each is held until it ends, and what it raises is logged, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

log = structlog.get_logger("detgate.tasks")

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()


def start(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run `work` beside its starter. Whoever starts it may cancel it or await it."""
    task = asyncio.create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_ended)
    return task


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task failed", task=task.get_name(), exc_info=error)
