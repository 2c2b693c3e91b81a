"""What must hold when all is over, whatever went wrong: each finding is one line that names it first."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway import schemes
from gateway.core import canonical
from gateway.shared.deeds import scope_name, session_name
from tests.simulate.clients import Request
from tests.simulate.engine import Inside
from tests.simulate.keyspace import Sorted
from tests.simulate.world import EPOCH, RUN, Member, World

Opened = dict[str, Any]
Place = tuple[str, str, int]
"""Session, effective identity, index."""

FAR = 0.1
"""Seconds within which what a gateway has given up is surely known to the engine."""

STATE = b"detgate:{%b}:state" % RUN.encode()


@dataclass
class Told:
    """What one gateway wrote down."""

    member: Member
    alive: bool
    opened: list[Opened] = field(default_factory=list)
    closed: list[dict[str, Any]] = field(default_factory=list)
    lost: list[dict[str, Any]] = field(default_factory=list)
    """Ends of claims that others left behind."""
    complete: set[Place] = field(default_factory=set)
    fenced: list[dict[str, Any]] = field(default_factory=list)
    """Indices that were found to be given twice."""


def check(world: World) -> list[str]:
    """Everything that does not hold."""
    found = [f"error: {error}" for error in world.errors]
    found += [f"lane: {crowd}" for crowd in world.crowded]
    if not hasattr(world, "clients") or world.halted:
        return found
    view = _View(world)
    for rule in RULES:
        found += (f"{rule.__name__}: {each}" for each in rule(view))
    return found


def _place(record: dict[str, Any]) -> Place:
    return record["session"], record["identity"], record["index"]


class _View:
    """All that was seen, put in order once."""

    def __init__(self, world: World) -> None:
        self.world = world
        members = [(member, False) for member in world.gone] + [(each, True) for each in world.members.values()]
        self.told = [_read(member, alive) for member, alive in members]
        self.opened = [(told, record) for told in self.told for record in told.opened]
        self.used: set[Place] = set()
        for told in self.told:
            self.used |= told.complete
            self.used |= {_place(record) for record in (*told.closed, *told.lost) if record["used"]}
        self.given_twice = {record["session"] for told in self.told for record in told.fenced}
        self.taken_for_gone = {_place(end) for told in self.told for end in told.lost}
        self.by_digest: dict[str, list[Request]] = defaultdict(list)
        for request in world.clients.requests:
            self.by_digest[canonical.raw(request.path, request.body).hex()].append(request)
        self.by_name = {request.name: request for request in world.clients.requests}
        self.texts: dict[tuple[str, str], set[str]] = defaultdict(set)
        """Gateway and request id → what was asked with it: by two, where one was told that the store forgot."""
        for told, record in self.opened:
            for request in self.by_digest[record["digest"]]:
                self.texts[told.member.process.name, record["request_id"]].add(request.twin or request.name)
        self.by_id = {(told.member.process.name, record["request_id"]): record for told, record in self.opened}
        self.keyspace = world.server.keyspace
        self.state: dict[bytes, bytes] = self.keyspace._get(STATE, dict) or {}

    def name(self, record: Opened) -> str:
        """What stands for the bytes that asked."""
        return self.by_digest[record["digest"]][0].name


def _read(member: Member, alive: bool) -> Told:
    told = Told(member, alive)
    ledger = member.gateway.runs.own.ledger
    if alive:
        ledger.flush()
    for line in ledger.file.read_bytes().splitlines():
        record = orjson.loads(line)
        match record["event"]:
            case "opened":
                told.opened.append(record)
            case "complete":
                told.complete.add(_place(record))
            case "fenced":
                told.fenced.append(record)
            case "closed" if "gateway" in record:
                told.lost.append(record)
            case "closed":
                told.closed.append(record)
    return told


# --- indices


def one_owner_in_the_store(view: _View) -> Iterator[str]:
    """Within an epoch the store gives an index to one request alone."""
    owners: dict[tuple[int, bytes, bytes, int], set[tuple[str, bytes]]] = defaultdict(set)
    for claim in view.world.claims:
        if claim.index < 0:
            continue
        owners[claim.epoch, claim.memory, claim.scope, claim.index].add(claim.owner)
    for (epoch, _, scope, index), of in owners.items():
        if len(of) > 1:
            yield f"index {index} of {scope.hex()} in epoch {epoch} has {len(of)} owners"


def one_owner(view: _View) -> Iterator[str]:
    """An index is used by one request. Another gets it in a later epoch alone, and is told so; in strict never.

    Where nobody could know, it is found when the former history is told. Nor does an epoch's number tell then which was
    the later one: who comes back first may not have heard of the last.
    """
    owners: dict[Place, dict[str, tuple[int, bool]]] = defaultdict(dict)
    for _, record in view.opened:
        fenced = "epoch" in record["flags"] and view.world.profile != "strict"
        owners[_place(record)].setdefault(view.name(record), (record["epoch"], fenced))
    for place, of in owners.items():
        if len(of) > 1 and not (view.world.unknowing and place[0] in view.given_twice):
            first, *later = sorted(of.values())
            if not all(fenced and (epoch > first[0] or view.world.unknowing) for epoch, fenced in later):
                yield f"{place} belongs to {of}"


def fenced_for_good(view: _View) -> Iterator[str]:
    """Where an index was found to be given twice, nobody gets another of its session without being told."""
    for told in view.told:
        for record in told.fenced:
            at = record["time"] - EPOCH
            for claim in view.world.claims:
                later = claim.at > at > view.world.lost_at and claim.index >= 0
                if later and claim.session == session_name(record["session"]) and not claim.fenced:
                    yield f"{record['session']} was fenced at {at:.3f} and served at {claim.at:.3f}"


def one_delivery(view: _View) -> Iterator[str]:
    """Of requests with equal bytes each has an index of its own, unless one is a retry that says that it shares it."""
    served: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for request in view.world.clients.requests:
        attempt = request.served
        if attempt is not None and not re.search("retry-shared|epoch", attempt.guarantee):
            served[request.session, attempt.headers["x-detgate-request-id"]].add(request.name)
    for which, names in served.items():
        bodies = {view.by_name[name].body for name in names}
        if len(names) > 1 and not (view.world.unknowing and (len(bodies) == 1 or which[0] in view.given_twice)):
            yield f"{which} was given to {sorted(names)}"


def none_delivered_unnoted(view: _View) -> Iterator[str]:
    """What a client got whole the store has noted for it before: who else asks gets another index from then on."""
    names: dict[str, Any] = {told.member.process.name: told.member.gateway for told in view.told}
    got: Counter[tuple[str, bytes, int]] = Counter()
    for request in view.world.clients.requests:
        for attempt in request.attempts:
            if attempt.outcome == "whole" and attempt.status == 200:
                record = view.by_id[attempt.gateway, attempt.headers["x-detgate-request-id"]]
                scope = scope_name(record["session"], record["identity"])
                got[names[attempt.gateway]._store.gateway, scope, record["index"]] += 1
    for place, count in got.items():
        if count > len(view.world.noted[place]):
            yield f"index {place[2]} of {place[1].hex()} was delivered {count} times by {place[0]}, unnoted"


def same_index_again(view: _View) -> Iterator[str]:
    """A request that is asked again keeps its index, and with it its seed, unless it is told that the store forgot."""
    if view.world.unknowing:
        return  # its epoch may have the number of the one before
    repeats: dict[bytes, list[int]] = defaultdict(list)
    for claim in view.world.claims:
        if not claim.waited:
            repeats[claim.raw].append(claim.repeat)
    had: dict[tuple[str, int], set[int]] = defaultdict(set)
    for _, record in view.opened:
        if "epoch" not in record["flags"]:
            had[record["digest"], record["epoch"]].add(record["index"])
    for (digest, epoch), indices in had.items():
        raw = bytes.fromhex(digest)
        request, *twins = view.by_digest[digest]
        in_order = all(one < two for one, two in zip(repeats[raw], repeats[raw][1:], strict=False))
        named = request.kind in ("key", "number")
        if len(indices) > 1 and not twins and (named or in_order):
            yield f"{request.name} had {sorted(indices)} in epoch {epoch}"


def none_lost(view: _View) -> Iterator[str]:
    """Each index that was drawn was used, or is there for who asks again."""
    if view.world.losses:
        return
    used = {(scope_name(session, identity), index) for session, identity, index in view.used}
    free = {
        (member[:16], int(member[-10:]))
        for member in (view.keyspace._get(STATE[:-5] + b"released", Sorted) or Sorted()).scores
        if member
    }
    for name, text in view.state.items():
        if len(name) != 16 or b"," not in text:
            continue
        head = re.fullmatch(rb"(\d+),(\w?)(,\d+){4}", text)
        assert head is not None, text
        if head[2] == b"n":
            continue
        for index in range(int(head[1])):
            place = name, index
            if place not in used and place not in free and b"%bb%d" % place not in view.state:
                yield f"index {index} of {name.hex()} is neither used nor free"


def none_free_that_was_delivered(view: _View) -> Iterator[str]:
    """What a client has got whole is not given to anybody else."""
    if view.world.losses:
        return
    free = (view.keyspace._get(STATE[:-5] + b"released", Sorted) or Sorted()).scores
    ends = {member[:16] + member[-10:] for member in free}
    for request in view.world.clients.requests:
        attempt = request.served
        record = attempt and view.by_id.get((attempt.gateway, attempt.headers["x-detgate-request-id"]))
        if not record:
            continue
        if scope_name(record["session"], record["identity"]) + b"%010d" % record["index"] in ends:
            yield f"{_place(record)} was delivered to {request.name} and is free"


def nothing_live_in_the_store(view: _View) -> Iterator[str]:
    """No claim is left, nothing is in flight, and nobody has a place in a lane or in its queue."""
    for key in view.world.live_keys():
        yield f"{key.decode()} is left"
    for name in view.state:
        if len(name) > 17 and name[16:17] == b"i" and name[17:].isdigit():
            yield f"index {name[17:].decode()} of {name[:16].hex()} is live"
        elif len(name) == 33 and name[16:17] == b"d":
            yield f"bytes {name[17:].hex()} are in flight"


# --- seeds


def seeds(view: _View) -> Iterator[str]:
    """What the engines got is what the ledger says, and that is the rule's."""
    seed = schemes.load("v1").seed
    for _, record in view.opened:
        if record["kind"] == "sample" and record["seed"] != seed(42, record["identity"], record["index"], None):
            yield f"{record['request_id']} has seed {record['seed']}"
    for inside in _inside(view):
        if (sent_as := _record(view, inside)) is None:
            yield f"{inside.name} reached {inside.gateway}'s engine as {inside.engine_id} without a record"
            continue
        text = inside.name.partition("#")[0]
        if text not in view.texts[inside.gateway, sent_as["request_id"]]:
            yield f"{inside.name} was sent as {inside.engine_id}"
        if inside.engine_id.endswith(".0!") and inside.seed != sent_as["seed"]:
            yield f"{inside.name} was sent with seed {inside.seed}, and not {sent_as['seed']}"


