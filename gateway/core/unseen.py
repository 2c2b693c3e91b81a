"""Characters that nobody sees, or that turn the direction of what follows: a text must not look like another."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def seen(text: str) -> str:
    """The text with what cannot be seen written out, as `\\u202e`."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
