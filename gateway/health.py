"""Asks every replica whether it lives and what it is. Probes never generate a token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import structlog

from gateway.core import exposition
from gateway.core.strangers import Look, Watch
from gateway.core.vitals import Outcome
from gateway.fleet import Fleet, Pool, Replica
from gateway.settings import Settings
from gateway.tasks import start, stop
from gateway.upstream import trust

log = structlog.get_logger("detgate.health")

LONGEST_PAUSE = 10.0
"""Seconds between two probes of a replica that has been down for long."""

WRAPPINGS = 10
"""Errors within errors that are looked into for the system's own."""

CONFIRM_SECONDS = 0.1
"""Seconds after which a replica that seems to have others' requests is asked again."""


class Health:
    """One probing loop a replica."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settings = settings.health
        self._watching: dict[Replica, asyncio.Task[None]] = {}
        self._watches: dict[Replica, Watch] = {}
        self._http: httpx.AsyncClient | None = None
        self.probed = asyncio.Event()
        """Every replica was probed once."""

    async def run(self) -> None:
        """Probe for ever."""
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=self._settings.timeout, limits=limits, verify=trust()) as http:
            self._http = http
            self.sync()
            try:
                await asyncio.Event().wait()
            finally:
                self._http = None
                await stop(*self._watching.values())

    def sync(self) -> None:
        """Watch the replicas that there are now, and no others."""
        if self._http is None:
            return
        present = {replica: pool for pool in self._fleet for replica in pool.replicas.values()}
        for replica in self._watching.keys() - present:
            self._watching.pop(replica).cancel()
            self._watches.pop(replica, None)
        for replica, pool in present.items():
            if replica not in self._watching:
                self._watching[replica] = start(self._watch(self._http, pool, replica), f"probe {replica.name}")

    async def _watch(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        pause = self._settings.interval
        while True:
            await self.probe(http, pool, replica)
            pause = self._settings.interval if replica.state == "up" else min(pause * 1.5, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def probe(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        """Ask once, and note what comes of it."""
        outcome, reason = await self._ask(http, pool, replica)
        cached = replica.facts.prefix_cache
        if outcome == "ok" and (replica.models is None or replica.state != "up"):
            await self._introduce(http, pool, replica)
        if outcome == "ok" and pool.role == "reward":
            await self._look_for_strangers(http, pool, replica)
            if replica.facts.prefix_cache and not cached:
                log.warning("prefix cache on: warm scores differ from cold ones", pool=pool.name, replica=replica.name)
        if replica.probed(outcome, reason):
            log.info("replica", pool=pool.name, replica=replica.name, state=replica.state, reason=reason)
        if not self.probed.is_set() and all(each.state != "unknown" for each in self._fleet.replicas):
            self.probed.set()

    async def _look_for_strangers(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        """See whether the engine has more requests than ours, or had since the last look.

        What it has now is asked twice, since it may count one that has ended.
        """
        has, had = await self._outnumbered(http, pool, replica)
        if has and not had:
            await asyncio.sleep(CONFIRM_SECONDS)
            has, had = await self._outnumbered(http, pool, replica)
        if (has or had) and not replica.foreign:
            log.warning("foreign traffic", pool=pool.name, replica=replica.name)
        replica.foreign = has or had

    async def _outnumbered(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> tuple[bool, bool]:
        """Whether the engine has more requests than ours, and whether it had since the last look."""
        if pool.engine.LOAD is None:
            return False, False
        replica.most_inside = replica.inside
        leaving = replica.leaving
        sent, inside, dropped = replica.sent, replica.inside, replica.dropped
        told = await _text(http, pool, replica, pool.engine.LOAD)
        if pool.engine.PREFIX_CACHE is not None:
            self._note_cache(pool, replica, exposition.label(told, *pool.engine.PREFIX_CACHE))
        running = pool.engine.running(told)
        has = running is not None and running > replica.most_inside + max(leaving, replica.leaving)
        done = pool.engine.done(told)
        if done is None:
            return has, False
        watch = self._watches.setdefault(replica, Watch(exact=pool.engine.EXACT))
        return has, watch.outdone(Look(done, sent, inside + leaving, dropped, replica.sent))

    def _note_cache(self, pool: Pool, replica: Replica, told: str | None) -> None:
        if told is not None:
            replica.facts = dataclasses.replace(replica.facts, prefix_cache=told.lower() in ("true", "1"))

    async def _ask(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> tuple[Outcome, str]:
        since = asyncio.get_running_loop().time()
        try:
            answer = await http.get(replica.url + pool.engine.PROBE, headers=_key(pool))
        except httpx.TimeoutException:
            late = f"{pool.engine.PROBE} did not answer within {self._settings.timeout:g} s"
            if replica.connections.heard >= since:
                return "busy", f"{late}, but answers come"
            return "slow", late
        except httpx.ConnectError as error:
            return "refused" if _refused(error) else "bad", f"no connection: {error}"
        except httpx.HTTPError as error:
            return "bad", f"{pool.engine.PROBE} broke off: {str(error) or type(error).__name__}"
        if answer.is_success:
            return "ok", "answers its probe"
        return "bad", f"{pool.engine.PROBE} answers {answer.status_code}"

    async def _introduce(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        """Learn what a replica that came up is."""
        told = {route: await _json(http, pool, replica, route) for route in ("/v1/models", *pool.engine.ASKS)}
        models = told.pop("/v1/models").get("data")
        if isinstance(models, list):
            replica.models = [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
        replica.facts = pool.engine.facts(told)
        self._fleet.learnt()


def _refused(error: BaseException | None) -> bool:
    """Whether a connection failed because no server listens: the HTTP library wraps what the system said."""
    for _ in range(WRAPPINGS):
        if isinstance(error, BaseExceptionGroup):
            return all(map(_refused, error.exceptions))
        if error is None or isinstance(error, ConnectionRefusedError):
            return error is not None
        error = error.__cause__
    return False


async def _text(http: httpx.AsyncClient, pool: Pool, replica: Replica, route: str) -> str:
    try:
        answer = await http.get(replica.url + route, headers=_key(pool))
    except httpx.HTTPError:
        return ""
    return answer.text if answer.is_success else ""


async def _json(http: httpx.AsyncClient, pool: Pool, replica: Replica, route: str) -> dict[str, Any]:
    try:
        told = json.loads(await _text(http, pool, replica, route) or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _key(pool: Pool) -> dict[str, str]:
    key = pool.settings.api_key
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
