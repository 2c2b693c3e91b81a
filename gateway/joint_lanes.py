"""Lanes that all gateways have together: those of `gateway.lanes`, kept in the store.

To join such a lane is to be about to ask: a place is asked for when its turn is waited for, or with others of its
request by `reserve`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from gateway.core.ordering import sortable
from gateway.core.strangers import Tally
from gateway.lanes import Lane, Lanes, Place, Rank
from gateway.shared.lanes import Claim, Places
from gateway.shared.link import Link
from gateway.telemetry import Telemetry


@dataclass(slots=True, eq=False)
class JointPlace(Place):
    """A place, as the store knows it."""

    claim: Claim = field(default_factory=lambda: Claim("", ""))

    def wake(self) -> None:
        self.claim.wake()


class JointLane(Lane):
    """A lane as one request sees it."""

    def __init__(self, name: str, places: Places, replica: str) -> None:
        self.name = name
        self._places = places
        self._replica = replica
        self._doubt = ""

    @property
    def doubt(self) -> str:
        return self._doubt

    @doubt.setter
    def doubt(self, replica: str) -> None:
        self._doubt = replica
        self._places.doubt(self.name, replica)

    def join(self, rank: Rank, *, further: bool = False) -> JointPlace:
        priority, index, names, sample = rank
        key = sortable(priority, index, cast(tuple[tuple[int, int, str], ...], names), sample)
        return JointPlace(rank, claim=Claim(self.name, self._replica, key))

    def holds(self, place: Place) -> bool:
        return self._places.holds(_claim(place))

    async def turn(self, place: Place) -> None:
        claim = _claim(place)
        await self._places.turn(claim)
        place.taken = claim.state == "in"
        self._doubt = claim.doubt

    def leave(self, place: Place) -> None:
        self._places.leave(_claim(place))


class JointLanes(Lanes):
    """The lanes of one pool, over all gateways."""

    shared = True

    def __init__(self, alone: Lanes, link: Link, seconds: float, telemetry: Telemetry) -> None:
        super().__init__(alone.pool, alone.scope, alone.limit, alone.queue, episodes=alone.episodes)
        self.places = Places(link, self.pool, self.limit or 0, self.queue, seconds, apart=self.apart)
        self.places.inherit = self._inherit
        self._telemetry = telemetry

    @property
    def why_down(self) -> str | None:
        return self.places.why_down

    @property
    def waiting(self) -> int:
        return self.held + self.places.waiting

    def find(self, replica: str, session: str, group: str = "") -> Lane | None:
        if self.scope == "none":
            return None
        return JointLane(self.name(replica, session, group), self.places, replica)

    def leave(self, lane: Lane, place: Place) -> None:
        lane.leave(place)

    async def reserve(self, places: Iterable[Place]) -> None:
        claims = [_claim(place) for place in places]
        if claims:
            await self.places.join(claims)

    def leaving(self, lane: Lane, place: Place) -> None:
        self.places.leaving(_claim(place))

    async def inside(self, lane: Lane, place: Place, own: int) -> int:
        return await self.places.inside(_claim(place))

    async def tally(self, replica: str) -> Tally | None:
        if not self.apart:
            return None
        return await self.places.tally(self.name(replica, ""), replica)

    def _inherit(self, claim: Claim) -> None:
        assert self.heir is not None
        self._telemetry.takeovers.add(self.pool)
        lane = JointLane(claim.lane, self.places, claim.replica)
        self.heir(lane, JointPlace((0, 0, (), 0), taken=True, claim=claim), claim.replica)


def _claim(place: Place) -> Claim:
    assert isinstance(place, JointPlace)
    return place.claim
