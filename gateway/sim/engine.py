"""The batch: who waits, who runs, and the loop that steps them together.

One task steps all running jobs and ends when none is left, so an idle engine holds nothing.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from gateway.sim import model
from gateway.sim.faults import Faults
from gateway.sim.jobs import Job
from gateway.sim.model import mix
from gateway.sim.records import Counters
from gateway.sim.settings import SimSettings

BLOCKS = {"vllm": 16, "sglang": 1}
_CACHED_BLOCKS = 100_000
_RESPONSES = 10_000


class PrefixCache:
    """Blocks of prompts that were read before; the least lately used go first."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._blocks: dict[int, None] = {}

    def read(self, tokens: list[int], salt: str) -> int:
        """Takes a prompt in; how many of its first tokens were there already."""
        key = model.states(salt.encode())[-1] if salt else 0
        keys = [mix(key, state) for state in model.states(tokens)[self._block - 1 :: self._block]]
        warm = next((place for place, block in enumerate(keys) if block not in self._blocks), len(keys))
        for block in keys:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > _CACHED_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return min(warm * self._block, max(0, len(tokens) - 1))

    def clear(self) -> None:
        self._blocks.clear()


class Engine:
    """One engine's batch, counters and faults.

    `dead`     it crashed: every connection is closed without an answer
    `running`  the jobs in the batch; `waiting` those that it had no place for
    `responses`  the conversations behind stored responses, by response id
    """

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.faults = Faults()
        self.counters = Counters()
        self.cache = PrefixCache(BLOCKS[settings.engine])
        self.dead = False
        self.responses: dict[str, list[Any]] = {}
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self._changed = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._loop: asyncio.Task[None] | None = None

    def submit(self, jobs: Iterable[Job]) -> None:
        self.waiting.extend(jobs)
        self._tell()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())

    def ids(self) -> set[str]:
        """The ids of all live jobs."""
        return {job.id for job in (*self.running, *self.waiting)}

    def abort(self, prefix: str) -> None:
        """Ends every live job whose id begins with `prefix`; each answers what it has."""
        for job in [*self.running, *self.waiting]:
            if job.id.startswith(prefix):
                self._forget(job)
                job.abort()

    def drop(self, jobs: Iterable[Job]) -> None:
        """Ends jobs that nobody reads any more."""
        for job in jobs:
            if not job.ended:
                self._forget(job)
                job.abort()

    def die(self) -> None:
        """Crashes: what runs is lost and every later request finds a closed socket."""
        self.dead = True
        self.drop([*self.running, *self.waiting])

    def pause(self) -> None:
        """Stops stepping; requests go on arriving."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def keep_response(self, id: str, conversation: list[Any]) -> None:
        """Stores a conversation for `previous_response_id`."""
        self.responses[id] = conversation
        while len(self.responses) > _RESPONSES:
            del self.responses[next(iter(self.responses))]

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    async def reached(self, count: int) -> None:
        """Waits until at least `count` jobs are here, running or waiting."""
        await self._until(lambda: len(self.running) + len(self.waiting) >= count)

    async def idle(self) -> None:
        """Waits until no job is here."""
        await self._until(lambda: not self.running and not self.waiting)

    def report(self) -> dict[str, object]:
        """The counters as JSON; bodies as text, with bytes that are no UTF-8 escaped by a backslash."""
        counters = self.counters
        return {
            "requests": counters.requests,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "peak_running": counters.peak_running,
            "aborted": counters.aborted,
            "disconnects": counters.disconnects,
            "dead": self.dead,
            "paused": self.paused,
            "seen": [asdict(seen) for seen in counters.seen],
            "bodies": [body.decode("utf-8", "backslashreplace") for body in counters.bodies],
            "faults": self.faults.report(),
        }

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _run(self) -> None:
        while self.running or self.waiting:
            await self._resumed.wait()
            self._admit()
            await asyncio.sleep(self.settings.token_seconds)
            if not self.paused:
                self._step()

    def _admit(self) -> None:
        if self.settings.priority_scheduling:
            upward = 1 if self.settings.engine == "vllm" else -1
            self.waiting.sort(key=lambda job: upward * job.priority)
        free = self.settings.max_num_seqs - len(self.running)
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        for job in admitted:
            if self.settings.prefix_cache:
                job.cached_tokens = self.cache.read(job.tokens, job.salt)
        self.running.extend(admitted)
        self.counters.peak_running = max(self.counters.peak_running, len(self.running))

    def _step(self) -> None:
        batch = list(self.running)
        for job in batch:
            job.step(self._company(job, len(batch)))
        self.running = [job for job in self.running if not job.ended]
        self._tell()

    def _company(self, job: Job, size: int) -> int:
        if not self.settings.batch_dependent:
            return 0
        return 0 if size == 1 and not job.cached_tokens else mix(size, job.cached_tokens)

    def _forget(self, job: Job) -> None:
        self.counters.aborted += 1
        for place in (self.running, self.waiting):
            if job in place:
                place.remove(job)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
