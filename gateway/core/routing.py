"""Where a request goes: one rule with one parameter, a pure function of a key, names and loads.

Every replica has a rendezvous score for every key: the highest among the candidates wins, so a replica that comes or
goes moves only the keys it wins or won (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998). The order of failover is the same rule asked again without those that
were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from hashlib import blake2b

from xxhash import xxh64_digest

from gateway.core.seeds import framed


def score(key: str, name: str) -> int:
    """XXH64 of the name in UTF-8, its seed the first 8 bytes, big-endian, of BLAKE2b-512 of the key.

    The key is in UTF-8 too, and framed as in `gateway.core.seeds`.
    """
    return int.from_bytes(_scoring(key)(name))


def best(key: str, names: Collection[str]) -> str:
    """The name with the highest score; of equal scores the greater name. Raises `ValueError` where there is none."""
    if len(names) == 1:
        return next(iter(names))
    return max(sorted(names, reverse=True), key=_scoring(key))


def order(key: str, names: Iterable[str]) -> list[str]:
    """The names by their score, the best first: each would be it without those before it."""
    ordered = sorted(names, reverse=True)  # of equal scores the greater name stays in front
    if len(ordered) > 1:
        ordered.sort(key=_scoring(key), reverse=True)
    return ordered


def candidates(loads: Mapping[str, int], slack: float) -> list[str]:
    """The names whose load is at most `slack` above the least."""
    if slack == math.inf:
        return list(loads)
    most = min(loads.values()) + int(slack)  # a float would be dear to compare
    return [name for name, load in loads.items() if load <= most]


def choose(key: str, loads: Mapping[str, int], slack: float) -> str:
    """The best candidate for a key. `loads` has every replica that may serve, at least one: else `ValueError`."""
    return best(key, candidates(loads, slack))


def ranked(key: str, loads: Mapping[str, int], slack: float) -> list[str]:
    """All candidates for a key, the one that `choose` gives first."""
    return order(key, candidates(loads, slack))


def _scoring(key: str) -> Callable[[str], bytes]:
    """What gives a name's score for a key, big-endian: such bytes sort as their numbers do."""
    seed = int.from_bytes(blake2b(framed(key.encode())).digest()[:8])
    return lambda name: xxh64_digest(name.encode(), seed)
