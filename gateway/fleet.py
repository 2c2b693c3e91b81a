"""The pools and their replicas as they are now: who serves a request, who is up, how much each carries."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway import engines, findings
from gateway.core import routing
from gateway.core.errors import Busy, CallerFault, ModelNotFound, NotFound
from gateway.core.types import Facts, Handling
from gateway.core.vitals import Outcome, State, Vitals
from gateway.findings import Finding, Told
from gateway.gates import Gate
from gateway.lanes import Lanes
from gateway.settings import InvalidSettings, Settings
from gateway.settings import Pool as PoolSettings
from gateway.settings import Replica as ReplicaSettings
from gateway.upstream import Blame, Connections

SESSIONS_KEPT = 100_000
"""Sessions whose first replica is remembered, with `routing.key: session` and a finite slack."""


class Replica:
    """One inference server. `load` is this gateway's own count of what is on its way to it and in it."""

    def __init__(
        self, settings: ReplicaSettings, pool: PoolSettings, everything: Settings, turned: Callable[[], None]
    ) -> None:
        """`turned`: called whenever it may have become usable or ceased to be."""
        self.settings = settings
        self.name = settings.name
        self.url = settings.url
        self.pool = pool.name
        self.load = 0
        self.inside = 0
        """Of these, the requests for the engine that were sent and have not ended."""
        self.most_inside = 0
        """The most that were inside at once since this was last set."""
        self.leaving = 0
        """Requests that were given up and that the engine may not have left yet."""
        self.sent = 0
        """Requests for the engine that were sent."""
        self.dropped = 0
        """Of these, those that were given up before their answer had ended."""
        health = everything.health
        self.vitals = Vitals(health.failures, health.successes, health.breaks)
        self.reason = "not probed yet"
        self.refusals = 0
        """Sendings to which no server listened."""
        self._draining = False
        self._turned = turned
        self.facts = Facts()
        self.models: list[dict[str, Any]] | None = None
        self.connections = Connections(
            settings.url,
            connect_seconds=everything.timeouts.connect,
            tls=pool.tls,
            answer_bytes=everything.limits.answer_bytes,
        )
        self.foreign = False
        """Its own metrics tell of more requests than this gateway sent."""
        self.fingerprint = ""
        """Which engine it is, as far as it tells; "" while it has not been asked."""
        self.known = False
        """It has answered all that it was asked about itself."""
        self.accepted = ""
        """The fingerprint that it had first, or that an operator accepted since."""
        self.verified: bool | None = None
        """Whether canaries passed on this engine; None where that was not tried."""
        self.reasons: tuple[str, ...] = ()
        """What its answers say in X-Detgate-Guarantee."""
        self.preempted_at = -math.inf
        """When it was last seen that requests in it had been preempted, by the loop's clock."""
        self.changed = asyncio.Event()
        address = self.connections.address
        self.prefix = address.prefix.encode()
        """What stands before a route in the replica's paths."""
        head = [f"host: {address.authority}\r\naccept-encoding: identity\r\n".encode()]
        if pool.api_key is not None:
            head.append(f"authorization: Bearer {pool.api_key.get_secret_value()}\r\n".encode())
        if settings.dp_rank is not None:
            head.append(f"x-data-parallel-rank: {settings.dp_rank}\r\n".encode())
        self.head = b"".join(head)
        """The headers that every request to this replica carries."""

    @property
    def state(self) -> State:
        return self.vitals.state

    @property
    def up(self) -> bool:
        """Requests that belong here may be sent."""
        return self.vitals.serves

    @property
    def draining(self) -> bool:
        """It gets nothing more; what is in flight ends."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._turned()

    @property
    def usable(self) -> bool:
        return self.vitals.serves and not self._draining

    def probed(self, outcome: Outcome, reason: str) -> bool:
        """Note a probe; True if the state changed."""
        before = self.vitals.state, self.vitals.serves
        self.vitals.probed(outcome)
        if outcome == "ok" and self.vitals.state == "down":
            self.reason = f"answers its probe again, and is up after {self.vitals.successes} that pass in a row"
        elif outcome != "ok" or not self.vitals.tripped:
            self.reason = reason
        if (self.vitals.state, self.vitals.serves) == before:
            return False
        self.tell()
        return before[0] != self.vitals.state

    @property
    def replaced(self) -> bool:
        """It is another engine than the one that was accepted."""
        return self.fingerprint not in ("", self.accepted)

    @property
    def told(self) -> Told:
        """All that findings depend on."""
        return Told(
            self.facts,
            self.fingerprint,
            pinned=self.settings.dp_rank is not None,
            foreign=self.foreign,
            verified=self.verified,
            changed=self.replaced,
        )

    def enter(self) -> None:
        """A request for the engine was sent here."""
        self.sent += 1
        self.inside += 1
        if self.inside > self.most_inside:
            self.most_inside = self.inside

    def leave(self, *, complete: bool) -> None:
        """It ended here, or was given up."""
        self.inside -= 1
        self.dropped += not complete

    def chosen(self) -> None:
        """A request is on its way here."""
        if self.vitals.chosen():
            self._turned()

    def served(self) -> None:
        """A request was answered here."""
        if self.vitals.served():
            self.tell()

    def failed(self, blame: Blame, reason: str) -> None:
        """A sending broke. Where no server listens the replica is down; breaks in a row open the breaker."""
        if blame == "refused":
            self.refusals += 1
            self.probed("refused", reason)
        elif blame == "broke" and self.vitals.broke():
            self.reason = f"{self.vitals.breaks} requests in a row broke on it; the last: {reason}"
            self.tell()

    def tell(self) -> None:
        """Wake whoever waits for this replica to change."""
        self._turned()
        self.changed.set()
        self.changed = asyncio.Event()


class Pool:
    """Replicas that serve the same models on the same engine, and the rule by which one is chosen."""

    def __init__(self, settings: PoolSettings, everything: Settings) -> None:
        self.settings = settings
        self.name = settings.name
        self.role = settings.role
        self.engine = engines.load(settings.engine)
        self.routing = settings.routing
        self.declared = settings.deterministic == "declared"
        self.isolates = settings.isolate_cache != "off"
        """What is in the engine's prefix cache is kept apart by a salt."""
        self._everything = everything
        self._usable: dict[str, Replica] = {}
        self._homes: list[str] = []
        self._outdated = True
        """A replica turned since these two were looked up."""
        self.replicas: dict[str, Replica] = {}
        for replica in settings.replicas:
            self.add(replica)
        self.facts = Facts()
        self.findings: list[Finding] = []
        self.contradicts: str | None = None
        """What was found against determinism, so that strict must refuse; None where nothing was."""
        lane = settings.lane
        self.lanes = Lanes(
            settings.name, lane.scope, lane.limit, everything.limits.queue, episodes=lane.members == "episode"
        )
        self.gate = Gate(settings.name, everything.limits.queue)
        self._firsts: OrderedDict[str, str] = OrderedDict()

    @property
    def stable(self) -> bool:
        """Whether a key has a home: the choice depends on no load."""
        return self.routing.slack == math.inf

    @property
    def fixed_home(self) -> bool:
        """Whether a request goes to its home or nowhere."""
        return self.stable and self.routing.on_home_down != "next"

    @property
    def inside(self) -> int:
        """Requests that are in the engines, or were given up and may still be."""
        return self.gate.inside + sum(replica.leaving for replica in self.replicas.values())

    @property
    def told(self) -> dict[str, Told]:
        """What is known of each replica."""
        return {name: replica.told for name, replica in self.replicas.items()}

    def learn(self) -> None:
        """Put together what is known of the replicas, and judge it. Where facts differ the dangerous one counts."""
        self.judge()
        told = [replica.facts for replica in self.replicas.values()]
        if len(told) == 1:
            self.facts = told[0]
            return
        self.facts = Facts(
            deterministic=_all([facts.deterministic for facts in told], dangerous=True),
            is_generation=_all([facts.is_generation for facts in told], dangerous=False),
            default_min_p=max((facts.default_min_p or 0.0 for facts in told), default=None),
            priority_scheduling=_all([facts.priority_scheduling for facts in told], dangerous=None),
        )

    def judge(self) -> None:
        """Find what breaks determinism, with what is known now."""
        self._agree()
        self.findings = findings.judge(self.settings, self.told)
        fatal = (finding.text for finding in self.findings if finding.severity == "fatal")
        self.contradicts = next(fatal, None)
        for name, reasons in findings.reasons(self.findings, self.replicas).items():
            self.replicas[name].reasons = reasons

    def accept(self, name: str, fingerprint: str) -> Replica:
        """Take this engine for the one that a replica should be."""
        replica = self.replicas[name]
        replica.accepted = fingerprint
        self.judge()
        return replica

    def _agree(self) -> None:
        """A pool whose replicas are all alike is as it was meant to be, whatever each of them was before."""
        prints = {replica.fingerprint for replica in self.replicas.values()}
        if len(self.replicas) > 1 and len(prints) == 1:
            for replica in self.replicas.values():
                replica.accepted = replica.fingerprint

    def elsewhere(self, avoid: Iterable[str]) -> bool:
        """Whether a broken request may be sent again: to its home, or to a replica not tried yet."""
        return self.fixed_home or self.has_other(avoid)

    def has_other(self, avoid: Iterable[str]) -> bool:
        """Whether a request may go to a replica not tried yet."""
        return not self.fixed_home and any(r.usable and r.name not in avoid for r in self.replicas.values())

    def why_down(self) -> str:
        """Each replica and what keeps it from serving, for an error's text."""
        return " ".join(
            f"{replica.name}: {'draining' if replica.draining else replica.reason}."
            for replica in self.replicas.values()
        )

    def kept(self, key: str) -> Replica | None:
        """The replica that a session was first sent to; None where it has none yet, or that one is gone."""
        name = self._firsts.get(key)
        if name is None:
            return None
        self._firsts.move_to_end(key)
        replica = self.replicas.get(name)
        return replica if replica is not None and replica.usable else None

    def keep(self, key: str, replica: Replica) -> None:
        """Note where a session was first sent to."""
        self._firsts[key] = replica.name
        if len(self._firsts) > SESSIONS_KEPT:
            self._firsts.popitem(last=False)

    @property
    def models(self) -> set[str] | None:
        """Names of the models served; None while nobody has said."""
        if self.settings.models:
            return set(self.settings.models)
        told = [replica.models for replica in self.replicas.values() if replica.models is not None]
        return {str(model.get("id")) for models in told for model in models} if told else None

    def home(self, key: str) -> Replica:
        """The replica with the highest score for `key` among all that are configured and not drained.

        Raises `Busy` where there is none.
        """
        self._look()
        if not self._homes:
            raise Busy(f"Every replica of pool {self.name} is drained.", code="no_healthy_replica", retry_after=2)
        return self.replicas[routing.best(key, self._homes)]

    def at_home(self, key: str, usable: Sequence[str]) -> bool:
        """Whether the first of these, which is the best of all that are usable, is the home of `key`."""
        self._look()
        return len(usable) == len(self._homes) or usable[0] == self.home(key).name

    def add(self, settings: ReplicaSettings) -> Replica:
        """Take a replica in. It gets requests once it answers its probes; who waits for a home may have another now."""
        replica = Replica(settings, self.settings, self._everything, self._turned)
        self.replicas[settings.name] = replica
        for each in self.replicas.values():
            each.tell()
        return replica

    def drain(self, name: str) -> Replica:
        """Send nothing more to a replica; what is in flight ends. Its keys move as if it were gone."""
        replica = self.replicas[name]
        replica.draining = True
        replica.tell()
        return replica

    def remove(self, name: str) -> Replica:
        """Take a replica out. What is in flight there ends as it would have."""
        replica = self.drain(name)
        del self.replicas[name]
        replica.connections.close()
        return replica

    def usable(self, without: Collection[str] = ()) -> Mapping[str, Replica]:
        """The usable replicas, but for those in `without`."""
        self._look()
        if not without:
            return self._usable
        return {name: replica for name, replica in self._usable.items() if name not in without}

    def ranked(self, key: str, usable: Mapping[str, Replica]) -> tuple[list[str], dict[str, int] | None]:
        """The candidates among these replicas, the best first, and the loads of all if the choice depends on them."""
        if self.stable:
            return routing.order(key, usable), None
        loads = {name: replica.load for name, replica in usable.items()}
        return routing.ranked(key, loads, self.routing.slack), loads

    def _turned(self) -> None:
        self._outdated = True

    def _look(self) -> None:
        """Look up which replicas are usable and which may be homes. A request must not ask each of hundreds."""
        if self._outdated:
            self._usable = {name: replica for name, replica in self.replicas.items() if replica.usable}
            self._homes = [name for name, replica in self.replicas.items() if not replica.draining]
            self._outdated = False


