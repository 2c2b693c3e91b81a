"""Which request gets which index: the whole rule, as one state machine without a clock or a lock.

A `Scope` is one counter: a (run, session, effective identity). Everything that a store must do atomically is one call
here: `claim`, `complete` and `settle`. An index belongs to a delivered answer. It is released when its last live claim
ended and none was delivered, and is then taken again only by what it was released to: its idempotency key, its number,
or the bytes it was asked for with. So a retry repeats its index, and no two requests own one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.errors import Conflict

Kind = Literal["arrival", "content", "client"]

MANY = -1
"""More than one index was issued for these bytes, so a repeat cannot tell which is its own."""


@dataclass(frozen=True, slots=True)
class Ask:
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
    repeat: bool = False
    """The client says that this is a retry (x-stainless-retry-count > 0)."""
    exclusive: bool = False
    """Profile `strict`: wait rather than race."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An index, claimed. `flags` are reasons that go into X-Detgate-Guarantee."""

    index: int
    flags: tuple[str, ...] = ()
    reused: bool = False
    """The index had been issued before: a repeat, or taken again after a release."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet. Ask again when the scope changes; with `final` when waiting is over."""

    why: Literal["racing", "repeat"]


@dataclass(slots=True)
class Live:
    """An index with claims that have not settled."""

    raw: bytes
    claims: int = 1
    open: int = 1
    """Claims whose answer has not ended: these can race."""
    used: bool = False
    drawn: bool = False
    """Drawn from the counter by a claim that is still open."""
    racing: bool = False
    numbered: bool = False
    key: str | None = None
    """A number or a key is what the index is released to; without either, the bytes."""

    @property
    def bound(self) -> bool:
        return self.numbered or self.key is not None


@dataclass(slots=True)
class Keyed:
    """What an idempotency key is bound to, for good."""

    identity: str
    index: int
    content: str
    used: bool = False


@dataclass(slots=True)
class Session:
    """What the scopes of one session share."""

    keys: dict[str, Keyed] = field(default_factory=dict)


