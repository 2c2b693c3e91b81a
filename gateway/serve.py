"""`detgate serve`: the gateway under uvicorn, from start to a drained end."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
import uvicorn

from gateway import addresses
from gateway.assembly import Gateway
from gateway.carriers.http1 import Carrier, Plane
from gateway.core.types import Request
from gateway.intake import Intake
from gateway.logs import configure
from gateway.settings import InvalidSettings, Settings
from gateway.siblings import Start, Worker, first
from gateway.tasks import start
from gateway.tls import Certificate

log = structlog.get_logger("detgate")

BACKLOG = 8192
"""Connections that may wait to be accepted on one socket."""

COLLECT_SECONDS = 10.0
"""How often what is young is looked through for cycles: probes leave some, 25 kB a second, that no load would."""

PREPARE_SECONDS = 2.0
"""How long one of several workers may take to learn what it needs, before it takes requests: others do meanwhile."""


def run(settings: Settings, load: Callable[[], Settings], *, resume: bool = False, new_run: bool = False) -> None:
    """Serve until SIGTERM or CTRL-C. SIGHUP asks `load` for the settings anew and brings the replicas to them.

    `resume`: go on with a run that has ended. `new_run`: begin one although the last did not end.
    """
    configure(settings.log)
    for line in settings.warnings():
        log.warning(line)
    _run(settings, _alone(settings, load, resume, new_run))


def work(line: socket.socket, sockets: Sequence[socket.socket]) -> None:
    """Serve as one of several workers: what, is the first that comes over the line to the process that started this."""
    begin: Start = first(line)
    configure(begin.settings.log)
    structlog.contextvars.bind_contextvars(worker=begin.number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _run(begin.settings, _worker(begin, line, sockets))


def _run(settings: Settings, serving: Coroutine[Any, Any, None]) -> None:
    files, connections = _allow_files(), settings.limits.connections
    if files < connections:
        log.warning(
            f"limits.connections: {connections} cannot be open at once, since this process may open {files} files"
            " (ulimit -n); past them clients are cut off, and replicas cannot be reached"
        )
    loop_factory = uvicorn.Config("", loop="uvloop", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serving)


def _allow_files() -> float:
    """Take as many open files as the system lets this process have: each request under way needs two.

    How many those are; inf: there is no bound.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


async def _alone(settings: Settings, load: Callable[[], Settings], resume: bool, new_run: bool) -> None:
    loop = asyncio.get_running_loop()
    # A long run's ledger takes long to read: a SIGHUP meanwhile must not end the process, and is heeded after it.
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    addresses.check(settings)
    gateway = Gateway(settings, resume=resume, new_run=new_run)
    loop.add_signal_handler(signal.SIGHUP, _reload, gateway, load)
    await serve(gateway, Server(gateway))


async def _worker(begin: Start, line: socket.socket, sockets: Sequence[socket.socket]) -> None:
    gateway = Gateway(begin.settings, resume=begin.resume, new_run=begin.new_run, pictured=begin.pictured)
    if begin.picture is not None:
        gateway.changes.match(begin.picture)
    worker = gateway.host = Worker(line, gateway.changes, gateway.siblings, gateway.telemetry, begin.settings)
    server = Server(gateway, sockets)
    hearing = start(_hear(worker, server), "line")
    try:
        await serve(gateway, server, lambda _: worker.ready(), PREPARE_SECONDS)
    finally:
        hearing.cancel()


async def _hear(worker: Worker, server: Server) -> None:
    await worker.run()
    log.error("the process that started this worker has gone: it ends too")
    server.handle_exit(signal.SIGTERM, None)


async def serve(
    gateway: Gateway, server: Server, ready: Callable[[Gateway], object] | None = None, wait: float = 0.0
) -> None:
    """Serve until told to stop, and log how it began and ended. Raises `KeyboardInterrupt` after CTRL-C.

    `ready` is called when the server listens; `wait`: seconds that it may take before, to learn what it needs.
    """
    own = gateway.runs.own
    log.info("run", run=own.name, resumed=own.resumed, ledger=str(own.folder), profile=gateway.settings.profile)
    if own.differs:
        log.error("not ready: the run began with other settings", run=own.name, keys=own.differs)
    async with gateway.running():
        await gateway.knows_its_world(wait)
        collect_rarely()
        await server.listen(ready)
    log.info("ended", run=own.name, cut=server.cut)
    if server.interrupted:
        raise KeyboardInterrupt


def collect_rarely() -> None:
    """Have the garbage collector do next to nothing under load.

    What stands now stays: it need not be walked again at each of its rounds. And what a request makes is freed by its
    last reference, so there is next to nothing to find; what probes leave, `Server` has it look for by the clock.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _reload(gateway: Gateway, load: Callable[[], Settings]) -> None:
    try:
        then = load()
    except InvalidSettings as error:
        log.error("not reloaded: the configuration is wrong", faults=error.lines)
        return
    waiting = gateway.changes.reload(gateway.settings, then)
    log.info("reloaded")
    if waiting:
        log.warning("these settings changed too and need a restart", keys=waiting)


class Administration:
    """What a carrier needs of the port for administration: the data plane's bounds, and none of its routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.intake = Intake(gateway.settings.limits)
        self.refused = gateway.refused
        self.head_bytes = gateway.head_bytes
        self.body_bytes = gateway.body_bytes
        self.head_seconds = gateway.head_seconds
        self.body_seconds = gateway.body_seconds
        self.write_seconds = gateway.write_seconds

    @property
    def draining(self) -> bool:
        return self._gateway.draining

    def owns(self, path: str) -> bool:
        return False

    async def serve(self, request: Request, client: Any) -> None:
        raise AssertionError(f"{request.path} is not of the data plane")


