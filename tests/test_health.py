"""Probes: what they ask, what comes of their answers, and which requests count against a replica."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway import health
from gateway.core.vitals import Outcome
from gateway.fleet import Fleet, Pool, Replica
from gateway.health import LONGEST_PAUSE, Health
from gateway.passes import Verdict
from gateway.questions import Answered
from gateway.settings import Settings
from gateway.upstream import Broken, Connections
from tests import ports
from tests.field.clock import jumping
from tests.harness import (
    MODEL,
    FakeWorker,
    Gate,
    Reply,
    Script,
    Seen,
    Wire,
    chat,
    completion,
    delta,
    gateway,
    polite,
    pool,
)
from tests.waiting import until

CHAT = "/v1/chat/completions"
PROBES = {"vllm": "/health", "sglang": "/ready", "openai": "/v1/models"}
UNWATCHED = {"interval": 3600.0}


class Probed:
    """A pool of one replica, and what probes it."""

    def __init__(self, url: str, **settings: Any) -> None:
        health = {"interval": 2.0, "timeout": 10.0} | settings.pop("health", {})
        loaded = Settings.load(None, {}, {"pools": [pool("policy", url, **settings)], "health": health})
        self.fleet = Fleet(loaded)
        self.health = Health(loaded, self.fleet)

    @property
    def pool(self) -> Pool:
        return self.fleet.pools["policy"]

    @property
    def replica(self) -> Replica:
        return self.pool.replicas["policy-0"]

    @property
    def state(self) -> str:
        return self.replica.state

    async def probe(self, times: int = 1) -> None:
        for _ in range(times):
            await self.health.probe(self.pool, self.replica)


class Engine(FakeWorker):
    """An engine that answers each probe as `answers` says: by a status and a body, or by a script. The rest is 404."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(probes=self._play)
        self.answers: dict[str, tuple[int, str] | Script] = {f"/{route}": told for route, told in answers.items()}
        self.asked: list[Seen] = []

    async def _play(self, seen: Seen, reply: Reply) -> None:
        self.asked.append(seen)
        answer = self.answers.get(seen.target, (404, ""))
        if callable(answer):
            await answer(seen, reply)
        else:
            status, body = answer
            reply.head(status, ("content-type", "application/json"), length=len(body))
            reply.writer.write(body.encode())


OK = (200, "{}")


# --- one probe


@pytest.mark.parametrize("engine", PROBES)
@pytest.mark.parametrize("role", ["generate", "reward"])
async def test_probes_generate_nothing_and_carry_the_replicas_own_key(engine: str, role: str) -> None:
    asked: list[Seen] = []

    async def note(seen: Seen, reply: Reply) -> None:
        asked.append(seen)
        reply.json({"data": [{"id": MODEL}]})

    async with FakeWorker(probes=note) as worker:
        await Probed(worker.url, engine=engine, role=role, api_key="replica-key").probe(3)
    assert asked[0].target == PROBES[engine]
    told = {
        "/v1/models",
        "/v1/chat/completions",
        "/metrics",
        "/version",
        "/weight_info",
        "/server_info",
        "/model_info",
        "/v1/loads",
    }
    told.add("/detgate/processes")
    assert {seen.target.partition("?")[0] for seen in asked} <= {PROBES[engine], *told}
    assert {seen.header("authorization") for seen in asked} == {"Bearer replica-key"}
    assert all(seen.body == b"" for seen in asked)
    assert worker.seen == [], "they are questions"


async def test_a_replica_without_a_key_gets_none() -> None:
    async with Engine(health=OK) as engine:
        await Probed(engine.url).probe()
    assert len(engine.asked) > 1
    assert not any(seen.header("authorization") for seen in engine.asked)


async def hangs(seen: Seen, reply: Reply) -> None:
    await reply.gone()


async def breaks(seen: Seen, reply: Reply) -> None:
    reply.reset()


async def stops(seen: Seen, reply: Reply) -> None:
    """In mid-answer."""
    reply.head(200, length=10)
    await reply.gone()


async def has_no_end(seen: Seen, reply: Reply) -> None:
    reply.head(200)
    for _ in range(65):
        reply.chunk(b"x" * (1 << 18))
        await reply.writer.drain()
    await reply.gone()


