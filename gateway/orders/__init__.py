"""Index orders: which counter of a session a request draws from. One file is one order, named as in the configuration.

Each gives `effective(identity, content) -> str`, the *effective identity*, where `content` computes the content digest;
it is called only by an order that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast


class Order(Protocol):
    """What an order's module gives."""

    def effective(self, identity: str, content: Callable[[], str]) -> str: ...


def names() -> list[str]:
    """The orders that exist."""
    return sorted(module.name for module in iter_modules(__path__))


ORDERS: dict[str, Order] = {name: cast(Order, import_module(f"{__name__}.{name}")) for name in names()}
