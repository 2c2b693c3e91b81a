"""Which request gets which index: the whole rule, as one state machine without a clock or a lock.

A `Scope` is one counter: a (run, session, effective identity). Everything that a store must do atomically is
one call here: `claim`, `complete` and `settle`. An index belongs to a delivered answer. It is released when
its last live claim ended and none was delivered, and is then taken again only by what it was released to: its
idempotency key, its number, or the bytes it was asked for with. So a retry repeats its index, and no two
requests own one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, MutableMapping, MutableSet, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gateway.core.errors import Conflict

Kind = Literal["arrival", "content", "client"]

MANY = -1
"""These bytes were asked for by several requests, so a repeat cannot tell which index is its own."""

NONE = -2
"""They were asked for by one request, which has waited for a rival and has no index yet."""

LATE = -3
"""The same, where the first that was seen of it was a repeat."""


class Ask(NamedTuple):
    """One request for an index. Everything that the rule looks at, and nothing else."""

    kind: Kind
    raw: bytes
    """The bytes digest: what a repeat has in common with the request it repeats."""
    content: str | None = None
    """The content digest; needed with a `number` or a `key`, which bind to content."""
    number: int | None = None
    """X-Request-Index."""
    key: str | None = None
    """Idempotency-Key."""
    repeat: int = 0
    """Which retry this is, as the client says (x-stainless-retry-count); 0: the first sending."""
    exclusive: bool = False
    """Profile `strict`: wait rather than race."""


class Claim(NamedTuple):
    """An index, claimed. `flags` are reasons that go into X-Detgate-Guarantee."""

    index: int  # type: ignore[assignment]  # hides a tuple's `index`, which nobody needs here
    flags: tuple[str, ...] = ()
    reused: bool = False
    """The index had been issued before: a repeat, or taken again after a release."""
    epoch: int = 0
    """Which memory of the store it is of."""


class Wait(NamedTuple):
    """Not yet. Ask again when the scope changes: `raced`, if a rival was why; `final`, when time is up."""

    why: Literal["racing", "repeat"]


def refused(code: str, detail: object = "") -> Conflict:
    """The refusal of a claim. `detail`: of `mixed_order` the kind that the scope has, else the index at issue."""
    match code:
        case "mixed_order":
            theirs = "X-Request-Index" if detail == "client" else "the order of arrival"
            return Conflict(
                f"This session takes its indices from {theirs}, which its first request fixed. "
                "Use one kind of index in a session, or another session.",
                code="mixed_order",
                param="X-Request-Index",
            )
        case "idempotency_conflict":
            if detail == "":
                text = "was used in this session with other content. Use a new key for a new request."
            else:
                text = f"is bound to index {detail}, and not to the one that X-Request-Index names."
            return Conflict(f"This Idempotency-Key {text}", code="idempotency_conflict", param="Idempotency-Key")
        case "index_conflict":
            return Conflict(
                f"Index {detail} of this session belongs to a request with other content. "
                "Give each request of a session an index of its own.",
                code="index_conflict",
                param="X-Request-Index",
            )
        case _:
            return Conflict(
                "Another request of this session is in flight, so the network would decide their order. "
                "Send one at a time, or set X-Index-Order: content, or give each its X-Request-Index.",
                code="racing_index",
                param="X-Request-Index",
            )


@dataclass(slots=True)
class Live:
    """An index with claims that have not settled."""

    raw: bytes
    used: bool = False
    drawn: bool = False
    """Drawn from the counter, by a request whose answer has not ended."""
    claims: int = 0
    open: int = 0
    """Claims whose answer has not ended."""


@dataclass(slots=True)
class Asked:
    """What was asked for with some bytes, without key and number."""

    index: int
    """The index that all of it got, `MANY`, `NONE` or `LATE`."""
    repeat: int
    """The latest retry. Those of one request count upwards, so a count that comes again is another's."""
    live: int = 0
    """Indices of these bytes that are live."""


