"""Two ledgers, request by request: which are not the same, which of these began it, and why.

Requests are aligned by canonical key. Those of one session are judged together: requests that changed places are found
there, and what came after a difference, and asks something else because of it, is told apart from what began it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.evidence import causes, reading
from gateway.evidence.bodies import Bodies
from gateway.evidence.causes import HARMLESS, Cause, Difference, Run
from gateway.evidence.ledgers import Source
from gateway.evidence.requests import (
    Request,
    Requests,
    equal_part,
    key_of,
    merged,
    request_of,
    session_of,
)

HELD = 20_000
"""Differences of one session that are judged together."""

KEPT = 2000
"""Differences that are kept to be shown; all are counted."""

SESSIONS = 200
"""Sessions with differences that are kept to be shown."""

CELLS = 200
"""Requests of a session that are kept to be shown."""

BINS = 240
"""Parts of the run for which differences are counted."""

_EARLIEST = 8
"""Differences of a session after which others may have come about."""

Pair = tuple[Request | None, Request | None]


class Cell(NamedTuple):
    """One request of a session that is shown. `kept`: the place of its difference among those kept; None: equal."""

    number: int
    kept: int | None


@dataclass(slots=True)
class Row:
    """A session that is shown."""

    identity: str
    ordinal: int
    session: str
    group: str | None
    cells: list[Cell]
    total: int


@dataclass(slots=True)
class Diff:
    """What came of it."""

    a: Run
    b: Run
    compared: int = 0
    """Requests that at least one run has."""
    common: int = 0
    """Requests that both have."""
    shared_sessions: int = 0
    """Sessions that both have."""
    roots: Counter[Cause] = field(default_factory=Counter)
    downstream: Counter[Cause] = field(default_factory=Counter)
    harmless: Counter[Cause] = field(default_factory=Counter)
    """Differences that the client cannot have noticed. Among the roots too, unless they were not asked for."""
    diverged_sessions: int = 0
    sessions: int = 0
    first: Difference | None = None
    """The first root in canonical order."""
    first_answer: Difference | None = None
    """The first root of which the client got something else."""
    kept: list[Difference] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    bins: list[Counter[Cause]] = field(default_factory=lambda: [Counter() for _ in range(BINS)])
    """Roots by the part of the run, in the order in which it was walked."""
    bins_downstream: list[int] = field(default_factory=lambda: [0] * BINS)
    skipped: int = 0
    """Requests that were left out, as it was asked."""
    fenced: tuple[int, int] = (0, 0)
    """Sessions of A and of B of which an index was found to be given twice."""
    torn: tuple[int, int] = (0, 0)
    """Lines of A and of B that are no record."""

    @property
    def different(self) -> int:
        """Requests that are not the same."""
        return self.roots.total() + self.downstream.total()

    @property
    def equal(self) -> bool:
        return self.comparable and not self.different

    @property
    def comparable(self) -> bool:
        """Something of one run could have been found in the other."""
        return self.shared_sessions > 0


def compare(
    a: Source,
    b: Source,
    *,
    answers_only: bool = False,
    replayed: bool = False,
    watch: Callable[[str, int], None] = lambda phase, done: None,
) -> Diff:
    """Compare two sources. Raises `Unusable` where one of them holds no request.

    `answers_only`: what the client cannot have noticed is no difference. `replayed`: B is A sent again, so what A did
    not deliver is left out, and how often something was asked for is nobody's concern. `watch` is told how far it has
    come: with `read`, bytes of both; with `walk`, requests.
    """
    mine, theirs = reading.both(a, b, lambda done: watch("read", done))
    try:
        return _Walk(mine, theirs, answers_only, replayed, watch).result()
    finally:
        mine.sorter.close()
        theirs.sorter.close()


class _Walk:
    def __init__(
        self, a: Requests, b: Requests, answers_only: bool, replayed: bool, watch: Callable[[str, int], None]
    ) -> None:
        self._a, self._b = a, b
        self._answers_only = answers_only
        self._replayed = replayed
        self._watch = watch
        # A session that is sent again brings its master seed.
        seeds = a.seeds | b.seeds if replayed else b.seeds
        self._runs = (
            Run(a.source.name, a.source.deciding, a.seeds, a.waited),
            Run(b.source.name, b.source.deciding, seeds, b.waited),
        )
        self._diff = Diff(*self._runs)
        self._each_bin = max(1, -(-max(len(a), len(b)) // BINS))
        self._group = _Group(b"")

    def result(self) -> Diff:
        with Bodies(self._a.source, self._b.source) as bodies:
            self._judge = _Judge(self._runs, bodies)
            for mine, theirs in _aligned(_claims(self._a), _claims(self._b)):
                self._meet(mine, theirs)
            self._flush()
        self._diff.fenced = (len(self._a.fenced), len(self._b.fenced))
        self._diff.torn = (self._a.torn, self._b.torn)
        self._watch("walk", self._diff.compared)
        return self._diff

    def _meet(self, mine: _Claimed | None, theirs: _Claimed | None) -> None:
        one = mine or theirs
        assert one is not None
        if not one.key.startswith(self._group.prefix) or not self._group.prefix:
            self._flush()
            self._group = _Group(session_of(one.item))
        group, diff = self._group, self._diff
        group.in_a |= mine is not None
        group.in_b |= theirs is not None
        if not diff.compared & 0xFFFF:
            self._watch("walk", diff.compared)
        if mine is not None and theirs is not None and _same(mine, theirs):
            diff.compared += 1
            diff.common += 1
            group.total += 1
            if len(group.equal) < CELLS:
                group.equal.append(mine.item)
            return
        for pair in _paired(mine, theirs):
            self._collect(pair)

    def _collect(self, pair: Pair) -> None:
        diff, group = self._diff, self._group
        if self._replayed:
            if pair[0] is None or not pair[0].delivered:
                diff.skipped += 1
                return
            for one in pair:
                if one is not None:
                    one.claims = 1
        group.bins.append(min(BINS - 1, diff.compared // self._each_bin))
        diff.compared += 1
        diff.common += None not in pair
        group.total += 1
        group.pairs.append(pair)
        if len(group.pairs) >= HELD:
            self._settle()

    def _flush(self) -> None:
        """Judge the session that is over."""
        group = self._group
        if not group.total:
            return
        if group.pairs:
            self._settle()
        self._diff.sessions += 1
        self._diff.shared_sessions += group.in_a and group.in_b
        self._diff.diverged_sessions += group.different
        if group.found:
            self._diff.rows.append(self._row(group))

    def _settle(self) -> None:
        group, diff = self._group, self._diff
        bins = {id(one): number for pair, number in zip(group.pairs, group.bins, strict=True) for one in pair if one}
        for difference in self._judge.session(group):
            hidden = difference.cause in HARMLESS and difference.answers_equal
            if hidden:
                diff.harmless[difference.cause] += 1
                if self._answers_only:
                    continue
            self._count(difference, bins[id(difference.one)])
        group.pairs.clear()
        group.bins.clear()

    def _count(self, difference: Difference, number: int) -> None:
        diff, group = self._diff, self._group
        group.different = True
        if difference.root:
            diff.roots[difference.cause] += 1
            diff.bins[number][difference.cause] += 1
            if diff.first is None or difference.one.rank < diff.first.one.rank:
                diff.first = difference
            heard = diff.first_answer
            if not difference.answers_equal and (heard is None or difference.one.rank < heard.one.rank):
                diff.first_answer = difference
        else:
            diff.downstream[difference.cause] += 1
            diff.bins_downstream[number] += 1
        if len(diff.kept) < KEPT and len(diff.rows) < SESSIONS and len(group.found) < CELLS:
            group.found.append((difference.one, len(diff.kept)))
            diff.kept.append(difference)

    def _row(self, group: _Group) -> Row:
        equal = [(request_of(item), None) for item in group.equal[: CELLS - len(group.found)]]
        shown: list[tuple[Request, int | None]] = [*equal, *group.found]
        shown.sort(key=lambda cell: _in_time(cell[0]))
        one = group.found[0][0]
        cells = [Cell(request.index, kept) for request, kept in shown]
        return Row(one.base, one.ordinal, one.session, one.group, cells, group.total)


@dataclass(slots=True)
class _Group:
    """The requests of one session, in both runs."""

    prefix: bytes
    total: int = 0
    in_a: bool = False
    in_b: bool = False
    different: bool = False
    equal: list[bytes] = field(default_factory=list)
    """The first items that are equal."""
    pairs: list[Pair] = field(default_factory=list)
    """Those that are not."""
    bins: list[int] = field(default_factory=list)
    """For each of them, in which part of the run it was met."""
    found: list[tuple[Request, int | None]] = field(default_factory=list)
    """Differences that are kept to be shown: the request, and the place among all that are kept."""
    earlier: list[Difference] = field(default_factory=list)
    """Differences after which others may have come about."""


# --- aligned


class _Claimed(NamedTuple):
    """The claims of one key."""

    key: bytes
    item: bytes
    others: list[bytes]


_NO_OTHERS: list[bytes] = []


def _same(mine: _Claimed, theirs: _Claimed) -> bool:
    """Equal at first sight, as nearly all are."""
    return not (mine.others or theirs.others) and equal_part(mine.item) == equal_part(theirs.item)


def _claims(requests: Requests) -> Iterator[_Claimed]:
    items = iter(requests)
    last = next(items, None)
    if last is None:
        return
    key, others = key_of(last), _NO_OTHERS
    for item in items:
        if item.startswith(key):
            others = [*others, item]
            continue
        yield _Claimed(key, last, others)
        last, key, others = item, key_of(item), _NO_OTHERS
    yield _Claimed(key, last, others)


def _aligned(a: Iterator[_Claimed], b: Iterator[_Claimed]) -> Iterator[tuple[_Claimed | None, _Claimed | None]]:
    mine, theirs = next(a, None), next(b, None)
    while mine is not None and theirs is not None:
        if mine.key == theirs.key:
            yield mine, theirs
            mine, theirs = next(a, None), next(b, None)
        elif mine.key < theirs.key:
            yield mine, None
            mine = next(a, None)
        else:
            yield None, theirs
            theirs = next(b, None)
    while mine is not None:
        yield mine, None
        mine = next(a, None)
    while theirs is not None:
        yield None, theirs
        theirs = next(b, None)


def _paired(mine: _Claimed | None, theirs: _Claimed | None) -> Iterator[Pair]:
    """The requests of one key. Several where sessions of a run share identity and ordinal: in the order they came."""
    a, b = _requests(mine), _requests(theirs)
    for number in range(max(len(a), len(b))):
        yield (a[number] if number < len(a) else None, b[number] if number < len(b) else None)


def _requests(claimed: _Claimed | None) -> list[Request]:
    if claimed is None:
        return []
    sessions: dict[str, list[Request]] = {}
    for item in (claimed.item, *claimed.others):
        request = request_of(item)
        sessions.setdefault(request.session, []).append(request)
    return [merged(claims) for claims in sessions.values()]


# --- judged


class _Judge:
    """Finds what is not the same in the requests of one session."""

    def __init__(self, runs: tuple[Run, Run], bodies: Bodies) -> None:
        self._runs = runs
        self._bodies = bodies

    def session(self, group: _Group) -> list[Difference]:
        """The differences of a session, in the order in which they came about."""
        found: list[Difference] = []
        moved: list[Pair] = []
        for a, b in group.pairs:
            if a is None or b is None or not self._same_prompt(a, b):
                moved.append((a, b))
            elif respects := causes.differing(a, b):
                detail = causes.explained(respects[0], a, b, self._runs)
                if respects[0] == "other-answer" and (spots := self._bodies.answers(a, b)):
                    detail = f"{detail}; {'; '.join(map(str, spots))}"
                found.append(Difference(a, b, respects[0], detail, also=tuple(respects[1:])))
        found += self._moved(moved, group)
        found.sort(key=_came)
        for difference in found:
            difference.root = not _follows(difference, group.earlier)
            if _spreads(difference) and len(group.earlier) < _EARLIEST:
                group.earlier.append(difference)
        return found

    def _same_prompt(self, a: Request, b: Request) -> bool:
        told = causes.same_prompt(a, b)
        if told is None:
            told = self._bodies.same(a, b)
        return bool(told)

    def _moved(self, pairs: list[Pair], group: _Group) -> Iterator[Difference]:
        """Those that ask something else under the same key, or that one run alone has under it."""
        theirs = _Asked(b for _, b in pairs)
        mine = _Asked(a for a, _ in pairs)
        left_a: list[Request] = []
        left_b: list[Request] = []
        for a, b in pairs:
            of_a = theirs.like(a)
            of_b = mine.like(b)
            if of_a is None and of_b is None and (a is None or b is None):
                left_a += [a] if a is not None else []
                left_b += [b] if b is not None else []
            elif a is not None and b is not None and of_a is None and of_b is None:
                yield self._asks_else(a, b)
            elif (a is None or of_a is not None) and (b is None or of_b is not None):
                yield self._changed_places(a, b, of_a, of_b)
            else:
                alone, other, one, run = ("A", "B", a, self._runs[1]) if of_a is None else ("B", "A", b, self._runs[0])
                assert one is not None
                lacks = f"gave no index: {_waited(other)}" if run.let_wait(one) else "has no record of"
                detail = f"{alone} has a request here that {other} {lacks}; what follows comes under other indices"
                yield Difference(a, b, "missing-request", detail)
        yield from self._alone(left_a, left_b, group)

    def _changed_places(
        self, a: Request | None, b: Request | None, of_a: Request | None, of_b: Request | None
    ) -> Difference:
        told = []
        if a is not None and of_a is not None:
            told.append(f"what A asked here has {_number(of_a)} in B")
        if b is not None and of_b is not None:
            told.append(f"what B asked here has {_number(of_b)} in A")
        raced = [side for side, ones in (("A", (a, of_b)), ("B", (b, of_a))) if any(one and one.racing for one in ones)]
        if raced:
            told.append(f"they raced in {' and '.join(raced)}")
        kinds = {one.order for one in (a, b, of_a, of_b) if one is not None}
        if len(kinds) > 1:
            told.append(f"the index orders are {' and '.join(sorted(kinds))}")
        siblings = tuple(sorted({one.index for one in (a, b, of_a, of_b) if one is not None}))
        return Difference(a, b, "other-order", "; ".join(told), siblings=siblings)

    def _alone(self, left_a: list[Request], left_b: list[Request], group: _Group) -> Iterator[Difference]:
        """Those that one run alone has. In content order the prompt is in the key: so they belong together in turn."""
        pairs = []
        if group.in_a and group.in_b:
            numbered = [(_contents(left_a), _contents(left_b))]
            pairs = [pair for ones in numbered for pair in zip(*ones, strict=False)]
        paired = {id(one) for pair in pairs for one in pair}
        for a, b in pairs:
            yield self._asks_else(a, b)
        for one in left_a:
            if id(one) not in paired:
                yield Difference(one, None, "missing-request", self._missing("B", one, group.in_b))
        for one in left_b:
            if id(one) not in paired:
                yield Difference(None, one, "missing-request", self._missing("A", one, group.in_a))

    def _missing(self, side: str, one: Request, has_session: bool) -> str:
        if self._runs["AB".index(side)].let_wait(one):
            return _waited(side)
        return f"{side} has no record of it" if has_session else f"{side} has no request of this session"

    def _asks_else(self, a: Request, b: Request) -> Difference:
        """Two requests that belong together and are not the same in what they ask. A client's seed is in its body."""
        if a.seed != b.seed and "client" in (a.seed_source, b.seed_source):
            alike = self._bodies.same_but_seeds(a, b)
            if alike is not False:
                detail = causes.explained("other-seed", a, b, self._runs)
                also = tuple(cause for cause in causes.differing(a, b) if cause != "other-seed")
                return Difference(a, b, "other-seed", detail, also=also, unsure=alike is None)
        return Difference(a, b, "other-prompt", self._prompt(a, b), also=tuple(causes.differing(a, b)))

    def _prompt(self, a: Request, b: Request) -> str:
        if a.route != b.route:
            return f"asked of {a.route} in A, of {b.route} in B"
        spots = self._bodies.spots(a, b)
        if spots:
            return "; ".join(map(str, spots))
        told = f"digest {a.content or a.digest} in A, {b.content or b.digest} in B"
        if causes.same_prompt(a, b) is None:
            return (
                f"{told}: of the bytes alone, so it may be a field that does not sample; ledger.bodies: true would tell"
            )
        return f"{told}; ledger.bodies: true would tell where"


