"""A language model and its tokens, small enough to read: words that follow words in one short text.

The next word depends on the word before, and through a hash on all tokens before, but not on where the prompt
ended: so an engine whose noise allows it continues a cut answer exactly.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from xxhash import xxh64_intdigest

TEXT = """
The harbour wakes before the sun. A small boat waits near the old pier, and the keeper counts the ropes
twice. Rain came in the night, so the stones are dark and the café has not opened its doors. Two gulls
argue over bread. The keeper writes a number in a long book, then another, then the name of the wind.
Nobody asks why the wind has a name. In 北京 a letter is on its way, and in 東京 somebody reads the same book
from the other end. When the boat leaves, the water closes behind it and keeps no mark. The naïve gull
follows. Every evening the keeper adds the numbers, and every evening the sum is the same, whatever order
they came in. That is the whole art, says the keeper, to count twice and to find one answer. The lamp
turns, the sea turns, and the night begins again.
"""

END, SYSTEM, USER, ASSISTANT, TOOL, IMAGE = range(256, 262)
SPECIAL = {
    "<|end|>": END,
    "<|system|>": SYSTEM,
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
    "<|tool|>": TOOL,
    "<|image|>": IMAGE,
}
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

_PIECES = re.compile(r"<\|\w+\|>| ?\w+|.", re.DOTALL)
_EXTRA_CANDIDATES = 12

_UNLIKELY = -20.0

Logits = Sequence[tuple[int, float]]
"""(token, logit) pairs, by token; what is not named has probability 0."""


def mix(key: int, value: int) -> int:
    """A 64-bit hash of two integers from 0 to 2⁶⁴−1."""
    return xxh64_intdigest(value.to_bytes(8, "little"), key)


def unit(value: int) -> float:
    """A 64-bit hash as a number strictly between 0 and 1."""
    return (value + 0.5) / 2**64


def single(value: float) -> float:
    """The nearest float32, as engines give their numbers."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _read(text: str) -> tuple[list[str], dict[str, int], dict[int, Counter[int]]]:
    words = _PIECES.findall(" " + " ".join(text.split()))
    names = sorted(set(words))
    ids = {name: END + len(SPECIAL) + place for place, name in enumerate(names)}
    after: dict[int, Counter[int]] = {}
    before = END
    for word in words:
        after.setdefault(before, Counter())[ids[word]] += 1
        before = END if word == "." else ids[word]
    return names, ids, after


_WORDS, _WORD_IDS, _AFTER = _read(TEXT)
_FULL_STOP = _WORD_IDS["."]
_AFTER[_FULL_STOP] = _AFTER[END]
VOCABULARY = END + len(SPECIAL) + len(_WORDS)
LONGEST_TOKEN = max(len(name.encode()) for name in [*SPECIAL, *_WORDS])
_SPECIAL_NAMES = {token: name for name, token in SPECIAL.items()}


def encode(text: str) -> list[int]:
    """The tokens of `text`: a word of the model's text, else the bytes of what stands there."""
    tokens: list[int] = []
    for piece in _PIECES.findall(text):
        known = _WORD_IDS.get(piece) or SPECIAL.get(piece)
        if known is None:
            tokens.extend(piece.encode("utf-8", "surrogatepass"))
        else:
            tokens.append(known)
    return tokens


def piece(token: int) -> bytes:
    """What one token stands for. KeyError: there is no such token."""
    if 0 <= token < END:
        return bytes([token])
    if token in _SPECIAL_NAMES:
        return _SPECIAL_NAMES[token].encode()
    if END <= token < VOCABULARY:
        return _WORDS[token - END - len(SPECIAL)].encode()
    raise KeyError(token)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; bytes that are no UTF-8 become U+FFFD. KeyError: there is no such token."""
    return b"".join(map(piece, tokens)).decode("utf-8", "replace")


def advance(state: int, token: int) -> int:
    """The model's state after one more token; it starts from 0."""
    return mix(state, token)


def states(tokens: Sequence[int]) -> list[int]:
    """The state after each token."""
    found = []
    state = 0
    for token in tokens:
        state = advance(state, token)
        found.append(state)
    return found


@lru_cache(maxsize=4096)
def logits(state: int, last: int) -> Logits:
    """What may follow."""
    found: dict[int, float] = {}
    for place in range(_EXTRA_CANDIDATES):
        found[END + len(SPECIAL) + mix(state, place) % len(_WORDS)] = 0.0
    for token, count in _AFTER.get(last, _AFTER[END]).items():
        found[token] = 2.0 + math.log(count)
    if last == _FULL_STOP:
        found[END] = 3.5
    else:
        found.setdefault(_FULL_STOP, 1.0)
    return tuple((token, logit + 2 * unit(mix(state, token))) for token, logit in sorted(found.items()))


def log_softmax(pairs: Logits) -> list[tuple[int, float]]:
    """The pairs with logarithms of probabilities in place of logits."""
    top = max(logit for _, logit in pairs)
    total = top + math.log(math.fsum(math.exp(logit - top) for _, logit in pairs))
    return [(token, logit - total) for token, logit in pairs]


def prompt_logprobs(prompt: Sequence[int]) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each token of a prompt its logprob after those before it, and the likeliest there, best first."""
    found = []
    state, last = 0, END
    for token in prompt:
        pairs = log_softmax(logits(state, last))
        top = tuple((known, single(value)) for known, value in sorted(pairs, key=lambda pair: -pair[1]))
        found.append((single(dict(pairs).get(token, _UNLIKELY)), top))
        state, last = advance(state, token), token
    return found
