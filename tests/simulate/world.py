"""One seed: three gateways, one store, four replicas, two hundred requests, and what goes wrong on the way.

The gateways are the real ones, from their ASGI carrier to the bytes that they write to the store and the replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from gateway.assembly import Gateway
from gateway.carriers.asgi import DataPlane
from gateway.settings import Settings
from gateway.shared import scripts
from gateway.shared.deeds import GATEWAYS
from tests.simulate import faults
from tests.simulate.clients import SIZES, Clients, Kind
from tests.simulate.door import Visit
from tests.simulate.engine import Engine, Inside
from tests.simulate.loop import Halted, Loop, Process
from tests.simulate.network import Network
from tests.simulate.server import Server

SPAN = 16.0
"""Seconds in which faults begin."""

LEASE = 3.0
PATIENCE = 100.0
"""Seconds in which every request must have ended."""

REST = 20.0
"""Seconds in which all must come to rest when everybody was answered."""

EPOCH = 1_800_000_000
POLICY_LIMIT = 3
RUN = "simulated"
STATE = scripts.keys(RUN, "")[0]


@dataclass(frozen=True)
class Claimed:
    """An answer of the store to who asked for an index. `index` -1: wait, another is in flight."""

    at: float
    epoch: int
    memory: bytes
    """Which memory of the store it was: epochs may have the same number where nobody knew of the former."""
    session: bytes
    scope: bytes
    index: int
    raw: bytes
    owner: tuple[str, bytes]
    """Whose the index is: the bytes, the number or the key that it goes to alone."""
    repeat: int
    reused: bool
    waited: bool
    """It had asked before, and was told to wait for a rival."""
    fenced: bool
    """It was told that the store may have forgotten."""


@dataclass(eq=False)
class Member:
    """One gateway, as one process."""

    process: Process
    gateway: Gateway
    door: DataPlane
    visits: list[Visit] = field(default_factory=list)
    ready: bool = False

    def left(self) -> dict[str, int]:
        """What is in flight, waits or is owed in it, where there is any."""
        gateway: Any = self.gateway
        runs, replicas = gateway._store._runs.values(), list(gateway.fleet.replicas)
        counts = {
            "requests": gateway.pipeline.serving,
            "sendings": len(gateway.pipeline.dispatcher.live),
            "waiting": sum(run.waiting for run in runs),
            "owed": gateway._store.owed,
            "held": sum(len(run._held) + len(run._issued) + len(run._drawn) for run in runs),
            "loads": sum(replica.load for replica in replicas),
            "inside": sum(replica.inside for replica in replicas),
            "leaving": sum(replica.leaving for replica in replicas),
            "gates": sum(pool.gate.inside + pool.gate.waiting for pool in gateway.fleet),
            "places": sum(len(pool.lanes.places._claims) for pool in gateway.fleet),
            "sessions": len(gateway.sessions._busy),
        }
        return {what: count for what, count in counts.items() if count}


@cache
def _settings(profile: str) -> Settings:
    def pool(name: str, lane: dict[str, Any], **more: Any) -> dict[str, Any]:
        replicas = [{"name": f"{name}-{number}", "url": f"http://{name}-{number}"} for number in range(2)]
        return {"name": name, "engine": "vllm", "models": [name], "deterministic": "declared", "lane": lane} | {
            "replicas": replicas,
            **more,
        }

    given = {
        "seed": 42,
        "profile": profile,
        "run": RUN,
        "state": "redis://store:6379/0",
        "routing": {"on_home_down": "next"},
        "timeouts": {"gateway": LEASE, "store": 1.0, "settle": 1.0, "dead": 4.0},
        "pools": [
            pool("policy", {"scope": "pool", "limit": POLICY_LIMIT}),
            pool("reward", {"scope": "replica", "limit": 1}, role="reward"),
        ],
    }
    return Settings.load(None, {}, given)


class World:
    """Everything of one seed. `run` plays it; the fields hold what came of it."""

    def __init__(self, seed: int, *, sizes: dict[Kind, tuple[int, int]] = SIZES, trace: list[str] | None = None):
        self.seed = seed
        self.lines = trace
        self._digest = hashlib.blake2b(digest_size=16)
        self.chance = random.Random(f"world {seed}")
        self.profile = self.chance.choice(["balanced", "balanced", "strict"])
        self.loop = Loop(seed)
        self.network = Network(self.loop, seed, self.trace)
        self.engines: dict[str, Engine] = {}
        for pool in ("policy", "reward"):
            for number in range(2):
                name = f"{pool}-{number}"
                engine = self.engines[name] = Engine(name, pool, self.network, seed, self._entered)
                self.network.listen(name, engine)
        self._servers = 0
        self.server = self._serve(None)
        self.members: dict[str, Member] = {}
        self.gone: list[Member] = []
        self.clients: Clients
        self._sizes = sizes
        self.folder = Path(tempfile.mkdtemp(prefix="simulate-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.shares = self.chance.random() < 0.5
        """The gateways share a ledger folder."""
        self._started = self._starting = 0
        self.errors: list[str] = []
        """What the gateways logged as errors of their own, and what did not end."""
        self.crowded: list[str] = []
        """Moments at which more was in a batch than a lane allows, unsaid."""
        self.struck: list[str] = []
        """Faults, as they happened."""
        self.losses = 0
        """How often the store may have forgotten."""
        self.lost_at = -1.0
        """When it may have for the last time."""
        self.unknowing = False
        """Once nobody could know what was lost: some that came back first had not heard of all that served."""
        self.crashes = 0
        self.claims: list[Claimed] = []
        self.noted: dict[tuple[str, bytes, int], set[bytes]] = defaultdict(set)
        """Gateway, scope and index → claims of which the store has noted that their answers are delivered."""
        self._tokens: dict[tuple[bytes, bytes], tuple[bytes, int]] = {}
        self.halted = False

    @property
    def may_fence(self) -> bool:
        """Whether a session may have been forgotten in part: a gateway may have been too late to tell of it."""
        late = re.compile("crash|freeze|stall")
        return self.losses > 0 or (self._servers > 1 and any(late.search(fault) for fault in self.struck))

    @property
    def epochs_began(self) -> bool:
        """Whether there was more than one memory of the store."""
        return self._servers > 1 or self.losses > 0

    # --- what is told
    def trace(self, line: str) -> None:
        line = f"{self.loop.time():.6f} {line}"
        self._digest.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """Stands for all that happened, in its order."""
        return self._digest.hexdigest()

    # --- its parts
    def _clock(self) -> int:
        return EPOCH * 1_000_000 + int(self.loop.time() * 1_000_000)

    def _serve(self, before: Server | None) -> Server:
        self._servers += 1
        server = Server(self._servers, self._clock, before)
        server.ran = lambda source, args, reply: self._ran(server, source, args, reply)
        self.network.listen("store", server)
        return server

    def _ran(self, server: Server, source: bytes, args: list[bytes], reply: Any) -> None:
        """A script was run: what it gave to whom."""
        if source == scripts.COMPLETE.source.encode():
            gateway, _, _, token = args
            kept = server.keyspace.hget(scripts.keys(RUN, gateway.decode())[2], token)
            if kept is not None and kept[16:17] == b"e":
                scope, index = self._tokens[gateway, token]
                self.noted[gateway.decode(), scope, index].add(token)
        if source != scripts.CLAIM.source.encode() or reply[0] not in (b"index", b"wait"):
            return
        gateway, _, token, scope, session, _, raw, content, number, key, repeat, mode, *_ = args
        owner = ("key", key) if key else ("number", number + content) if number else ("bytes", raw)
        index = int(reply[1]) if reply[0] == b"index" else -1
        if index < 0 and reply[1] != b"racing":
            return
        self._tokens[gateway, token] = scope, index
        epoch, memory = server.keyspace.hmget(STATE, b"@epoch", b"@memory")
        reused, fenced = (bool(reply[2]), bool(reply[6])) if index >= 0 else (False, False)
        self.claims.append(
            Claimed(
                self.loop.time(),
                int(epoch or 0),
                memory or b"",
                session,
                scope,
                index,
                raw,
                owner,
                int(repeat),
                reused,
                bool(int(mode) & 2),
                fenced,
            )
        )

    def _entered(self, engine: Engine, inside: Inside) -> None:
        """A request is in a batch: the lane's bound holds, or its answer will say that it may not."""
        self.trace(f"{engine.name} takes {inside.name} as {inside.engine_id} seed {inside.seed}")
        others = engine.inside
        if engine.pool == "policy":
            # Of several in a batch an engine does not tell which it has left: here those count that somebody wants.
            alike = [other for other in self.engines.values() if other.pool == "policy"]
            others = [each for other in alike for each in other.inside if each.wanted]
        others = [each for each in others if not self._untold(each)]
        if len(others) <= (POLICY_LIMIT if engine.pool == "policy" else 1):
            return
        member = self.members.get(inside.gateway)
        sending = None if member is None else member.gateway.pipeline.dispatcher.live.get(inside.engine_id)
        if sending is None or "lane-uncertain" not in sending.job.flags:
            who = ", ".join(f"{each.name} of {each.gateway} since {each.since:.3f}" for each in others)
            self.crowded.append(f"{self.loop.time():.3f} {engine.name}: {who}")

    def _untold(self, inside: Inside) -> bool:
        """Whether the store may have forgotten the place of a request, whose gateway stands still and cannot tell."""
        member = self.members.get(inside.gateway)
        return self.epochs_began and member is not None and member.process.still_until > self.loop.time()

    async def _start(self, *, elsewhere: bool = False) -> None:
        """One more gateway. `elsewhere`: in a folder that none had."""
        name = f"gateway-{self._started}"
        self._started += 1
        process = Process(name)
        made: asyncio.Future[Member] = self.loop.create_future()

        async def life() -> None:
            folder = self.folder / ("shared" if self.shares else f"part-{int(name.split('-')[1]) % 3}")
            if elsewhere:
                folder = self.folder / name
            settings = _settings(self.profile)
            settings = settings.model_copy(update={"ledger": settings.ledger.model_copy(update={"path": folder})})
            gateway = Gateway(settings)
            member = self.members[name] = Member(process, gateway, DataPlane(gateway, _nothing))
            made.set_result(member)
            async with gateway.running():
                await gateway.knows_its_world(5.0)
                member.ready = True
                await asyncio.Event().wait()

        process.context.run(lambda: self.loop.create_task(life(), name=name))
        await made

    def _ask(self, gateway: str, scope: Any, body: bytes, cut: bool) -> Visit:
        member = self.members[gateway]
        visit = Visit(self.network, member.process, member.door, scope, body, cut=cut)
        member.visits.append(visit)
        return visit

    def _ready(self) -> list[str]:
        return [name for name, member in self.members.items() if member.ready]

    # --- what goes wrong
    async def _strike(self, plan: list[faults.Fault]) -> None:
        for fault in plan:
            await asyncio.sleep(max(0.0, fault.at - self.loop.time()))
            names = list(self.members)
            if not names:
                continue
            name = names[fault.who % len(names)]
            self.struck.append(f"{self.loop.time():.3f} {fault.kind} {name} {fault.steps} {fault.seconds}")
            self.trace(f"fault {fault}")
            self._do(fault, name)

    def _do(self, fault: faults.Fault, name: str) -> None:
        process, seconds, network = self.members[name].process, fault.seconds, self.network
        engine = list(self.engines.values())[fault.who % len(self.engines)]
        match fault.kind:
            case "crash":
                process.strike(fault.steps, lambda: self._crash(name, seconds))
            case "freeze":
                process.strike(fault.steps, lambda: setattr(process, "still_until", self.loop.time() + seconds))
            case "leave":
                process.strike(fault.steps, lambda: self._leave(name, fault.who))
            case "flap":
                engine.die()
                network.cut(engine.name)
                self.loop.call_later(seconds, setattr, engine, "up", True)
            case "breaks":
                engine.break_next = 1 + fault.who % 4
            case "slow":
                engine.slow = 4.0
                self.loop.call_later(seconds, setattr, engine, "slow", 1.0)
            case "stall-in" if fault.who % 2:
                network.hold(name, "store", seconds)
            case "stall" | "stall-in" | "stall-out":
                if fault.kind != "stall-out":
                    network.stall(name, "store", seconds)
                if fault.kind != "stall-in":
                    network.stall("store", name, seconds)
            case "cut":
                process.strike(fault.steps, lambda: network.cut("store", name))
            case "error":
                self.server.fail = [b"OOM command not allowed when used memory > 'maxmemory'."] * (1 + fault.who % 3)
            case "flush":
                self._loses()
                self.server.keyspace.flushall()
            case "lossless":
                self._failover(seconds / 10, self.server.keyspace.copied())
            case "lossy":
                self._loses()
                had = self.server.keyspace.copied() if fault.who % 3 else ({}, {})
                self.loop.call_later(seconds / 5, lambda: self._failover(0.1, had))
            case "blackout":
                had = self.server.keyspace.copied() if fault.who % 3 == 0 else ({}, {})
                self.loop.call_later(seconds / 5, lambda: self._black_out(seconds, had, fault.who % 4 == 3))

    def _loses(self) -> None:
        self.losses += 1
        self.lost_at = self.loop.time()

    def _black_out(self, seconds: float, had: tuple[Any, Any], elsewhere: bool) -> None:
        """The store goes, and every gateway; one after the other they come back.

        `elsewhere`: the first that comes has a folder that none had.
        """
        stores: list[Any] = [member.gateway._store for member in (*self.members.values(), *self.gone)]
        served = {store.gateway for store in stores}
        known = [served <= set(file.read_text().split()) for file in self.folder.glob(f"*/{RUN}/{GATEWAYS}")]
        self.unknowing |= elsewhere or not all(known)
        self._loses()
        self._failover(0.1, had)
        if elsewhere:
            self._come_back(0.2, elsewhere=True)
        for number, name in enumerate(list(self.members), 1):
            self._crash(name, number * seconds)

    def _failover(self, seconds: float, had: tuple[Any, Any]) -> None:
        """Another server is in its place after some time."""
        before = self.server
        before.up = False
        self.network.cut("store")
        self.server = self._serve(before)
        self.server.keyspace.data, self.server.keyspace.ends = had
        self.server.up = False
        self.loop.call_later(seconds, setattr, self.server, "up", True)

    def _crash(self, name: str, seconds: float) -> None:
        member = self.members.pop(name, None)
        if member is None:
            return
        self.trace(f"crash {name}")
        self.crashes += 1
        self.loop.forget(member.process)
        self.network.vanish(member.process)
        _closed_by_the_system(member)
        self.gone.append(member)
        for visit in member.visits:
            visit.reset()
        self._come_back(seconds)

    def _come_back(self, seconds: float, *, elsewhere: bool = False) -> None:
        again = self._again(seconds, elsewhere)
        self.loop.call_soon(lambda: self.loop.create_task(again, name="again"), context=self.loop.world.context)

    async def _again(self, seconds: float, elsewhere: bool) -> None:
        self._starting += 1
        await asyncio.sleep(seconds)
        await self._start(elsewhere=elsewhere)
        self._starting -= 1

    def _leave(self, name: str, which: int) -> None:
        """A client of this gateway leaves now."""
        visits = [visit for visit in self.members[name].visits if visit in self.clients.open and not visit.over]
        if visits:
            visits[which % len(visits)].leave()

    # --- all of it
    def run(self) -> None:
        """Play it to its end."""
        with _own(self):
            asyncio.set_event_loop(self.loop)
            try:
                playing = self.loop.world.context.run(lambda: self.loop.create_task(self._play(), name="play"))
                self.loop.run_until_complete(playing)
            except Halted as halted:
                self.errors.append(str(halted))
                self.halted = True
            finally:
                asyncio.set_event_loop(None)

    async def _play(self) -> None:
        await asyncio.gather(*(self._start() for _ in range(3)))
        async with asyncio.timeout(PATIENCE):
            while len(self._ready()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        self.trace("ready")
        self.clients = Clients(self.loop, self.seed, self._ready, self._ask, self._sizes)
        striking = self.loop.create_task(self._strike(faults.plan(self.seed, SPAN)), name="faults")
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await self.clients.run()
        await striking
        for request in self.clients.requests:
            self.trace(f"{request.name} {request.done} {[(each.outcome, each.status) for each in request.attempts]}")
        # Leases end, engines let go, what is owed is told.
        rest = self.loop.time() + REST
        while self.loop.time() < rest:
            await asyncio.sleep(LEASE / 2)
            if not (self._starting or self.live_keys() or any(each.left() for each in self.members.values())):
                break

    def live_keys(self) -> list[bytes]:
        """What the store has of claims and of places."""
        live = re.compile(rb"\}:claims:|:(in|queue|round|next)$|:places:")
        return [key for key in self.server.keyspace.data if live.search(key)]

    def close(self) -> None:
        """Nothing of it is left."""
        self.loop._going.clear()
        for member in (*self.gone, *self.members.values()):
            if member in self.gone or member.process.alive:
                _closed_by_the_system(member)
            member.process.alive = False
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.set_exception_handler(lambda loop, context: None)
        shutil.rmtree(self.folder, ignore_errors=True)


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(f"no route of the data plane: {scope['path']}")


def _closed_by_the_system(member: Member) -> None:
    """The files of a process that is gone: what it held back is lost."""
    for run in member.gateway.runs._open.values():
        ledger = run.ledger
        if ledger._fd >= 0:
            os.close(ledger._fd)
            ledger._fd = -1
        ledger._write = lambda: None  # type: ignore[method-assign]
    store: Any = member.gateway._store
    for shared in store._runs.values():
        shared.hide()


class _Entropy:
    """Stands for `secrets`: other words each time, the same in each run."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"secrets {seed}")

    def token_hex(self, count: int) -> str:
        return self._chance.randbytes(count).hex()


class _Clock:
    """Stands for `time`."""

    def __init__(self, loop: Loop) -> None:
        self.monotonic = loop.time
        self._loop = loop

    def time(self) -> float:
        return EPOCH + self._loop.time()


@contextmanager
def _own(world: World) -> Iterator[None]:
    """The gateway's modules see this world's time and chance."""
    entropy, clock = _Entropy(world.seed), _Clock(world.loop)

    def note(logger: Any, method: str, event: Any) -> Any:
        if event.get("exc_info") or event["event"] in ("task failed", "request failed"):
            world.errors.append(f"{event['event']}: {event.get('exc_info') or event}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[_with_error, note], cache_logger_on_first_use=False)
    logging.getLogger("asyncio").disabled = True
    with (
        mock.patch("os.getpid", return_value=1),
        mock.patch("socket.gethostname", return_value="host"),
        mock.patch("gateway.shared.lanes.secrets", entropy),
        mock.patch("gateway.shared.events.secrets", entropy),
        mock.patch("gateway.stores.redis.secrets", entropy),
        mock.patch("gateway.shared.lanes.time", clock),
        mock.patch("gateway.record.time", clock),
        mock.patch("gateway.stores.redis.time", clock),
    ):
        try:
            yield
        finally:
            logging.getLogger("asyncio").disabled = False
            structlog.configure(**before)


def _with_error(logger: Any, method: str, event: Any) -> Any:
    if method == "exception" or event.get("exc_info") is True:
        event["exc_info"] = repr(sys.exc_info()[1])
    return event
