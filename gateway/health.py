"""Asks every replica whether it lives and what it is. Probes never generate a token."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import structlog

from gateway.core import exposition
from gateway.core.errors import StoreFault
from gateway.core.strangers import Look, Tally, Watch
from gateway.core.vitals import Outcome
from gateway.findings import Told
from gateway.fleet import Fleet, Pool, Replica
from gateway.introductions import introduce
from gateway.passes import Passes, Verdict
from gateway.questions import Ask, ask
from gateway.settings import Settings
from gateway.tasks import start, stop
from gateway.upstream import Broken, Connections

log = structlog.get_logger("detgate.health")

LONGEST_PAUSE = 10.0
"""Seconds between two probes of a replica that has been down for long."""

CONFIRM_SECONDS = 0.1
"""Seconds after which a replica that seems to have others' requests is asked again."""


COMING_AND_GOING = ("foreign-traffic", "fingerprint-changed")
"""Findings that are logged each time, where they are seen."""

METRICS_SECONDS = 2.0
"""How long a replica may take to tell of its preemptions: a probe does not wait for it longer."""

Others = Literal["before", "now", "none", "unsure"]
"""Whether an engine had others' requests since the last look, has some now, has none, or may have: it has as many as
ours have been, which come and go while it is asked."""

Note = Callable[[str, Pool, Replica, dict[str, Any]], None]
"""Records what became known of a replica: what it is, its pool, itself, and the particulars."""


