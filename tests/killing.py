"""Kills a gateway with SIGKILL in the middle of traffic, many times, and checks what its clients were told.

    python -m tests.killing 200

Every client sends one request at a time, in sessions of their own and together with others in one; some bodies are the
same again and again, as when several samples of one prompt are drawn in one session.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.harness import FakeWorker, Reply, Seen, chat, completion, delta, pool
from tests.processes import Process, serving

CLIENTS = 16
PATH = "v1/chat/completions"


@dataclass
class Told:
    """What the clients were told in all lives of the gateway."""

    delivered: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Session → index and seed of each answer that came whole."""
    lost: dict[str, int] = field(default_factory=dict)
    """Session → requests that broke and were asked again."""
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def answers(self) -> int:
        return sum(map(len, self.delivered.values()))

    async def note(self, name: str, index: int, seed: str) -> None:
        """An answer came whole."""
        async with self.news:
            self.delivered.setdefault(name, []).append((index, seed))
            self.news.notify_all()


async def worker(seen: Seen, reply: Reply) -> None:
    """Takes a few milliseconds; every other answer is a stream."""
    await asyncio.sleep(0.002)
    if seen.json.get("stream"):
        reply.sse()
        for event in (delta("h"), delta("i"), delta("", "stop"), "data: [DONE]\n\n"):
            reply.chunk(event)
            await asyncio.sleep(0.001)
        reply.end()
    else:
        reply.json(completion())


async def client(number: int, urls: asyncio.Queue[str], stop: asyncio.Event, told: Told) -> None:
    """Asks until it is told to stop; what broke is asked again with the same bytes, of the gateway's next life."""
    chance = random.Random(number)
    session = "shared" if number % 4 == 0 else f"s{number}"
    order = {"X-Index-Order": "content"} if session == "shared" else {}
    asked = 0
    url = await urls.get()
    while not stop.is_set():
        asked += 1
        text = "again" if session != "shared" and chance.random() < 0.5 else f"{number} {asked}"
        body = json.dumps(chat(text, stream=chance.random() < 0.5)).encode()
        while True:
            try:
                async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
                    answer = await http.post(f"/sessions/{session}/{PATH}", content=body, headers=order)
                assert answer.status_code == 200, answer.text
                assert b"finish_reason" in answer.content
                name = answer.headers["x-detgate-request-id"].rpartition(":")[0]
                index, seed = answer.headers["x-detgate-index"], answer.headers["x-detgate-seed"]
                await told.note(name, int(index), seed)
                break
            except httpx.HTTPError:
                told.lost[session] = told.lost.get(session, 0) + 1
                url = await urls.get()


async def lives(folder: Path, kills: int, seconds: float) -> Told:
    """Kill so many times, each after a random time of at most so many seconds; then end it cleanly."""
    told, stop = Told(), asyncio.Event()
    urls = [asyncio.Queue[str]() for _ in range(CLIENTS)]
    chance = random.Random(kills)
    async with FakeWorker(worker) as replica:
        text = json.dumps({"run": "r", "pools": [pool("policy", replica.url)]})
        clients = [asyncio.create_task(client(number, urls[number], stop, told)) for number in range(CLIENTS)]
        for life in range(kills + 1):
            async with serving(folder, text) as gate:
                for queue in urls:
                    queue.put_nowait(str(gate.http.base_url))
                if life < kills:
                    await _some_answers(told, chance.randrange(1, 60))
                    await asyncio.sleep(chance.random() * seconds)
                    gate.process.kill()
                    await gate.process.wait()
                else:
                    await _some_answers(told, 50)
                    stop.set()
                    await asyncio.gather(*clients)
                    await _ended(gate)
    return told


async def _some_answers(told: Told, number: int) -> None:
    enough = told.answers + number
    async with told.news:
        await told.news.wait_for(lambda: told.answers >= enough)


async def _ended(gate: Process) -> None:
    gate.process.terminate()
    assert await gate.ended() == 0


def check(told: Told, folder: Path) -> None:
    """No index was given to two answers, none was lost, and the ledger has every one."""
    opened, used = set(), Counter[tuple[str, int]]()
    for file in sorted(folder.rglob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            record = json.loads(line)
            if record["event"] == "opened":
                opened.add((record["identity"], record["index"], str(record["seed"])))
            elif record["event"] == "closed" and record["used"]:
                used[record["identity"], record["index"]] += 1
    for name, answers in told.delivered.items():
        indices = [index for index, _ in answers]
        assert len(set(indices)) == len(indices), f"{name}: an index was given twice: {Counter(indices).most_common(3)}"
        for index, seed in answers:
            assert (name, index, seed) in opened, f"{name}:{index} is not in the ledger"
            assert used[name, index] == 1, f"{name}:{index} is used {used[name, index]} times"
        whole = {index for identity, index in used if identity == name}
        assert whole == set(range(len(whole))), f"{name}: indices were lost: {sorted(set(range(max(whole))) - whole)}"
        doubtful = len(whole) - len(indices)
        assert doubtful <= sum(told.lost.values()), f"{name}: {doubtful} indices are used by nobody"


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(lives(Path(folder), kills, 0.3))
        check(told, Path(folder))
    print(
        f"{kills} kills, {told.answers} answers, {sum(told.lost.values())} requests broken: no index twice, none lost"
    )


if __name__ == "__main__":
    main()
