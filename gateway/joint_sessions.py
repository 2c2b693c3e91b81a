"""Sessions that all gateways of a run have together: those of `gateway.sessions`, decided in the store.

What is created and what ends is known here as it happens. How a session stands beside that, its rewards and whether its
last request was delivered, is in the store alone, and asked for when it matters. The ledger of the gateway that was
asked has the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from typing import Any

import orjson
import structlog

from gateway.core.errors import Busy, Gone, StoreFault
from gateway.core.identity import Known
from gateway.keys import digest
from gateway.ledger.writer import Ledger
from gateway.session import UNDELIVERED, Group, Interaction, Session, Wanted
from gateway.session_records import created_record, ended_record, restored, rewarded_record
from gateway.sessions import (
    FIRSTS,
    PREFIX,
    Look,
    Sessions,
    active,
    new_key,
    no_rewards,
    numbered,
    sought,
    too_large_a_reward,
    too_many,
)
from gateway.settings import Settings
from gateway.shared import scripts
from gateway.shared.deeds import session_name
from gateway.shared.events import Events, Kept, Words
from gateway.shared.link import Link
from gateway.shared.scripts import GATEWAYS
from gateway.stores import Store

log = structlog.get_logger("detgate.sessions")

CHOICE = 8
"""Ordinals that are offered for a new session: as many may be taken by others meanwhile."""

TRIES = 100
"""How often others are offered."""

TOUCHES = 10
"""How often the store hears which sessions are used, within the time that a session may be idle."""

SHORTEST, LONGEST = 0.05, 30.0
"""Seconds between two of these, at least and at most."""

TOLD = 1000
"""Sessions in one such call."""

FIRSTS_MS = 3_600_000
"""Milliseconds for which the store remembers what guards look for in a group, after the last of it, at most."""

SWEPT = 100
"""Sessions that end for being idle in one step."""


class JointSessions(Sessions):
    """The sessions of this process's runs, and of all other gateways that serve them."""

    shared = True

    def __init__(self, settings: Settings, store: Store, link: Link, retention: float) -> None:
        super().__init__(settings, store)
        self._link = link
        self._retention = retention
        self._events: dict[str, Events] = {}
        self._used: dict[tuple[str, str], None] = {}
        """Sessions that were used since the store last heard which were."""
        self._busy: dict[Session, None] = {}
        """Sessions with an open request here."""

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return all(events.ready for events in self._events.values())

    def serve(self, run: str, ledger: Ledger) -> None:
        self._ledgers[run] = ledger
        # Others may have the run's folder too.
        self._put_by(run, ledger.file.with_suffix(".sessions.db"))
        self._events[run] = Events(self._link, run, self._limit, self._retention, _Witness(self, run))

    @property
    def busy(self) -> set[str]:
        """Those too of which it is not known yet."""
        return super().busy | {run for run, events in self._events.items() if not events.ready}

    def end_run(self, run: str) -> None:
        super().end_run(run)
        self._used = {place: None for place in self._used if place[0] != run}
        if (events := self._events.pop(run, None)) is not None:
            events.leave()

    async def close(self) -> None:
        """Follow nothing any more."""
        for events in self._events.values():
            await events.close()

    async def prepared(self, run: str, key: bytes) -> None:
        events = self._events.get(run)
        if events is None:
            return
        holder = self._by_key.get(digest(key)) if key.startswith(PREFIX) else None
        if not events.ready or (key.startswith(PREFIX) and (holder is None or holder.state != "open")):
            await events.catch_up()

    async def first(self, group: Group, what: str, who: str) -> str:
        """Over all gateways; where the store does not answer, of those that came here."""
        first = group.firsts.get(what)
        if first is None:
            key = scripts.prefix_of(group.run) + b"firsts:" + session_name(group.id)
            kept = min(FIRSTS_MS, round(self._retention * 1000))
            try:
                told: bytes = await self._link.call(scripts.FIRST, (key,), (what, who, FIRSTS, kept))
            except StoreFault:
                return await super().first(group, what, who)
            first = told.decode()
        return await super().first(group, what, first)

    async def refresh(self, session: Session) -> None:
        run, name = session.place
        trouble, delivered, rewards = await self._events[run].call("look", name)
        session.stands(orjson.loads(trouble), delivered, _total(rewards))

    async def gateways(self, run: str) -> Collection[str]:
        told: list[bytes] = await self._link.call(GATEWAYS, scripts.keys(run, "")[:1], ())
        return {gateway.decode() for gateway in told}

    # --- life
    async def create(self, run: str, wanted: Wanted, key: str | None = None) -> tuple[list[Session], list[str]]:
        self._check_wanted(wanted)
        events, size = self._events[run], wanted.group_size
        wish = "" if key is None else digest(key.encode()).hex()
        await events.catch_up()
        first = self._ordinal(run, wanted.identities, None if size is None else wanted.identity)
        keys = [new_key() for _ in wanted.identities]
        for _ in range(TRIES):
            sessions = self._made(run, wanted, first)
            words: list[str | bytes | int] = []
            for session, each in zip(sessions, keys, strict=True):
                session.key = digest(each.encode())
                words += (session.known.identity, session.key.hex(), orjson.dumps(_about(session)))
            for ordinal in range(first, first + CHOICE):
                words += (session_name(numbered(identity, ordinal)) for identity in wanted.identities)
            group = "" if size is None else wanted.identity
            outcome, *told = await events.call("create", len(sessions), group, wish, CHOICE, first, *words)
            if outcome == b"created":
                if told[1]:
                    keys[0] = key or ""
                made = [self._sessions[run, numbered(identity, told[0])] for identity in wanted.identities]
                self._ledgers[run].opened(*map(created_record, made))
                return made, keys
            if outcome == b"full":
                raise too_many(told[0])
            if outcome == b"active":
                raise active(told[0].decode())
            first = told[0]
        raise Busy("Too many create sessions of this identity at once. Ask again.", code="too_many_sessions")

    async def end(self, session: Session, failed: str | None = None) -> None:
        if session.state == "open":
            await self._finish(session, failed)

    async def end_unknown(self, run: str, name: str, failed: str | None = None) -> Session:
        await self._finish(Session(Known(run, name, name), None), failed)
        return self._sessions[run, name]

    async def _finish(self, session: Session, failed: str | None) -> None:
        run, name = session.place
        outcome, told = await self._events[run].call(
            "finish", name, "" if failed is None else orjson.dumps(failed), UNDELIVERED
        )
        if outcome == b"done":
            await self.refresh(session)
            self._ledgers[run].opened(ended_record(session, orjson.loads(told)))

    async def reward(self, session: Session, name: str | None, reward: float, look: Look) -> None:
        run, session_id = session.place
        words: tuple[str | int, ...] = (session_id, repr(reward), name or "")
        outcome, *told = await self._events[run].call("reward", *words)
        if outcome == b"unknown":
            interaction = await sought(session, name, look)
            words += (interaction.identity, interaction.index)
            outcome, *told = await self._events[run].call("reward", *words)
        if outcome == b"ended":
            raise no_rewards(session)
        if outcome == b"large":
            raise too_large_a_reward()
        identity, index, before, rewards = told
        interaction = Interaction(identity.decode(), int(index), "", reward=float(before) if before else None)
        total = _total(rewards)
        session.stands(session.trouble, session.interactions, total)
        self._ledgers[run].opened(rewarded_record(session, interaction, reward, float(total or 0)))

    def hold(self, session: Session, pool: str, version: str) -> None:
        super().hold(session, pool, version)
        run, name = session.place
        self._events[run].tell("hold", name, pool, version)

    def enter(self, session: Session, interaction: Interaction | None = None) -> Interaction | None:
        self._busy[session] = None
        return super().enter(session, interaction)

    def leave(
        self, session: Session, trouble: str | None, interaction: Interaction | None = None, answer: str | None = None
    ) -> None:
        before = session.trouble
        super().leave(session, trouble, interaction, answer)
        if not session.open:
            self._busy.pop(session, None)
        if session.key is None or (interaction is None and before == trouble):
            return
        run, name = session.place
        words: list[str | bytes | int] = [name, "" if trouble is None else orjson.dumps(trouble)]
        if interaction is not None and trouble is None:
            words += (interaction.identity, interaction.index, interaction.request_id, answer or "")
        self._events[run].tell("left", *words)

    # --- time
    def _touch(self, session: Session) -> None:
        self._used[session.place] = None

    async def run(self) -> None:
        """Have the store know which sessions are used, and end those that no gateway has used for too long."""
        pause = min(LONGEST, max(SHORTEST, self._idle_seconds / TOUCHES))
        told = False
        while True:
            await asyncio.sleep(pause)
            try:
                for run in tuple(self._events):
                    await self._sweep(run, SWEPT if told else 0)
                told = True
            except (StoreFault, Gone):
                # Others may have had no word from the store either: nobody is idle for that.
                told = False
            except Exception:
                told = False
                log.exception("sessions could not be looked after; tries again")

    async def _sweep(self, run: str, most: int) -> None:
        events = self._events.get(run)
        if events is None:
            return
        used, self._used = self._used, {place: None for place in self._used if place[0] != run}
        busy = [session.place for session in self._busy]
        names = sorted({name for of, name in (*used, *busy) if of == run})
        why = f"idle for {self._idle_seconds:g} s"
        words = round(self._idle_seconds * 1000), orjson.dumps(why)
        while len(names) > TOLD:
            await events.call("sweep", *words, 0, *names[:TOLD])
            del names[:TOLD]
        ended = await events.call("sweep", *words, most, *names)
        for name in ended:
            session = self._sessions.get((run, name.decode()))
            if session is not None:
                self._ledgers[run].closed(ended_record(session, why))
                log.info("session ended", run=run, session=session.known.session, why=why)

    def sweep(self) -> None:
        """Sessions end by `run` alone."""

    # --- what happens
    def created(self, run: str, ordinal: int, told: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Know sessions that were created together."""
        group: Group | None = None
        for key, about in told:
            session = _session(run, ordinal, key, about)
            group = session.group = group or session.group
            if session.place not in self._sessions:
                self._take(session)

    def ended(self, run: str, name: str, why: str | None) -> None:
        """Know that a session has ended."""
        session = self._sessions.get((run, name))
        if session is None:
            session = self._sessions[run, name] = Session(Known(run, name, name), None)
        if session.state == "open":
            self._close(session, why)

    def held(self, run: str, name: str, pool: str, version: str) -> None:
        """Know to what weights a session is held: it may have met others here at the same moment."""
        session = self._sessions.get((run, name))
        if session is not None:
            session.held[pool] = version

    def known(self, run: str) -> Iterator[tuple[str, Words]]:
        """All that is known of a run, as the store is told again."""
        told: set[Group] = set()
        for session in [session for session in self._sessions.values() if session.known.run == run]:
            group = session.group
            if session.key is None or group in told:
                continue
            members = [session] if group is None else group.members
            if group is not None:
                told.add(group)
            words: list[str | bytes | int] = [session.known.ordinal, group.identity if group else "", len(members)]
            for member in members:
                words += (member.known.identity, (member.key or b"").hex(), orjson.dumps(_about(member)))
            words += (b"" if member.state == "open" else orjson.dumps(member.why) for member in members)
            yield "retell", words
            for pool, version in session.held.items():
                yield "hold", (session.known.session, pool, version)


class _Witness:
    """Tells the sessions what happened in one run."""

    def __init__(self, sessions: JointSessions, run: str) -> None:
        self._sessions = sessions
        self._run = run

    def happened(self, event: dict[str, Any]) -> None:
        if event["event"] == "created":
            told = [(each["key"], each["about"]) for each in event["sessions"]]
            self._sessions.created(self._run, event["ordinal"], told)
        elif event["event"] == "held":
            self._sessions.held(self._run, event["session"], event["pool"], event["version"])
        else:
            self._sessions.ended(self._run, event["session"], event["why"])

    def found(self, sessions: Iterable[Kept]) -> None:
        groups: dict[tuple[int, str | None, str | None], dict[str, Kept]] = {}
        for kept in sessions:
            group, identity = kept.about["group_identity"], kept.about["identity"]
            together = groups.setdefault((kept.ordinal, group, identity if group is None else None), {})
            together[identity] = kept
        for (ordinal, *_), together in groups.items():
            members = sorted(together.values(), key=lambda kept: kept.about["member"] or 0)
            self._sessions.created(self._run, ordinal, [(kept.key, kept.about) for kept in members])
            for kept in members:
                name = numbered(kept.about["identity"], ordinal)
                for pool, version in kept.held.items():
                    self._sessions.held(self._run, name, pool, version)
                if kept.ended:
                    self._sessions.ended(self._run, name, kept.why)

    def known(self) -> Iterable[tuple[str, Words]]:
        return self._sessions.known(self._run)


def _about(session: Session) -> dict[str, Any]:
    """What a session was created with, but for its ordinal, what is named by that, and its key."""
    record = created_record(session)
    for name in ("event", "time", "run", "session", "ordinal", "group", "key_digest"):
        del record[name]
    return record


def _session(run: str, ordinal: int, key: str, about: dict[str, Any]) -> Session:
    group = about["group_identity"]
    return restored(
        run,
        {
            **about,
            "session": numbered(about["identity"], ordinal),
            "ordinal": ordinal,
            "group": None if group is None else numbered(group, ordinal),
            "key_digest": key,
        },
    )


def _total(rewards: Iterable[bytes]) -> Fraction | None:
    """The exact sum of rewards; None: there are none."""
    given = [Fraction(float(reward)) for reward in rewards]
    return sum(given, Fraction()) if given else None