class Health:
    """One probing loop a replica. `note` records what is found out on the way."""

    def __init__(self, settings: Settings, fleet: Fleet, note: Note | None = None) -> None:
        self._fleet = fleet
        self._note = note
        self._passes = Passes(settings.ledger.path)
        self._preempted: dict[Replica, tuple[float, float]] = {}
        """What was counted when a replica was last asked, and when that was."""
        self._warned: set[tuple[str, str]] = set()
        """Findings that were logged, by replica or pool and rule: bounded by both."""
        self._met_before: set[Replica] = set()
        """Replicas that were judged at least once."""
        self._off = settings.profile == "off"
        self._settings = settings.health
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._watches: dict[Replica, Watch] = {}
        self._running = False
        self.probed = asyncio.Event()
        """Every replica was probed once."""

    async def run(self) -> None:
        """Probe for ever."""
        self._running = True
        self.sync()
        try:
            await asyncio.Event().wait()
        finally:
            self._running = False
            await stop(*self._watching.values())

    def sync(self) -> None:
        """Watch the replicas that there are now, and no others."""
        if not self._running:
            return
        present = {replica: pool for pool in self._fleet for replica in pool.replicas.values()}
        for replica in self._watching.keys() - present:
            self._watching.pop(replica).cancel()
            self._watches.pop(replica, None)
            self._preempted.pop(replica, None)
            self._met_before.discard(replica)
        for replica, pool in present.items():
            if replica not in self._watching:
                self._watching[replica] = start(self._watch(pool, replica), f"probe {replica.name}")

    async def _watch(self, pool: Pool, replica: Replica) -> None:
        pause = self._settings.interval
        while True:
            await self.probe(pool, replica)
            pause = self._settings.interval if replica.state == "up" else min(pause * 1.5, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def probe(self, pool: Pool, replica: Replica) -> None:
        """Ask once, and note what comes of it. What no reader of its answers foresaw counts against the replica."""
        refusals, before = replica.refusals, replica.told
        # Each time by a new connection: whether one can be had is what is asked first.
        seconds = self._settings.timeout
        connections = Connections(replica.url, connect_seconds=seconds, tls=pool.settings.tls)
        try:
            outcome, reason = await self._met(partial(ask, connections, replica.head, seconds=seconds), pool, replica)
            self.judge(pool, replica, before)
        except Exception as error:
            outcome, reason = "bad", f"what it tells cannot be read: {type(error).__name__}"
        finally:
            connections.close()
        if outcome == "ok" and replica.refusals != refusals:
            return  # it ended after it had answered: this pass is of before
        if replica.probed(outcome, reason):
            log.info("replica", pool=pool.name, replica=replica.name, state=replica.state, reason=reason)
        if not self.probed.is_set() and all(each.state != "unknown" for each in self._fleet.replicas):
            self.probed.set()

    async def _met(self, ask: Ask, pool: Pool, replica: Replica) -> tuple[Outcome, str]:
        """Ask whether it lives, and what it is and does if that is to be known."""
        outcome, reason = await self._lives(ask, pool, replica)
        if outcome == "ok" and (replica.models is None or replica.state != "up" or not replica.known):
            refusal = await self._introduce(ask, pool, replica)
            if refusal:
                outcome, reason = "bad", refusal
        if outcome == "ok" and pool.role == "reward":
            await self._look_for_strangers(ask, pool, replica)
        elif outcome == "ok" and pool.engine.PREEMPTIONS is not None:
            await self._look_for_preemptions(ask, pool, replica, *pool.engine.PREEMPTIONS)
        return outcome, reason

    def note(self, pool: Pool, replica: Replica, verdict: Verdict) -> None:
        """Write a verdict down, unless it stands already."""
        engine, apart, passed, at = verdict
        try:
            self._passes.note(pool.settings, replica.name, engine, apart=apart, passed=passed, at=at)
        except OSError as error:
            log.error("a verdict cannot be written", replica=replica.name, why=error.strerror)

    def judge(self, pool: Pool, replica: Replica, before: Told | None = None) -> None:
        """Find anew what speaks against a pool, if a replica tells something else than `before`, or canaries do."""
        before = before or replica.told
        replica.verified = self._passes.verdict(pool.settings, replica.name, replica.fingerprint)
        if replica.told != before or replica not in self._met_before:
            self._met_before.add(replica)
            pool.judge()
            self._warn(pool)

    def _warn(self, pool: Pool) -> None:
        """Log what is found, once. Of replicas that have answered nothing yet nothing is known that could be said."""
        unmet = {name for name, replica in pool.replicas.items() if not replica.fingerprint}
        for finding in pool.findings:
            key = (finding.replica or finding.pool, finding.id)
            if finding.replica in unmet:
                continue
            if self._off or finding.severity == "note" or finding.id in COMING_AND_GOING or key in self._warned:
                continue
            self._warned.add(key)
            log.warning(finding.text, pool=pool.name, replica=finding.replica, finding=finding.id, mend=finding.mend)

    async def _look_for_preemptions(self, ask: Ask, pool: Pool, replica: Replica, route: str, series: str) -> None:
        """See whether the engine put requests back since it was last asked."""
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                count = exposition.total(await _text(ask, route), (series,))
        except TimeoutError:
            return
        now = asyncio.get_running_loop().time()
        if count is None:
            return
        last, since = self._preempted.get(replica, (count, now))
        self._preempted[replica] = count, now
        if count <= last:
            return
        replica.preempted_at = now
        log.warning("requests were preempted", pool=pool.name, replica=replica.name, count=count - last)
        self._tell("preempted", pool, replica, count=count - last, since=time.time() - (now - since))

    def _tell(self, what: str, pool: Pool, replica: Replica, **particulars: Any) -> None:
        if self._note is not None and not self._off:
            self._note(what, pool, replica, particulars)

    async def _look_for_strangers(self, ask: Ask, pool: Pool, replica: Replica) -> None:
        """See whether the engine has more requests than ours, or had since the last look.

        What it has now is asked twice before anything else is said of it than before: it may count one that has ended,
        and not yet count one that was sent.
        """
        others = await self._others(ask, pool, replica)
        if others == ("none" if replica.foreign else "now"):
            await asyncio.sleep(CONFIRM_SECONDS)
            others = await self._others(ask, pool, replica)
        if others == "none":
            replica.foreign = False
        elif others != "unsure" and not replica.foreign:
            log.warning("foreign traffic", pool=pool.name, replica=replica.name)
            replica.foreign = True

    async def _others(self, ask: Ask, pool: Pool, replica: Replica) -> Others:
        """Whether others' requests are in the engine, or were since the last look."""
        if pool.engine.LOAD is None:
            return "none"
        replica.most_inside = replica.inside
        before = await self._tally(pool, replica)
        told = await _text(ask, pool.engine.LOAD)
        if pool.engine.PREFIX_CACHE is not None:
            self._note_cache(pool, replica, exposition.label(told, *pool.engine.PREFIX_CACHE))
        after = await self._tally(pool, replica)
        if before is None or after is None:
            return "unsure"
        done = pool.engine.done(told)
        if done is not None:
            watch = self._watches.setdefault(replica, Watch(exact=pool.engine.EXACT))
            sent = Look(done, before.taken, before.open + before.leaving, before.dropped, after.taken)
            if watch.outdone(sent):
                return "before"
        running = pool.engine.running(told) or 0
        taken = after.taken - before.taken
        most = before.open + taken if pool.lanes.shared else replica.most_inside
        if running > most + max(before.leaving, after.leaving):
            return "now"
        throughout = after.open - taken
        return "none" if running <= max(0, throughout) else "unsure"

    async def _tally(self, pool: Pool, replica: Replica) -> Tally | None:
        """What was sent to a replica, by this gateway or by all; None: no one knows of all."""
        if not pool.lanes.shared:
            return Tally(replica.sent, replica.dropped, replica.inside, replica.leaving)
        try:
            return await pool.lanes.tally(replica.name)
        except StoreFault:
            return None

    def _note_cache(self, pool: Pool, replica: Replica, told: str | None) -> None:
        if told is not None:
            replica.facts = dataclasses.replace(replica.facts, prefix_cache=told.lower() in ("true", "1"))

    async def _lives(self, ask: Ask, pool: Pool, replica: Replica) -> tuple[Outcome, str]:
        since, route = asyncio.get_running_loop().time(), pool.engine.PROBE
        try:
            answer = await ask(route)
        except Broken as error:
            if error.timeout and replica.connections.heard >= since:
                return "busy", f"{route}: {error.reason}, but answers come"
            outcome: Outcome = "slow" if error.timeout else "refused" if error.blame == "refused" else "bad"
            return outcome, f"{route}: {error.reason}"
        if answer.good:
            return "ok", "answers its probe"
        return "bad", f"{route} answers {answer.status}"

    async def _introduce(self, ask: Ask, pool: Pool, replica: Replica) -> str:
        """Learn what a replica that came up is. Why it would answer no request; "": nothing is known against it."""
        said = await introduce(ask, pool.engine)
        replica.models = said.models
        replica.known = said.whole
        if said.whole or not replica.fingerprint:
            replica.facts = said.facts
        if said.whole and said.fingerprint != replica.fingerprint:
            self._identify(pool, replica, said.fingerprint)
        self._fleet.learnt()
        return said.refusal

    def _identify(self, pool: Pool, replica: Replica, fingerprint: str) -> None:
        """Note which engine a replica is now."""
        before, replica.fingerprint = replica.fingerprint, fingerprint
        replica.accepted = replica.accepted or fingerprint
        replica.verified = self._passes.verdict(pool.settings, replica.name, fingerprint)
        told = {"fingerprint": fingerprint, "facts": replica.facts.known()}
        if not before:
            self._tell("introduced", pool, replica, **told)
            return
        log.warning("fingerprint changed", pool=pool.name, replica=replica.name, before=before, now=fingerprint)
        self._tell("fingerprint", pool, replica, before=before, **told)


async def _text(ask: Ask, route: str) -> str:
    try:
        answer = await ask(route)
    except Broken:
        return ""
    return answer.text if answer.good else ""
