"""Pools, their replicas, what was found against their determinism, and lanes, as parts of pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest

from gateway.findings import Finding, strict_serves
from gateway.fleet import Fleet, Pool, Replica
from gateway.ui.frame import count, facts, note, sign, table
from gateway.ui.html import Inner, Markup, name, render, tag

LANES = 50
"""Lanes of one pool that are listed."""

_SEVERITY = {"fatal": "bad", "warning": "warn", "note": "quiet"}


def replicas(fleet: Fleet, profile: str) -> Iterator[Markup]:
    """Every pool with its replicas and findings."""
    for pool in fleet:
        yield tag(
            "section",
            tag("h2", "Pool ", name(pool.name)),
            facts(
                [
                    ("Engine", pool.settings.engine),
                    ("Role", pool.role),
                    ("Models", _models(pool)),
                    ("Routing", f"slack {pool.routing.slack:g}, key {pool.routing.key}"),
                    ("Lane", _lane(pool)),
                    ("Weights", _weights(pool)),
                    ("Strict", _strict(pool, profile)),
                ]
            ),
            table(
                f"Replicas of {pool.name}",
                ("Replica", "State", "In flight", "Deterministic", "Verified", "Fingerprint", "Address"),
                [_row(replica) for replica in pool.replicas.values()],
            ),
            tag("h3", "What was found"),
            _findings(pool.findings),
            class_="card",
        )


def _row(replica: Replica) -> tuple[Inner, ...]:
    return (
        name(replica.name),
        _state(replica),
        (
            replica.load,
            (" ", sign("warn", "foreign traffic")) if replica.foreign else None,
        ),
        _three(replica.facts.deterministic, "yes", "no", "not told"),
        _three(replica.verified, "passed", "failed", "not tried"),
        (
            tag("code", replica.fingerprint[:16]) if replica.fingerprint else "not known",
            (" ", sign("bad", "changed")) if replica.replaced else None,
        ),
        tag("bdi", replica.url),
    )


def _state(replica: Replica) -> Markup:
    if replica.draining:
        return render((sign("warn", "draining"), f" {replica.load} left" if replica.load else None))
    kind = "good" if replica.up else "warn" if replica.state == "unknown" else "bad"
    word = "breaker open" if replica.state == "up" and not replica.up else replica.state
    reason = None if replica.up and not replica.reason else tag("small", replica.reason)
    return render((sign(kind, word), " ", reason))


def _three(told: bool | None, yes: str, no: str, unknown: str) -> Markup:
    return sign("quiet", unknown) if told is None else sign("good", yes) if told else sign("bad", no)


def _models(pool: Pool) -> Inner:
    models = pool.models
    if models is None:
        return "not told yet"
    return [(", " if place else "", name(model)) for place, model in enumerate(sorted(models))] or "none"


def _lane(pool: Pool) -> str:
    lanes = pool.lanes
    return "none" if lanes.scope == "none" else f"{lanes.limit} in flight for each {lanes.scope}"


def _weights(pool: Pool) -> Inner:
    named = pool.gate.weights
    shut = sign("warn", "paused") if pool.gate.shut else None
    return (name(named) if named is not None else "not named", " ", shut)


def _strict(pool: Pool, profile: str) -> Markup:
    verb = "is" if profile == "strict" else "would be"
    states = (replica.state for replica in pool.replicas.values())
    match strict_serves(fatal=pool.contradicts is not None, states=states):
        case True:
            return sign("good", f"{verb} served")
        case False:
            return sign("bad", f"{verb} refused")
    return sign("warn", "not known while a replica is not up")


def _findings(found: Iterable[Finding]) -> Markup:
    items = [
        tag(
            "li",
            tag("p", sign(_SEVERITY[each.severity], each.severity), " ", each.text, "."),
            tag("p", "Mend it: ", tag("code", each.mend)) if each.mend else None,
            note(
                tag("code", each.id),
                {
                    "told": " · the replica says it",
                    "measured": " · seen from outside",
                    "unknown": " · the replica does not tell",
                }[each.sure],
                (" · answers say ", tag("code", each.reason)) if each.reason else None,
                (" · ", tag("a", "documented here", href=each.report, rel="noreferrer"))
                if each.report and each.report.startswith("https://")
                else None,
            ),
        )
        for each in found
    ]
    return tag("ul", items, class_="findings") if items else tag("p", sign("good", "nothing against determinism"))


def lanes(fleet: Fleet) -> Iterator[Markup]:
    """Every pool's lanes: how they are bounded, and those that are used now."""
    for pool in fleet:
        of_pool = pool.lanes
        yield tag(
            "section",
            tag("h2", "Pool ", name(pool.name)),
            facts(
                [
                    ("One lane for each", of_pool.scope if of_pool.scope != "none" else "nothing: not bounded"),
                    ("In flight in one lane", of_pool.limit if of_pool.scope != "none" else "any number"),
                    ("Members of groups", "one after the other" if of_pool.episodes else "as they come"),
                    ("Waiting now", of_pool.waiting),
                    ("May wait in one lane", of_pool.queue),
                    ("Held back while weights change", pool.gate.waiting),
                ]
            ),
            _used(pool),
            class_="card",
        )


def _used(pool: Pool) -> Markup:
    if pool.lanes.shared and pool.lanes.scope != "none":
        return note("The places are in the store, for all gateways; what waits is counted in this one.")
    used = nlargest(LANES, pool.lanes, key=lambda lane: (lane.waiting, lane.running))
    if not used:
        return note("No lane is in use.")
    more = len(pool.lanes) - len(used)
    rows: list[tuple[Inner, ...]] = [
        (
            name(lane.name),
            f"{lane.running} of {lane.limit}",
            lane.waiting,
            sign("warn", "may still be at ", name(lane.doubt)) if lane.doubt else sign("quiet", "none"),
        )
        for lane in used
    ]
    listed = table(f"Lanes in use in {pool.name}", ("Lane", "In flight", "Waiting", "In doubt"), rows)
    return render((listed, note("and ", count(more, "lane more", "lanes more")) if more else None))
