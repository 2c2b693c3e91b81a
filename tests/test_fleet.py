"""Which pool serves a request, what its replicas make of it together, and which of them the rule gives."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core import routing
from gateway.core.errors import Busy, CallerFault, Fault, ModelNotFound, NotFound
from gateway.core.types import Facts
from gateway.core.vitals import Outcome
from gateway.fleet import Fleet, Pool, Replica
from gateway.settings import Replica as ReplicaSettings
from gateway.settings import Settings
from gateway.upstream import Blame
from tests.harness import MODEL, FakeWorker, Reply, Seen, chat, gateway, pool

CHAT = "/v1/chat/completions"


def fleet(*pools: dict[str, Any], **settings: Any) -> Fleet:
    """A fleet that nothing has probed yet."""
    return Fleet(Settings.load(None, {}, {"pools": list(pools)} | settings))


def urls(count: int) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in range(1, count + 1)]


def policy(count: int, **settings: Any) -> Pool:
    """A pool whose replicas, policy-0 and so on, are all up."""
    made = fleet(pool("policy", *urls(count)), **settings).pools["policy"]
    for replica in made.replicas.values():
        replica.probed("ok", "answers its probe")
    return made


# --- the pool of a request


def served(*models: str) -> list[dict[str, Any]]:
    return [{"id": model} for model in models]


@pytest.fixture
def mixed() -> Fleet:
    """Two policies, a reward pool that serves the first one's model, and an SGLang pool that tells its models."""
    (url,) = urls(1)
    return fleet(
        pool("large", url, models=["large", "both"]),
        pool("small", url, models=["small", "both"]),
        pool("reward", url, models=["large"], role="reward"),
        pool("told", url, models=[], engine="sglang"),
    )


@pytest.mark.parametrize(
    ("route", "model", "named", "found"),
    [
        (CHAT, "large", None, "large"),
        (CHAT, "small", None, "small"),
        ("/classify", "large", None, "reward"),
        ("/classify", None, None, "reward"),
        ("/generate", None, None, "told"),
        (CHAT, "both", "small", "small"),
        (CHAT, None, "large", "large"),
        (CHAT, "a-model-that-only-the-engine-knows", "large", "large"),
        ("/tokenize", "small", None, "small"),
    ],
)
def test_a_request_goes_to_the_pool_of_its_route_its_model_or_its_own_choice(
    mixed: Fleet, route: str, model: str | None, named: str | None, found: str
) -> None:
    chosen, handling = mixed.find(route, model, named)
    assert chosen.name == found
    assert handling is chosen.engine.ROUTES[route]


@pytest.mark.parametrize(
    ("route", "model", "named", "kind", "code", "param"),
    [
        ("/v1/nonsense", None, None, NotFound, "route_not_found", None),
        (CHAT, "large", "nowhere", CallerFault, "pool_not_found", "X-Detgate-Pool"),
        ("/classify", "large", "small", CallerFault, "no_pool", None),
        ("/generate", None, "large", CallerFault, "no_pool", None),
        (CHAT, None, None, CallerFault, "ambiguous_pool", "model"),
        (CHAT, "both", None, CallerFault, "ambiguous_pool", "X-Detgate-Pool"),
        (CHAT, "unheard", None, Busy, "models_unknown", None),
    ],
)
def test_where_no_pool_fits_or_several_do_the_request_is_refused(
    mixed: Fleet, route: str, model: str | None, named: str | None, kind: type[Fault], code: str, param: str | None
) -> None:
    with pytest.raises(kind) as caught:
        mixed.find(route, model, named)
    assert (type(caught.value), caught.value.code, caught.value.param) == (kind, code, param)


async def test_a_route_that_no_pool_can_serve_is_said_to_be_one() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.post("/score", json={"model": MODEL, "text_1": "a", "text_2": "b"})
    told = answer.json()["error"]
    assert (told["code"], told["message"]) == (
        "no_pool",
        "No pool can serve /score: another engine or role is needed.",
    )