@pytest.mark.parametrize("health", [hangs, breaks, stops, has_no_end, (500, ""), (503, ""), (401, "")])
async def test_a_bad_answer_takes_three(health: Any) -> None:
    async with Engine(health=OK) as engine:
        subject = Probed(engine.url, health={"timeout": 0.5})
        await subject.probe()
        assert subject.state == "up"
        engine.answers["/health"] = health
        await subject.probe(2)
        assert subject.state == "up"
        await subject.probe()
        assert subject.state == "down"
        assert "/health" in subject.replica.reason
        engine.answers["/health"] = OK
        await subject.probe()
        assert subject.state == "down"
        assert subject.replica.reason == "answers its probe again, and is up after 2 that pass in a row"
        await subject.probe()
        assert subject.state == "up"
        assert subject.replica.reason == "answers its probe"


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 1),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 1),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), 3),
        (OSError(errno.EMFILE, "Too many open files"), 3),
        (OSError(errno.EHOSTUNREACH, "No route to host"), 3),
        (TimeoutError(), 3),
    ],
    ids=repr,
)
async def test_a_refused_connection_or_an_unknown_name_is_proof_and_anything_else_takes_three(
    error: OSError, needed: int
) -> None:
    async with Engine(health=OK) as engine:
        subject = Probed(engine.url)
        await subject.probe()
        with pytest.MonkeyPatch.context() as patch:

            async def failing(*asked: Any, **how: Any) -> None:
                raise error

            patch.setattr(asyncio.get_running_loop(), "create_connection", failing)
            await subject.probe(needed - 1)
            assert subject.state == "up"
            await subject.probe()
            assert subject.state == "down"
            assert "connect" in subject.replica.reason
        await subject.probe(2)
        assert subject.state == "up"


async def test_each_probe_has_a_connection_of_its_own_and_leaves_none() -> None:
    """A connection that was kept would not show that nobody listens any more, and may close as it is used."""
    async with Engine(health=OK) as engine:
        subject = Probed(engine.url)
        await subject.probe(3)
        assert len({seen.connection for seen in engine.asked if seen.target == "/health"}) == 3
        await until(lambda: engine.open == 0)


async def test_a_port_that_nobody_listens_on_any_more_is_proof() -> None:
    async with Engine(health=OK) as engine:
        subject = Probed(engine.url)
        await subject.probe()
        assert subject.state == "up"
    await subject.probe()
    assert subject.state == "down"


async def test_a_replica_that_wants_another_key_is_down_and_says_so() -> None:
    async def picky(seen: Seen, reply: Reply) -> None:
        if seen.target == "/health" or seen.header("authorization") == "Bearer right":
            reply.json({"data": [{"id": MODEL, "object": "model"}]})
        else:
            reply.json({"error": "Unauthorized"}, 401)

    for key in (None, "wrong", "right"):
        async with FakeWorker(probes=picky) as worker:
            async with gateway(pool("policy", worker.url, api_key=key)) as gate:
                answer = await gate.http.post(CHAT, json=chat())
                if key == "right":
                    assert answer.status_code == 200
                    continue
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_replica")
                assert "401: it wants a key, or another (pools[].api_key)" in answer.json()["error"]["message"]
                assert (await gate.http.get("/readyz")).status_code == 503


async def test_nothing_that_a_probe_meets_ends_the_probing() -> None:
    """What no reader of an answer foresaw counts as a bad answer."""
    odd: dict[str, tuple[str, str]] = {}

    asked: list[str] = []

    async def strange(seen: Seen, reply: Reply) -> None:
        asked.append(seen.target)
        kind, body = odd.get(seen.target, ("application/json", "{}"))
        reply.head(200, ("content-type", kind), length=len(body))
        reply.writer.write(body.encode())

    async with FakeWorker(probes=strange) as worker, gateway(pool("policy", worker.url)) as gate:
        replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
        for target, answer in (
            ("/metrics", ("text/plain; charset=hex", "vllm:num_preemptions_total 1.0")),
            ("/v1/models", ("application/json", "[" * 100_000)),
            ("/v1/models", ("application/json", '{"data":[{"id":"\\ud800"}]}')),
            ("/version", ("application/json", '{"version":"\\ud800"}')),
        ):
            odd[target] = answer
            replica.known, replica.models = False, None
            asked.clear()
            await gate.until(lambda: asked.count("/health") > 2)
            assert (await gate.http.get("/readyz")).status_code in (200, 503)
            assert (await gate.http.get("/determinism")).status_code == 200
            odd.clear()
            await gate.until(lambda: replica.usable)


