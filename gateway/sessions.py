"""Sessions that were created before they were used, and their groups: those of all runs of this process.

A session needs no creation: an id in a path or a header is enough. One that was created has more: a key that opens it
and nothing else, an identity and a master seed of its own, an index order, a place in a group, rewards. What is
created, rewarded or ended is in the run's ledger before it takes effect, so a restarted gateway knows it; of keys the
ledger has digests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from gateway.core.errors import Busy, CallerFault, Conflict, Gone, NotFound, Unauthorized
from gateway.core.identity import Known, Named, text
from gateway.core.ids import random_like
from gateway.keys import Keys, digest
from gateway.ledger.writer import Ledger
from gateway.session import LARGEST, Group, Interaction, Session, Visitor, Wanted
from gateway.session_records import Created, Open, again, created_record, ended_record, rewarded_record
from gateway.settings import Settings
from gateway.shelf import Entries, Shelf
from gateway.stores import Store

log = structlog.get_logger("detgate.sessions")

PREFIX = b"dgs-"
"""What every session's key begins with: one that nobody holds is then refused, and not taken for no key at all."""

FIRSTS = 10_000
"""What guards look for in one group, remembered."""

PAST = 20_000
"""Ordinals of identities, and ended sessions beyond `limits.sessions`, that are in memory; others are in a file."""

SWEEPS = 4
"""How often the idle are looked for within the time that a session may be idle."""

SHORTEST, LONGEST = 0.05, 30.0
"""Seconds between two looks, at least and at most."""

Look = Callable[[Session, str], Awaitable[Interaction]]
"""Finds a request of a session by its own id or its answer's. Raises `CallerFault` where there is none."""


_ANYONE = Visitor()


