"""`detgate serve` processes on one store, one of them killed again and again while all are busy.

`ROUNDS` says how often.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.harness import FakeWorker, Reply, Seen, chat, completion
from tests.processes import Process, serving
from tests.redis_server import RedisServer
from tests.waiting import until

ROUNDS = int(os.environ.get("ROUNDS", "2"))
GATEWAYS, CLIENTS, PAUSE = 3, 8, 0.03

CONFIGURATION = """\
run: r
state: {state}
timeouts: {{gateway: 1.5, store: 1, settle: 1}}
health: {{interval: 0.2}}
log: {{level: warning}}
pools:
  - name: policy
    engine: vllm
    models: [test-model]
    replicas: [{{name: policy-0, url: "{worker}"}}]
"""


async def brief(seen: Seen, reply: Reply) -> None:
    """An answer that takes a moment, so that a kill finds many on their way."""
    await asyncio.sleep(0.02)
    reply.json(completion())


@dataclass
class Load:
    """Clients as SDKs are: what fails they send again, to the next gateway, and say so."""

    gates: list[Process | None]
    answers: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Session, text, index and seed of each answer."""
    over: bool = False

    async def client(self, number: int) -> None:
        session = f"s{number}"
        for turn in count():
            if self.over:
                return
            text = f"{number} {turn}"
            for attempt in count():
                gate = self.gates[(number + turn + attempt) % GATEWAYS]
                if gate is not None and await self.asks(gate, session, text, attempt):
                    break
                await asyncio.sleep(PAUSE)
            await asyncio.sleep(PAUSE)

    async def asks(self, gate: Process, session: str, text: str, attempt: int) -> bool:
        headers = {"X-Session-ID": session, "X-Stainless-Retry-Count": str(attempt)}
        try:
            answer = await gate.http.post("/v1/chat/completions", json=chat(text), headers=headers)
        except httpx.TransportError:
            return False
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            return False
        told = answer.headers
        self.answers.append((session, text, int(told["x-detgate-index"]), int(told["x-detgate-seed"])))
        return True


async def test_a_killed_gateway_loses_no_index_and_a_retry_keeps_its_own(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker(brief) as worker, AsyncExitStack() as gates:
        await server.meet()
        text = CONFIGURATION.format(state=server.url, worker=worker.url)

        async def begin(number: int) -> Process:
            folder = tmp_path / str(number)
            folder.mkdir(exist_ok=True)
            return await gates.enter_async_context(serving(folder, text))

        load = Load(list(await asyncio.gather(*map(begin, range(GATEWAYS)))))
        clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
        for number in range(ROUNDS):
            done = len(load.answers)
            await until(lambda done=done: len(load.answers) > done + 30, 60)  # type: ignore[misc]
            victim, load.gates[number % GATEWAYS] = load.gates[number % GATEWAYS], None
            assert victim is not None
            victim.signal(signal.SIGKILL)
            await victim.ended()
            done = len(load.answers)
            await until(lambda done=done: len(load.answers) > done + 30, 60)  # type: ignore[misc]
            load.gates[number % GATEWAYS] = await begin(number % GATEWAYS)
        load.over = True
        await asyncio.gather(*clients)
    records = opened(tmp_path)
    check(load.answers, records)
    print(f"{ROUNDS} kills, {len(load.answers)} answers, {len(records)} claims")


def opened(folder: Path) -> list[dict[str, Any]]:
    """The claims in the ledgers of all gateways. The last line of a killed one may be torn."""
    found = []
    for file in folder.rglob("*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n") and (record := json.loads(line))["event"] == "opened":
                found.append(record)
    return found


def check(answers: list[tuple[str, str, int, int]], records: list[dict[str, Any]]) -> None:
    """No index has two owners, none is not in a ledger, and all claims of one request have one index and one seed."""
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    of_request: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        owners[record["session"], record["index"]].add(record["digest"])
        of_request[record["session"], record["digest"]].add((record["index"], record["seed"]))
    assert {place: digests for place, digests in owners.items() if len(digests) > 1} == {}
    assert {place: had for place, had in of_request.items() if len(had) > 1} == {}
    claimed = {(record["session"], record["index"], record["seed"]) for record in records}
    assert [answer for answer in answers if (answer[0], *answer[2:]) not in claimed] == []
    assert len({(session, index) for session, _, index, _ in answers}) == len(answers)
