"""What the two engines do differently on the routes that they share."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Generation, Piece
from gateway.sim.replies import Reply
from gateway.sim.runs import Answer, Run, read_count, read_sampling
from gateway.sim.sampling import Noise, Sampling

Object = dict[str, Any]


class Dialect(ABC):
    """One engine's ids, seeds, errors and shapes."""

    @abstractmethod
    def refusal(self, path: str, refused: Refused) -> Reply:
        """The engine's answer to a request that it refuses."""

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
    def tail(self, ask: Ask, usage: Object, answers: Sequence[Answer], *, chat: bool) -> Object:
        """The members of a whole answer that come after its choices."""

    @abstractmethod
    def usage(self, prompt: int, completion: int) -> Object:
        """The token counts of a whole answer."""

    @abstractmethod
    def stream_usage(self, prompt: int, completion: int, *, chat: bool) -> Object:
        """The token counts of a stream."""

    @abstractmethod
    def message(self, content: str | None, calls: list[Object]) -> Object:
        """A chat answer's message."""

    @abstractmethod
    def delta(self, **members: Any) -> Object:
        """A chat chunk's delta with these members."""

    @abstractmethod
    def tool_delta(self, arguments: str, *, id: str | None = None, name: str | None = None) -> Object:
        """A chat chunk's delta of a tool call: its opening, with the call's id and name, or more arguments."""

    @abstractmethod
    def chat_ending(self, ask: Ask, job: Generation, answer: Answer, *, called: bool) -> Object:
        """The last members of a whole chat choice; `called`: it calls a tool."""

    @abstractmethod
    def text_ending(self, ask: Ask, answer: Answer) -> Object:
        """The last members of a whole completion choice."""

    @abstractmethod
    def chat_chunk_ending(self, ask: Ask, piece: Piece | None) -> Object:
        """The last members of a chat chunk's choice; no piece: the opening one."""

    @abstractmethod
    def text_chunk_ending(self, ask: Ask, piece: Piece, prompt: list[int] | None) -> Object:
        """The last members of a completion chunk's choice; `prompt` on a choice's first."""

    @abstractmethod
    def chunk_tail(self, ask: Ask, *, chat: bool, prompt: list[int] | None = None, last: bool = False) -> Object:
        """The members of a chunk that come after its choices; `prompt` on a chat choice's opening chunk."""

    @property
    @abstractmethod
    def finish_apart(self) -> bool:
        """Whether a chat stream's finish_reason comes in a chunk of its own, after all text."""

    @abstractmethod
    def chosen_logprobs(self, piece: Piece) -> list[tuple[int, float]]:
        """The (token, logprob) pairs that the answer tells of one step."""

    @abstractmethod
    def text_offset(self, length: int) -> int:
        """Where a token begins in a completion's text, after `length` characters."""

    @abstractmethod
    def call_id(self) -> str:
        """A tool call's id, random at both engines."""

    @abstractmethod
    def tool_finish(self, named: bool) -> str:
        """The finish_reason of a choice that called the forced tool."""


def fresh(digits: int = 32) -> str:
    """A random id of hexadecimal digits."""
    return uuid.uuid4().hex[:digits]


def begin(
    ask: Ask,
    dialect: Dialect,
    kind: str,
    prompts: list[list[int]],
    *,
    fields: Fields | None = None,
    budget: str = "max_tokens",
    top_logprobs: int = 0,
    seeded: bool = True,
    default_budget: int | None = None,
) -> tuple[str, Run]:
    """Puts a body's samples together: prompt by prompt, n of each. Gives the answer's id and the run.

    `fields` stands for the body where a route has other names for the same things. Refused, EngineDied.
    """
    fields = fields or ask.fields
    count = read_count(fields)
    sampling = read_sampling(
        fields, defaults(ask), budget=budget, top_logprobs=top_logprobs, default_budget=default_budget
    )
    dialect.check(ask, sampling, count)
    seed = dialect.seed(fields) if seeded else None
    id = dialect.request_id(ask, kind)
    run = Run(ask)
    used = []
    salt = ask.fields.text("cache_salt") or ask.fields.text("extra_key")
    priority = ask.fields.integer("priority", 0) or 0
    for place, job_id in enumerate(dialect.job_ids(id, len(prompts) * count)):
        noise, effective = dialect.noise(ask, seed, place % count)
        used.append(effective)
        run.add(job_id, prompts[place // count], sampling, noise, salt=salt, priority=priority)
    ask.note(id, seed, tuple(used))
    return id, run


def defaults(ask: Ask) -> Mapping[str, float]:
    """The sampling defaults that come with the model."""
    settings = ask.settings
    preferred = settings.preferred_sampling_params if settings.engine == "sglang" else {}
    return {**(settings.generation_config if ask.path.startswith("/v1") else {}), **preferred}


def answer_usage(dialect: Dialect, prompts: list[list[int]], answers: Sequence[Answer]) -> Object:
    """The usage of whole answers."""
    return dialect.usage(sum(map(len, prompts)), sum(len(answer.tokens) for answer in answers))


def wants_usage(ask: Ask) -> bool:
    """Whether a stream has to tell its usage."""
    return ask.fields.inner("stream_options").flag("include_usage")
