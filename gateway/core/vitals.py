"""When a replica counts as up: a rule over the outcomes of probes, without a clock.

One refused connection is proof that no server listens. Anything else may be a busy server: it takes several in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "refused", "bad", "slow"]
"""ok: answered 2xx. refused: no connection. bad: another status or a broken answer. slow: nothing in time."""

State = Literal["unknown", "up", "down"]


@dataclass(slots=True)
class Vitals:
    """The state of one replica, from its probes."""

    failures: int
    """Probes in a row that must fail, unless refused, before an up replica is down."""
    successes: int
    """Probes in a row that must pass before a down replica is up again."""
    state: State = "unknown"
    streak: int = 0
    """Probes in a row against the present state."""

    def probed(self, outcome: Outcome) -> State:
        """Take in one probe and say the state after it."""
        passed = outcome == "ok"
        if passed == (self.state == "up"):
            self.streak = 0
            if self.state == "unknown":
                self.state = "down"
            return self.state
        self.streak += 1
        if self.state == "unknown":
            needed = 1
        elif passed:
            needed = self.successes
        else:
            needed = 1 if outcome == "refused" else self.failures
        if self.streak >= needed:
            self.state, self.streak = ("up" if passed else "down"), 0
        return self.state

    def refused(self) -> None:
        """A request found no server: as a refused probe."""
        self.probed("refused")
