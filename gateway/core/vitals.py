"""When a replica gets requests: a rule over the outcomes of probes and of sendings, without a clock.

One refused connection is proof that no server listens, and so is a name that nobody has. Anything else may be a busy
server: it takes several in a row.
Apart from that, a server may answer its probes and break every request. Then its breaker opens, and each passing probe
lets one request through to find out whether it serves again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "refused", "bad", "slow", "busy"]
"""ok: answered 2xx. refused: no server listens. bad: another status, no connection or a broken answer. slow: nothing in
time. busy: the same while answers to requests came, which says nothing."""

State = Literal["unknown", "up", "down"]


@dataclass(slots=True)
class Vitals:
    """The state of one replica."""

    failures: int
    """Probes in a row that must fail, unless refused, before an up replica is down."""
    successes: int
    """Probes in a row that must pass before a down replica is up again."""
    breaks: int
    """Requests in a row that must break before the breaker opens."""
    state: State = "unknown"
    tripped: bool = False
    """The breaker is open: requests are kept away although the probes pass."""
    trial: bool = False
    """One request may go to find out whether an open breaker can close."""
    serves: bool = False
    """A request may be sent."""
    _against: int = 0
    _broken: int = 0

    def probed(self, outcome: Outcome) -> State:
        """Take in one probe and say the state after it."""
        if outcome == "busy":
            return self.state
        passed = outcome == "ok"
        self.trial = passed and self.tripped
        if self.state == "unknown":
            self.state = "up" if passed else "down"
        elif passed == (self.state == "up"):
            self._against = 0
        else:
            self._against += 1
            needed = self.successes if passed else 1 if outcome == "refused" else self.failures
            if self._against >= needed:
                self.state, self._against = ("up" if passed else "down"), 0
        self._judge()
        return self.state

    def chosen(self) -> bool:
        """A request is on its way. True if that uses the trial of an open breaker."""
        if not self.trial:
            return False
        self.trial = False
        self._judge()
        return True

    def served(self) -> bool:
        """A request was answered, whatever the answer blames on its sender. True if that closes the breaker."""
        self._broken = 0
        if not self.tripped:
            return False
        self.tripped = self.trial = False
        self._judge()
        return True

    def broke(self) -> bool:
        """A request broke on the replica. True if that opens the breaker."""
        self._broken += 1
        if self.tripped or self._broken < self.breaks:
            return False
        self.tripped = True
        self._judge()
        return True

    def _judge(self) -> None:
        self.serves = self.state == "up" and (not self.tripped or self.trial)
