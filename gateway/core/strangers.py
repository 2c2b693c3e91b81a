"""Whether a server's own count of what it has done tells of more than was sent to it: then others use it too.

Scoring takes one step of the engine, so a look at what runs in it now hardly ever meets a request. What was done stays
counted, whoever asked for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

LATE_LOOKS = 3
"""Looks after which a server has let go of what was given up."""


class Tally(NamedTuple):
    """What all gateways together have done with one replica, by its lane."""

    taken: int
    """Places taken so far."""
    dropped: int
    """Of these, given up before the answer had ended."""
    open: int
    """Of these, in the lane now."""
    leaving: int
    """Given up, and in the lane until the engine has let go."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server has done since its start, and what had been sent to it when that was asked."""

    done: float
    sent: int
    """Requests sent to it since the watch began."""
    open: int
    """Of these, those not ended yet."""
    dropped: int
    """Of these, those given up before their answer had ended: it may go on with them, and count them or not."""
    sent_after: int
    """As `sent`, but when the answer was there."""


class Watch:
    """The looks at one server.

    `exact`: `done` counts requests. Else it grows by any amount with each, and tells of others only while nothing of
    ours can be in it.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._looks: deque[Look] = deque(maxlen=LATE_LOOKS + 1)

    def outdone(self, look: Look) -> bool:
        """Whether it did more since the last look than can be ours.

        A server that was started anew since then counts from 0 and tells nothing. Nor does a count of what was sent
        that is lower than before: whoever counts has forgotten.
        """
        if self._looks and look.sent < self._looks[-1].sent:
            self._looks.clear()
        if not self._looks:
            self._looks.append(look)
            return False
        last = self._looks[-1]
        late = last.dropped - self._looks[0].dropped
        ours = look.sent_after - last.sent + last.open + late
        grown = look.done - last.done
        self._looks.append(look)
        return grown > ours if self._exact else grown > 0 and not ours