def _inside(view: _View) -> Iterator[Inside]:
    return (inside for engine in view.world.engines.values() for inside in engine.seen)


def _record(view: _View, inside: Inside) -> Opened | None:
    request_id = re.sub(r"\.\d+(-\d+)?!$", "", inside.engine_id)
    return view.by_id.get((inside.gateway, request_id))


# --- races


def races(view: _View) -> Iterator[str]:
    """Who was in flight together is told so; who asked one thing at a time is not."""
    drawn = Counter((claim.epoch, claim.scope, claim.index) for claim in view.world.claims)
    first = {(each.epoch, each.scope, each.index) for each in view.world.claims if not each.reused}
    racing = {
        (told.member.process.name, _place(record)): record["racing"] for told in view.told for record in told.closed
    }
    flights: dict[tuple[str, str, int], list[tuple[Inside, Opened]]] = defaultdict(list)
    for inside in _inside(view):
        record = _record(view, inside)
        if record is not None and record["order"] == "arrival" and _place(record) not in view.taken_for_gone:
            place = record["epoch"], scope_name(record["session"], record["identity"]), record["index"]
            if drawn[place] == 1 and place in first:
                flights[record["session"], record["identity"], record["epoch"]].append((inside, record))
    for flown in flights.values():
        for at, (one, of_one) in enumerate(flown):
            for two, of_two in flown[at + 1 :]:
                if of_one["index"] == of_two["index"] or not (
                    one.since < min(two.until, two.left - FAR) and two.since < min(one.until, one.left - FAR)
                ):
                    continue
                for inside, record in ((one, of_one), (two, of_two)):
                    if racing.get((inside.gateway, _place(record))) is False and not view.world.epochs_began:
                        yield f"{one.name} and {two.name} were in flight together, and {inside.name} is not racing"
    for requests in view.world.clients.sessions.values():
        calm = all(each.outcome == "whole" and each.status == 200 for request in requests for each in request.attempts)
        if calm and requests[0].kind == "walk" and not view.world.losses:
            for request in requests:
                if any("racing" in each.guarantee for each in request.attempts):
                    yield f"{request.name} was asked alone and is racing"