def _made(place: int, pool: PoolSettings, settings: Settings) -> Pool:
    try:
        return Pool(pool, settings)
    except InvalidSettings as error:
        raise InvalidSettings(line.replace("pools[]", f"pools[{place}]", 1) for line in error.lines) from None


class Fleet:
    """All pools."""

    def __init__(self, settings: Settings) -> None:
        self.pools = {pool.name: _made(place, pool, settings) for place, pool in enumerate(settings.pools)}
        self._found: dict[tuple[str, str | None], tuple[Pool, Handling]] = {}
        """Bounded by the models served: a named pool takes any model, so what is found there is not kept."""

    def __iter__(self) -> Iterator[Pool]:
        return iter(self.pools.values())

    @property
    def replicas(self) -> Iterator[Replica]:
        """All replicas of all pools."""
        return (replica for pool in self for replica in pool.replicas.values())

    def knows(self, route: str) -> bool:
        """Whether any pool's engine has this route."""
        return any(route in pool.engine.ROUTES for pool in self)

    def methods(self, route: str) -> list[str]:
        """The methods that any pool takes on a route."""
        taken = (handling.methods for pool in self if (handling := pool.engine.ROUTES.get(route)) is not None)
        return list(dict.fromkeys(method for methods in taken for method in methods))

    def find(self, route: str, model: str | None, named: str | None) -> tuple[Pool, Handling]:
        """The pool for a request: by its route, the role that the route needs, its model, or the pool it names.

        Raises `NotFound` for a route that no pool has, `ModelNotFound`, `CallerFault` where several fit or none.
        """
        if named is not None:
            return self._find(route, model, named)
        if (found := self._found.get((route, model))) is not None:
            return found
        found = self._found[route, model] = self._find(route, model, None)
        return found

    def learnt(self) -> None:
        """What the replicas say that they are and serve is another now."""
        self._found.clear()
        for pool in self:
            pool.learn()

    def _find(self, route: str, model: str | None, named: str | None) -> tuple[Pool, Handling]:
        fitting = [pool for pool in self if (handling := pool.engine.ROUTES.get(route)) and _fits(pool, handling)]
        if named is not None:
            if named not in self.pools:
                raise CallerFault(
                    f"There is no pool {named!r}. Pools: {', '.join(self.pools)}.",
                    code="pool_not_found",
                    param="X-Detgate-Pool",
                )
            fitting = [pool for pool in fitting if pool.name == named]
        if not fitting:
            if not self.knows(route):
                raise NotFound(
                    f"No pool's engine has the route {route}. Ask for another, or add a pool of one that has it.",
                    code="route_not_found",
                )
            who = f"Pool {named} cannot" if named is not None else "No pool can"
            raise CallerFault(f"{who} serve {route}: another engine or role is needed.", code="no_pool")
        if model is not None and named is None:
            fitting = _serving(fitting, model)
        if len(fitting) > 1:
            raise CallerFault(
                f"Several pools can serve this: {', '.join(pool.name for pool in fitting)}. "
                "Name the model, or the pool in X-Detgate-Pool.",
                code="ambiguous_pool",
                param="model" if model is None else "X-Detgate-Pool",
            )
        pool = fitting[0]
        return pool, pool.engine.ROUTES[route]


def _fits(pool: Pool, handling: Handling) -> bool:
    return handling.role == "any" or handling.role == pool.role


def _serving(pools: list[Pool], model: str) -> list[Pool]:
    known = [(pool, pool.models) for pool in pools]
    serving = [pool for pool, models in known if models is not None and model in models]
    if serving:
        return serving
    if any(models is None for _, models in known):
        raise Busy("The replicas have not said yet which models they serve.", code="models_unknown")
    names = sorted({name for _, models in known for name in models or ()})
    raise ModelNotFound(f"No pool serves the model {model!r}. Served: {', '.join(names)}.", param="model")


def _all(told: list[bool | None], *, dangerous: bool | None) -> bool | None:
    if dangerous in told:
        return dangerous
    return told[0] if len(set(told)) == 1 else None