async def test_what_canaries_passed_on_is_not_warned_of_whoever_is_probed_first(tmp_path: Path) -> None:
    slow = asyncio.Event()

    async def late(seen: Seen, reply: Reply) -> None:
        if seen.target == "/metrics":
            await slow.wait()
        reply.json({"data": [{"id": MODEL, "object": "model"}]})

    async with FakeWorker() as one, FakeWorker(probes=late) as two:
        given: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
        slow.set()
        async with gateway(pool("policy", one.url, two.url), **given) as gate:
            of_pool = gate.gateway.fleet.pools["policy"]
            for name, replica in of_pool.replicas.items():
                verdict = Verdict(replica.fingerprint, apart=False, passed=True, at=1.0)
                gate.gateway.health.note(of_pool, replica, verdict)
                assert replica.reasons == ("unverified",), name
        slow.clear()
        with capture_logs() as logs:
            starting = asyncio.create_task(warned(pool("policy", one.url, two.url), given))
            await until(lambda: any(log.get("replica") == "policy-0" and log["event"] == "replica" for log in logs))
            slow.set()
            await starting
        assert not [log for log in logs if log.get("finding") == "unverified"]


async def test_a_replica_that_could_not_be_asked_is_not_said_to_tell_nothing() -> None:
    with capture_logs() as logs:
        async with gateway(pool("policy", f"http://127.0.0.1:{ports.free()}")):
            pass
    assert not [log for log in logs if "finding" in log]
    assert [log["state"] for log in logs if log["event"] == "replica"] == ["down"]


async def warned(wanted: dict[str, Any], given: dict[str, Any]) -> None:
    async with gateway(wanted, **given):
        pass


async def test_a_late_probe_is_no_failure_while_answers_come() -> None:
    async with Engine(health=OK) as engine:
        subject = Probed(engine.url, health={"timeout": 0.05})
        await subject.probe()

        async def late(seen: Seen, reply: Reply) -> None:
            subject.replica.connections.heard = asyncio.get_running_loop().time()
            await reply.gone()

        engine.answers["/health"] = late
        await subject.probe(10)
        assert subject.state == "up"
        assert "but answers come" in subject.replica.reason
        engine.answers["/health"] = hangs
        await subject.probe(3)
        assert subject.state == "down"


async def test_a_pass_of_before_it_refused_is_none() -> None:
    """A server that ends after it answered its probe, and refuses a request before that is judged, is down."""
    async with Engine(health=OK) as engine:
        engine.answers["/v1/models"] = OK
        subject = Probed(engine.url, health={"successes": 1})
        await subject.probe()
        subject.replica.failed("refused", "no server listens")
        assert subject.state == "down"

        async def ends(seen: Seen, reply: Reply) -> None:
            subject.replica.failed("refused", "no server listens")
            reply.json({})

        engine.answers["/v1/models"] = ends
        await subject.probe()
        assert subject.state == "down"
        engine.answers["/v1/models"] = OK
        await subject.probe()
        assert subject.state == "up"


async def test_a_replica_is_asked_what_it_is_when_it_comes_up() -> None:
    async with Engine(ready=(500, ""), server_info=(200, '{"enable_deterministic_inference": true}')) as engine:
        engine.answers |= {
            "/model_info": (200, '{"is_generation": true}'),
            "/v1/models": (200, '{"data": [{"id": "m"}]}'),
        }

        def introductions() -> int:
            return [seen.target for seen in engine.asked].count("/v1/models")

        subject = Probed(engine.url, engine="sglang", models=[])
        await subject.probe()
        assert introductions() == 0
        assert subject.replica.facts.deterministic is None
        engine.answers["/ready"] = OK
        await subject.probe(3)
        assert subject.replica.facts.deterministic is True
        assert subject.pool.models == {"m"}
        assert introductions() == 2, "while it comes up, and no more"