# --- ends


def every_request_ends(view: _View) -> Iterator[str]:
    for request in view.world.clients.requests:
        if request.done in ("", "never", "refused"):
            last = request.attempts[-1] if request.attempts else None
            why = last and (last.outcome, last.status, last.code, last.body[:200])
            yield f"{request.name} ended {request.done!r} after {len(request.attempts)} tries: {why}"
        elif request.done == "fenced" and not view.world.may_fence:
            yield f"{request.name} was fenced, and the store has forgotten nothing"


def nothing_left(view: _View) -> Iterator[str]:
    """No gateway has anything in flight, waiting or owed."""
    for name, member in view.world.members.items():
        for what, count in member.left().items():
            yield f"{name} has {count} {what} left"


def no_strangers(view: _View) -> Iterator[str]:
    """Nobody else sends to the replicas, and no gateway takes another for a stranger."""
    for request in view.world.clients.requests:
        if any("foreign-traffic" in attempt.guarantee for attempt in request.attempts):
            yield f"{request.name} was told of foreign traffic"


# --- the ledger


def ledger(view: _View) -> Iterator[str]:
    """What clients got is written down as they got it, and every claim has an end."""
    by_gateway = {told.member.process.name: told for told in view.told}
    for request in view.world.clients.requests:
        for attempt in request.attempts:
            if attempt.outcome != "whole" or attempt.status != 200:
                continue
            record = view.by_id.get((attempt.gateway, attempt.headers["x-detgate-request-id"]))
            if record is None:
                yield f"{request.name} was answered by {attempt.gateway} without a record"
                continue
            told = by_gateway[attempt.gateway]
            if attempt.headers["x-detgate-index"] != str(record["index"]) or (
                "x-detgate-seed" in attempt.headers and attempt.headers["x-detgate-seed"] != str(record["seed"])
            ):
                yield f"{request.name} was told another index or seed than the ledger"
            if _place(record) not in told.complete:
                yield f"{request.name} got {_place(record)} whole before the ledger knew"
            ends = [end for end in told.closed if _place(end) == _place(record)]
            if told.alive and not any(end["outcome"] == "delivered" and end["used"] for end in ends):
                yield f"{request.name} got {_place(record)}, and the ledger has {[end['outcome'] for end in ends]}"
    for told in view.told:
        begun = Counter(map(_place, told.opened))
        ended = Counter(map(_place, told.closed))
        name, closed = told.member.process.name, Counter(ended)
        known: Any = told.member.gateway
        for other in view.told:
            ended += Counter(_place(end) for end in other.lost if end["gateway"] == known._store.gateway)
        if not told.alive and view.world.losses:
            continue
        for place in begun:
            if begun[place] > ended[place]:
                yield f"{name} opened {place} {begun[place]} times, and {ended[place]} ends are written"
        if told.alive:
            for place in closed:
                if closed[place] > begun[place]:
                    yield f"{name} closed {place}, which it has not opened"


RULES: tuple[Callable[[_View], Iterator[str]], ...] = (
    one_owner_in_the_store,
    one_owner,
    fenced_for_good,
    one_delivery,
    none_delivered_unnoted,
    same_index_again,
    none_lost,
    none_free_that_was_delivered,
    nothing_live_in_the_store,
    seeds,
    races,
    every_request_ends,
    nothing_left,
    no_strangers,
    ledger,
)
