"""What goes wrong, when: a plan that a seed makes before anything begins.

A fault strikes a process after some number of its own steps from its moment on, so at any of its awaits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = {
    "crash": 3,
    "freeze": 3,
    "flap": 3,
    "breaks": 2,
    "slow": 2,
    "stall": 4,
    "stall-in": 3,
    "stall-out": 4,
    "cut": 4,
    "error": 3,
    "lossless": 2,
    "lossy": 2,
    "flush": 1,
    "leave": 6,
}
"""Kind → how often, beside the others."""

BLACKOUTS = 0.15
"""How many seeds have a moment at which the store and all gateways go."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at: float
    kind: str
    who: int
    steps: int
    seconds: float


def plan(seed: int, span: float) -> list[Fault]:
    """The faults of a seed. One in eight has none."""
    chance = random.Random(f"faults {seed}")
    if seed % 8 == 7:
        return []
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randint(2, 12))
    made = [_fault(kind, span, chance) for kind in kinds]
    if (chance := random.Random(f"blackout {seed}")).random() < BLACKOUTS:
        made.append(_fault("blackout", span, chance))
    return sorted(made, key=lambda fault: fault.at)


def _fault(kind: str, span: float, chance: random.Random) -> Fault:
    seconds = chance.choice([0.1, 0.5, 1.5, 2.5, 4.0, 7.0])
    return Fault(0.5 + span * chance.random(), kind, chance.randrange(12), chance.randrange(60), seconds)