@pytest.mark.parametrize("told", ["not json", "[]", '{"data": 5}', '{"data": [{"id": 3}, "x"]}'])
async def test_nonsense_from_a_replica_is_no_reason_to_fail(told: str) -> None:
    async with Engine(health=OK) as engine:
        engine.answers["/v1/models"] = (200, told)
        subject = Probed(engine.url, models=[])
        await subject.probe()
        assert subject.state == "up"
        assert not subject.pool.models


# --- probes over time, under a clock that jumps


class Played:
    """What the probe of a replica gets, by the time: what it does, from when."""

    def __init__(self, *phases: tuple[float, Outcome]) -> None:
        self.phases = phases
        self.asked: list[float] = []

    async def __call__(self, connections: Connections, headers: bytes, path: str, seconds: float) -> Answered:
        if path != "/health":
            return Answered(404, b"")
        now = asyncio.get_running_loop().time()
        self.asked.append(now)
        outcome = next(outcome for since, outcome in reversed(self.phases) if since <= now)
        if outcome == "slow":
            until = next((since for since, _ in self.phases if since > now), now + 1e9)
            await asyncio.sleep(min(seconds, until - now))
            if until - now > seconds:
                raise Broken("slow", "send", timeout=True)
        elif outcome == "refused":
            raise Broken("refused", "connect", blame="refused")
        return Answered(200, b"")


async def watched(played: Played, until: float) -> list[tuple[float, str]]:
    """Probe until that time; when the state changed, and to what."""
    subject = Probed("http://replica:1")
    changes: list[tuple[float, str]] = []
    loop = asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "ask", played)
        probing = asyncio.create_task(subject.health.run())
        while loop.time() < until:
            if not changes or changes[-1][1] != subject.replica.state:
                changes.append((loop.time(), subject.replica.state))
            await asyncio.sleep(0.1)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    return changes


@jumping
async def test_a_busy_replica_that_is_slow_for_25_seconds_keeps_its_place() -> None:
    for begin in range(5, 13):
        played = Played((0, "ok"), (begin, "slow"), (begin + 25, "ok"))
        start = asyncio.get_running_loop().time()
        played.phases = tuple((start + since, outcome) for since, outcome in played.phases)
        changes = await watched(played, start + 60)
        assert [state for _, state in changes] == ["unknown", "up"]


@jumping
async def test_a_replica_that_is_silent_for_long_is_down_and_joins_again() -> None:
    changes = await watched(Played((0, "ok"), (20, "slow"), (100, "ok")), 150)
    assert [state for _, state in changes] == ["unknown", "up", "down", "up"]
    assert 50 < changes[2][0] < 60, "three probes of 10 s, and the pauses between"
    assert changes[3][0] < 100 + 2 * LONGEST_PAUSE + 1


@jumping
async def test_a_replica_that_is_down_at_start_joins_later() -> None:
    """After minutes, within two probes; meanwhile it is asked ever more seldom, and at least every ten seconds."""
    played = Played((0, "refused"), (400, "ok"))
    changes = await watched(played, 450)
    assert [state for _, state in changes] == ["unknown", "down", "up"]
    assert 400 < changes[2][0] < 400 + 2 * LONGEST_PAUSE + 1
    pauses = [round(after - before, 1) for before, after in zip(played.asked, played.asked[1:], strict=False)]
    assert pauses[:4] == [3.0, 4.5, 6.8, 10.0]
    assert max(pauses) == LONGEST_PAUSE
    assert pauses[-3:] == [2.0] * 3


