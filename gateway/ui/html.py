"""HTML that is built of elements, so that text can only become text.

`Markup` is made here alone. Whatever else stands in an element or an attribute is escaped, and characters that nobody
sees, or that turn the direction of what follows, are written out: a name must not look like another.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from urllib.parse import urlencode

from gateway.core.unseen import seen


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Inner = str | int | float | None | Iterable["Inner"]
"""What may stand in an element: text, numbers, markup, nothing, or several of these."""

_VOID = frozenset({"input", "link", "meta", "br", "hr"})


def render(inner: Inner) -> Markup:
    """What is given as markup."""
    if isinstance(inner, Markup):
        return inner
    if inner is None:
        return Markup()
    if isinstance(inner, str):
        return Markup(escape(seen(inner)))
    if isinstance(inner, int | float):
        return Markup(f"{inner:,}")
    return Markup("".join(map(render, inner)))


def tag(name: str, /, *inner: Inner, **attributes: str | int | bool | None) -> Markup:
    """An element. `class_` is `class`, `data_label` is `data-label`; True: an attribute without a value; None: none."""
    opened = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    if name in _VOID:
        return Markup(opened)
    return Markup(f"{opened}{render(inner)}</{name}>")


def _attribute(key: str, value: str | int | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escape(str(value))}"'


def link(to: str, /, *inner: Inner, **query: str | int | None) -> Markup:
    """A link to a page, with these query parameters; None leaves one out."""
    return tag("a", *inner, href=address(to, **query))


def address(to: str, /, **query: str | int | None) -> str:
    """Where a page is, relative to any other."""
    given = {key: value for key, value in query.items() if value is not None}
    return f"{to}?{urlencode(given, errors='replace')}" if given else to


def name(text: str) -> Markup:
    """A name that somebody chose, kept apart from the text around it whatever its script."""
    return tag("bdi", text, class_="name")
