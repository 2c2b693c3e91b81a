"""Salts by which an engine's prefix cache is parted, so that a warm prefix cannot change an answer.

A salt decides what is found in the cache and nothing else: it enters no seed, no id and no route.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from gateway.core.document import Edit, Set
from gateway.core.seeds import framed
from gateway.core.types import Call


def salt(parts: Sequence[bytes]) -> str:
    """32 hex digits of the BLAKE2b of the framed parts, whatever they hold: engines take no `/` and at most 128."""
    return blake2b(framed(*parts), digest_size=16).hexdigest()


def salted(name: str, parts: Sequence[bytes], call: Call, edits: list[Edit]) -> list[Edit]:
    """`edits` of a call, and one that puts a salt into the field `name`. A salt of the client is one more part."""
    shared = next((edit.literal for edit in edits if isinstance(edit, Set) and edit.path == (name,)), None)
    own = shared if shared is not None else call.document.literal((name,))
    whole = parts if own in (None, b"null") else (*parts, own or b"")
    kept = [edit for edit in edits if edit.path != (name,)]
    return [*kept, Set((name,), b'"%b"' % salt(whole).encode())]
