"""One session, and one group of sessions: what it was created with, and how it stands."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from gateway.core.identity import Known
from gateway.ledger.writer import Mark

RECENT = 64
"""Requests of one session that are remembered for rewards; those before them are in the ledger alone."""

LARGEST = Fraction(sys.float_info.max)
"""How far from zero the sum of a session's rewards may be, so that it is a finite float."""

UNDELIVERED = "its last request was not delivered: "

State = Literal["open", "ended", "failed"]


class Wanted(NamedTuple):
    """What a session, or a group of sessions, shall be."""

    identity: str
    group_size: int | None = None
    """How many sessions; None: one, in no group."""
    index_order: str | None = None
    seed: int | None = None
    order: int | None = None
    """Its place in the order of submission."""
    failed_reward: float | None = None
    """Its reward if it fails before it was given one; None: as the settings say."""
    weights: str | None = None
    """Whether it is held to the weights that it meets first; None: as the settings say."""

    @property
    def identities(self) -> list[str]:
        """That of each session."""
        if self.group_size is None:
            return [self.identity]
        return [f"{self.identity}:{member}" for member in range(self.group_size)]


@dataclass(slots=True, eq=False)
class Interaction:
    """A sampled request of a session: what a reward is given for."""

    identity: str
    index: int
    request_id: str
    answer: str | None = None
    """The id that its answer has."""
    delivered: bool = False
    reward: float | None = None


@dataclass(slots=True, eq=False)
class Session:
    """One session: what it was created with, and how it stands."""

    known: Known
    key: bytes | None
    """Digest of its key; None: it was used without having been created."""
    order: int | None = None
    group: Group | None = None
    since: Mark | None = None
    """Where in the ledger its records begin; None: anywhere."""
    state: State = "open"
    why: str | None = None
    """Why it failed."""
    open: int = 0
    """Its requests that have an index and have not ended."""
    trouble: str | None = None
    """Why its last request was not delivered; None: it was."""
    overtook: bool = False
    """It waited in vain for the members before it, and went on without them."""
    failed_reward: float | None = None
    """What its reward is if it fails before it was given one."""
    holds: bool = False
    """It is held to the version of the weights that it, or another member of its group, has met first."""
    interactions: int = 0
    """Its sampled requests that were delivered."""
    _held: dict[str, str] = field(default_factory=dict)
    _total: Fraction | None = None
    _recent: dict[tuple[str, int], Interaction] = field(default_factory=dict)
    """Its last sampled requests, in the order in which they got their indices."""

    @property
    def place(self) -> tuple[str, str]:
        return self.known.run, self.known.session

    @property
    def undelivered(self) -> str | None:
        """Why it has failed if it ends now and nobody says more."""
        return None if self.trouble is None else f"{UNDELIVERED}{self.trouble}"

    @property
    def held(self) -> dict[str, str]:
        """Pool → the version of its weights that was met there first."""
        return self._held if self.group is None else self.group.held

    @property
    def reward(self) -> float | None:
        """The sum of its requests' rewards, exact but for the last rounding; None: it has none."""
        return None if self._total is None else float(self._total)

    def find(self, name: str | None) -> Interaction | None:
        """A remembered request that was delivered, by its own id or its answer's; without a name the last one."""
        for interaction in reversed(self._recent.values()):
            if interaction.delivered and name in (None, interaction.request_id, interaction.answer):
                return interaction
        return None

    def remembered(self, identity: Any, index: Any) -> Interaction | None:
        """What is remembered of an index."""
        return self._recent.get((identity, index))

    def asked(self, interaction: Interaction) -> Interaction:
        """A request got its index; the one that is remembered of that index."""
        key = interaction.identity, interaction.index
        known = self._recent.setdefault(key, interaction)
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return known

    def answered(self, interaction: Interaction, answer: str | None) -> None:
        """It was delivered."""
        self.interactions += not interaction.delivered
        interaction.delivered, interaction.answer = True, answer

    def dropped(self, interaction: Interaction) -> None:
        """It was not delivered."""
        key = interaction.identity, interaction.index
        if not interaction.delivered and self._recent.get(key) is interaction:
            del self._recent[key]

    def stands(self, trouble: str | None, interactions: int, total: Fraction | None) -> None:
        """It is known anew how it stands. `total`: the sum of its rewards."""
        if total is None and self.state == "failed" and self.failed_reward is not None:
            total = Fraction(self.failed_reward)
        self.trouble, self.interactions, self._total = trouble, interactions, total

    def with_reward(self, before: float | None, reward: float) -> Fraction:
        """What the sum would be if a request's reward were changed."""
        return (self._total or Fraction()) + Fraction(reward) - Fraction(before or 0.0)

    def add(self, before: float | None, reward: float) -> None:
        """A request's reward was changed."""
        self._total = self.with_reward(before, reward)


@dataclass(slots=True, eq=False)
class Group:
    """Sessions that were created together: the samples of one task."""

    run: str
    id: str
    identity: str
    size: int
    members: list[Session] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    firsts: dict[str, str] = field(default_factory=dict)
    """What guards look for → who came to it first; the last `FIRSTS` of them."""
    held: dict[str, str] = field(default_factory=dict)
    """Pool → the version of its weights that the members are held to, if they are."""

    @property
    def failed(self) -> Session | None:
        """The first member that failed."""
        return next((member for member in self.members if member.state == "failed"), None)

    def ahead(self, session: Session) -> Session | None:
        """The first member before this one that has not ended."""
        place = session.known.member or 0
        return next((m for m in self.members if (m.known.member or 0) < place and m.state == "open"), None)

    async def turn(self, session: Session, seconds: float) -> Session | None:
        """Wait until every member before this one has ended; the first that has not, when time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.ahead(session) is not None:
                    await self.changed.wait()
        return self.ahead(session)

    def tell(self) -> None:
        """Wake whoever waits for a member to end."""
        self.changed.set()
        self.changed = asyncio.Event()


class Visitor(NamedTuple):
    """Who comes with a key."""

    holder: Session | None = None
    """The session that the key opens."""
    trusted: bool = False
    """The key is one of `auth.api_keys`, which open every session."""
    name: str | None = None
    """Who has that key, where the configuration says so."""
