"""Asks every replica whether it lives and what it is. Probes never generate a token."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import structlog

from gateway.core.vitals import Outcome, Vitals
from gateway.fleet import Fleet, Pool, Replica
from gateway.settings import Settings
from gateway.upstream import trust

log = structlog.get_logger("detgate.health")

LONGEST_PAUSE = 10.0
"""Seconds between two probes of a replica that has been down for long."""


class Health:
    """One probing loop a replica."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settings = settings.health
        self._vitals: dict[str, Vitals] = {}
        self.probed = asyncio.Event()
        """Every replica was probed once."""

    async def run(self) -> None:
        """Probe for ever."""
        http = httpx.AsyncClient(timeout=self._settings.timeout, verify=trust())
        async with http, asyncio.TaskGroup() as group:
            for pool in self._fleet:
                for replica in pool.replicas.values():
                    group.create_task(self._watch(http, pool, replica))

    async def _watch(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        pause = self._settings.interval
        while True:
            await self.probe(http, pool, replica)
            pause = self._settings.interval if replica.up else min(pause * 1.5, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def probe(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> None:
        """Ask once, and note what comes of it."""
        outcome, reason = await self._ask(http, pool, replica)
        vitals = self._vitals.setdefault(replica.name, Vitals(self._settings.failures, self._settings.successes))
        if replica.state == "down" and vitals.state == "up":
            vitals.refused()
        state = vitals.probed(outcome)
        if state == "up" and replica.models is None:
            await self._introduce(http, pool, replica)
        changed = replica.mark(state, reason)
        if not self.probed.is_set() and all(each.state != "unknown" for each in self._fleet.replicas):
            self.probed.set()
        if changed:
            log.info("replica", pool=pool.name, replica=replica.name, state=state, reason=reason)

    async def _ask(self, http: httpx.AsyncClient, pool: Pool, replica: Replica) -> tuple[Outcome, str]:
        try:
            answer = await http.get(replica.url + pool.engine.PROBE, headers=_key(pool))
        except httpx.TimeoutException:
            return "slow", f"{pool.engine.PROBE} did not answer within {self._settings.timeout:g} s"
        except httpx.ConnectError as error:
            return "refused", f"no connection: {error}"
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


async def _json(http: httpx.AsyncClient, pool: Pool, replica: Replica, route: str) -> dict[str, Any]:
    try:
        answer = await http.get(replica.url + route, headers=_key(pool))
        told = answer.json() if answer.is_success else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _key(pool: Pool) -> dict[str, str]:
    key = pool.settings.api_key
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
