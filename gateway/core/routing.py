"""Where a request goes: one rule with one parameter, a pure function of a key, names and loads.

Every replica has a rendezvous score for every key: the highest among the candidates wins, so a replica that comes or
goes moves only the keys it wins or won (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998). The order of failover is the same rule asked again without those that
were tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

from gateway.core.seeds import framed

SCORE_BYTES = 8
"""How much of a digest is a score."""


def score(key: str, name: str) -> int:
    """The first 8 bytes, big-endian, of BLAKE2b-512 of key and name in UTF-8, framed as in `gateway.core.seeds`."""
    return int.from_bytes(_scores(key, [name])[name][:SCORE_BYTES])


def best(key: str, names: Collection[str]) -> str:
    """The name with the highest score; of equal scores the greater name. Raises `ValueError` where there is none."""
    if len(names) == 1:
        return next(iter(names))
    return max(names, key=_scores(key, names).__getitem__)


def candidates(loads: Mapping[str, int], slack: float) -> list[str]:
    """The names whose load is at most `slack` above the least."""
    most = min(loads.values()) + slack
    return [name for name, load in loads.items() if load <= most]


def choose(key: str, loads: Mapping[str, int], slack: float) -> str:
    """The best candidate for a key. `loads` has every replica that may serve, at least one: else `ValueError`."""
    return best(key, candidates(loads, slack))


def ranked(key: str, loads: Mapping[str, int], slack: float) -> list[str]:
    """All candidates for a key, the one that `choose` gives first: each would be next without those before it."""
    names = candidates(loads, slack)
    if len(names) > 1:
        names.sort(key=_scores(key, names).__getitem__, reverse=True)
    return names


def _scores(key: str, names: Iterable[str]) -> dict[str, bytes]:
    """What each name ranks by: its score and, should two be equal, the name behind it, whose UTF-8 sorts as it does."""
    copy = blake2b(framed(key.encode())).copy
    scores = {}
    for name in names:
        encoded, hashed = _encoded(name)
        whole = copy()
        whole.update(hashed)
        scores[name] = whole.digest()[:SCORE_BYTES] + encoded
    return scores


@lru_cache(maxsize=4096)
def _encoded(name: str) -> tuple[bytes, bytes]:
    """A name in UTF-8, and as it is hashed."""
    encoded = name.encode()
    return encoded, framed(encoded)
