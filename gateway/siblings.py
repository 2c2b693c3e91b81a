"""Others that serve with this process: the workers of its `detgate serve`, and all gateways of its run.

Each worker has a line to the process that started it, and to nobody else. Numbers come together there, and a reload
goes over it to all. Both ends are one program, and nobody else can reach the line: so values go over it as Python's own
pickles. What is changed at one gateway goes to all of its run, over the store: `gateway.joint_changes`.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from gateway.changes import Change, Changes, Picture
from gateway.core.errors import Busy
from gateway.settings import Settings
from gateway.tasks import start, stop
from gateway.telemetry import Numbers, Telemetry

ANSWER_SECONDS = 5.0
"""How long the answer to a question may take."""

COUNT_SECONDS = 1.0
"""How long that to the question for its numbers may take a worker."""

PUSH_SECONDS = 1.0
"""How often a worker tells its numbers unasked, so that they outlive it."""

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Start:
    """The first that a worker hears: what it shall serve."""

    number: int
    """Which of the workers it is."""
    settings: Settings
    picture: Picture | None
    """The fleet as it was after the last reload; None: as it is configured."""
    pictured: int
    """Of the last change that the picture has."""
    resume: bool
    new_run: bool


@dataclass(frozen=True, slots=True)
class Reload:
    """Bring the replicas to those of these settings."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The replicas of a worker are those of new settings."""

    picture: Picture
    number: int
    """Of the last change that the picture has."""
    waiting: list[str]
    """Settings that changed too and need a restart."""


@dataclass(frozen=True, slots=True)
class Count:
    """What are your numbers? Asked of a worker. Asked by one: what are those of all others?"""

    numbers: Numbers | None = None
    """Those of the worker that asks: what it shows counts on when it dies right after."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker listens."""


class Host(Protocol):
    """All processes of this `detgate serve`."""

    async def numbers(self) -> Sequence[Numbers]:
        """The numbers of all others, and of those that have died. Raises `Busy` where they cannot be had now."""


class Single:
    """The one process of its `detgate serve`."""

    async def numbers(self) -> Sequence[Numbers]:
        return ()


class Siblings(Protocol):
    """All gateways of a run, workers of this host or of others."""

    @property
    def ready(self) -> bool:
        """All that was changed before is known."""

    @property
    def number(self) -> int:
        """Of the last change that was made here."""

    async def change(self, *changes: Change) -> list[int]:
        """Make these changes, in this order and together, at all of them. The number of each, for those of gates.

        Raises `Busy` where that cannot be had now, and `Conflict` where a replica is there already.
        """

    async def inside(self, pools: Collection[str]) -> int:
        """How many requests others have in the engines of these pools, at most; of pools that are shut.

        Raises `Busy` where that cannot be had now.
        """

    async def close(self) -> None:
        """Nothing is in flight any more."""


class Alone:
    """The only gateway of its run."""

    ready = True
    number = 0

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def change(self, *changes: Change) -> list[int]:
        for change in changes:
            self._changes.check(change)
        return [self._changes.apply(change) for change in changes]

    async def inside(self, pools: Collection[str]) -> int:
        return 0

    async def close(self) -> None:
        pass


class Worker:
    """One of several: its line to the process that started it."""

    def __init__(
        self, line: socket.socket, changes: Changes, siblings: Siblings, telemetry: Telemetry, settings: Settings
    ) -> None:
        self._changes = changes
        self._siblings = siblings
        self._telemetry = telemetry
        self._settings = settings
        self._line = Line(line, self._answer)

    async def run(self) -> None:
        """Answer what is asked, and tell the numbers, until the line breaks: then the process that started this has
        gone."""
        telling = start(self._tell(), "numbers")
        try:
            await self._line.run()
        finally:
            await stop(telling)

    def ready(self) -> None:
        """Say that this worker listens."""
        self._line.tell(Ready())

    async def numbers(self) -> Sequence[Numbers]:
        try:
            others: Sequence[Numbers] = await self._line.ask(Count(self._telemetry.numbers()), 2 * COUNT_SECONDS)
        except (ConnectionError, TimeoutError):
            raise Busy("The other workers could not be asked in time. Ask again.", code="workers_busy") from None
        return others

    async def _tell(self) -> None:
        while True:
            self._line.tell(self._telemetry.numbers())
            await asyncio.sleep(PUSH_SECONDS)

    async def _answer(self, question: Count | Reload) -> Any:
        if isinstance(question, Count):
            return self._telemetry.numbers()
        waiting = self._changes.reload(self._settings, question.settings)
        return Reloaded(self._changes.picture, self._siblings.number, waiting)


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    question: Any


@dataclass(frozen=True, slots=True)
class _Answered:
    number: int
    answer: Any


class Line:
    """One end of a line between two processes: questions and answers both ways, and news."""

    def __init__(
        self,
        end: socket.socket,
        answer: Callable[[Any], Awaitable[Any]],
        news: Callable[[Any], None] = lambda news: None,
    ) -> None:
        self._end = end
        self._answer = answer
        self._news = news
        self._numbers = count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._closed = False

    async def run(self) -> None:
        """Read until the other end has gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        self._writer.writelines(self._unsent)
        self._unsent.clear()
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._heard(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._closed = True
            self._writer.close()
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the other process has gone"))

    async def ask(self, question: Any, seconds: float) -> Any:
        """The other end's answer. Raises `ConnectionError` where it has gone, `TimeoutError`."""
        if self._closed:
            raise ConnectionError("the other process has gone")
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(_Asked(number, question))
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            del self._open[number]

    def tell(self, news: Any) -> None:
        """Say something that wants no answer. Lost where the other end has gone."""
        frame = framed(news)
        if self._writer is None:
            self._unsent.append(frame)
        elif not self._closed:
            self._writer.write(frame)

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()

    def _heard(self, heard: Any) -> None:
        match heard:
            case _Asked(number, question):
                start(self._reply(number, question), "answer")
            case _Answered(number, answer):
                waiting = self._open.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            case _:
                self._news(heard)

    async def _reply(self, number: int, question: Any) -> None:
        self.tell(_Answered(number, await self._answer(question)))


def framed(value: Any) -> bytes:
    """A value as it goes over a line."""
    body = pickle.dumps(value)
    return _LENGTH.pack(len(body)) + body


def first(end: socket.socket) -> Any:
    """The first value that comes over a line. Raises `EOFError` where none comes."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return pickle.loads(_exactly(end, length))


def _exactly(end: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = end.recv(length - len(data))
        if not part:
            raise EOFError("the process that started this one has gone")
        data += part
    return data