def test_once_every_pool_has_told_its_models_an_unknown_one_is_not_found(mixed: Fleet) -> None:
    replica = mixed.pools["told"].replicas["told-0"]
    replica.models = served("third")
    mixed.learnt()
    assert mixed.find(CHAT, "third", None)[0].name == "told"
    with pytest.raises(ModelNotFound) as caught:
        mixed.find(CHAT, "unheard", None)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert "both, large, small, third" in caught.value.message
    replica.models = served("fourth")
    mixed.learnt()
    with pytest.raises(ModelNotFound):
        mixed.find(CHAT, "third", None)


async def test_a_pool_may_be_named_in_a_header() -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        async with gateway(pool("a", first.url), pool("b", second.url)) as gate:
            refused = await gate.http.post(CHAT, json=chat())
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "ambiguous_pool")
            answer = await gate.http.post(CHAT, json=chat(), headers={"x-detgate-pool": "b"})
            assert answer.headers["x-detgate-replica"] == "b-0"


@pytest.mark.parametrize(("body", "why"), [(b"{no", "not JSON"), (b"[]", "must be a JSON object"), (b"{}", None)])
async def test_a_plain_proxy_says_why_a_body_names_no_model(body: bytes, why: str | None) -> None:
    async with FakeWorker() as first, FakeWorker() as second:
        async with gateway(pool("a", first.url), pool("b", second.url), profile="off") as gate:
            refused = await gate.http.post(CHAT, content=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "ambiguous_pool")
            assert ("The body" in refused.json()["error"]["message"]) is (why is not None)
            assert (why or "X-Detgate-Pool") in refused.json()["error"]["message"]


async def test_a_replica_that_goes_takes_along_the_models_that_it_alone_served() -> None:
    def telling(*models: str) -> FakeWorker:
        async def probes(seen: Seen, reply: Reply) -> None:
            reply.json({"data": served(*models)} if seen.target == "/v1/models" else {})

        return FakeWorker(probes=probes)

    async with telling("one") as first, telling("two") as second:
        async with gateway(pool("policy", first.url, second.url, models=[])) as gate:
            assert (await gate.http.post(CHAT, json=chat(model="two"))).status_code == 200
            await gate.http.delete("/admin/pools/policy/replicas/policy-1")
            gone = await gate.http.post(CHAT, json=chat(model="two"))
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


# --- what is known of a pool


@pytest.mark.parametrize(
    ("field", "told", "together"),
    [
        ("deterministic", [True, True], True),
        ("deterministic", [False, False], False),
        ("deterministic", [False, True], True),
        ("deterministic", [None, True], True),
        ("deterministic", [None, False], None),
        ("is_generation", [True, True], True),
        ("is_generation", [True, False], False),
        ("is_generation", [True, None], None),
        ("default_min_p", [None, 0.1, 0.05], 0.1),
        ("default_min_p", [None, None], 0.0),
        ("priority_scheduling", [True, True], True),
        ("priority_scheduling", [True, None], None),
        ("priority_scheduling", [True, False], None),
    ],
)
def test_of_replicas_that_differ_the_dangerous_value_counts(field: str, told: list[Any], together: Any) -> None:
    made = policy(len(told))
    for replica, value in zip(made.replicas.values(), told, strict=True):
        replica.facts = Facts(**{field: value})
    made.learn()
    assert getattr(made.facts, field) == together


def test_what_a_lone_replica_says_is_what_is_known() -> None:
    made = policy(1)
    made.replicas["policy-0"].facts = told = Facts(deterministic=False, priority_scheduling=True, prefix_cache=True)
    made.learn()
    assert made.facts == told


