"""`detgate serve --workers N`: a process that starts N workers, keeps them alive, and serves nothing itself.

Each worker has a socket of its own on the one port, and the kernel parts the connections among them evenly. The sockets
are this process's: one that takes the place of a dead worker takes over its socket, and whoever waits to be accepted
there. Workers meet in the store; beside it they share what goes over their lines: see `gateway.siblings`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import structlog

from gateway import addresses
from gateway.changes import Picture
from gateway.logs import configure
from gateway.settings import InvalidSettings, Settings
from gateway.siblings import ANSWER_SECONDS, COUNT_SECONDS, Count, Line, Ready, Reload, Reloaded, Start
from gateway.tasks import start
from gateway.telemetry import Numbers, Telemetry, lasting, together

log = structlog.get_logger("detgate")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before a worker that died is replaced: doubled each time that one dies young."""

YOUNG_SECONDS = 30.0

STOP_SECONDS = 15.0
"""How long a worker may take to end, beyond `timeouts.drain`."""

BACKLOG = 8192
"""Connections that may wait to be accepted by one worker."""

INTERRUPTED = 130
"""The exit status after CTRL-C."""


def run(settings: Settings, load: Callable[[], Settings], *, resume: bool = False, new_run: bool = False) -> int:
    """Serve by `settings.workers` processes until SIGTERM or CTRL-C. Gives the exit status.

    SIGHUP asks `load` for the settings anew and brings every worker's replicas to them.
    """
    configure(settings.log)
    for line in settings.warnings():
        log.warning(line)
    addresses.check(settings)
    return asyncio.run(Workers(settings, load, resume=resume, new_run=new_run).run())


@dataclass(slots=True, eq=False)
class Post:
    """The place of one worker: it stays when the worker dies."""

    number: int
    sockets: Sequence[socket.socket]
    process: asyncio.subprocess.Process | None = None
    line: Line | None = None
    numbers: Numbers = field(default_factory=list)
    """What its worker told last."""
    ready: bool = False