async def test_replicas_that_hang_hold_up_the_probes_of_none() -> None:
    """However many they are."""

    async def hang(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    async with FakeWorker(probes=hang) as hung, FakeWorker() as worker:
        pools = pool("hung", *[hung.url] * 120), pool("policy", worker.url)
        async with gateway(*pools, health={"interval": 3600.0, "timeout": 1.0}) as gate:
            states = [replica.state for replica in gate.gateway.fleet.replicas]
            assert states == [*["down"] * 120, "up"]


# --- who is probed


class Asked:
    """A worker's probes, counted."""

    def __init__(self) -> None:
        self.count = 0
        self.told = asyncio.Event()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        self.count += 1
        self.told.set()
        reply.json({"data": [{"id": MODEL, "object": "model"}]})

    async def again(self, times: int = 3) -> None:
        for _ in range(times):
            self.told.clear()
            await asyncio.wait_for(self.told.wait(), 5)


async def removed_by_route(gate: Gate, one: FakeWorker, two: FakeWorker) -> None:
    await gate.http.delete("/admin/pools/policy/replicas/policy-1")


async def removed_by_reload(gate: Gate, one: FakeWorker, two: FakeWorker) -> None:
    then = Settings.load(None, {}, {"pools": [pool("policy", one.url)]})
    gate.gateway.changes.reload(gate.gateway.settings, then)


@pytest.mark.parametrize("remove", [removed_by_route, removed_by_reload])
async def test_a_replica_that_was_removed_is_probed_no_more(
    remove: Callable[[Gate, FakeWorker, FakeWorker], Any],
) -> None:
    first, second = Asked(), Asked()
    async with FakeWorker(probes=first) as one, FakeWorker(probes=second) as two:
        async with gateway(pool("policy", one.url, two.url), health={"interval": 0.02}) as gate:
            await second.again()
            await remove(gate, one, two)
            await first.again()
            count = second.count
            await first.again(5)
            assert second.count == count


async def test_a_replica_that_was_added_is_probed_at_once() -> None:
    asked = Asked()
    async with FakeWorker() as one, FakeWorker(probes=asked) as two:
        async with gateway(pool("policy", one.url), health=UNWATCHED) as gate:
            await gate.http.post("/admin/pools/policy/replicas", json={"name": "new", "url": two.url})
            await asked.again(1)
            await gate.until(lambda: gate.gateway.fleet.pools["policy"].replicas["new"].usable)


# --- what requests say of a replica


def find(gate: Gate, name: str = "policy-0") -> Replica:
    return gate.gateway.fleet.pools["policy"].replicas[name]


async def reset(seen: Seen, reply: Reply) -> None:
    reply.reset()


async def broken_stream(seen: Seen, reply: Reply) -> None:
    reply.sse()
    reply.chunk(delta("h"))
    await reply.writer.drain()
    reply.reset()


async def server_error(seen: Seen, reply: Reply) -> None:
    reply.json({"error": {"message": "broken"}}, status=500)


BREAKING = [(reset, False), (reset, True), (broken_stream, True), (server_error, False)]


@pytest.mark.parametrize(("script", "stream"), BREAKING)
async def test_a_replica_that_passes_its_probes_and_breaks_requests_gets_none_but_trials(
    script: Callable[[Seen, Reply], Any], stream: bool
) -> None:
    asked = Asked()
    async with FakeWorker(script, probes=asked) as worker:
        health = {"interval": 0.05, "breaks": 3}
        async with gateway(pool("policy", worker.url), limits={"attempts": 1}, health=health) as gate:

            async def ask() -> int:
                async with Wire(gate.port) as wire:
                    wire.post(CHAT, chat(stream=stream))
                    status = await wire.head()
                    await (wire.broken_body() if status == 200 else wire.body())
                    return status

            for _ in range(3):
                await ask()
            assert find(gate).state == "up"
            sent, probed = len(worker.seen), asked.count
            assert sent == 3
            statuses = [await ask() for _ in range(20)]
            refused_now = statuses.count(503)
            assert refused_now > 10
            assert len(worker.seen) - sent == 20 - refused_now <= asked.count - probed + 1
            shown = (await gate.http.get("/readyz?pool=policy")).json()
            state = shown["pools"]["policy"]["replicas"]["policy-0"]
            assert (state["state"], state["breaker"]) == ("up", "open")
            assert "3 requests in a row broke on it" in state["reason"]
            worker.script = polite
            await gate.until(lambda: find(gate).usable)
            assert (await gate.http.post(CHAT, json=chat())).status_code == 200
            assert [(await gate.http.post(CHAT, json=chat())).status_code for _ in range(10)] == [200] * 10
            assert find(gate).usable


async def test_a_closed_breaker_wakes_who_waits_for_its_home() -> None:
    """At once, not at the next probe: that one hangs."""
    silent, go = asyncio.Event(), asyncio.Event()
    asked = Asked()

    async def probes(seen: Seen, reply: Reply) -> None:
        if silent.is_set():
            await reply.gone()
        else:
            await asked(seen, reply)

    async def held(seen: Seen, reply: Reply) -> None:
        await go.wait()
        reply.json(completion())

    async with FakeWorker(reset, probes=probes) as worker:
        rule = {"slack": "inf", "on_home_down": "wait"}
        health = {"interval": 0.05, "timeout": 60, "breaks": 1}
        settings = pool("policy", worker.url, routing=rule)
        async with gateway(settings, limits={"attempts": 1}, health=health) as gate:
            assert (await gate.http.post(CHAT, json=chat())).status_code == 502
            worker.script = held
            asking = [asyncio.create_task(gate.http.post(CHAT, json=chat(str(n)))) for n in range(5)]
            await gate.until(lambda: gate.in_flight("policy-0") == 1)
            silent.set()
            go.set()
            answers = await asyncio.wait_for(asyncio.gather(*asking), 5)
            assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_refusals_never_count(status: int) -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        reply.json({"error": {"message": "no"}}, status=status)

    async with FakeWorker(refuse) as worker:
        async with gateway(pool("policy", worker.url), health={"breaks": 1} | UNWATCHED) as gate:
            for _ in range(10):
                assert (await gate.http.post(CHAT, json=chat())).status_code == status
            assert find(gate).usable


async def test_an_overloaded_answer_counts_neither_way() -> None:
    answers = iter([500, 503, 500])

    async def overloaded(seen: Seen, reply: Reply) -> None:
        reply.json({"error": {"message": "no"}}, status=next(answers))

    async with FakeWorker(overloaded) as worker:
        async with gateway(pool("policy", worker.url), health={"breaks": 2} | UNWATCHED) as gate:
            for status in (500, 503):
                assert (await gate.http.post(CHAT, json=chat())).status_code == status
                assert find(gate).usable
            await gate.http.post(CHAT, json=chat())
            assert not find(gate).usable


@pytest.mark.parametrize("stream", [False, True])
async def test_a_whole_answer_between_breaks_starts_the_count_anew(stream: bool) -> None:
    begun = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if len(worker.seen) % 2:
            await (broken_stream if stream else reset)(seen, reply)
        elif stream:
            reply.sse()
            reply.chunk(delta("h"))
            await begun.wait()
            begun.clear()
            reply.chunk(delta("", "stop"))
            reply.end()
        else:
            reply.json(completion())

    async with FakeWorker(script) as worker:
        health = {"breaks": 2} | UNWATCHED
        async with gateway(pool("policy", worker.url), limits={"attempts": 1}, health=health) as gate:
            for _ in range(10):
                async with Wire(gate.port) as wire:
                    wire.post(CHAT, chat(stream=stream))
                    status = await wire.head()
                    if stream and len(worker.seen) % 2:
                        await wire.broken_body()
                    else:
                        begun.set()
                        await wire.body()
                    assert stream or status == (502 if len(worker.seen) % 2 else 200)
                assert find(gate).usable
            assert len(worker.seen) == 10


async def test_a_stream_that_its_client_aborts_by_its_id_does_not_count() -> None:
    async def hold(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(delta("h"))
        await reply.gone()

    async with FakeWorker(hold) as worker:
        async with (
            gateway(pool("policy", worker.url), health={"breaks": 1} | UNWATCHED) as gate,
            Wire(gate.port) as wire,
        ):
            wire.post(CHAT, chat(stream=True, request_id="mine"))
            assert await wire.head() == 200
            await gate.http.post("/abort_request", json={"rid": "mine"})
            assert b"aborted by its client" in await wire.broken_body()
            assert find(gate).usable


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_never_count(stream: bool) -> None:
    arrived = asyncio.Semaphore(0)

    async def hold(seen: Seen, reply: Reply) -> None:
        if stream:
            reply.sse()
            reply.chunk(delta("h"))
        arrived.release()
        await reply.gone()

    async with FakeWorker(hold) as worker:
        async with gateway(pool("policy", worker.url), health={"breaks": 1} | UNWATCHED) as gate:
            for _ in range(5):
                async with Wire(gate.port) as wire:
                    wire.post(CHAT, chat(stream=stream))
                    await arrived.acquire()
                    if stream:
                        await wire.head()
                await gate.until(lambda: gate.in_flight("policy-0") == 0)
            assert find(gate).usable


async def test_a_refused_connection_takes_a_replica_out_at_once() -> None:
    async with FakeWorker() as one, FakeWorker() as two:
        async with gateway(pool("policy", one.url, two.url), health=UNWATCHED) as gate:
            await one.stop()
            answers = [await gate.http.post(CHAT, json=chat(str(n))) for n in range(10)]
            assert [answer.status_code for answer in answers] == [200] * 10
            assert sorted(answer.headers["x-detgate-attempts"] for answer in answers) == ["1"] * 9 + ["2"]
            assert find(gate).state == "down"
            assert "cannot connect" in find(gate).reason


async def test_a_connection_that_takes_too_long_is_no_proof() -> None:
    """A full backlog is a busy server: it counts as a break, and the breaker opens when it goes on."""
    async with FakeWorker(backlog=1) as one, FakeWorker() as two:
        health = {"breaks": 2} | UNWATCHED
        async with gateway(pool("policy", one.url, two.url), health=health, timeouts={"connect": 0.1}) as gate:
            one.deafen()
            for broke in (1, 2):
                while (await gate.http.post(CHAT, json=chat())).headers["x-detgate-attempts"] == "1":
                    assert find(gate).usable
                assert find(gate).state == "up"
                assert find(gate).usable is (broke == 1)


async def test_want_of_files_here_says_nothing_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), health={"breaks": 1} | UNWATCHED) as gate:
            first = await gate.http.post(CHAT, json=chat())
            assert first.status_code == 200

            async def connect(*_: object, **__: object) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            find(gate).connections.close()
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.get_running_loop(), "create_connection", connect)
                answer = await gate.http.post(CHAT, json=chat())
            assert answer.status_code == 502
            assert "Too many open files" in answer.json()["error"]["message"]
            assert find(gate).usable


