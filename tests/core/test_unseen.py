"""What nobody sees is written out; what people write is left as it is."""

from __future__ import annotations

import pytest

from gateway.core.unseen import seen

UNSEEN = ["\u202e", "\u2066", "\u200b", "\u200e", "\u200f", "\ufeff", "\x00", "\x1b", "\r", "\x9b", "\ud800"]


@pytest.mark.parametrize("text", UNSEEN)
def test_what_cannot_be_seen_is_written_out(text: str) -> None:
    assert seen(f"a{text}b") == f"a\\u{ord(text):04x}b"


def test_letters_of_every_script_stay_as_they_are() -> None:
    text = "naïve 会话 сессия جلسة\n\tz"
    assert seen(text) == text
