"""What a reward engine's routes share: texts go through the batch one job each and come back as logits."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.fields import Refused
from gateway.sim.jobs import Scoring
from gateway.sim.model import END, single

WIDTH = 8

Reader = Callable[[Any], list[list[int]]]


async def logits(ask: Ask, id: str, texts: list[list[int]], width: int = 1) -> list[list[float]]:
    """The raw logits of each text. Refused: one is empty or too long."""
    settings = ask.settings
    for text in texts:
        if not 0 < len(text) < settings.max_model_len:
            raise Refused(400, f"an input has {len(text)} tokens, not 1 to {settings.max_model_len - 1}")
    jobs = [
        Scoring(
            id=id if len(texts) == 1 else f"{id}-{place}",
            tokens=text,
            priority=ask.fields.integer("priority", 0) or 0,
            width=width,
            seconds=settings.score_seconds or 0.0,
        )
        for place, text in enumerate(texts)
    ]
    ask.note(id)
    ask.jobs.extend(jobs)
    ask.engine.submit(jobs)
    return await asyncio.gather(*(job.done for job in jobs))


def pairs(left: Any, right: Any, read: Reader) -> list[list[int]]:
    """The texts of a comparison: one with each, or as many with as many, in order."""
    first, second = read(left), read(right)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise Refused(400, f"input lengths {len(first)} and {len(second)} do not match")
    return [[*a, END, *b] for a, b in zip(first, second, strict=True)]


def sigmoid(logit: float) -> float:
    return single(1 / (1 + math.exp(-logit)))


def normalised(vector: list[float]) -> list[float]:
    """The vector at length 1."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [single(value / length) for value in vector]