@pytest.mark.parametrize(
    ("role", "told", "against"),
    [
        (
            "generate",
            Facts(deterministic=False),
            "p-1 says that it is not in deterministic mode, so its answers hang on",
        ),
        ("reward", Facts(prefix_cache=True), "p-1 has a prefix cache, so a warm score differs from a cold one"),
        ("generate", Facts(deterministic=True, prefix_cache=True), None),
        ("reward", Facts(deterministic=False, prefix_cache=False), None),
        ("generate", Facts(), None),
        ("reward", Facts(), None),
    ],
)
def test_what_speaks_against_determinism_is_named_with_its_replica(role: str, told: Facts, against: str | None) -> None:
    made = fleet(pool("p", *urls(2), role=role)).pools["p"]
    made.replicas["p-1"].facts = told
    made.judge()
    assert made.contradicts is None if against is None else str(made.contradicts).startswith(against)


# --- the rule, over the replicas as they are


@given(
    st.text(max_size=10),
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5),
    st.sampled_from([0, 2, "inf"]),
)
def test_the_rule_is_asked_for_the_replicas_that_may_serve(
    key: str, states: list[tuple[int, bool, bool, bool]], slack: int | str
) -> None:
    made = fleet(pool("policy", *urls(len(states))), routing={"slack": slack}).pools["policy"]
    without, loads = set(), {}
    for replica, (load, up, draining, tried) in zip(made.replicas.values(), states, strict=True):
        replica.load, replica.draining = load, draining
        replica.probed("ok" if up else "bad", "")
        if tried:
            without.add(replica.name)
        elif up and not draining:
            loads[replica.name] = load
    usable = made.usable(without)
    assert {name: replica.load for name, replica in usable.items()} == loads
    if loads:
        ranked, told = made.ranked(key, usable)
        assert ranked == routing.ranked(key, loads, float(slack))
        assert told == (None if slack == "inf" else loads)


