"""Waiting for what a test cannot be told of."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest

TURN_SECONDS = 0.005
"""Seconds between two looks."""


async def until(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until a condition holds; fails the test, and shows what all its tasks wait for, if it does not in time.

    Looks are counted and not seconds: what is waited for has had as many turns of the loop, however long the machine
    stood still in between.
    """
    for _ in range(round(seconds / TURN_SECONDS)):
        if holds():
            return
        await asyncio.sleep(TURN_SECONDS)
    pytest.fail(f"not within {seconds:g} s\n{_stacks()}")


def _stacks() -> str:
    told = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        task.print_stack(file=told)
    return told.getvalue()