class _Asked:
    """The requests of one run that have no counterpart under their own key, by what they ask."""

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._found: dict[tuple[str | None, str], Request] = {}
        for request in requests:
            if request is not None:
                for token in _tokens(request):
                    self._found.setdefault(token, request)

    def like(self, request: Request | None) -> Request | None:
        """The first that asks the same."""
        return next((found for token in _tokens(request) if (found := self._found.get(token)) is not None), None)


def _tokens(request: Request | None) -> list[tuple[str | None, str]]:
    if request is None:
        return []
    return [(request.route, token) for token in (request.content, request.digest) if token is not None]


def _contents(requests: list[Request]) -> list[Request]:
    found = [request for request in requests if request.order == "content" and request.named]
    return sorted(found, key=lambda request: request.opened)


def _number(request: Request) -> str:
    return f"index {request.index}" if request.order != "content" else f"index {request.index} of {request.identity}"


def _waited(side: str) -> str:
    return f"{side} was asked for one with its bytes, which waited for a rival in vain (refused, or its client gave up)"


def _in_time(request: Request) -> tuple[int, Any]:
    """A session's requests as they came: by index, where it tells that."""
    return (1, request.opened) if request.order == "content" else (0, request.index)


def _came(difference: Difference) -> tuple[Any, ...]:
    request = difference.one
    return (difference.a is None and request.order == "content", *_in_time(request))


