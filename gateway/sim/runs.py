"""The generations of one request, and what is read from the request for them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Finish, Generation, Piece
from gateway.sim.sampling import Noise, Sampling

_MOST_CHOICES = 16384


@dataclass
class Answer:
    """One finished sample."""

    prompt: list[int]
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces if piece.token is not None]

    @property
    def finish(self) -> Finish:
        finish = self.pieces[-1].finish
        assert finish is not None
        return finish


class Run:
    """Samples that one request asked for, in the batch until all ended or the request has."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.feed: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.generations: list[Generation] = []

    def add(
        self,
        id: str,
        prompt: list[int],
        sampling: Sampling,
        noise: Noise,
        *,
        salt: str = "",
        priority: int = 0,
    ) -> None:
        """One more sample, whose choice number is its place. Refused: the prompt is too long."""
        longest = self._ask.settings.max_model_len
        room = longest - len(prompt)
        if room <= 0 or not prompt:
            raise Refused(400, f"the prompt has {len(prompt)} tokens, not 1 to {longest - 1}", "input_tokens")
        budget = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        self.generations.append(
            Generation(
                id=id,
                tokens=prompt,
                salt=salt,
                priority=priority,
                sampling=sampling,
                noise=noise,
                budget=budget,
                feed=self.feed,
                place=len(self.generations),
                abort_at=self._ask.fault.abort_after_tokens,
            )
        )

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Every piece as it comes, with its choice's number."""
        open_choices = len(self.generations)
        self._ask.jobs.extend(self.generations)
        self._ask.engine.submit(self.generations)
        while open_choices:
            place, piece = await self.feed.get()
            open_choices -= piece.finish is not None
            yield place, piece

    async def answers(self) -> list[Answer]:
        """All samples, whole."""
        pieces: list[list[Piece]] = [[] for _ in self.generations]
        async for place, piece in self.pieces():
            pieces[place].append(piece)
        return [Answer(job.tokens, parts) for job, parts in zip(self.generations, pieces, strict=True)]


def read_sampling(
    fields: Fields,
    defaults: Mapping[str, float],
    *,
    budget: str,
    top_logprobs: int = 0,
    default_budget: int | None = None,
) -> Sampling:
    """The sampling parameters of an OpenAI-like body; `budget` names the field that bounds the tokens."""
    most = fields.integer(budget, default_budget, 0 if budget == "max_new_tokens" else 1)
    return Sampling(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0, 1e6),
        top_p=fields.number("top_p", defaults.get("top_p", 1.0), 1e-9, 1),
        top_k=fields.integer("top_k", int(defaults.get("top_k", -1)), -1) or -1,
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0, 1),
        max_tokens=most,
        min_tokens=fields.integer("min_tokens", 0, 0) or 0,
        stop=tuple(stop for stop in fields.texts("stop") if stop),
        stop_token_ids=frozenset(fields.integers("stop_token_ids")),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=fields.flag("ignore_eos"),
        top_logprobs=top_logprobs,
    )


def read_count(fields: Fields) -> int:
    """`n`, the samples of one prompt."""
    return fields.integer("n", 1, 1, _MOST_CHOICES) or 1


def read_prompts(value: Any, longest: int, name: str = "prompt") -> list[list[int]]:
    """One or several prompts: a text, tokens, a list of texts or a list of lists of tokens."""
    match value:
        case str():
            return [tokens_of(value, longest)]
        case [int(), *_] if all(type(token) is int for token in value):
            return [_known(value, name)]
        case [str(), *_] if all(isinstance(item, str) for item in value):
            return [tokens_of(item, longest) for item in value]
        case [[*_], *_] if all(isinstance(item, list) for item in value):
            return [_known(item, name) for item in value]
    raise Refused(400, f"{name} must be a text, tokens, or a list of these", name, schema=True)


def tokens_of(text: str, longest: int) -> list[int]:
    """The tokens of a text. Refused: it cannot fit, which is seen without reading it."""
    if len(text) > longest * model.LONGEST_TOKEN:
        said = f"the prompt has {len(text)} characters, too many for {longest} tokens"
        raise Refused(400, said, "input_tokens")
    return model.encode(text)


def _known(tokens: Sequence[Any], name: str) -> list[int]:
    if not all(type(token) is int and 0 <= token < model.VOCABULARY for token in tokens):
        raise Refused(400, f"{name} holds a token that the model does not have", name)
    return list(tokens)
