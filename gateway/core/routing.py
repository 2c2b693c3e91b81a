"""Where a request goes: one rule with one parameter, a pure function of a key, names and loads.

Every replica has a rendezvous score for every key: the highest among the candidates wins, so a replica that comes or
goes moves only the keys it wins or won (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b


def score(key: str, name: str) -> int:
    """The first 8 bytes of BLAKE2b-512 over key and name, each in UTF-8 behind its length; big-endian, lengths too."""
    return int.from_bytes(_scored(_keyed(key), _part(name))[:8])


def rank(key: str, names: Sequence[str]) -> list[str]:
    """The names by falling score: home first, then the order of failover. Equal scores fall back to the name."""
    if len(names) == 1:
        return list(names)
    keyed = _keyed(key)
    scored = [(_scored(keyed, _part(name)), name) for name in names]
    scored.sort(key=lambda pair: (pair[0][:8], pair[1]), reverse=True)
    return [name for _, name in scored]


def choose(ranked: Sequence[str], loads: Mapping[str, int], slack: float) -> str | None:
    """The first of `ranked` whose load is at most `slack` above the least; names without a load are not candidates."""
    present = [name for name in ranked if name in loads]
    if not present:
        return None
    most = min(loads[name] for name in present) + slack
    return next(name for name in present if loads[name] <= most)


def _part(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(8) + data


def _keyed(key: str) -> blake2b:
    return blake2b(_part(key))


def _scored(keyed: blake2b, part: bytes) -> bytes:
    hasher = keyed.copy()
    hasher.update(part)
    return hasher.digest()
