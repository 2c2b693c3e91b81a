"""What the two engines do differently on the routes that they share."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.fields import Fields
from gateway.sim.jobs import Piece
from gateway.sim.replies import Reply
from gateway.sim.runs import Answer, Run, read_count, read_sampling
from gateway.sim.sampling import Noise, Sampling

Object = dict[str, Any]


class Dialect(ABC):
    """One engine's ids, seeds, errors and shapes.

    finish_apart  a stream's finish_reason comes in chunks of its own, after the last text
    """

    finish_apart: bool

    @abstractmethod
    def error(self, path: str, status: int, message: str, param: str | None = None) -> Reply:
        """The engine's error body for that route."""

    @abstractmethod
    def broken(self, path: str) -> bytes:
        """What a stream ends with when the engine fails in its middle."""

    @abstractmethod
    def guarded(self, path: str) -> bool:
        """Whether the route wants the API key."""

    @abstractmethod
    def request_id(self, ask: Ask, kind: str) -> str:
        """The answer's id; `kind` is its prefix, as in chatcmpl. Refused: it is in use."""

    @abstractmethod
    def job_ids(self, id: str, count: int) -> list[str]:
        """The ids by which the samples of one request are known in the batch."""

    @abstractmethod
    def chunk_ids(self, id: str, jobs: list[str]) -> list[str]:
        """The id on each choice's stream chunks."""

    @abstractmethod
    def check(self, ask: Ask, sampling: Sampling, count: int) -> None:
        """Refused or EngineDied: what this engine cannot sample."""

    @abstractmethod
    def noise(self, ask: Ask, seed: int | None, choice: int) -> tuple[Noise, int | None]:
        """The noise of one choice, and the seed that it has in effect; None: random."""

    @abstractmethod
    def seed(self, fields: Fields) -> int | None:
        """The body's seed; None: there is none. Refused: it is no int64."""

    @abstractmethod
    def head(self, ask: Ask, id: str, kind: str) -> Object:
        """The members of an answer or chunk that come before its choices."""

    @abstractmethod
    def tail(self, ask: Ask, answers: list[Answer]) -> Object:
        """The members of a whole answer that come after its choices and usage."""

    @abstractmethod
    def usage(self, prompt: int, completion: int, cached: int) -> Object:
        """The token counts."""

    @abstractmethod
    def message(self, content: str | None, calls: list[Object]) -> Object:
        """A chat answer's message."""

    @abstractmethod
    def ending(self, answer: Answer, ask: Ask, id: str) -> Object:
        """The last members of a whole choice."""

    @abstractmethod
    def chunk_ending(self, piece: Piece | None, ask: Ask) -> Object:
        """The last members of a choice in a chunk."""

    @abstractmethod
    def chunk_tail(self, ask: Ask, place: int, prompt: list[int], first: bool) -> Object:
        """The members of a chunk that come after its choices."""

    @abstractmethod
    def call_id(self) -> str:
        """A tool call's id, random at both engines."""

    @abstractmethod
    def tool_finish(self, named: bool) -> str:
        """The finish_reason of a choice that called the forced tool."""


def fresh() -> str:
    """A random id without dashes."""
    return uuid.uuid4().hex


def begin(
    ask: Ask,
    dialect: Dialect,
    kind: str,
    prompts: list[list[int]],
    *,
    budget: str,
    top_logprobs: int = 0,
    seeded: bool = True,
    default_budget: int | None = None,
) -> tuple[str, Run]:
    """Puts a body's samples together: prompt by prompt, n of each. Gives the answer's id and the run."""
    fields = ask.fields
    count = read_count(fields)
    sampling = read_sampling(
        fields, defaults(ask), budget=budget, top_logprobs=top_logprobs, default_budget=default_budget
    )
    dialect.check(ask, sampling, count)
    seed = dialect.seed(fields) if seeded else None
    id = dialect.request_id(ask, kind)
    run = Run(ask)
    used = []
    ids = dialect.job_ids(id, len(prompts) * count)
    salt = fields.text("cache_salt") or fields.text("extra_key")
    for place, job_id in enumerate(ids):
        noise, effective = dialect.noise(ask, seed, place % count)
        used.append(effective)
        run.add(
            job_id,
            prompts[place // count],
            sampling,
            noise,
            salt=salt,
            priority=fields.integer("priority", 0) or 0,
        )
    ask.note(id, seed, tuple(used))
    return id, run


def defaults(ask: Ask) -> Mapping[str, float]:
    """The sampling defaults of a /v1 route, which the model brings along."""
    settings = ask.settings
    preferred = settings.preferred_sampling_params if settings.engine == "sglang" else {}
    return {**settings.generation_config, **preferred}


def used_tokens(dialect: Dialect, prompts: list[list[int]], answers: list[Answer]) -> Object:
    """The usage of whole answers."""
    return dialect.usage(
        sum(map(len, prompts)),
        sum(len(answer.tokens) for answer in answers),
        sum(answer.cached_tokens for answer in answers),
    )
