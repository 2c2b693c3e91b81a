"""What runs in a batch: generations, which take a step for each token, and scorings, which take one."""

import asyncio
import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.sim import model
from gateway.sim.model import END, log_softmax, mix, single, unit
from gateway.sim.sampling import Noise, Sampling, choose

_LOGIT_CHANGE = 0.2
_SCORE_CHANGE = 1e-4


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended: "length", "abort" or "stop".

    With "stop", `matched` is the stop string or token, None for the end token.
    """

    reason: str
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step gave: a token, the text that it made certain, and the end if it was the last."""

    token: int | None
    text: str
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None


@dataclass(eq=False, kw_only=True)
class Job:
    """One member of a batch; `company` is what the batch adds to a result, 0 for none."""

    id: str
    tokens: list[int]
    salt: str = ""
    priority: int = 0
    cached_tokens: int = 0
    arrived: float = field(default_factory=time.time)
    ended: bool = False

    def step(self, company: int) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Generation(Job):
    """One sample. Its pieces go into `feed`, with `place`, the number of its choice."""

    sampling: Sampling
    noise: Noise
    budget: int
    feed: asyncio.Queue[tuple[int, Piece]]
    place: int = 0
    abort_at: int | None = None
    drawn: int = 0
    _state: int = 0
    _text: str = ""
    _sent: int = 0

    def __post_init__(self) -> None:
        for token in self.tokens:
            self._state = model.advance(self._state, token)
        self._last = self.tokens[-1] if self.tokens else END

    def step(self, company: int) -> None:
        if self.drawn == self.abort_at or self.budget <= 0:
            self._end(Finish("abort" if self.drawn == self.abort_at else "length"))
            return
        logits = self._logits(company)
        token = choose(logits, self.sampling, self.noise(self.drawn, len(self.tokens) + self.drawn))
        logprobs = log_softmax(logits)
        self.drawn += 1
        self._state, self._last = model.advance(self._state, token), token
        finish = self._finish(token)
        text = self._certain(token, finish)
        if isinstance(text, Finish):
            finish, text = text, self._flush()
        self._emit(Piece(token, text, single(dict(logprobs)[token]), self._top(logprobs), finish))

    def abort(self) -> None:
        self._end(Finish("abort"))

    def _logits(self, company: int) -> list[tuple[int, float]]:
        pairs = [*model.logits(self._state, self._last)]
        if self.sampling.ignore_eos or self.drawn < self.sampling.min_tokens:
            pairs = [pair for pair in pairs if pair[0] != END]
        if not company:
            return pairs
        key = mix(company, self._state)
        return [(token, logit + _LOGIT_CHANGE * (unit(mix(key, token)) - 0.5)) for token, logit in pairs]

    def _top(self, logprobs: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
        count = self.sampling.top_logprobs
        ordered = sorted(logprobs, key=lambda pair: (-pair[1], pair[0])) if count else []
        return tuple((token, single(logprob)) for token, logprob in ordered[:count])

    def _finish(self, token: int) -> Finish | None:
        if token == END:
            return Finish("stop")
        if token in self.sampling.stop_token_ids and self.drawn >= self.sampling.min_tokens:
            return Finish("stop", token)
        if self.drawn >= self.budget:
            return Finish("length")
        return None

    def _certain(self, token: int, finish: Finish | None) -> str | Finish:
        """The new text that no stop string can take back, or the stop that was found."""
        if token != END and not (finish and finish.matched is not None):
            self._text += model.decode([token])
        begin = max(0, self._sent - max(map(len, self.sampling.stop), default=0))
        found = [(self._text.find(stop, begin), stop) for stop in self.sampling.stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits and self.drawn >= self.sampling.min_tokens:
            at, stop = min(hits)
            self._text = self._text[: at + len(stop) * self.sampling.include_stop]
            return Finish("stop", stop)
        return self._flush(0 if finish else self._held())

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        return max(
            (size for stop in self.sampling.stop for size in range(1, len(stop)) if self._text.endswith(stop[:size])),
            default=0,
        )

    def _flush(self, held: int = 0) -> str:
        until = max(self._sent, len(self._text) - held)
        text, self._sent = self._text[self._sent : until], until
        return text

    def _end(self, finish: Finish) -> None:
        if not self.ended:
            self._emit(Piece(None, self._flush(), finish=finish))

    def _emit(self, piece: Piece) -> None:
        self.ended = piece.finish is not None
        self.feed.put_nowait((self.place, piece))


@dataclass(eq=False, kw_only=True)
class Scoring(Job):
    """One pass over a text; `done` gives its raw logits, at `due` by the loop's clock at the earliest."""

    width: int = 1
    due: float = 0.0
    done: asyncio.Future[list[float]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def logit(self) -> float:
        """The first logit, once it is done."""
        return self.done.result()[0]

    def step(self, company: int) -> None:
        if asyncio.get_running_loop().time() < self.due:
            return
        self.ended = True
        if not self.done.done():
            self.done.set_result([single(value) for value in logit_vector(self.tokens, self.width, company)])

    def abort(self) -> None:
        self.ended = True
        self.done.cancel()


def logit_vector(tokens: Sequence[int], width: int, company: int = 0) -> list[float]:
    """Raw logits from −4 to 4: a function of the text alone, but for what the batch changes."""
    values = []
    text = struct.pack(f"<{len(tokens)}I", *tokens)
    for column in range(width):
        digest = hashlib.sha256(column.to_bytes(4, "little") + text).digest()
        number = int.from_bytes(digest[:8], "little")
        change = _SCORE_CHANGE * (unit(mix(company, number)) - 0.5) if company else 0.0
        values.append(8 * unit(number) - 4 + change)
    return values
