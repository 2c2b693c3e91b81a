"""Rollouts that go on: a prompt sent again with the tokens that were drawn so far.

What goes on is a *segment* of the sample that it names. The sample's request keeps its index; its segments are counted
by themselves, from 1, in a scope that stands right behind it in canonical order. A segment's name means its sample.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.core import ids
from gateway.core.errors import CallerFault

LARGEST_SAMPLE = 4095

_SEGMENTS = re.compile(r"(.*)/([0-9]{1,10})\.([0-9]{1,4})", re.S)
_CONTENT = r"(?P<content>/[0-9a-f]{16})?"
_SEGMENT = r"(?:/(?P<first>[0-9]{1,10})\.(?P<drawn>[0-9]{1,4}))?"
_PLACE = r":(?P<index>[0-9]{1,10})(?:\.(?P<sample>[0-9]{1,4})(?:-[0-9]+)?!?)?"


class Origin(NamedTuple):
    """The sample that goes on."""

    identity: str
    """Effective identity of the request that drew its beginning."""
    index: int  # type: ignore[assignment]  # hides a tuple's `index`
    sample: int = 0

    def name(self, ordinal: int = 0) -> str:
        """What X-Detgate-Resume may call it."""
        return f"{ids.request_id(self.identity, self.index, ordinal)}.{self.sample}"

    @property
    def scope(self) -> str:
        """The effective identity of its segments."""
        return f"{self.identity}/{self.index}.{self.sample}"


class Named(NamedTuple):
    """A request by its id: its effective identity and index, and the sample that goes on with it."""

    identity: str
    index: int  # type: ignore[assignment]  # hides a tuple's `index`
    origin: Origin


def read(name: str, identity: str, ordinal: int = 0) -> Named | None:
    """The request that an id names; None where it is none of this identity and session, or has no such sample.

    `{request id}` is its sample 0, `{request id}.{sample}` any, also as an engine has it, with `!`. A segment has one
    sample; how many another request has does not follow from its name.
    """
    behind = f"~{ordinal}" if ordinal else ""
    match = re.fullmatch(re.escape(ids.written(identity)) + _CONTENT + _SEGMENT + behind + _PLACE, name)
    if match is None:
        return None
    segment, place = match["first"] is not None, int(match["index"])
    index = int(match["first"]) if segment else place
    of_place = int(match["sample"] or 0)
    sample = int(match["drawn"]) if segment else of_place
    if max(index, place) > ids.LARGEST_INDEX or sample > LARGEST_SAMPLE or (segment and of_place):
        return None
    effective = identity + (match["content"] or "")
    origin = Origin(effective, index, sample)
    return Named(origin.scope if segment else effective, place, origin)


def origin(scope: str) -> Origin | None:
    """The sample whose segments have this effective identity."""
    match = _SEGMENTS.fullmatch(scope)
    return None if match is None else Origin(match[1], int(match[2]), int(match[3]))


def unknown(run: str) -> CallerFault:
    """The refusal of a name that no request of the run had."""
    return CallerFault(
        f"X-Detgate-Resume names a request that this session did not ask in run {run}. Name one that it did; one of "
        "another run by /runs/{run} in the path or X-Detgate-Run.",
        code="unknown_resume",
        param="X-Detgate-Resume",
    )
