"""The ASGI application of one simulated engine."""

import asyncio
import json
from types import SimpleNamespace

from gateway.sim.asks import Ask
from gateway.sim.connection import Connection, Receive, Scope, Send
from gateway.sim.dialect import fresh
from gateway.sim.engine import Engine
from gateway.sim.faults import NO_FAULT, PROBES, QUIET
from gateway.sim.fields import Refused
from gateway.sim.records import Seen
from gateway.sim.replies import EngineDied, Headers, Reply, Sender, Stream, answer
from gateway.sim.routes import routes
from gateway.sim.settings import SimSettings
from gateway.sim.sglang import Sglang
from gateway.sim.vllm import Vllm

CONTROL = "/_sim"


class App:
    """Reads a request, meets its fault, answers; `state.engine` is the engine.

    /_sim is no engine's: GET tells the counters, POST with fields of a `Fault` and maybe `route` and `times`
    adds a rule, DELETE drops all rules; POST {"paused": true} holds the batch until {"paused": false}.
    """

    def __init__(self, settings: SimSettings) -> None:
        self.engine = Engine(settings)
        self.state = SimpleNamespace(engine=self.engine)
        self._dialect = Vllm() if settings.engine == "vllm" else Sglang()
        self._routes = routes(settings)
        self._paths = {path for _, path in self._routes}
        self._open: set[Connection] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        connection = Connection(scope, receive, send)
        if self.engine.dead:
            connection.reset()
            return
        self._open.add(connection)
        try:
            await self._serve(scope, connection)
        finally:
            self._open.discard(connection)

    async def _serve(self, scope: Scope, connection: Connection) -> None:
        body = await connection.body()
        if body is None:
            self.engine.counters.disconnects += 1
            return
        path: str = scope["path"]
        if path == CONTROL:
            await Sender(connection, NO_FAULT).send(self._control(scope["method"], body))
            return
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        fault = self.engine.faults.take(path)
        ask = Ask(scope["method"], path, Seen(path, headers), body, fault, self.engine)
        if path not in QUIET and ask.method != "GET":
            ask.note_arrival()
        await self._until_gone(ask, connection)

    async def _until_gone(self, ask: Ask, connection: Connection) -> None:
        work = asyncio.create_task(self._answer(ask, connection))
        gone = asyncio.create_task(connection.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self.engine.counters.disconnects += 1
        finally:
            work.cancel()
            gone.cancel()
            self.engine.drop(ask.jobs)

    async def _answer(self, ask: Ask, connection: Connection) -> None:
        fault = ask.fault
        if fault.hang:
            await asyncio.Event().wait()
        if fault.reset_before_head:
            connection.reset()
            await connection.gone()
            return
        await asyncio.sleep(fault.health_delay if ask.path in PROBES else fault.delay_head)
        try:
            reply = await self._reply(ask)
        except EngineDied:
            self.crash()
            await connection.gone()
            return
        await Sender(connection, fault, self._id_header(ask)).send(reply)

    async def _reply(self, ask: Ask) -> Reply | Stream:
        status = ask.fault.health_status if ask.path in PROBES else ask.fault.status
        if status is not None:
            return self._dialect.refusal(ask.path, Refused(status, f"simulated fault: status {status}"))
        refusal = self._refusal(ask)
        if refusal is not None:
            return refusal
        try:
            reply = await self._routes[ask.method, ask.path](ask, self._dialect)
        except Refused as refused:
            return self._dialect.refusal(ask.path, refused)
        if isinstance(reply, Reply) and ask.fault.error_event_after_tokens is not None:
            return self._dialect.refusal(ask.path, Refused(500, "simulated fault: the engine failed"))
        return reply

    def _refusal(self, ask: Ask) -> Reply | None:
        settings = self.engine.settings
        guarded = self._dialect.guarded(ask.path) or (settings.guard_probes and ask.path in PROBES)
        if settings.api_key and guarded and ask.header("authorization") != f"Bearer {settings.api_key}":
            return answer({"error": "Unauthorized"}, 401)
        if ask.path not in self._paths:
            return answer({"detail": "Not Found"}, 404)
        if (ask.method, ask.path) not in self._routes:
            allowed = ", ".join(method for method, path in self._routes if path == ask.path)
            return answer({"detail": "Method Not Allowed"}, 405, (("allow", allowed),))
        return None

    def _id_header(self, ask: Ask) -> Headers:
        settings = self.engine.settings
        if settings.engine == "sglang" or not settings.request_id_headers:
            return ()
        return (("x-request-id", ask.header("x-request-id") or fresh()),)

    def crash(self) -> None:
        """Ends as a process that was killed: every open connection is reset, no later one is answered."""
        self.engine.die()
        for connection in self._open:
            connection.reset()

    def _control(self, method: str, body: bytes) -> Reply:
        engine = self.engine
        if method == "DELETE":
            engine.faults.clear()
        elif method == "POST":
            try:
                given = json.loads(body)
                if "paused" in given:
                    (engine.pause if given.pop("paused") else engine.resume)()
                if given:
                    engine.faults.add(**given)
            except (ValueError, TypeError, AttributeError) as error:
                return answer({"error": str(error)}, 400)
        elif method != "GET":
            return answer({"detail": "Method Not Allowed"}, 405)
        return answer(engine.report())


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def build(settings: SimSettings) -> App:
    """The application, for any ASGI server; resets need `SimServer` or `serve`."""
    return App(settings)