@dataclass(slots=True)
class Bound:
    """An index that a number or a key names, so that bytes play no part in it."""

    content: str | None
    """Content digest of the request whose index it is; None: released to its number, for any content."""
    keyed: bool = False
    """A key is bound to it, so it never goes to other content."""
    used: bool = False


@dataclass(frozen=True, slots=True)
class Keyed:
    """What an idempotency key is bound to, for good."""

    identity: str
    index: int
    content: str


@dataclass(slots=True)
class Session:
    """What the scopes of one session share."""

    keys: MutableMapping[str, Keyed] = field(default_factory=dict)


class Indices(MutableSet[int]):
    """A set of indices, a bit each: those of a counter are dense."""

    __slots__ = ("_bits",)

    def __init__(self, bits: bytes = b"") -> None:
        self._bits = bytearray(bits)

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (index & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        return (byte * 8 + bit for byte, bits in enumerate(self._bits) for bit in range(8) if bits >> bit & 1)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._bits)

    def __bytes__(self) -> bytes:
        return bytes(self._bits)

    def add(self, index: int) -> None:
        byte = index >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (index & 7)

    def discard(self, index: int) -> None:
        if index in self:
            self._bits[index >> 3] &= ~(1 << (index & 7))


_NOTHING: Any = MappingProxyType({})
_NONE: Any = frozenset()
"""What a scope has instead of a dict or set that nothing was put into yet: most scopes issue a single index."""


def _nothing() -> Any:
    return _NOTHING


