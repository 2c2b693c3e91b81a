"""The gateway put together: every owner of state made once, at start, and handed down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from importlib import import_module
from typing import Any

from gateway import control, stores, tracing, weights
from gateway.carriers.asgi import Application, DataPlane
from gateway.changes import Changes
from gateway.doors import Public
from gateway.fleet import Fleet
from gateway.health import Health
from gateway.intake import Intake
from gateway.ledger import reader
from gateway.ledger.shapes import Unreadable
from gateway.pipeline import Pipeline
from gateway.runs import Runs
from gateway.sessions import Sessions
from gateway.settings import InvalidSettings, Settings
from gateway.siblings import Alone, Host, Siblings, Single
from gateway.silence import Silence
from gateway.tasks import start, stop
from gateway.telemetry import Telemetry
from gateway.ui.clerk import Clerk


class Gateway:
    """All of it. Carriers need `owns`, `serve` and the bounds; servers need `application` and `running`."""

    def __init__(self, settings: Settings, *, resume: bool = False, new_run: bool = False, pictured: int = 0) -> None:
        """`pictured`: the number of the last change that the fleet will be given beside the settings."""
        self.settings = settings
        self.telemetry = Telemetry()
        self.fleet = Fleet(settings)
        store = self._store = stores.build(settings, self.telemetry.store_errors.add)
        self._joint: Any = None
        if store.shared:
            self._joint = import_module("gateway.joint").Joint(settings, store, self.fleet, self.telemetry)
        self.sessions: Sessions = self._joint.sessions if store.shared else Sessions(settings, store)
        self.runs = Runs(settings, store, self.sessions, self.telemetry.ledger_errors.add, resume=resume, new=new_run)
        self.run = self.runs.own.name
        self._tracing = tracing.build(settings)
        self.intake = Intake(settings.limits)
        self.pipeline = Pipeline(
            settings, self.runs, self.sessions, self.fleet, store, self.telemetry, self.intake, self._tracing
        )
        self.health = Health(settings, self.fleet, lambda *told: self.changes.note(*told))
        own = self.runs.own
        self.changes = Changes(self.run, self.fleet, self.health, own.ledger, own.reloaded)
        self.host: Host = Single()
        self._clerk = Clerk(settings)
        try:
            recorded = list(reader.changes(own.folder))
            named = weights.restore(self.fleet, recorded)
            self.changes.restore(() if store.shared else recorded, own.began)
        except Unreadable as fault:
            raise InvalidSettings([f"ledger.path: {fault.message}"]) from None
        self.siblings: Siblings = Alone(self.changes)
        if store.shared:
            running = self.pipeline.dispatcher.running
            joint = import_module("gateway.joint_changes")
            self.siblings = joint.JointSiblings(
                settings, store, self.run, self.fleet, self.changes, running, pictured=pictured, recorded=named
            )
        self.silence = Silence(settings.timeouts, self.pipeline.dispatcher)
        self.head_bytes = settings.limits.head_bytes
        self.body_bytes = settings.limits.body_bytes
        self.head_seconds = settings.timeouts.head
        self.body_seconds = settings.timeouts.body
        self.write_seconds = settings.timeouts.client_write
        self.owns = self.pipeline.owns
        self.serve = self.pipeline.serve
        self.refused = self.telemetry.refusals.add
        self._gauges()

    @property
    def draining(self) -> bool:
        """No request is taken any more."""
        return self.pipeline.draining

    @property
    def application(self) -> Application:
        """The gateway for any ASGI server: all of it, or without what stands on a port of its own."""
        rest: Any = self.administration if self.settings.admin_port is None else Public(self.administration)
        return DataPlane(self, rest)

    @cached_property
    def administration(self) -> Any:
        """The control plane."""
        return control.build(
            self.settings,
            self.runs,
            self.sessions,
            self._store,
            self.fleet,
            self.telemetry,
            self.host,
            self.siblings,
            self._clerk,
            lambda: self.draining,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe while it serves; its runs are ended cleanly afterwards."""
        tasks = [
            start(self._store.run(), "store"),
            start(self.health.run(), "health"),
            start(self.silence.run(), "silence"),
            start(self.sessions.run(), "sessions"),
        ]
        if self._joint is not None:
            tasks.append(start(self._joint.run(), "lanes"))
        try:
            yield
        finally:
            await self.siblings.close()
            if self._joint is not None:
                await self._joint.close()
            await self._store.stop()
            await stop(*tasks)
            for replica in self.fleet.replicas:
                replica.connections.close()
            self.runs.close()
            if self._tracing is not None:
                await self._tracing.close()

    async def knows_its_world(self, seconds: float) -> None:
        """Wait, for a bounded time, until replicas were probed and the store has told what others know."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.health.probed.wait()
                while not self._knows_others():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    def _knows_others(self) -> bool:
        return self._store.why_down(self.run) is None and self.sessions.ready and self.siblings.ready

    def _gauges(self) -> None:
        replica_labels = ("pool", "replica")

        def loads() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((replica.pool, replica.name), replica.load) for replica in self.fleet.replicas)

        def ups() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((replica.pool, replica.name), float(replica.up)) for replica in self.fleet.replicas)

        def waiting() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((pool.name,), pool.lanes.waiting) for pool in self.fleet)

        def sessions() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self.sessions.live),)

        def connections() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self.intake.connections),)

        def held_bytes() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self.intake.bytes),)

        def scopes() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self._store.scopes),)

        def readings() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self._clerk.reading),)

        def owed() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((), self._store.owed),)

        def refused() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((what,), number) for what, number in self._store.refused.items())

        add = self.telemetry.gauge
        add("detgate_in_flight", "Requests on their way to a replica or in it.", replica_labels, loads)
        add("detgate_replica_up", "1 while a replica answers its probes.", replica_labels, ups, "min")

        def insides() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((pool.name,), pool.inside) for pool in self.fleet)

        def paused() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((pool.name,), float(pool.gate.shut)) for pool in self.fleet)

        def paused_since() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((pool.name,), pool.gate.since or 0.0) for pool in self.fleet)

        def held_back() -> Iterable[tuple[tuple[str, ...], float]]:
            return (((pool.name,), pool.gate.waiting) for pool in self.fleet)

        add("detgate_inside", "Requests in the engines, or given up and perhaps still there.", ("pool",), insides)
        add("detgate_paused", "1 while weights are changed and requests held back.", ("pool",), paused, "max")
        since = "When that began, in seconds since 1970; 0: they are not."
        add("detgate_paused_since_seconds", since, ("pool",), paused_since, "max")
        add("detgate_paused_waiting", "Requests that wait for that.", ("pool",), held_back)
        add("detgate_lane_waiting", "Requests that wait in lanes.", ("pool",), waiting)
        add("detgate_connections", "Connections of clients that are open.", (), connections)
        add("detgate_held_bytes", "Bytes of request bodies that are held.", (), held_bytes)
        add("detgate_scopes", "Counters in memory.", (), scopes)
        add("detgate_store_owed", "Ends of claims that the store could not be told yet.", (), owed)
        add("detgate_store_refused", "Runs or pools whose keys the store refuses, by what for.", ("keys",), refused)
        add("detgate_readings", "Ledgers that are being read for pages.", (), readings)
        add("detgate_sessions", "Sessions that were created and have not ended.", (), sessions, "max")