def _spreads(difference: Difference) -> bool:
    """Whether what its session asks next may be another because of it."""
    return difference.cause in ("missing-request", "other-prompt", "other-order") or not difference.answers_equal


def _follows(difference: Difference, earlier: list[Difference]) -> bool:
    """Whether it came about by an earlier one: it asks something else, and began when that had ended."""
    if not difference.one.named:
        return False
    asks_else = difference.unsure or difference.cause in ("missing-request", "other-prompt", "other-order")
    goes_on = difference.cause == "other-answer" and difference.one.route == "/v1/responses"
    return (asks_else or goes_on) and any(
        _after(before, difference) and not _swapped(before, difference) for before in earlier
    )


def _swapped(one: Difference, other: Difference) -> bool:
    """They changed places with each other, so neither follows from the other."""
    return one.cause == other.cause == "other-order" and not set(one.siblings).isdisjoint(other.siblings)


def _after(before: Difference, difference: Difference) -> bool:
    sides = [
        (first, then)
        for first, then in ((before.a, difference.a), (before.b, difference.b))
        if first is not None and then is not None
    ]
    return all(_began_after(first, then) for first, then in sides)


def _began_after(first: Request, then: Request) -> bool:
    if first.ended is None:
        return False
    if first.ended.segment == then.opened.segment:
        return first.ended < then.opened or first.ended == first.opened
    return then.opened > first.ended if "content" in (first.order, then.order) else then.index > first.index
