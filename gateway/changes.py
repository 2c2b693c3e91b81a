"""Changes of the fleet while it serves: each is logged, written into the ledger, and known to the probes at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from gateway.core.errors import Busy, StoreFault
from gateway.fleet import Fleet, Pool, Replica
from gateway.health import Health
from gateway.ledger.writer import Ledger
from gateway.passes import Verdict
from gateway.settings import Replica as ReplicaSettings
from gateway.settings import Settings

log = structlog.get_logger("detgate.fleet")

Picture = dict[str, dict[str, tuple[ReplicaSettings, bool]]]
"""The fleet: pool → name of a replica → what it is, and whether it is drained."""


What = Literal["add", "drain", "remove", "accept", "pause", "resume", "weights", "verdict"]


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as whoever administers asked for it."""

    what: What
    pool: str
    name: str
    """Of a replica; of the new weights; nothing for `pause` and `resume`."""
    settings: ReplicaSettings | None = None
    """What is added."""
    engine: str = ""
    """The fingerprint that is accepted."""
    verdict: Verdict | None = None
    """The verdict on a replica."""
    after: int | None = None
    """The number of the change that the pool's gate must stand by when this is made."""


@dataclass(frozen=True, slots=True)
class Made:
    """The place of a change among all that were made at the gateways of a run."""

    number: int
    at: float
    """Seconds since the epoch."""


class Changes:
    """Adds, drains and removes replicas, and takes those that came back as others for what they are."""

    def __init__(self, run: str, fleet: Fleet, health: Health, ledger: Ledger) -> None:
        self._run = run
        self._fleet = fleet
        self._health = health
        self._ledger = ledger
        self._gates = 0
        """How often a gate was shut or opened, where no other gateway does."""

    def add(self, pool: Pool, settings: ReplicaSettings) -> Replica:
        """Take a replica in."""
        return self._done("added", pool, pool.add(settings))

    def drain(self, pool: Pool, name: str) -> Replica:
        """Send a replica nothing more."""
        return self._done("draining", pool, pool.drain(name))

    def remove(self, pool: Pool, name: str) -> Replica:
        """Take a replica out."""
        replica = pool.remove(name)
        self._fleet.learnt()
        return self._done("removed", pool, replica)

    def accept(self, pool: Pool, name: str, engine: str) -> Replica:
        """Take an engine, by its fingerprint, for the one that a replica should be."""
        return self._done("accepted", pool, pool.accept(name, engine))

    def verdict(self, pool: Pool, name: str, verdict: Verdict | None) -> Replica:
        """Go by a verdict on a replica."""
        replica = pool.replicas[name]
        if verdict is not None:
            self._health.note(pool, replica, verdict)
        self._health.judge(pool, replica)
        log.info("verdict", pool=pool.name, replica=name, passed=replica.verified)
        self.note("verdict", pool, replica, {"passed": replica.verified})
        return replica

    def check(self, change: Change) -> None:
        """Raises `Busy` where a change is meant for a gate that stands otherwise now."""
        if change.after not in (None, self._fleet.pools[change.pool].gate.number):
            raise contended(change.pool)

    def apply(self, change: Change, made: Made | None = None) -> int:
        """Make a change, unless the fleet is so already; the number by which the pool's gate stands then.

        `made`: its place, where other gateways make it too.
        """
        self._apply(change, made)
        return self._fleet.pools[change.pool].gate.number

    def _apply(self, change: Change, made: Made | None) -> None:
        pool = self._fleet.pools[change.pool]
        replica = pool.replicas.get(change.name)
        match change.what:
            case "pause" | "resume" | "weights":
                self._gate(pool, change, made)
            case "add":
                assert change.settings is not None
                if replica is not None and (replica.draining or replica.settings != change.settings):
                    self.remove(pool, change.name)
                if change.name not in pool.replicas:
                    self.add(pool, change.settings)
            case _ if replica is None:
                return
            case "drain":
                self.drain(pool, change.name)
            case "remove":
                self.remove(pool, change.name)
            case "accept":
                self.accept(pool, change.name, change.engine)
            case "verdict":
                self.verdict(pool, change.name, change.verdict)

    def _gate(self, pool: Pool, change: Change, made: Made | None) -> None:
        """Shut or open the gate of a pool, or say which weights are behind it."""
        gate, now = pool.gate, time.time() if made is None else made.at
        if change.what == "weights":
            gate.name(change.name)
        else:
            self._gates += 1
            gate.number = self._gates if made is None else made.number
            if change.what == "pause":
                gate.close(now)
            else:
                gate.open()
        log.info("weights", change=change.what, pool=pool.name, version=gate.named)
        record = {"event": "weights", "time": now, "run": self._run, "change": change.what, "pool": pool.name}
        place = {} if made is None else {"number": made.number}
        try:
            self._ledger.opened({**record, "version": gate.named, "paused": gate.shut, **place})
        except StoreFault:
            log.error("a change of weights could not be recorded", change=change.what, pool=pool.name)

    @property
    def picture(self) -> Picture:
        """The fleet as it is."""
        return {
            pool.name: {name: (replica.settings, replica.draining) for name, replica in pool.replicas.items()}
            for pool in self._fleet
        }

    def match(self, picture: Picture) -> None:
        """Bring the fleet to a picture of it."""
        for name, replicas in picture.items():
            pool = self._fleet.pools[name]
            self._match(pool, {replica: settings for replica, (settings, _) in replicas.items()})
            for replica, (_, draining) in replicas.items():
                if draining and not pool.replicas[replica].draining:
                    self.drain(pool, replica)

    def reload(self, now: Settings, then: Settings) -> list[str]:
        """Bring the replicas of `now` to those of `then`. Gives the keys that differ but need a restart."""
        for wanted in then.pools:
            pool = self._fleet.pools.get(wanted.name)
            if pool is not None:
                for name in [name for name, replica in pool.replicas.items() if replica.draining]:
                    self.remove(pool, name)
                self._match(pool, {replica.name: replica for replica in wanted.replicas})
        ours = now.model_dump(exclude={"pools": {"__all__": {"replicas"}}})
        theirs = then.model_dump(exclude={"pools": {"__all__": {"replicas"}}})
        return sorted(key for key in ours if ours[key] != theirs[key])

    def _match(self, pool: Pool, wanted: dict[str, ReplicaSettings]) -> None:
        for name, replica in list(pool.replicas.items()):
            if wanted.get(name) != replica.settings:
                self.remove(pool, name)
        for name, settings in wanted.items():
            if name not in pool.replicas:
                self.add(pool, settings)

    def _done(self, what: str, pool: Pool, replica: Replica) -> Replica:
        self._health.sync()
        log.info("fleet changed", change=what, pool=pool.name, replica=replica.name)
        self.note(what, pool, replica, {"replicas": [n for n, r in pool.replicas.items() if not r.draining]})
        return replica

    def note(self, what: str, pool: Pool, replica: Replica, particulars: Mapping[str, Any]) -> None:
        """Write down what became of a replica, or became known of it."""
        record = {
            "event": "fleet",
            "time": time.time(),
            "run": self._run,
            "change": what,
            "pool": pool.name,
            "replica": replica.name,
            "fingerprint": replica.fingerprint or None,
        }
        try:
            self._ledger.opened({**record, **particulars})
        except StoreFault:
            log.error("a change of the fleet could not be recorded", change=what, replica=replica.name)


def contended(pool: str) -> Busy:
    """The refusal of a change of weights where somebody else has changed the gate meanwhile."""
    return Busy(
        f"The pause of pool {pool} was ended, or taken over, by somebody else. Ask again.", code="weights_contended"
    )
