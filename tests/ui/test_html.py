"""Text can only become text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.unseen import seen
from gateway.ui import html
from gateway.ui.html import Markup, link, name, render, tag


class Read(HTMLParser):
    """What a browser would make of markup."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text())
def test_whatever_the_text_is_it_stays_text_and_an_attribute_stays_one(text: str) -> None:
    read = Read(tag("p", name(text), title=text, hidden=True))
    assert read.tags == ["p", "bdi"]
    assert read.text.replace("\r\n", "\n") == seen(text).replace("\r\n", "\n")
    assert list(read.attributes[0]) == ["title", "hidden"]


@given(st.text())
def test_a_link_brings_back_what_it_was_given(text: str) -> None:
    read = Read(link("requests", "look", session=text, after=None))
    parts = urlsplit(read.attributes[0]["href"] or "")
    assert (parts.scheme, parts.netloc, parts.path) == ("", "", "requests")
    assert parse_qs(parts.query, keep_blank_values=True) == {"session": [text]}


def test_numbers_and_nothing_and_several_can_be_given() -> None:
    assert render((1234, None, ["<", Markup("<br>")])) == "1,234&lt;<br>"


def test_markup_is_made_of_texts_written_in_the_code_alone() -> None:
    """`Markup(…)` is called in `html` and nowhere else, so nothing else can be taken for HTML."""
    folder = Path(html.__file__).parent
    assert [file.name for file in sorted(folder.glob("*.py")) if "Markup(" in file.read_text()] == ["html.py"]
