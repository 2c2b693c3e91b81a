"""One step of sampling, and each engine's own kind of noise."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.sim.model import log_softmax, mix, unit

Noise = Callable[[int, int], int]
"""(tokens drawn so far by this request, absolute position) → the key of this step's noise."""

_ENTROPY = random.SystemRandom()
_LOW_32 = 2**32 - 1
_STREAM = 0x766C6C6D
_HASHED = 0x73676C


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sample is drawn; the fields as in the engines' sampling parameters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    top_logprobs: int = 0


def random_noise() -> Noise:
    """Noise that nobody can repeat: what an engine has for a request without a seed."""
    key = _ENTROPY.getrandbits(64)
    return lambda drawn, position: mix(key, drawn)


def stream_noise(seed: int) -> Noise:
    """vLLM: a stream of its own for each request, of 32 bits of seed, that restarts with the request."""
    key = mix(_STREAM, seed & _LOW_32)
    return lambda drawn, position: mix(key, drawn)


def hashed_noise(seed: int) -> Noise:
    """SGLang: a hash of the folded seed and the position, so that a cut answer continues exactly."""
    key = mix(_HASHED, fold(seed))
    return lambda drawn, position: mix(key, position)


def fold(seed: int) -> int:
    """An int64 seed as 32 bits: MurmurHash3's mixing of its two halves. Seeds from 0 to 2³²−1 stay apart."""
    return _murmur(_murmur(0, seed & _LOW_32), seed >> 32 & _LOW_32)


def _murmur(state: int, word: int) -> int:
    word = _rotate(word * 0xCC9E2D51 & _LOW_32, 15) * 0x1B873593 & _LOW_32
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _LOW_32


def _rotate(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _LOW_32


def choose(pairs: Sequence[tuple[int, float]], sampling: Sampling, key: int) -> int:
    """The token drawn from (token, logit) pairs by Gumbel noise with this step's key."""
    if sampling.temperature < 1e-5:
        return max(pairs, key=lambda pair: (pair[1], -pair[0]))[0]
    scaled = log_softmax([(token, logit / sampling.temperature) for token, logit in pairs])
    return max((logit + _gumbel(mix(key, token)), token) for token, logit in _kept(scaled, sampling))[1]


def _kept(pairs: list[tuple[int, float]], sampling: Sampling) -> list[tuple[int, float]]:
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return pairs
    ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    if sampling.top_k > 0:
        ordered = ordered[: sampling.top_k]
    floor = ordered[0][1] + math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    kept = []
    reached = 0.0
    for token, logit in ordered:
        if reached >= sampling.top_p or logit < floor:
            break
        kept.append((token, logit))
        reached += math.exp(logit)
    return kept


def _gumbel(value: int) -> float:
    return -math.log(-math.log(unit(value)))