class Server(uvicorn.Server):
    """uvicorn, with the data plane's carrier in its sockets and a drain that ends what outlives its deadline."""

    def __init__(self, gateway: Gateway, sockets: Sequence[socket.socket] = ()) -> None:
        self.gateway = gateway
        settings = gateway.settings
        self._admin_port = settings.admin_port
        admin = [sock for sock in sockets if sock.getsockname()[1] == self._admin_port]
        self._sockets = [sock for sock in sockets if sock not in admin]
        self._admin_sockets = admin
        self.certificate = None if settings.tls.cert is None else Certificate(settings.tls)
        super().__init__(self._config(gateway.application, gateway, settings.host, settings.port))
        self._ready: Callable[[Gateway], object] | None = None
        self.interrupted = False
        """It was CTRL-C that ended it: whoever listened raises it again when all is closed."""
        self.cut = 0
        """Requests that the end of the drain ended as errors."""

    def _config(self, application: Any, plane: Plane, host: str, port: int) -> uvicorn.Config:
        certificate = self.certificate
        return uvicorn.Config(
            application,
            host=host,
            port=port,
            http=partial(Carrier, plane),  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[("server", "detgate")],
            backlog=BACKLOG,
            timeout_keep_alive=int(self.gateway.settings.timeouts.keep_alive),
            timeout_graceful_shutdown=5,
            ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        )

    async def listen(self, ready: Callable[[Gateway], object] | None = None) -> None:
        """Serve until told to stop."""
        self._ready = ready
        watch = start(self._watch(), "connections")
        try:
            with self.capture_signals():
                await self._serve(self._sockets or None)
                # Not raised again: after SIGTERM the exit status is 0, and CTRL-C waits until the run is ended.
                self.interrupted = signal.SIGINT in self._captured_signals
                self._captured_signals = []
        finally:
            watch.cancel()
        if not self.started:
            sys.exit(3)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._admin_port is not None:
            await self._open_admin(self._admin_port)
        if self.started and not sockets:
            self._say_where()
        if self.started and self._ready is not None:
            self._ready(self.gateway)

    def _say_where(self) -> None:
        settings = self.gateway.settings
        scheme = "http" if self.certificate is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        log.info("listening", url=f"{scheme}://{host}:{self.port}", admin_port=self._admin_port)

    async def _open_admin(self, port: int) -> None:
        """Listen on the port for administration too. It is one server with two ports: they drain and end together."""
        settings = self.gateway.settings
        host = settings.admin_host or settings.host
        config = self._config(self.gateway.administration, Administration(self.gateway), host, port)
        config.load()
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]

        try:
            if self._admin_sockets:
                for sock in self._admin_sockets:
                    self.servers.append(await loop.create_server(connection, sock=sock, ssl=config.ssl))
            else:
                self.servers.append(await loop.create_server(connection, host, port, ssl=config.ssl, backlog=BACKLOG))
        except OSError as error:
            log.error("cannot listen", host=host, port=port, why=error.strerror or str(error))
            sys.exit(3)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests with 503 while those under way end, for a bounded time; then stop listening.

        CTRL-C waits for nothing.
        """
        pipeline = self.gateway.pipeline
        pipeline.drain()
        seconds = 0.0 if self._hurries() else self.gateway.settings.timeouts.drain
        log.info("draining", run=self.gateway.run, requests=pipeline.serving, seconds=seconds)
        try:
            async with asyncio.timeout(seconds):
                while not (pipeline.drained.is_set() or self._hurries()):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(pipeline.drained.wait(), 0.1)
        except TimeoutError:
            log.warning("requests outlived timeouts.drain and end as errors", seconds=seconds)
        self.cut = sum(connection.give_up() for connection in self._carriers())
        await super().shutdown(sockets)

    def _hurries(self) -> bool:
        return signal.SIGINT in self._captured_signals

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        collected = loop.time()
        while True:
            await asyncio.sleep(1.0)
            if self.certificate is not None:
                self._renew(self.certificate)
            self.gateway.runs.look()
            now = loop.time()
            if now - collected >= COLLECT_SECONDS:
                gc.collect(0)
                collected = now
            for connection in self._carriers():
                connection.overdue(now)

    def _renew(self, certificate: Certificate) -> None:
        """Show a certificate that was put in the old one's place. What does not fit yet is tried again."""
        try:
            if certificate.renewed():
                log.info("certificate renewed")
        except InvalidSettings as error:
            log.error("the new certificate cannot be used", faults=error.lines)

    def _carriers(self) -> list[Any]:
        return [connection for connection in self.server_state.connections if isinstance(connection, Carrier)]
