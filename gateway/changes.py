"""Changes of the fleet while it serves: each is logged, written into the ledger, and known to the probes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from pydantic import ValidationError

from gateway.core.errors import Busy, StoreFault
from gateway.fleet import Fleet, Pool, Replica
from gateway.health import Health
from gateway.ledger.shapes import unsound
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
    """Adds, drains and removes replicas, and takes those that came back as others for what they are.

    `reloaded` is told of settings to which the fleet was brought.
    """

    def __init__(
        self,
        run: str,
        fleet: Fleet,
        health: Health,
        ledger: Ledger,
        reloaded: Callable[[Settings], None] = lambda settings: None,
    ) -> None:
        self._run = run
        self._fleet = fleet
        self._health = health
        self._ledger = ledger
        self._reloaded = reloaded
        self._gates = 0
        """How often a gate was shut or opened, where no other gateway does."""

    def add(self, pool: Pool, settings: ReplicaSettings, *, asked: bool = False) -> Replica:
        """Take a replica in. `asked`, here and below: by whoever administers, so that it outlives this process."""
        return self._done("added", pool, pool.add(settings), asked, url=settings.url, dp_rank=settings.dp_rank)

    def drain(self, pool: Pool, name: str, *, asked: bool = False) -> Replica:
        """Send a replica nothing more."""
        return self._done("draining", pool, pool.drain(name), asked)

    def remove(self, pool: Pool, name: str, *, asked: bool = False) -> Replica:
        """Take a replica out."""
        replica = pool.remove(name)
        self._fleet.learnt()
        return self._done("removed", pool, replica, asked)

    def accept(self, pool: Pool, name: str, engine: str, *, asked: bool = False) -> Replica:
        """Take an engine, by its fingerprint, for the one that a replica should be."""
        return self._done("accepted", pool, pool.accept(name, engine), asked)

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
        self._apply(change, made, asked=True)
        return self._fleet.pools[change.pool].gate.number

    def restore(self, records: Iterable[dict[str, Any]], began: Mapping[str, Any]) -> None:
        """Make again what the ledger of a run tells that `/admin` was asked for: what stands of it, in its order.

        `began`: pools and the names of their replicas with which the run began. Where the configuration has others now
        the ledger is told. Raises `Unreadable`.
        """
        for pool in self._fleet:
            names = list(pool.replicas)
            if sorted(names) != began.get(pool.name, sorted(names)):
                self.note("configured", pool, None, {"replicas": names})
        for change in standing(map(_asked, records)):
            if change.pool in self._fleet.pools:
                self._apply(change, None, asked=False)

    def _apply(self, change: Change, made: Made | None, *, asked: bool) -> None:
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
                    self.add(pool, change.settings, asked=asked)
            case _ if replica is None:
                return
            case "drain":
                self.drain(pool, change.name, asked=asked)
            case "remove":
                self.remove(pool, change.name, asked=asked)
            case "accept":
                self.accept(pool, change.name, change.engine, asked=asked)
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
        self._reloaded(then)
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

    def _done(self, what: str, pool: Pool, replica: Replica, asked: bool, **particulars: Any) -> Replica:
        self._health.sync()
        log.info("fleet changed", change=what, pool=pool.name, replica=replica.name)
        names = [name for name, each in pool.replicas.items() if not each.draining]
        self.note(what, pool, replica, {"replicas": names, "asked": asked, **particulars})
        return replica

    def note(self, what: str, pool: Pool, replica: Replica | None, particulars: Mapping[str, Any]) -> None:
        """Write down what became of a replica, or became known of it. None: of the pool."""
        record = {
            "event": "fleet",
            "time": time.time(),
            "run": self._run,
            "change": what,
            "pool": pool.name,
            "replica": replica and replica.name,
            "fingerprint": (replica and replica.fingerprint) or None,
        }
        try:
            self._ledger.opened({**record, **particulars})
        except StoreFault:
            log.error("a change of the fleet could not be recorded", change=what, replica=record["replica"])


def standing(changes: Iterable[Change | None]) -> list[Change]:
    """What stands of changes of the fleet, as `gateway.shared.series` has it: of each replica the last of each kind,
    and of what was done with it nothing from before it was added or removed."""
    stands: dict[tuple[str, str], Change] = {}
    for change in changes:
        if change is None:
            continue
        as_, name = "replica" if change.what in ("add", "remove") else change.what, change.name
        stands.pop((as_, name), None)
        stands[as_, name] = change
        if as_ == "replica":
            for of in ("drain", "accept"):
                stands.pop((of, name), None)
    return list(stands.values())


_WHAT: dict[str, What] = {"added": "add", "draining": "drain", "removed": "remove", "accepted": "accept"}


def _asked(record: Mapping[str, Any]) -> Change | None:
    """What a record of the ledger tells that `/admin` was asked for. Raises `Unreadable`."""
    what = _WHAT.get(str(record.get("change")))
    if record["event"] != "fleet" or not record.get("asked") or what is None:
        return None
    name = record["replica"]
    settings = None
    if what == "add":
        try:
            settings = ReplicaSettings(name=name, url=record["url"], dp_rank=record["dp_rank"])
        except ValidationError as error:
            raise unsound(f"The record by which {name} was added to pool {record['pool']}", str(error)) from None
    return Change(what, record["pool"], name, settings, record["fingerprint"] or "")


def contended(pool: str) -> Busy:
    """The refusal of a change of weights where somebody else has changed the gate meanwhile."""
    return Busy(
        f"The pause of pool {pool} was ended, or taken over, by somebody else. Ask again.", code="weights_contended"
    )
