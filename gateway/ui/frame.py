"""What every page has: head, way past the navigation, navigation, and the headers that bind a browser."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from gateway.ui.html import Inner, Markup, render, tag

PAGES = {".": "Replicas", "lanes": "Lanes", "sessions": "Sessions", "runs": "Runs"}
"""Address and title of what the navigation leads to."""

POLICY = "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
"""No script runs, whatever stands in a page; nothing is fetched but the stylesheet."""

BOUND = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Frame(NamedTuple):
    """What is the same on all pages of one visit."""

    run: str
    """The gateway's own run."""
    profile: str
    can_leave: bool = False
    """The visitor has logged in by the form."""


def page(frame: Frame | None, title: str, *main: Inner, here: str = "", status: int = 200) -> Response:
    """A page as an answer. `here`: which page of the navigation it belongs to; without a frame there is none."""
    body = tag(
        "body",
        tag("a", "Skip to the content", class_="skip", href="#content"),
        _header(frame, here) if frame is not None else None,
        tag("main", tag("h1", title), *main, id="content", tabindex="-1"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · detgate"),
        tag("link", rel="stylesheet", href="style.css"),
    )
    text = f"<!doctype html>{tag('html', head, body, lang='en')}"
    return Response(text.encode(errors="replace"), status, dict(BOUND), "text/html; charset=utf-8")


def _header(frame: Frame, here: str) -> Markup:
    entries = (
        tag("li", tag("a", title, href=to, aria_current="page" if to == here else None)) for to, title in PAGES.items()
    )
    leave = tag("form", tag("button", "Log out"), method="post", action="logout") if frame.can_leave else None
    return tag(
        "header",
        tag("p", tag("b", "detgate"), " ", tag("span", "profile ", tag("code", frame.profile)), class_="brand"),
        tag("nav", tag("ul", entries), aria_label="Pages"),
        leave,
    )


# --- parts of pages

MARKS = {"good": "✓", "warn": "▲", "bad": "✕", "quiet": "–"}
"""What stands before a word that says how something is, so that its colour is never alone."""


def sign(kind: str, *inner: Inner) -> Markup:
    """A word that says how something is: `good`, `warn`, `bad` or `quiet`."""
    return tag("span", tag("span", MARKS[kind], aria_hidden="true"), " ", *inner, class_=f"sign {kind}")


def table(caption: str, head: tuple[str, ...], rows: list[tuple[Inner, ...]]) -> Markup:
    """A table whose rows become cards on a narrow screen. The first cell of a row is its heading."""
    roles = {"row": "row", "head": "columnheader", "name": "rowheader", "cell": "cell"}
    first = tag("tr", (tag("th", each, scope="col", role=roles["head"]) for each in head), role="row")
    body = []
    for row in rows:
        cells = [tag("th", row[0], scope="row", role="rowheader")]
        cells += [
            tag("td", tag("div", cell), data_label=label, role="cell")
            for label, cell in zip(head[1:], row[1:], strict=True)
        ]
        body.append(tag("tr", cells, role="row"))
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", first, role="rowgroup"),
        tag("tbody", body, role="rowgroup"),
        role="table",
    )


def facts(pairs: list[tuple[str, Inner]]) -> Markup:
    """Names and what they are."""
    return tag("dl", (tag("div", tag("dt", term), tag("dd", said)) for term, said in pairs), class_="facts")


def note(*inner: Inner) -> Markup:
    """Something to know about a page."""
    return tag("p", *inner, class_="note")


def count(number: int, one: str, many: str | None = None) -> Markup:
    """A number and its noun."""
    return render((number, " ", one if number == 1 else many or f"{one}s"))
