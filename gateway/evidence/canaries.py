"""Canaries: the same request under different circumstances, and what comes of it.

Each gives a `Result`, whatever happens. Nothing here knows what to do about one, or how it is shown.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import httpx

from gateway.evidence.endpoints import Answer, Body, Sampling, Scoring
from gateway.tasks import start, stop

Outcome = Literal["passed", "failed", "broken", "skipped"]
"""broken: a request had no answer that could be read. skipped: not tried, or not served."""

CROWDS = (2, 8, 32)
"""Requests at once."""

TOKENS = 32
"""Of each answer."""

SHORT = 12
"""Tokens of the answers that are only company."""

SEEDS = (1_000_003, 2_000_003, 3_000_017, 4_000_037)

PROMPTS = (
    "Name a colour.",
    "Write the first lines of a letter to a friend who has moved to another town.",
    "Explain in plain words why the sky is blue, why it turns red in the evening, and what the sea has to do with it.",
    "List five things that one may find in a kitchen, and say for each of them what it is used for. " * 3,
)

_FILLER = "The lamp, the table and the chair stand in the room beside the window. "

LONG = _FILLER * 16
"""Longer than a block of any engine's prefix cache."""

LATE = "the budget was used up"

NOT_HERE = "not served"

NOT_SERVED = (400, 404, 405, 422, 501)
"""What a server answers where it does not have a route, or not for its model."""


class First(NamedTuple):
    """Where two answers to one request part."""

    prompt: int
    """Which prompt, from 0."""
    at: int
    """Which part of the answer, from 0; −1: which score."""
    expected: str
    got: str
    values: tuple[float | None, float | None]
    """Their logprobs, or the scores themselves."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one canary."""

    canary: str
    outcome: Outcome
    endpoint: str = ""
    distinct: int = 0
    """Distinct answers to the prompt that had the most of them …"""
    of: int = 0
    """… of so many that it was asked for."""
    differing: int = 0
    """Prompts with more than one answer …"""
    prompts: int = 0
    """… of so many."""
    first: First | None = None
    detail: str = ""