class Workers:
    """Starts workers, replaces those that die, and brings together what they tell."""

    def __init__(self, settings: Settings, load: Callable[[], Settings], *, resume: bool, new_run: bool) -> None:
        self._settings = settings
        self._load = load
        self._resume, self._new_run = resume, new_run
        self._posts: list[Post] = []
        self._picture: Picture | None = None
        """What the last reload has left; what is changed for all gateways of the run workers hear from the store."""
        self._number = 0
        """Of the last of these changes that the picture has."""
        self._reloading = asyncio.Lock()
        self._telemetry = Telemetry()
        self._dead: Numbers = []
        """What those counted that have died."""
        self._up = asyncio.Event()
        """A worker was ready once, or none shall be any more."""
        self._stopping = asyncio.Event()
        self._status = 0
        self._told = False
        """A signal has ended it."""

    async def run(self) -> int:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: start(self._reload(), "reload"))
        places = _listening(self._settings.host, self._settings.port, self._settings.workers)
        admin = self._settings.admin_port
        if admin is not None:
            more = _listening(self._settings.admin_host or self._settings.host, admin, self._settings.workers)
            places = [[*place, *others] for place, others in zip(places, more, strict=True)]
        self._posts = [Post(number, sockets) for number, sockets in enumerate(places)]
        host, port = places[0][0].getsockname()[:2]
        log.info("listening", host=host, port=port, workers=len(self._posts))
        first, *others = self._posts
        keeping = [start(self._keep(first), "worker 0")]
        # The first alone: what is wrong with the run or the configuration is then said once.
        await self._up.wait()
        if not self._stopping.is_set():
            keeping += [start(self._keep(post), f"worker {post.number}") for post in others]
        await self._stopping.wait()
        _, late = await asyncio.wait(keeping, timeout=self._settings.timeouts.drain + STOP_SECONDS)
        if late:
            log.error("workers that did not end in time are killed")
            self._status = self._status or 1
            self._send(signal.SIGKILL)
            await asyncio.wait(late)
        if self._told:
            log.info("ended", workers=len(self._posts), status=self._status)
        return self._status

    # --- one worker after the other in each post
    async def _keep(self, post: Post) -> None:
        """Have a worker in a post until told to stop."""
        loop = asyncio.get_running_loop()
        pause = SHORTEST_PAUSE
        while not self._stopping.is_set():
            since = loop.time()
            status = await self._live(post)
            was_ready, post.ready = post.ready, False
            self._bury(post)
            if self._stopping.is_set():
                if was_ready and status != 0 and not self._status:
                    self._status = 1
                return
            if not self._up.is_set():
                # It has said why it cannot serve, and no other could.
                self._status = status if status > 0 else 1
                self._stop(None)
                return
            log.error("a worker died and is replaced", worker=post.number, status=status)
            self._telemetry.worker_restarts.add()
            pause = min(2 * pause, LONGEST_PAUSE) if loop.time() - since < YOUNG_SECONDS else SHORTEST_PAUSE
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _live(self, post: Post) -> int:
        """The life of one worker; its exit status. One that the system does not let begin has died at once."""
        try:
            ours = await self._begin(post)
        except OSError as error:
            log.error("a worker cannot be started", worker=post.number, why=error.strerror or str(error))
            return 1
        assert post.process is not None
        if self._stopping.is_set():
            post.process.terminate()
        post.line = Line(ours, self._answer_to(post), lambda news: self._heard(post, news))
        post.line.tell(Start(post.number, self._settings, self._picture, self._number, self._resume, self._new_run))
        reading = start(post.line.run(), f"line {post.number}")
        try:
            return await post.process.wait()
        finally:
            await reading

    async def _begin(self, post: Post) -> socket.socket:
        """Start a process in a post; this end of its line. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), *(sock.fileno() for sock in post.sockets)]
        try:
            with theirs:
                post.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "gateway", "worker", *map(str, descriptors)),
                    pass_fds=descriptors,
                    stdin=asyncio.subprocess.DEVNULL,
                    # CTRL-C reaches all processes of a terminal: a worker is to hear of it from here alone.
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return ours

    def _bury(self, post: Post) -> None:
        """What a dead worker has counted counts on."""
        self._dead = together((self._dead, lasting(post.numbers)), {})
        post.numbers, post.process, post.line = [], None, None

    # --- what workers say
    def _heard(self, post: Post, news: Any) -> None:
        if isinstance(news, Ready):
            post.ready = True
            self._up.set()
            log.info("worker ready", worker=post.number, pid=post.process.pid if post.process else None)
        else:
            post.numbers = news

    def _answer_to(self, post: Post) -> Callable[[Any], Awaitable[Any]]:
        async def answer(question: Count) -> Any:
            if question.numbers is not None:
                post.numbers = question.numbers
            return await self._count(post)

        return answer

    async def _count(self, asker: Post) -> list[Numbers]:
        """The numbers of all but the asker, and of the dead. Of one that does not answer, what it told last."""
        others = [post for post in self._posts if post is not asker]
        await asyncio.gather(*(self._ask(post) for post in others))
        return [self._dead, self._telemetry.numbers(), *(post.numbers for post in others)]

    async def _ask(self, post: Post) -> None:
        with suppress(ConnectionError, TimeoutError):
            if post.line is not None and post.ready:
                post.numbers = await post.line.ask(Count(), COUNT_SECONDS)

    async def _tell(self, reload: Reload) -> Reloaded | None:
        """Have all workers reload, one time after the other. What one of them has answered."""
        async with self._reloading:
            lines = [post.line for post in self._posts if post.line is not None]
            told = await asyncio.gather(*(line.ask(reload, ANSWER_SECONDS) for line in lines), return_exceptions=True)
            reloaded: list[Reloaded] = [answer for answer in told if isinstance(answer, Reloaded)]
            if len(reloaded) < len(lines):
                log.error("not every worker has reloaded yet", reloaded=len(reloaded), workers=len(lines))
            if not reloaded:
                return None
            self._picture, self._number = reloaded[0].picture, reloaded[0].number
            return reloaded[0]

    # --- signals
    def _stop(self, number: signal.Signals | None) -> None:
        """Tell every worker to end: drained after SIGTERM, at once after CTRL-C. A second CTRL-C kills."""
        again = self._stopping.is_set()
        if number is not None and not again:
            self._told = True
            log.info("draining", workers=len(self._posts), signal=number.name)
        self._stopping.set()
        self._up.set()
        if number == signal.SIGINT:
            self._status = INTERRUPTED
        self._send(signal.SIGKILL if again and number == signal.SIGINT else number or signal.SIGTERM)
        for sock in chain.from_iterable(post.sockets for post in self._posts):
            sock.close()

    def _send(self, number: signal.Signals) -> None:
        for post in self._posts:
            if post.process is not None and post.process.returncode is None:
                post.process.send_signal(number)

    async def _reload(self) -> None:
        try:
            settings = self._load()
        except InvalidSettings as error:
            log.error("not reloaded: the configuration is wrong", faults=error.lines)
            return
        reloaded = await self._tell(Reload(settings))
        log.info("reloaded")
        if reloaded is not None and reloaded.waiting:
            log.warning("these settings changed too and need a restart", keys=reloaded.waiting)


def _listening(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """For each worker sockets on every address of the host, all on one port. Exits with 1 where none can be had."""
    try:
        addresses = list(
            dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        )
        places: list[list[socket.socket]] = []
        for _ in range(workers):
            places.append([])
            for family, _, _, _, address in addresses:
                sock = socket.create_server(
                    (str(address[0]), port), family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=False
                )
                port = sock.getsockname()[1]
                places[-1].append(sock)
    except OSError as error:
        log.error("cannot listen", host=host, port=port, why=error.strerror or str(error))
        sys.exit(1)
    return places
