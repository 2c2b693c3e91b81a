"""Request ids, the ids that engines see, and session ids that cannot repeat.

A request id names a logical request in headers, routing, engines and the ledger, in every run alike.
"""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote

LARGEST_INDEX = 2**31 - 1

LONGEST = 200
"""Bytes of the longest request id that is written out."""

_KEPT = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9\-._:/]").search

# The versions of RFC 9562 that are drawn or stamped; 3 and 5 are digests of a name, and repeat.
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[12467][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_BARE_UUID = re.compile(
    r"(?<![0-9A-Fa-f])(?=[0-9]*[A-Fa-f])"
    r"(?:[0-9a-f]{12}[12467][0-9a-f]{3}[89ab][0-9a-f]{15}|[0-9A-F]{12}[12467][0-9A-F]{3}[89AB][0-9A-F]{15})"
    r"(?![0-9A-Fa-f])"
)
_ULID = re.compile(
    r"(?<![0-9A-Za-z])(?=[0-9A-Fa-f]*[G-Zg-z])"
    r"(?:01[0-9A-HJKMNP-TV-Z]{24}|01[0-9a-hjkmnp-tv-z]{24})"
    r"(?![0-9A-Za-z])"
)


def request_id(identity: str, index: int, ordinal: int = 0) -> str:
    """`{identity}:{index}`; `{identity}~{ordinal}:{index}` for a session that is not its identity's first.

    Outside of letters, digits, `-`, `.`, `_`, `:` and `/` the identity is percent-encoded as UTF-8 (so `~`
    is), so the id is safe in headers and no two requests share one. An id above 200 bytes is its
    first 100, `~`, and the first 16 hex digits of the SHA-256 of the whole.
    """
    identity = written(identity)
    whole = f"{identity}~{ordinal}:{index}" if ordinal else f"{identity}:{index}"
    if len(whole) <= LONGEST:
        return whole
    return f"{whole[:_KEPT]}~{sha256(whole.encode()).hexdigest()[:16]}"


def written(identity: str) -> str:
    """An identity as it stands in request ids."""
    if _UNSAFE(identity) is None:
        return identity
    return quote(identity, safe=":/").replace("~", "%7E")


def engine_id(request_id: str, sample: int, live: int) -> str:
    """The id that an engine sees: `{request id}.{sample}!`, with `-{live}` before the `!` where `live` > 0.

    `live` tells ids apart of which an equal one is in flight. The `!` ends every id and stands nowhere else
    in one, so none is a prefix of another: SGLang aborts by prefix.
    """
    return f"{request_id}.{sample}-{live}!" if live else f"{request_id}.{sample}!"


def random_like(session_id: str) -> bool:
    """True if the id holds a UUID or a ULID, which is another one in every run.

    A UUID is recognised by its version and variant, with hyphens or as 32 hex digits with a letter among
    them; a ULID by a time between 2004 and 2039, and a letter that is no hex digit. Digests of other
    lengths, numbers, and UUIDs that are digests of a name (versions 3 and 5) are not meant.
    """
    if len(session_id) < 26:
        return False
    return bool(_UUID.search(session_id) or _BARE_UUID.search(session_id) or _ULID.search(session_id))
