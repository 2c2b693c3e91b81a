"""What a reward engine's routes share: texts go through the batch one job each and come back as logits."""

import asyncio
import base64
import math
import struct
from collections.abc import Callable
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.fields import Refused
from gateway.sim.jobs import Scoring
from gateway.sim.model import END, single

WIDTH = 8

Reader = Callable[[Any], list[list[int]]]


async def score(ask: Ask, ids: list[str], texts: list[list[int]], width: int = 1) -> list[Scoring]:
    """Puts the texts through the batch; all are done. Refused: one is empty or too long."""
    settings = ask.settings
    for text in texts:
        if not 0 < len(text) < settings.max_model_len:
            raise Refused(400, f"an input has {len(text)} tokens, not 1 to {settings.max_model_len - 1}")
    due = asyncio.get_running_loop().time() + (settings.score_seconds or 0.0)
    priority = ask.fields.integer("priority", 0) or 0
    salt = (ask.fields.text("cache_salt") or "") if settings.engine == "vllm" else ""
    jobs = [
        Scoring(id=id, tokens=text, priority=priority, width=width, due=due, salt=salt)
        for id, text in zip(ids, texts, strict=True)
    ]
    ask.note(ids[0])
    ask.jobs.extend(jobs)
    ask.engine.submit(jobs)
    await asyncio.gather(*(job.done for job in jobs))
    return jobs


def numbered(id: str, count: int) -> list[str]:
    """The ids of a request's parts."""
    return [id] if count == 1 else [f"{id}-{place}" for place in range(count)]


def pairs(left: Any, right: Any, read: Reader) -> list[list[int]]:
    """The texts of a comparison: one with each, or as many with as many, in order. Refused: other counts."""
    first, second = read(left), read(right)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise Refused(400, f"input lengths {len(first)} and {len(second)} do not match")
    return [[*a, END, *b] for a, b in zip(first, second, strict=True)]


def sigmoid(logit: float) -> float:
    """The logit as a probability."""
    return single(1 / (1 + math.exp(-logit)))


def normalised(vector: list[float]) -> list[float]:
    """The vector at length 1."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [single(value / length) for value in vector]


def encoded(vector: list[float], form: str) -> list[float] | str:
    """The vector as numbers, or with the form "base64" as its float32 bytes."""
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