# --- what is shown


async def test_readiness_says_why_for_all_and_for_one_pool() -> None:
    async with FakeWorker() as one, FakeWorker() as two:
        pools = (pool("policy", one.url), pool("other", two.url, models=["other"]))
        async with gateway(*pools) as gate:

            async def ready(query: str = "") -> tuple[int, list[str]]:
                answer = await gate.http.get(f"/readyz{query}")
                return answer.status_code, answer.json()["why"]

            assert await ready() == (200, [])
            await one.stop()
            await gate.until(lambda: find(gate).state == "down")
            status, [why] = await ready()
            assert status == 200, "the other pool serves"
            assert why.startswith("policy: no replica is up. policy-0: ")
            assert await ready("?pool=policy") == (503, [why])
            assert await ready("?pool=other") == (200, [])
            await gate.http.post("/admin/pools/other/replicas/other-0/drain")
            status, whys = await ready()
            assert (status, len(whys)) == (503, 2)
            assert "other-0: draining" in whys[1]
            assert (await gate.http.get("/readyz?pool=none")).status_code == 404
            assert (await gate.http.get("/livez")).status_code == 200


async def test_the_gauge_of_a_replica_follows_its_state() -> None:
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url), health={"successes": 1, "interval": 0.05}) as gate,
    ):
        labels = {"pool": "policy", "replica": "policy-0"}
        assert await gate.gauge("detgate_replica_up", **labels) == 1
        await worker.stop()
        await gate.until(lambda: find(gate).state == "down")
        assert await gate.gauge("detgate_replica_up", **labels) == 0
        async with FakeWorker(port=worker.port):
            await gate.until(lambda: find(gate).usable)
            assert await gate.gauge("detgate_replica_up", **labels) == 1


async def test_determinism_tells_each_replicas_state_and_reason() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        told = (await gate.http.get("/determinism")).json()["pools"]["policy"]["replicas"]["policy-0"]
        assert (told["state"], told["reason"]) == ("up", "answers its probe")