class Broken(Exception):
    """A request without an answer that can be read."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Replica:
    """A replica that is asked directly."""

    http: httpx.AsyncClient
    """With the replica's address and key."""
    model: str
    apart: bool
    """Company is sent one at a time, as the pool's lane would."""
    deadline: float
    """By the loop's clock: what has not begun by then is skipped."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sample(self, endpoint: Sampling, prompt: str, seed: int, tokens: int = TOKENS) -> Answer:
        """One answer. Raises `Broken`."""
        told = await self._post(endpoint.path, endpoint.body(self.model, prompt, seed, tokens))
        answer: Answer = _read(endpoint.read, told)
        return answer

    async def score(self, endpoint: Scoring, texts: Sequence[str]) -> list[Answer]:
        """The scores of texts in one call. Raises `Broken`."""
        scores: list[Answer] = _read(endpoint.read, await self._post(endpoint.path, endpoint.body(self.model, texts)))
        if len(scores) != len(texts):
            raise Broken(f"{len(scores)} scores for {len(texts)} texts")
        return scores

    async def together(self, asking: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """Ask all at once; one after the other where the lane keeps them apart. Raises `Broken`."""

        async def one(ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            try:
                if not self.apart:
                    return await ask()
                async with self._turn:
                    return await ask()
            except Broken as error:
                return error

        tasks = [start(one(ask), "canary") for ask in asking]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            await stop(*tasks)
        for answer in answers:
            if isinstance(answer, Broken):
                raise answer
        return answers

    @property
    def late(self) -> bool:
        return asyncio.get_running_loop().time() >= self.deadline

    async def _post(self, path: str, body: Body) -> Any:
        try:
            answer = await self.http.post(path, json=body)
        except httpx.HTTPError as error:
            raise Broken(f"{path}: {str(error) or type(error).__name__}") from None
        if not answer.is_success:
            raise Broken(f"{path} answers {answer.status_code}: {answer.text[:200]}", answer.status_code)
        try:
            return answer.json()
        except ValueError:
            raise Broken(f"{path} answers no JSON") from None


def _read(read: Callable[[Any], Any], told: Any) -> Any:
    try:
        return read(told)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Broken(f"the answer has another shape: {type(error).__name__} {error}") from None


# --- what is tried

References = list[Answer]
"""The answer to each prompt when nothing else was there."""


async def of_sampling(replica: Replica, endpoint: Sampling) -> AsyncIterator[tuple[Result, References | None]]:
    """The canaries of a route that samples, one after the other. With the first, what is compared over replicas."""
    alone: References = []

    async def repeats() -> Result:
        # The first may find a cold cache, which is another canary's business.
        first = [await replica.sample(endpoint, prompt, SEEDS[0]) for prompt in PROMPTS]
        rounds = [[await replica.sample(endpoint, prompt, SEEDS[0]) for prompt in PROMPTS] for _ in range(3)]
        alone.extend(rounds[0])
        if all(not answer.parts for answer in first):
            raise Broken("every answer is empty")
        return judge("seed-repeats", [list(answers) for answers in zip(*rounds, strict=True)])

    async def differ() -> Result:
        answers = [await replica.sample(endpoint, PROMPTS[1], seed) for seed in SEEDS]
        distinct = len({answer.parts for answer in answers})
        told = Result("seeds-differ", "passed", distinct=distinct, of=len(answers), prompts=1)
        if distinct > 1:
            return told
        return replace(told, outcome="failed", detail="all seeds give one answer: they are ignored, or shared")

    async def crowded() -> Result:
        answers = [[answer] for answer in alone]
        for size in CROWDS:
            ours = [_asking(replica, endpoint, prompt, SEEDS[0], TOKENS) for prompt in PROMPTS[:size]]
            company = [
                _asking(replica, endpoint, _FILLER * (1 + n % 7), SEEDS[1] + n, SHORT + n % 5)
                for n in range(size - len(ours))
            ]
            for place, answer in enumerate((await replica.together([*ours, *company]))[: len(ours)]):
                answers[place].append(answer)
        return judge("crowded", answers)

    async def mixed() -> Result:
        asked = PROMPTS[:2]
        answers = [
            [answer, await _amid_prefills(replica, endpoint, p)] for answer, p in zip(alone, asked, strict=False)
        ]
        return judge("prefill-mixed", answers)

    async def cold() -> Result:
        asked = [f"{secrets.token_hex(8)} {LONG}{prompt}" for prompt in PROMPTS[:3]]
        answers = [[await replica.sample(endpoint, prompt, SEEDS[0]) for _ in range(3)] for prompt in asked]
        return judge("cold-warm", answers)

    repeated = await _tried("seed-repeats", repeats, replica)
    yield repeated, alone
    yield await _after(repeated, "seeds-differ", differ, replica, whatever=True), None
    for name, canary in (("crowded", crowded), ("prefill-mixed", mixed), ("cold-warm", cold)):
        yield await _after(repeated, name, canary, replica), None


async def of_scoring(replica: Replica, endpoint: Scoring) -> AsyncIterator[tuple[Result, References | None]]:
    """The same for a route that scores."""
    alone: References = []

    async def one(text: str) -> Answer:
        return (await replica.score(endpoint, [text]))[0]

    async def repeats() -> Result:
        for text in PROMPTS:
            await one(text)
        rounds = [[await one(text) for text in PROMPTS] for _ in range(3)]
        alone.extend(rounds[0])
        return judge("score-repeats", [list(answers) for answers in zip(*rounds, strict=True)])

    async def crowded() -> Result:
        answers = [[answer] for answer in alone]
        for size in CROWDS:
            texts = [*PROMPTS[:size], *(_FILLER * (1 + n % 7) for n in range(size - len(PROMPTS[:size])))]
            scores = await replica.together([_scoring(one, text) for text in texts])
            for place, answer in enumerate(scores[: min(size, len(PROMPTS))]):
                answers[place].append(answer)
        return judge("crowded", answers)

    async def batched() -> Result:
        texts = [*PROMPTS, *(_FILLER * (1 + n % 7) for n in range(CROWDS[-1] - len(PROMPTS)))]
        if replica.apart:
            scores = await replica.together([_scoring(one, text) for text in texts])
        else:
            scores = await replica.score(endpoint, texts)
        return judge("batched", [list(pair) for pair in zip(alone, scores[: len(PROMPTS)], strict=True)])

    async def cold() -> Result:
        asked = [f"{secrets.token_hex(8)} {LONG}{text}" for text in PROMPTS]
        return judge("cold-warm", [[await one(text) for _ in range(3)] for text in asked])

    repeated = await _tried("score-repeats", repeats, replica)
    yield repeated, alone
    for name, canary in (("crowded", crowded), ("batched", batched), ("cold-warm", cold)):
        yield await _after(repeated, name, canary, replica), None


SAMPLING_CANARIES, SCORING_CANARIES = 5, 4
"""How many of them there are."""


async def _after(
    repeated: Result,
    name: str,
    canary: Callable[[], Coroutine[Any, Any, Result]],
    replica: Replica,
    *,
    whatever: bool = False,
) -> Result:
    """Try a canary that is compared with answers given alone, if those were equal among themselves."""
    if repeated.outcome == "failed" and not whatever:
        return Result(name, "skipped", detail="answers differ even alone")
    if repeated.outcome in ("skipped", "broken"):
        return Result(name, "skipped", detail=repeated.detail)
    return await _tried(name, canary, replica)


async def _tried(name: str, canary: Callable[[], Coroutine[Any, Any, Result]], replica: Replica) -> Result:
    if replica.late:
        return Result(name, "skipped", detail=LATE)
    try:
        return await canary()
    except Broken as error:
        if error.status in NOT_SERVED and name in ("seed-repeats", "score-repeats"):
            return Result(name, "skipped", detail=f"{NOT_HERE}: {error}")
        return Result(name, "broken", detail=str(error))


def _asking(
    replica: Replica, endpoint: Sampling, prompt: str, seed: int, tokens: int
) -> Callable[[], Coroutine[Any, Any, Answer]]:
    return lambda: replica.sample(endpoint, prompt, seed, tokens)


def _scoring(one: Callable[[str], Coroutine[Any, Any, Answer]], text: str) -> Callable[[], Coroutine[Any, Any, Answer]]:
    return lambda: one(text)


async def _amid_prefills(replica: Replica, endpoint: Sampling, prompt: str) -> Answer:
    """An answer while long new prompts come in, one after the other, until it has ended."""
    if replica.apart:
        await replica.sample(endpoint, f"{secrets.token_hex(8)} {LONG}", SEEDS[1], 1)
        return await replica.sample(endpoint, prompt, SEEDS[0])
    ended = asyncio.Event()

    async def decode() -> Answer:
        try:
            return await replica.sample(endpoint, prompt, SEEDS[0])
        finally:
            ended.set()

    async def prefill() -> None:
        while not ended.is_set():
            await replica.sample(endpoint, f"{secrets.token_hex(8)} {LONG}", SEEDS[1], 1)

    answer: Answer = (await replica.together([decode, prefill]))[0]
    return answer


# --- what comes of it


def judge(canary: str, answers: Sequence[Sequence[Answer]]) -> Result:
    """Passed where all answers to each prompt are equal, to the last bit where bits are told. By prompt, the reference
    first."""
    counts = [(len(set(given)), len(given)) for given in answers]
    most, of = max(counts, key=lambda count: count[0])
    differing = sum(distinct > 1 for distinct, _ in counts)
    pairs = [(prompt, given[0], other) for prompt, given in enumerate(answers) for other in given if other != given[0]]
    # Other tokens are shown before other bits.
    first = next((_first(*pair) for pair in pairs if pair[1].parts != pair[2].parts), None) or (
        _first(*pairs[0]) if pairs else None
    )
    return Result(
        canary,
        "failed" if differing else "passed",
        distinct=most,
        of=of,
        differing=differing,
        prompts=len(answers),
        first=first,
        detail=_kind(answers) if differing else "",
    )


def _kind(answers: Sequence[Sequence[Answer]]) -> str:
    if any(len({answer.parts for answer in given}) > 1 for given in answers):
        return "other tokens"
    if any(answer.parts for given in answers for answer in given):
        return "equal tokens, other logprobs: another prompt may get other tokens"
    return "other scores"


def _first(prompt: int, expected: Answer, got: Answer) -> First:
    """Where two different answers part: by their parts, else by their values."""
    place = _parting(expected.parts, got.parts)
    if place is None:
        place = _parting(expected.values, got.values) or 0
    return First(
        prompt,
        place if expected.parts else -1,
        _at(expected.parts, place, "the end") if expected.parts else "score",
        _at(got.parts, place, "the end") if got.parts else "score",
        (_at(expected.values, place, None), _at(got.values, place, None)),
    )


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first place at which two sequences differ; None where they do not."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(values: Sequence[Any], place: int, otherwise: Any) -> Any:
    return values[place] if place < len(values) else otherwise