class Sessions:
    """Owns every session that was created, until it has ended and `limits.sessions` others ended after it."""

    shared = False
    """Other gateways create and end sessions too."""

    ready = True
    """What others did before is known."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._keys = Keys(settings.auth)
        self._store = store
        self._limit = settings.limits.sessions
        self._largest = settings.limits.group
        self._idle_seconds = settings.sessions.idle_seconds
        self._failed_reward = settings.sessions.failed_reward
        self._looking = asyncio.Lock()
        self._weights = settings.sessions.weights
        self._strict = settings.profile == "strict" and not settings.sessions.allow_random
        self._ledgers: dict[str, Ledger] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._groups: dict[tuple[str, str], Group] = {}
        self._past: dict[str, Entries[str, int]] = {}
        """Run → the ordinal that the next session of an identity has at least, and sessions that are remembered no more
        but for having ended."""
        self._forgotten = 0
        self._idle: dict[Session, float] = {}
        """Live sessions without an open request, and since when; the longest idle first."""
        self._ended: dict[Session, None] = {}

    @property
    def live(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions) - len(self._ended)

    # --- who asks
    def visitor(self, key: bytes) -> Visitor:
        """Who comes with this key. Raises `Unauthorized` where one is needed and this is none."""
        if self._keys.open and not key.startswith(PREFIX):
            return _ANYONE
        holder = self._by_key.get(digest(key)) if key.startswith(PREFIX) else None
        if holder is not None:
            return Visitor(holder)
        if self._keys.holds(key):
            return Visitor(trusted=True, name=self._keys.name(key))
        if key.startswith(PREFIX):
            raise Unauthorized("This key opens no session here: it is wrong, of another gateway, or ended long ago.")
        self._keys.check(key)
        return Visitor()

    def may_create(self, key: bytes) -> None:
        """Raises `Unauthorized` for a key by which no session may be created."""
        if self.visitor(key).holder is not None:
            raise Unauthorized("This key opens one session and creates none: send one of the gateway's own keys.")

    def find(self, visitor: Visitor, names: Named, own: str) -> Session | None:
        """The created session that a request is of; None: it is of none. `own`: the run where none is named.

        Raises `NotFound` for a session that the visitor's key does not open, `Unauthorized` without the key of one
        that has one, `Gone` for one that has ended.
        """
        found = self._opened(visitor.holder, names) or (
            self._sessions.get((names.run or own, names.session)) if names.session is not None else None
        )
        if found is None:
            if names.session is not None and self.has_ended(names.run or own, names.session):
                raise Gone(f"Session {names.session} has ended. Create another.", code="session_ended")
            return None
        if found.key is not None and found is not visitor.holder and not visitor.trusted:
            raise Unauthorized(f"Session {found.known.session} was created with a key of its own: send that.")
        if found.state != "open":
            raise Gone(f"Session {found.known.session} has ended. Create another.", code="session_ended")
        if not found.open:
            self._touch(found)
        return found

    def has_ended(self, run: str, session: str) -> bool:
        """Whether it is a session that is remembered no more but for having ended."""
        return bool(self._forgotten) and run in self._past and self._past[run].get(f"ended {session}") is not None

    def _opened(self, holder: Session | None, names: Named) -> Session | None:
        """The session that a key opens, if that is the one that is named."""
        if holder is None:
            return None
        run, session = holder.place
        if names.session not in (None, session) or names.run not in (None, run):
            raise NotFound("This key opens no such session.", code="session_not_found")
        return holder

    def read(self, visitor: Visitor, names: Named, own: str) -> Session | None:
        """The session that is to be looked at; None: no such one was created. Raises `NotFound` as `find`."""
        if visitor.holder is not None:
            return self._opened(visitor.holder, names)
        return self._sessions.get((names.run or own, names.session or ""))

    def session(self, run: str, name: str) -> Session | None:
        """A created session by its id."""
        return self._sessions.get((run, name))

    def group(self, run: str, name: str) -> Group | None:
        """A group by its id."""
        return self._groups.get((run, name))

    # --- life
    async def create(self, run: str, wanted: Wanted, key: str | None = None) -> tuple[list[Session], list[str]]:
        """Create a session, or a group of sessions, and the key of each.

        `key`: the key of a session that has ended, which the first one shall have; any other is not taken. Raises
        `CallerFault` for what cannot be an identity and for a group that is too large, `Conflict` where the key's
        session has not ended, `Busy` where too many are live or the ledger cannot be written; nothing is created then.
        """
        self._check_wanted(wanted)
        self.sweep()
        if self.live + (wanted.group_size or 1) > self._limit:
            raise too_many(self.live)
        before = self._by_key.get(digest(key.encode())) if key is not None else None
        if before is not None and before.state == "open":
            raise active(before.known.session)
        sessions = self._made(run, wanted)
        keys = [new_key() for _ in sessions]
        if before is not None and key is not None:
            keys[0] = key
        for session, each in zip(sessions, keys, strict=True):
            session.key = digest(each.encode())
        ledger = self._ledgers[run]
        since = ledger.mark
        ledger.opened(*map(created_record, sessions))
        for session in sessions:
            session.since = since
            self._take(session)
        return sessions, keys

    def _check_wanted(self, wanted: Wanted) -> None:
        """Raises `CallerFault` for what can never be created, before anything is made of it."""
        for name, most in (("limits.group", self._largest), ("limits.sessions", self._limit)):
            if (wanted.group_size or 1) > most:
                why = f"A group of {wanted.group_size} is larger than {name}, {most}."
                raise CallerFault(why, param="group_size")
        if self._strict and random_like(wanted.identity):
            raise CallerFault(
                "This identity holds a random id, so no other run could repeat it. Name the session by what it is "
                "for, or set sessions.allow_random.",
                code="random_session",
                param="identity",
            )

    def _made(self, run: str, wanted: Wanted, ordinal: int | None = None) -> list[Session]:
        """Sessions as they are wanted, at this ordinal or the first that is free. Nobody knows of them yet."""
        size = wanted.group_size
        identities = wanted.identities
        if ordinal is None:
            ordinal = self._ordinal(run, identities, None if size is None else wanted.identity)
        group = None
        if size is not None:
            group = Group(run, numbered(wanted.identity, ordinal), wanted.identity, size)
        made = []
        for member, identity in enumerate(identities):
            known = Known(
                run=run,
                session=numbered(identity, ordinal),
                identity=identity,
                ordinal=ordinal,
                order=wanted.index_order,
                seed=wanted.seed,
                group=None if group is None else group.id,
                member=None if group is None else member,
            )
            _check(known.session)
            failed_reward = self._failed_reward if wanted.failed_reward is None else wanted.failed_reward
            holds = (wanted.weights or self._weights) == "hold"
            made.append(Session(known, None, wanted.order, group, failed_reward=failed_reward, holds=holds))
        return made

    def _ordinal(self, run: str, identities: list[str], group: str | None) -> int:
        """The first ordinal that gives the next sessions of these identities, and their group, ids that are free."""
        first: int = max(self._past[run].get(f"next {identity}", 0) for identity in identities)
        return next(
            ordinal
            for ordinal in count(first)
            if (group is None or (run, numbered(group, ordinal)) not in self._groups)
            and not any(self._taken(run, numbered(identity, ordinal)) for identity in identities)
        )

    def _taken(self, run: str, session: str) -> bool:
        return (run, session) in self._sessions or self._store.knows(run, session)

    def _take(self, session: Session) -> None:
        """Know a session from now on."""
        known, group = session.known, session.group
        self._sessions[session.place] = session
        if session.key is not None:
            before = self._by_key.get(session.key)
            if before is not None:
                before.key = None
            self._by_key[session.key] = session
        next_of = f"next {known.identity}"
        self._note_past(known.run, next_of, max(self._past[known.run].get(next_of, 0), known.ordinal + 1))
        if group is not None:
            group.members.append(session)
            self._groups[group.run, group.id] = group
        self._touch(session)

    async def end(self, session: Session, failed: str | None = None) -> None:
        """End a session: it takes no more requests. `failed`: why its work is worth nothing, if so.

        One whose last request was not delivered has failed too. Harmless when repeated. Raises `LedgerFault`.
        """
        if session.state != "open":
            return
        why = session.undelivered if failed is None else failed
        self._ledgers[session.known.run].opened(ended_record(session, why))
        self._close(session, why)

    async def end_unknown(self, run: str, name: str, failed: str | None = None) -> Session:
        """End a session that was used without having been created: it takes no more requests either."""
        session = Session(Known(run, name, name), None)
        self._ledgers[run].opened(ended_record(session, failed))
        self._sessions[session.place] = session
        self._close(session, failed)
        return session

    def _close(self, session: Session, why: str | None) -> None:
        session.state, session.why = "ended" if why is None else "failed", why
        if why is not None and session.reward is None and session.failed_reward is not None:
            session.add(None, session.failed_reward)
        self._idle.pop(session, None)
        self._ended[session] = None
        if session.group is not None:
            session.group.tell()
        if len(self._ended) > self._limit:
            self._forget(next(iter(self._ended)))

    def _note_past(self, run: str, name: str, value: int) -> None:
        past = self._past[run]
        past[name] = value
        if len(past) > PAST:
            past.shed(PAST // 2)

    def _forget(self, session: Session) -> None:
        self._forgotten += 1
        self._note_past(session.known.run, f"ended {session.known.session}", 1)
        del self._ended[session]
        del self._sessions[session.place]
        if session.key is not None:
            del self._by_key[session.key]
        group = session.group
        if group is not None and not any(member.place in self._sessions for member in group.members):
            del self._groups[group.run, group.id]

    async def reward(self, session: Session, name: str | None, reward: float, look: Look) -> None:
        """Give a request its reward; one that it had before counts no more.

        `name`: its own id or its answer's; None: the last that was delivered. `look` finds one that is remembered no
        more. Raises `CallerFault` where there is none and where the sum would be no finite number, `Gone`,
        `LedgerFault`.
        """
        if session.state != "open":
            raise no_rewards(session)
        interaction = session.find(name)
        if interaction is not None:
            self._give(session, interaction, reward)
            return
        async with self._looking:
            self._give(session, await sought(session, name, look), reward)

    def _give(self, session: Session, interaction: Interaction, reward: float) -> None:
        if session.state != "open":
            raise no_rewards(session)
        total = session.with_reward(interaction.reward, reward)
        if abs(total) > LARGEST:
            raise too_large_a_reward()
        self._ledgers[session.known.run].opened(rewarded_record(session, interaction, reward, float(total)))
        session.add(interaction.reward, reward)
        interaction.reward = reward
        if not session.open:
            self._touch(session)

    def hold(self, session: Session, pool: str, version: str) -> None:
        """Hold a session, and its group, to a version of the weights of a pool."""
        run, name = session.place
        self._ledgers[run].closed(
            {"event": "session_weights", "run": run, "session": name, "pool": pool, "version": version}
        )
        session.held[pool] = version

    def enter(self, session: Session, interaction: Interaction | None = None) -> Interaction | None:
        """A request of a session has its index; what is remembered of it, if it samples."""
        session.open += 1
        self._idle.pop(session, None)
        return None if interaction is None else session.asked(interaction)

    def leave(
        self, session: Session, trouble: str | None, interaction: Interaction | None = None, answer: str | None = None
    ) -> None:
        """A request of a session has ended. `trouble`: why it was not delivered; None: it was. `answer`: its id."""
        session.open -= 1
        session.trouble = trouble
        if interaction is not None and trouble is None:
            session.answered(interaction, answer)
        elif interaction is not None:
            session.dropped(interaction)
        if not session.open and session.state == "open":
            self._touch(session)

    def _touch(self, session: Session) -> None:
        self._idle.pop(session, None)
        self._idle[session] = asyncio.get_running_loop().time()

    # --- other gateways
    async def prepared(self, run: str, key: bytes) -> None:
        """Know what other gateways know that whoever comes with a key may mean. Raises `StoreFault`."""

    async def first(self, group: Group, what: str, who: str) -> str:
        """Who of a group came to something first: an earlier one that is remembered, else `who`, who is from now on."""
        first = group.firsts.setdefault(what, who)
        if len(group.firsts) > FIRSTS:
            del group.firsts[next(iter(group.firsts))]
        return first

    async def refresh(self, session: Session) -> None:
        """Know how a session stands at all gateways. Raises `StoreFault`."""

    async def gateways(self, run: str) -> Collection[str]:
        """The gateways that have served a run, where there may be several. Raises `StoreFault`."""
        return ()

    # --- time
    async def run(self) -> None:
        """End what is idle for too long, as long as this runs."""
        while True:
            await asyncio.sleep(min(LONGEST, max(SHORTEST, self._idle_seconds / SWEEPS)))
            try:
                self.sweep()
            except Exception:
                log.exception("sessions could not be looked after; tries again")

    def sweep(self) -> None:
        """End every session that was idle for too long: nobody said that it was done, so it has failed."""
        due = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle:
            session, since = next(iter(self._idle.items()))
            if since > due:
                return
            why = f"idle for {self._idle_seconds:g} s"
            self._ledgers[session.known.run].closed(ended_record(session, why))
            self._close(session, why)
            log.info("session ended", run=session.known.run, session=session.known.session, why=why)

    # --- after a restart
    def restoring(self, run: str, folder: Path, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Know the sessions of a run by its records, which are passed on."""
        self._put_by(run, folder / "sessions.db")
        created, still_open = Created(run), Open()
        for record in records:
            event, name = record.get("event"), record.get("session")
            if event == "session":
                for session in created.read(record):
                    self._take(session)
            elif event == "session_ended":
                self._ended_before(run, record["session"], record["why"])
            elif name is not None and (known := self._sessions.get((run, name))) is not None:
                again(known, record)
                still_open.read(record)
            yield record
        for end in still_open.lost():
            if (known := self._sessions.get((run, end["session"]))) is not None:
                again(known, end)

    def _ended_before(self, run: str, name: str, why: str | None) -> None:
        session = self._sessions.get((run, name)) or Session(Known(run, name, name), None)
        self._sessions[session.place] = session
        self._close(session, why)

    def serve(self, run: str, ledger: Ledger) -> None:
        """Record in this ledger what becomes of the sessions of a run."""
        self._ledgers[run] = ledger

    def _put_by(self, run: str, file: Path) -> None:
        """Have a file for what is remembered of a run and not needed now."""
        self._past[run] = Entries(Shelf(file), b"", int, int)

    @property
    def busy(self) -> set[str]:
        """Runs with a created session that has not ended."""
        return {run for (run, _), session in self._sessions.items() if session.state == "open"}

    def take_over(self, other: Sessions) -> None:
        """Know the sessions that others of this process were brought to; those are used no more."""
        self._past |= other._past
        for key in other._by_key.keys() & self._by_key.keys():
            self._by_key[key].key = None
        self._by_key |= other._by_key
        self._sessions |= other._sessions
        self._groups |= other._groups
        self._idle |= other._idle
        self._ended |= other._ended
        while len(self._ended) > self._limit:
            self._forget(next(iter(self._ended)))

    def end_run(self, run: str) -> None:
        """A run is served no more."""
        self._ledgers.pop(run, None)
        for session in [session for session in self._sessions.values() if session.known.run == run]:
            del self._sessions[session.place]
            self._idle.pop(session, None)
            self._ended.pop(session, None)
            if session.key is not None:
                self._by_key.pop(session.key, None)
        for place in [place for place in self._groups if place[0] == run]:
            del self._groups[place]
        if (past := self._past.pop(run, None)) is not None:
            past.shelf.close()