@dataclass(slots=True)
class Scope:
    """One counter and what is known of the indices it issued."""

    identity: str
    session: Session
    next: int = 0
    kind: Kind | None = None
    live: dict[int, Live] = field(default_factory=dict)
    asked: dict[bytes, Asked] = field(default_factory=dict)
    """By bytes digest."""
    released: dict[bytes, list[int]] = field(default_factory=_nothing)
    """Bytes digest → the indices that it may take again, smallest first."""
    bound: dict[int, Bound] = field(default_factory=_nothing)
    drawn: dict[bytes, int] = field(default_factory=dict)
    """Bytes digest → how many indices in flight were drawn from the counter with it."""
    calm: set[int] = _NONE
    """Those in flight that were drawn and have not raced yet: all of the same bytes, else they would have."""
    contended: bool = False
    """One that was to be drawn waits for those in flight, or did: they have a rival."""
    raced: Set[int] = _NONE
    """Indices that the network decided. One that is taken again is no better for that."""
    remembered: int = 0
    """Requests that it had in memory when its store last looked."""

    def claim(self, ask: Ask, *, raced: bool = False, final: bool = False) -> Claim | Wait:
        """Take an index. Raises `Conflict`; nothing is taken then, nor when it answers `Wait`.

        Those in flight have raced then all the same: had this come a moment earlier, it would have been the first.

        `raced`: it has waited for a rival, so the network decided which of them came first.
        """
        if self.kind is None and not (
            raced or ask.repeat or ask.key is not None or ask.number is not None or self.asked
        ):
            return self._first(ask)
        self._check_kind(ask)
        if ask.key is not None and (keyed := self.session.keys.get(ask.key)) is not None:
            return self._by_key(ask, keyed)
        if ask.number is not None:
            claim: Claim | Wait = self._by_number(ask, ask.number)
        elif ask.key is not None:
            claim = self._draw(ask, raced, final)
        else:
            claim = self._by_bytes(ask, raced, final)
        if isinstance(claim, Claim):
            self.kind = ask.kind
            if ask.key is not None:
                self._bind(ask.key, claim.index, ask.content)
        return claim

    def _first(self, ask: Ask) -> Claim:
        """The first index of the counter, for which nobody races and which repeats nothing."""
        raw = ask.raw
        self.kind, self.next, self.calm = ask.kind, 1, {0}
        self.live[0] = Live(raw, drawn=True, claims=1, open=1)
        self.asked[raw] = Asked(0, 0, 1)
        self.drawn[raw] = 1
        return Claim(0)

    def has_issued(self, index: int) -> bool:
        """Whether a claim ever took this index."""
        return index < self.next or self.bound.get(index) is not None

    def complete(self, index: int) -> bool:
        """The answer to one claim has ended: it races no more. Says whether the index raced."""
        live = self.live[index]
        live.open -= 1
        if live.open == 0 and live.drawn:
            live.drawn = False
            if index in self.calm:
                self.calm.remove(index)
            self.drawn[live.raw] -= 1
            if not self.drawn[live.raw]:
                del self.drawn[live.raw]
                self.contended = self.contended and bool(self.drawn)
        return index in self.raced

    def settle(self, index: int, *, used: bool) -> bool:
        """One claim is over; `used`: an answer or part of one was delivered. True: the index is released."""
        live = self.live[index]
        live.claims -= 1
        live.used |= used
        if live.claims:
            return False
        del self.live[index]
        bound = self.bound.get(index)
        if bound is None:
            self.asked[live.raw].live -= 1
            if not live.used:
                if self.released is _NOTHING:
                    self.released = {}
                insort(self.released.setdefault(live.raw, []), index)
        elif live.used:
            bound.used = True
        elif not bound.keyed:
            bound.content = None
        return not live.used

    def restore(self, ask: Ask, index: int, *, raced: bool, late: bool = False) -> None:
        """Take in a claim that was made before, in the order of the claims: it is live until it is settled.

        `late`: the index was drawn before others that were taken in already.
        """
        first = late or (ask.number is None and index >= self.next)
        self.kind = ask.kind
        if first:
            self.next = max(self.next, index + 1)
        rivals = first and self._rivals(ask)
        bound = self.bound.get(index)
        if ask.number is not None or ask.key is not None:
            bound = bound or self._named(index, Bound(ask.content))
            bound.content = ask.content
            if ask.key is not None:
                self._bind(ask.key, index, ask.content)
            live = self._hold(index, ask.raw, used=bound.used)
        else:
            free = self._free(ask.raw, index)
            live = self._hold(index, ask.raw, used=not (first or free))
            self._note(ask, index)
            self.asked[ask.raw].live += live.claims == 1
        if first:
            self._drawn(index, live, rivals=raced and rivals, raced=raced)
        elif raced:
            self._race([index])

    def restore_asked(self, raw: bytes, index: int, repeat: int) -> None:
        """Take in what was known of these bytes (`Asked`) when a request of them had waited for a rival in vain."""
        asked = self.asked.get(raw)
        self.asked[raw] = Asked(index, repeat, 0 if asked is None else asked.live)

    def restore_raced(self, index: int) -> None:
        """Take in that an index was said to have raced when a claim of it was over."""
        self._race([index])

    def _check_kind(self, ask: Ask) -> None:
        if self.kind is not None and "client" in (self.kind, ask.kind) and self.kind != ask.kind:
            raise refused("mixed_order", self.kind)

    def _bind(self, key: str, index: int, content: str | None) -> None:
        assert content is not None
        self.session.keys[key] = Keyed(self.identity, index, content)
        (self.bound.get(index) or self._named(index, Bound(content))).keyed = True

    def _named(self, index: int, bound: Bound) -> Bound:
        """Note that an index is named by a number or a key."""
        if self.bound is _NOTHING:
            self.bound = {}
        self.bound[index] = bound
        return bound

    def _by_key(self, ask: Ask, keyed: Keyed) -> Claim:
        if keyed.content != ask.content or keyed.identity != self.identity:
            raise refused("idempotency_conflict")
        if ask.number is not None and ask.number != keyed.index:
            raise refused("idempotency_conflict", keyed.index)
        self._hold(keyed.index, ask.raw, used=self.bound[keyed.index].used)
        return self._claimed(keyed.index)

    def _by_number(self, ask: Ask, index: int) -> Claim:
        assert ask.content is not None
        bound = self.bound.get(index)
        reused = bound is not None
        if bound is None:
            bound = self._named(index, Bound(ask.content))
        elif bound.content is None:
            bound.content = ask.content
        elif bound.content != ask.content:
            raise refused("index_conflict", index)
        self._hold(index, ask.raw, used=bound.used)
        return Claim(index, reused=reused)

    def _by_bytes(self, ask: Ask, raced: bool, final: bool) -> Claim | Wait:
        asked = self.asked.get(ask.raw)
        claim: Claim | Wait
        if free := self.released.get(ask.raw):
            claim = self._take(ask.raw, free[0])
        elif not ask.repeat:
            claim = self._draw(ask, raced, final)
        elif not final and asked is not None and asked.live:
            return Wait("repeat")
        elif asked is None or asked.index == MANY or (ask.repeat <= asked.repeat and not raced):
            claim = self._draw(ask, raced, final, "retry-unmatched")
        elif asked.index in (NONE, LATE):
            claim = self._draw(ask, raced, final, *(("retry-unmatched",) if asked.index == LATE else ()))
        else:
            claim = self._claimed(asked.index, "retry-shared")
            self._hold(asked.index, ask.raw, used=True)
        if isinstance(claim, Claim):
            self._note(ask, claim.index, waited=raced)
            self.asked[ask.raw].live += self.live[claim.index].claims == 1
        elif claim.why == "racing" and not (raced and asked is not None):
            self._note(ask, LATE if ask.repeat else NONE)
        return claim

    def _take(self, raw: bytes, index: int) -> Claim:
        self._free(raw, index)
        self._hold(index, raw, used=False)
        return self._claimed(index)

    def _free(self, raw: bytes, index: int) -> bool:
        """Take an index out of those released to these bytes, if it is one."""
        free = self.released.get(raw, [])
        if index not in free:
            return False
        free.remove(index)
        if not free:
            del self.released[raw]
        return True

    def _note(self, ask: Ask, index: int, *, waited: bool = False) -> None:
        """Keep whether all that asked for these bytes may be one request.

        Who waits for a rival has asked; `waited`: it did, and was noted then.
        """
        asked = self.asked.get(ask.raw)
        if asked is None:
            self.asked[ask.raw] = Asked(index, ask.repeat)
        elif (ask.repeat <= asked.repeat and not waited) or (index >= 0 and asked.index >= 0 and asked.index != index):
            asked.index = MANY
        else:
            asked.repeat = max(asked.repeat, ask.repeat)
            if index >= 0 and asked.index != MANY:
                asked.index = index

    def _draw(self, ask: Ask, raced: bool, final: bool, *flags: str) -> Claim | Wait:
        rivals = self._rivals(ask)
        if rivals and ask.exclusive:
            self._race(self.calm)
            self.calm, self.contended = _NONE, True
            if not final:
                return Wait("racing")
            raise refused("racing_index")
        index = self.next
        self.next += 1
        self._drawn(index, self._hold(index, ask.raw, used=False), rivals=rivals, raced=raced)
        return self._claimed(index, *flags, reused=False)

    def _rivals(self, ask: Ask) -> bool:
        """Whether others are in flight that the network could put in another order."""
        return ask.kind == "arrival" and len(self.drawn) > (ask.raw in self.drawn)

    def _drawn(self, index: int, live: Live, *, rivals: bool, raced: bool) -> None:
        """Note that an index was drawn from the counter, while there were `rivals` or after a wait for one."""
        live.drawn = True
        self.drawn[live.raw] = self.drawn.get(live.raw, 0) + 1
        if rivals:
            self._race(self.calm)
            self.calm = _NONE
        if rivals or raced or self.contended:
            self._race([index])
        else:
            if self.calm is _NONE:
                self.calm = set()
            self.calm.add(index)

    def _race(self, indices: Iterable[int]) -> None:
        if not isinstance(self.raced, Indices):
            self.raced = Indices()
        for index in indices:
            self.raced.add(index)

    def _claimed(self, index: int, *flags: str, reused: bool = True) -> Claim:
        return Claim(index, ("racing", *flags) if index in self.raced else flags, reused)

    def _hold(self, index: int, raw: bytes, *, used: bool) -> Live:
        """One more claim on an index. `used`: it was used before, if it is not live."""
        live = self.live.get(index)
        if live is None:
            live = self.live[index] = Live(raw, used)
        live.claims += 1
        live.open += 1
        return live