class Turns(RuleBasedStateMachine):
    """Whatever happens to replicas, a request finds those that are usable, and the home of its key."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = fleet(
            pool("policy", *urls(3)), routing={"slack": "inf"}, health={"failures": 1, "successes": 1, "breaks": 1}
        ).pools["policy"]
        self.gone: list[Replica] = []

    def _one(self, data: st.DataObject) -> Replica:
        """One that is there, or that was removed and ends what it has."""
        return data.draw(st.sampled_from([*self.pool.replicas.values(), *self.gone]))

    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "bad", "refused", "busy"]))
    def probe(self, data: st.DataObject, outcome: Outcome) -> None:
        self._one(data).probed(outcome, "")

    @rule(data=st.data(), blame=st.sampled_from(["refused", "broke"]))
    def fail(self, data: st.DataObject, blame: Blame) -> None:
        self._one(data).failed(blame, "")

    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        self._one(data).chosen()

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        self._one(data).served()

    @precondition(lambda self: self.pool.replicas)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        self.pool.drain(data.draw(st.sampled_from(sorted(self.pool.replicas))))

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        self._one(data).draining = False

    @precondition(lambda self: len(self.pool.replicas) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.gone.append(self.pool.remove(data.draw(st.sampled_from(sorted(self.pool.replicas)))))

    @precondition(lambda self: len(self.pool.replicas) < 5)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({f"policy-{number}" for number in range(6)} - {*self.pool.replicas})))
        self.pool.add(ReplicaSettings(name=name, url="http://127.0.0.1:1"))

    @invariant()
    def all_is_found(self) -> None:
        replicas = self.pool.replicas
        usable = {name: each for name, each in replicas.items() if each.vitals.serves and not each.draining}
        assert self.pool.usable() == usable
        homes = [name for name, each in replicas.items() if not each.draining]
        if not homes:
            with pytest.raises(Busy):
                self.pool.home("key")
            return
        assert self.pool.home("key").name == routing.best("key", homes)
        if usable:
            ranked, _ = self.pool.ranked("key", self.pool.usable())
            assert self.pool.at_home("key", ranked) == (ranked[0] == routing.best("key", homes))


def test_the_trial_of_an_open_breaker_is_for_one_request() -> None:
    made = policy(2, health={"breaks": 1})
    replica = made.replicas["policy-0"]
    replica.failed("broke", "it said nothing")
    assert [*made.usable()] == ["policy-1"]
    replica.probed("ok", "")
    assert [*made.usable()] == ["policy-0", "policy-1"]
    replica.chosen()
    assert [*made.usable()] == ["policy-1"]
    replica.served()
    assert [*made.usable()] == ["policy-0", "policy-1"]


TestTurns = Turns.TestCase
TestTurns.settings = effort(max_examples=50, stateful_step_count=30)


def test_a_home_is_the_best_of_all_that_are_not_drained_up_or_down() -> None:
    made = policy(4, routing={"slack": "inf"})
    for number in range(20):
        key = f"17:3:{number}"
        order: list[Replica] = []
        while len(order) < 4:
            home = made.home(key)
            assert home.name == made.ranked(key, made.usable())[0][0]
            home.probed("refused", "no connection")
            assert made.home(key) is home
            assert home.name not in made.usable()
            order.append(made.drain(home.name))
        assert [each.name for each in order] == sorted(
            made.replicas, key=lambda name: routing.score(key, name), reverse=True
        )
        with pytest.raises(Busy) as caught:
            made.home(key)
        assert caught.value.code == "no_healthy_replica"
        for replica in order:
            replica.draining = False
            replica.probed("ok", "")
            replica.probed("ok", "")


CHOICES = """
import json, sys
from tests.test_fleet import choices
print(json.dumps(choices(json.loads(sys.argv[1]), int(sys.argv[2]))))
"""


def choices(names: list[str], load: int) -> list[str]:
    """Where 200 keys go in a pool of these replicas, in this order, the first of them with this load, the next with
    twice as much."""
    replicas = [{"name": name, "url": "http://127.0.0.1:1"} for name in names]
    made = fleet({"name": "p", "engine": "vllm", "replicas": replicas}, profile="strict").pools["p"]
    for number, replica in enumerate(made.replicas.values(), 1):
        replica.probed("ok", "")
        replica.load = load * number
    return [made.ranked(f"17:{key}:0", made.usable())[0][0] for key in range(200)]


def test_no_load_no_order_and_no_process_changes_a_choice_of_strict() -> None:
    names = [f"policy-{number}" for number in range(5)]
    here = choices(names, 0)
    assert len(here) == 200
    assert set(here) == set(names)
    done = subprocess.run(
        [sys.executable, "-c", CHOICES, json.dumps(names[::-1]), "7"],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == here


def test_a_session_is_kept_while_its_replica_is_there() -> None:
    made = policy(2, routing={"key": "session"})
    first = made.replicas["policy-0"]
    assert made.kept("s") is None
    made.keep("s", first)
    assert made.kept("s") is first
    first.probed("refused", "no connection")
    assert made.kept("s") is None
    first.probed("ok", "")
    first.probed("ok", "")
    assert made.kept("s") is first
    made.drain("policy-0")
    assert made.kept("s") is None
    made.remove("policy-0")
    assert made.kept("s") is None


def test_the_sessions_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.SESSIONS_KEPT", 2)
    made = policy(1, routing={"key": "session"})
    (replica,) = made.replicas.values()
    made.keep("a", replica)
    made.keep("b", replica)
    made.kept("a")
    made.keep("c", replica)
    assert [key for key in "abc" if made.kept(key)] == ["a", "c"]


def test_only_slack_without_a_bound_gives_a_key_a_home() -> None:
    assert policy(1, routing={"slack": "inf"}).stable
    assert policy(1).routing.slack == 0
    assert not policy(1).stable
    assert policy(1, profile="strict").routing.slack == math.inf
    assert [
        policy(1, routing={"slack": slack, "on_home_down": does}).fixed_home
        for slack, does in (("inf", "wait"), ("inf", "fail"), ("inf", "next"), (4, "wait"))
    ] == [True, True, False, False]
