"""A replica that is killed in the middle of traffic, and comes back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.core import routing
from gateway.sim import SimServer, SimSettings
from tests.harness import Gate, Wire, chat, gateway, pool

CHAT = "/v1/chat/completions"
MODEL = "sim-model"
REQUESTS = 90


@dataclass
class Outcome:
    """What one client saw."""

    session: str
    stream: bool
    status: int = 0
    replica: str = ""
    attempts: int = 0
    got: bytes = b""
    broken: bool = False

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.broken and (not self.stream or self.got.endswith(b"data: [DONE]\n\n"))

    @property
    def home(self) -> str:
        """Where the rule sends it while all are up."""
        return routing.best(f"{self.session}:0", ["policy-0", "policy-1", "policy-2"])

    @property
    def next(self) -> str:
        """Where the rule sends it while policy-1 is down."""
        return routing.best(f"{self.session}:0", ["policy-0", "policy-2"])


@dataclass
class Traffic:
    """Clients that ask, one every few milliseconds, every other for a stream."""

    gate: Gate
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(REQUESTS):
                outcome = Outcome(f"s{number}", stream=number % 2 == 1)
                self.outcomes.append(outcome)
                clients.create_task(self._client(outcome))
                await asyncio.sleep(0.005)

    async def _client(self, outcome: Outcome) -> None:
        async with Wire(self.gate.port) as wire:
            body = chat(model=MODEL, stream=outcome.stream, max_tokens=20, min_tokens=20)
            wire.post(f"/sessions/{outcome.session}{CHAT}", body)
            outcome.status = await wire.head()
            outcome.replica = wire.header("x-detgate-replica") or ""
            outcome.attempts = int(wire.header("x-detgate-attempts") or 0)
            try:
                if not outcome.stream:
                    outcome.got = await wire.body()
                while outcome.stream and (piece := await wire.chunk()):
                    outcome.got += piece
            except (asyncio.IncompleteReadError, ConnectionError):
                outcome.broken = True


def settings(*sims: SimServer, **routing_rule: Any) -> dict[str, Any]:
    return pool("policy", *(sim.url for sim in sims), models=[MODEL], routing={"slack": "inf"} | routing_rule)


def sim() -> SimServer:
    return SimServer(SimSettings(engine="vllm", model=MODEL, token_seconds=0.01))


async def kill(victim: SimServer) -> None:
    """Kill it when it has work that has begun and work that has not."""
    await victim.engine.reached(3)
    await victim.stop()


async def test_with_next_no_request_fails_whose_first_byte_had_not_left() -> None:
    async with sim() as one, sim() as two, sim() as three:
        async with gateway(settings(one, two, three, on_home_down="next"), health={"interval": 0.1}) as gate:
            traffic = Traffic(gate)
            running = asyncio.create_task(traffic.run())
            await kill(two)
            await running
            broken = [each for each in traffic.outcomes if not each.whole]
            assert all(each.stream and each.got and each.replica == "policy-1" for each in broken)
            moved = [each for each in traffic.outcomes if each.home == "policy-1" and each.whole]
            assert any(each.attempts > 1 for each in moved), "some were sent again"
            assert all(each.replica in ("policy-1", each.next) for each in moved)
            stayed = [each for each in traffic.outcomes if each.home != "policy-1"]
            assert all(each.whole and each.replica == each.home and each.attempts == 1 for each in stayed)
            await gate.until(lambda: not any(replica.load for replica in gate.gateway.fleet.replicas))
            seeds = {each["session"]: each["seed"] for each in gate.records() if each["event"] == "opened"}
            assert len(seeds) == REQUESTS == len({*seeds.values()})


async def test_with_wait_each_is_served_at_home_when_that_is_back() -> None:
    async with sim() as one, sim() as two, sim() as three:
        rule = settings(one, two, three, on_home_down="wait")
        async with gateway(rule, health={"interval": 0.05, "successes": 1}) as gate:
            traffic = Traffic(gate)
            running = asyncio.create_task(traffic.run())
            await kill(two)
            await gate.until(lambda: gate.gateway.fleet.pools["policy"].replicas["policy-1"].state == "down")
            others = [each for each in traffic.outcomes if each.home != "policy-1"]
            await gate.until(lambda: all(each.whole for each in others if each.status) and len(traffic.outcomes) > 60)
            waiting = [each for each in traffic.outcomes if each.home == "policy-1" and not each.status]
            assert len(waiting) > 3
            await two.start()
            await running
            assert all(each.whole and each.replica == "policy-1" for each in waiting)
            broken = [each for each in traffic.outcomes if not each.whole]
            assert [each for each in broken if not (each.stream and each.got and each.home == "policy-1")] == []
            assert all(each.replica == each.home for each in traffic.outcomes)
