"""An event loop whose time is a number and whose order is a seed's.

Nothing waits: when nobody can go on, time jumps to the next timer. What runs together is a *process*: in one, callbacks
run in the order in which asyncio promises to run them; between processes the seed decides. A process can stand still,
and it can be gone from one step to the next, as after kill -9: none of its code runs any more.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

PROCESS: ContextVar[Process] = ContextVar("process")


class Halted(Exception):
    """The loop was stopped: so many steps mean that something runs in circles."""


class Process:
    """What runs, stands still and dies together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.still_until = 0.0
        self.ready: deque[asyncio.Handle] = deque()
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.after: tuple[int, Callable[[], None]] | None = None
        """What happens when it has made so many more steps."""
        self.tasks: list[Task] = []
        """Held, so that none of its code runs when it is gone."""

    def kill(self) -> None:
        """No step of it is made any more."""
        self.alive = False
        self.ready.clear()

    def strike(self, steps: int, blow: Callable[[], None]) -> None:
        """Have something happen after so many of its steps: at any of its awaits."""
        self.after = (steps, blow)


class Task(asyncio.Task[Any]):
    """A task whose place in a set is the same in each run."""

    def __init__(self, work: Any, number: int, **named: Any) -> None:
        self._number = number
        super().__init__(work, **named)

    def __hash__(self) -> int:
        return self._number


class Loop(asyncio.BaseEventLoop):
    """Virtual time. `seed` decides which process goes on."""

    def __init__(self, seed: int, most_steps: int = 3_000_000) -> None:
        super().__init__()
        self._chance = random.Random(f"loop {seed}")
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sequence = count()
        self.numbers = count()
        """Of tasks."""
        self._going: list[Process] = []
        """Those that have something to do."""
        self.steps = 0
        self._most_steps = most_steps
        self.world = Process("world")
        self.connect: Callable[..., Coroutine[Any, Any, Any]]
        """How `create_connection` connects."""
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._now

    # --- what is to be done
    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._sequence), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _put(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS, self.world)  # type: ignore[attr-defined]
        if process.alive:
            if not process.ready:
                self._going.append(process)
            process.ready.append(handle)

    # --- one step
    def _run_once(self) -> None:
        going = [process for process in self._going if process.still_until <= self._now]
        if not going:
            self._jump()
            return
        process = going[0] if len(going) == 1 else going[int(self._chance.random() * len(going))]
        if process.after is not None:
            steps, blow = process.after
            process.after = (steps - 1, blow) if steps else None
            if not steps:
                blow()
                if not process.alive or process.still_until > self._now:
                    return
        handle = process.ready.popleft()
        if not process.ready:
            self._going.remove(process)
        if not handle.cancelled():
            self.steps += 1
            if self.steps > self._most_steps:
                raise Halted(f"{self.steps} steps, and no end")
            handle._run()

    def _jump(self) -> None:
        """On to the next time at which somebody can go on."""
        nexts = [process.still_until for process in self._going]
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._timers:
            nexts.append(self._timers[0][0])
        if not nexts:
            raise Halted("nobody can go on any more")
        self._now = max(self._now, min(nexts))
        while self._timers and self._timers[0][0] <= self._now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._put(timer)

    def forget(self, process: Process) -> None:
        """It is gone: nothing of it is to be done."""
        process.kill()
        if process in self._going:
            self._going.remove(process)

    # --- what a loop has beside that
    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once: a thread would be another source of order."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **named: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        made: tuple[asyncio.Transport, asyncio.BaseProtocol] = await self.connect(factory, host, port)
        return made

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _task(
    loop: asyncio.AbstractEventLoop, work: Generator[Any, None, Any] | Coroutine[Any, Any, Any], **named: Any
) -> Task:
    assert isinstance(loop, Loop)
    task = Task(work, next(loop.numbers), loop=loop, **named)
    process = PROCESS.get(None)
    if process is not None:
        process.tasks.append(task)
    return task
