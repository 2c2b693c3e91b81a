"""What breaks determinism: facts of replicas and settings of their pool in, findings out. Pure.

Rules that hold for one engine stand in the file of its name; those for all in `replicas` and `pools`. A finding is
*fatal* where `profile: strict` could not keep its promise with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, cast

from gateway.core.types import Facts
from gateway.settings import Pool

Severity = Literal["fatal", "warning", "note"]

Sure = Literal["told", "measured", "unknown"]
"""told: the replica says it of itself. measured: seen from outside. unknown: the replica does not tell."""

SEVERITIES: tuple[Severity, ...] = ("fatal", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that breaks determinism, or may."""

    id: str
    severity: Severity
    says: str
    """What was found, to be read after the replica's name."""
    breaks: str
    """What follows from it."""
    sure: Sure = "told"
    mend: str | None = None
    """The flag, variable or setting that mends it, as it is written."""
    since: str | None = None
    """The first release of the engine that has all that `mend` names; filled in by `judge`."""
    report: str | None = None
    """Where it is documented or was reported, as a link."""
    reason: str | None = None
    """The word by which X-Detgate-Guarantee tells of it."""
    pool: str = ""
    replica: str | None = None
    """None: it concerns the pool as a whole."""

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.replica or self.pool} {self.says}, so {self.breaks}"


def doubted(id: str, says: str, breaks: str, mend: str, report: str) -> Finding:
    """Something that was reported to break an engine's deterministic mode although it is on."""
    return Finding(id, "warning", says, breaks, mend=mend, report=report, reason="engine-doubted")


class Told(NamedTuple):
    """What is known of one replica."""

    facts: Facts
    fingerprint: str = ""
    """"" while it has not been asked."""
    pinned: bool = False
    """A data-parallel rank is set for it."""
    foreign: bool = False
    """It has more requests than were sent to it."""
    verified: bool | None = None
    """Whether canaries passed on this engine; None where that was not tried."""
    changed: bool = False
    """It has another fingerprint than when it was first asked, and nobody has accepted that."""


class Case(NamedTuple):
    """One replica in its pool."""

    pool: Pool
    told: Told

    @property
    def facts(self) -> Facts:
        return self.told.facts

    @property
    def generates(self) -> bool:
        """Its pool samples."""
        return self.pool.role == "generate"

    @property
    def warms(self) -> bool:
        """It has a prefix cache in which one request may find what another left."""
        return bool(self.facts.prefix_cache) and self.pool.isolate_cache != "request"

    @property
    def alone(self) -> bool:
        """The lane lets one request at a time into the replica, so nothing shares its batch."""
        return alone(self.pool)


class Rules(Protocol):
    """What the file of an engine gives."""

    @staticmethod
    def findings(case: Case) -> Iterator[Finding]:
        """Those of one replica; pool and replica are filled in for it."""


def alone(pool: Pool) -> bool:
    """Whether the pool's lane lets one request at a time into each replica."""
    return pool.lane.scope in ("replica", "pool") and pool.lane.limit == 1


def judge(pool: Pool, told: Mapping[str, Told]) -> list[Finding]:
    """Everything found in a pool, by name of its replicas: the worst first, then by replica and rule."""
    from gateway.findings import flags, pools, replicas

    rules = cast(Rules, import_module(f"gateway.findings.{pool.engine}"))
    found = [replace(finding, pool=pool.name) for finding in pools.findings(pool, told)]
    for name, each in told.items():
        case = Case(pool, each)
        of_one = list(replicas.findings(case))
        if not any(finding.id == "engine-other" for finding in of_one):
            of_one += rules.findings(case)
        found += (
            replace(finding, pool=pool.name, replica=name, since=flags.since(pool.engine, finding.mend))
            for finding in of_one
        )
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def strict_serves(*, fatal: bool, states: Iterable[str]) -> bool | None:
    """Whether `profile: strict` would serve, by what was found and the states of the replicas.

    None, not known: nothing fatal was found, but a replica is not up, so nobody can vouch for it.
    """
    if fatal:
        return False
    return True if all(state == "up" for state in states) else None


def reasons(found: Iterable[Finding], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By name of the replicas: the reasons that answers of each carry, each once."""
    carried: dict[str, dict[str, None]] = {name: {} for name in names}
    for finding in found:
        if finding.reason is not None:
            for name in carried if finding.replica is None else (finding.replica,):
                carried[name][finding.reason] = None
    return {name: tuple(each) for name, each in carried.items()}


def report(pool: Pool, told: Mapping[str, Told], found: Iterable[Finding]) -> dict[str, Any]:
    """A pool and what was found in it, as JSON."""
    return {
        "engine": pool.engine,
        "role": pool.role,
        "declared": pool.deterministic == "declared",
        "one_at_a_time": alone(pool),
        "replicas": {
            name: {
                "fingerprint": each.fingerprint or None,
                "fingerprint_changed": each.changed,
                "verified": each.verified,
                "foreign_traffic": each.foreign,
                "deterministic": each.facts.deterministic,
                "prefix_cache": each.facts.prefix_cache,
                "facts": each.facts.known(),
            }
            for name, each in told.items()
        },
        "findings": [asdict(finding) for finding in found],
    }