async def sought(session: Session, name: str | None, look: Look) -> Interaction:
    """A request that is remembered no more. Raises `CallerFault`."""
    if name is None:
        raise CallerFault("No request of this session was answered yet.", code="no_interactions")
    return await look(session, name)


def new_key() -> str:
    """A key that nobody has."""
    return (PREFIX + secrets.token_urlsafe(32).encode()).decode()


def too_many(live: int) -> Busy:
    """The refusal of a session beyond the limit."""
    return Busy(f"{live} sessions are open already. End some, or raise limits.sessions.", code="too_many_sessions")


def active(session: str) -> Conflict:
    """The refusal of a key that opens a session."""
    return Conflict(f"This key is that of session {session}, which is open.", code="session_active")


def no_rewards(session: Session) -> Gone:
    """The refusal of a reward that comes too late."""
    return Gone(f"Session {session.known.session} has ended and takes no rewards.", code="session_ended")


def too_large_a_reward() -> CallerFault:
    """The refusal of a reward that would make the sum of its session's rewards no finite number."""
    return CallerFault(
        f"With this reward the rewards of the session would add up to more than {float(LARGEST)}.",
        code="reward_too_large",
        param="reward",
    )


def numbered(name: str, ordinal: int) -> str:
    """The id of the session, or group, that comes after `ordinal` others of its name."""
    return f"{name}-{ordinal}" if ordinal else name


def _check(name: str) -> None:
    try:
        text(name.encode(), "The id of a session")
    except CallerFault as fault:
        raise CallerFault(fault.message, code="invalid_identity", param="identity") from None