@dataclass(slots=True)
class Scope:
    """One counter and what is known of the indices it issued."""

    identity: str
    session: Session
    next: int = 0
    kind: Kind | None = None
    live: dict[int, Live] = field(default_factory=dict)
    issued: dict[bytes, int] = field(default_factory=dict)
    """Bytes digest → the one index issued for it, or `MANY`."""
    released: dict[bytes, list[int]] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    """Index given by the client → content digest of the request that used it or is in flight."""
    drawn: dict[bytes, int] = field(default_factory=dict)
    """Bytes digest → how many requests in flight drew from the counter with it."""
    calm: dict[bytes, dict[int, Live]] = field(default_factory=dict)
    """Those of `drawn` that have not raced yet."""

    def claim(self, ask: Ask, *, final: bool = False) -> Claim | Wait:
        """Take an index. Raises `Conflict`; nothing is taken then, nor when it answers `Wait`."""
        self._check_kind(ask)
        if ask.key is not None and (bound := self.session.keys.get(ask.key)) is not None:
            return self._by_key(ask, bound)
        claim = self._by_number(ask) if ask.number is not None else self._by_bytes(ask, final)
        if isinstance(claim, Claim):
            self.kind = ask.kind
            if ask.key is not None:
                self.session.keys[ask.key] = Keyed(self.identity, claim.index, ask.content or "")
                self.live[claim.index].key = ask.key
        return claim

    def complete(self, index: int) -> bool:
        """The answer to one claim has ended: it races no more. Says whether the index raced."""
        live = self.live[index]
        live.open -= 1
        if live.open == 0 and live.drawn:
            live.drawn = False
            self._forget(self.calm.get(live.raw), live.raw, index)
            left = self.drawn[live.raw] - 1
            if left:
                self.drawn[live.raw] = left
            else:
                del self.drawn[live.raw]
        return live.racing

    def settle(self, index: int, *, used: bool) -> bool:
        """One claim is over; `used`: an answer, or part of one, was delivered. True if the index is released now."""
        live = self.live[index]
        live.claims -= 1
        live.used |= used
        if live.used and live.key is not None:
            self.session.keys[live.key].used = True
        if live.claims:
            return False
        del self.live[index]
        if live.used:
            return False
        self.numbers.pop(index, None)
        if not live.bound:
            insort(self.released.setdefault(live.raw, []), index)
        return True

    def _check_kind(self, ask: Ask) -> None:
        if self.kind is not None and "client" in (self.kind, ask.kind) and self.kind != ask.kind:
            theirs = "X-Request-Index" if self.kind == "client" else "the order of arrival"
            raise Conflict(
                f"This session takes its indices from {theirs}, which its first request fixed. "
                "Use one kind of index in a session, or another session.",
                code="mixed_order",
                param="X-Request-Index",
            )

    def _by_key(self, ask: Ask, bound: Keyed) -> Claim:
        if bound.content != ask.content or bound.identity != self.identity:
            raise Conflict(
                "This Idempotency-Key was used in this session with other content. Use a new key for a new request.",
                code="idempotency_conflict",
                param="Idempotency-Key",
            )
        if ask.number is not None and ask.number != bound.index:
            raise Conflict(
                f"This Idempotency-Key is bound to index {bound.index}, not {ask.number}.",
                code="idempotency_conflict",
                param="Idempotency-Key",
            )
        if ask.number is not None:
            self.numbers[bound.index] = bound.content
        self._hold(bound.index, ask, used=bound.used).key = ask.key
        return Claim(bound.index, reused=True)

    def _by_number(self, ask: Ask) -> Claim:
        assert ask.number is not None and ask.content is not None
        index = ask.number
        known = self.numbers.get(index)
        if known is not None and known != ask.content:
            raise Conflict(
                f"Index {index} of this session belongs to a request with other content. "
                "Give each request of a session an index of its own.",
                code="index_conflict",
                param="X-Request-Index",
            )
        self.numbers[index] = ask.content
        self._hold(index, ask, used=known is not None).numbered = True
        return Claim(index, reused=known is not None)

    def _by_bytes(self, ask: Ask, final: bool) -> Claim | Wait:
        free = self.released.get(ask.raw)
        if free:
            index = free.pop(0)
            if not free:
                del self.released[ask.raw]
            self._hold(index, ask, used=False)
            return Claim(index, reused=True)
        if ask.repeat:
            return self._repeat(ask, final)
        return self._draw(ask, final)

    def _repeat(self, ask: Ask, final: bool) -> Claim | Wait:
        if not final and any(live.raw == ask.raw and not live.bound for live in self.live.values()):
            return Wait("repeat")
        only = self.issued.get(ask.raw, MANY)
        if only != MANY:
            self._hold(only, ask, used=True)
            return Claim(only, ("retry-shared",), reused=True)
        drawn = self._draw(ask, final)
        if isinstance(drawn, Claim):
            return Claim(drawn.index, (*drawn.flags, "retry-unmatched"))
        return drawn

    def _draw(self, ask: Ask, final: bool) -> Claim | Wait:
        rivals = ask.kind == "arrival" and len(self.drawn) > (ask.raw in self.drawn)
        if rivals and ask.exclusive:
            if not final:
                return Wait("racing")
            raise Conflict(
                "Another request of this session is in flight, so their order would be decided by the network. "
                "Send one at a time, or set X-Index-Order: content, or give each its X-Request-Index.",
                code="racing_index",
                param="X-Request-Index",
            )
        index = self.next
        self.next += 1
        live = self.live[index] = Live(ask.raw, drawn=True, racing=rivals)
        self.drawn[ask.raw] = self.drawn.get(ask.raw, 0) + 1
        if rivals:
            self._mark_rivals(ask.raw)
        else:
            self.calm.setdefault(ask.raw, {})[index] = live
        self.issued[ask.raw] = MANY if ask.raw in self.issued else index
        return Claim(index, ("racing",) if rivals else ())

    def _mark_rivals(self, raw: bytes) -> None:
        """Requests in flight that drew from this counter and ask for something else: their order mattered."""
        own = self.calm.pop(raw, None)
        for others in self.calm.values():
            for live in others.values():
                live.racing = True
        self.calm.clear()
        if own:
            self.calm[raw] = own

    def _forget(self, calm: dict[int, Live] | None, raw: bytes, index: int) -> None:
        if calm is not None and calm.pop(index, None) is not None and not calm:
            del self.calm[raw]

    def _hold(self, index: int, ask: Ask, *, used: bool) -> Live:
        """One more claim on an index that was issued before, or that the client chose."""
        live = self.live.get(index)
        if live is None:
            live = self.live[index] = Live(ask.raw, used=used)
        else:
            live.claims += 1
            live.open += 1
        return live
