"""The clients of the simulation: what they ask, and how they ask again.

Most are patient: they ask until they are served, as the SDKs do, with a count that goes up. Some leave in the middle,
some give up waiting and ask another gateway while the first still works, and some requests arrive twice.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.simulate.door import Said, Visit
from tests.simulate.loop import Loop

Kind = Literal["walk", "number", "key", "content", "score", "race"]
CUT = 0.03
"""Share of sendings whose client leaves in the middle of the body."""

MOST = 60
"""Tries after which a request counts as never served."""

SIZES: dict[Kind, tuple[int, int]] = {
    "walk": (10, 8),
    "number": (3, 8),
    "key": (4, 6),
    "content": (3, 8),
    "score": (6, 6),
    "race": (3, 4),
}
"""Sessions of each kind, and requests in each: two hundred."""

FEW: dict[Kind, tuple[int, int]] = {kind: (max(1, sessions // 3), each) for kind, (sessions, each) in SIZES.items()}
"""A third of the sessions, for what is found in a small story too."""


@dataclass(eq=False)
class Attempt:
    """One sending of a request."""

    repeat: int
    gateway: str
    since: float
    until: float = -1.0
    outcome: str = "left"
    """whole, broken, or left: the client did."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def code(self) -> str:
        """The code of an error."""
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return ""

    @property
    def guarantee(self) -> str:
        return self.headers.get("x-detgate-guarantee", "")


@dataclass(eq=False)
class Request:
    """What a client wants once."""

    name: str
    session: str
    kind: Kind
    path: str
    body: bytes
    headers: dict[str, str]
    twin: str = ""
    """Another request of the same bytes."""
    leaves: bool = False
    """Its client leaves, and asks no more."""
    doubled: bool = False
    """It arrives twice."""
    attempts: list[Attempt] = field(default_factory=list)
    done: str = ""
    """How it ended: served, left, fenced, refused, never."""

    @property
    def served(self) -> Attempt | None:
        return next((each for each in self.attempts if each.outcome == "whole" and each.status == 200), None)


Ask = Callable[[str, Any, bytes, bool], Visit]


class Clients:
    """All clients of one seed. `gateways`: the names of those that can be asked now."""

    def __init__(
        self, loop: Loop, seed: int, gateways: Callable[[], list[str]], ask: Ask, sizes: dict[Kind, tuple[int, int]]
    ) -> None:
        self._loop = loop
        self._chance = random.Random(f"clients {seed}")
        self._cuts = random.Random(f"cuts {seed}")
        self._gateways, self._ask = gateways, ask
        self.sessions = {
            f"{kind}-{number}": self._session(kind, f"{kind}-{number}", size)
            for kind, (sessions, size) in sizes.items()
            for number in range(sessions)
        }
        self.requests = [request for session in self.sessions.values() for request in session]
        self.open: dict[Visit, Attempt] = {}

    async def run(self) -> None:
        """Ask everything. Returns when every request has ended."""
        await asyncio.gather(*(self._walk(requests) for requests in self.sessions.values()))

    # --- what is asked
    def _session(self, kind: Kind, session: str, size: int) -> list[Request]:
        return [self._request(kind, session, number) for number in range(size)]

    def _request(self, kind: Kind, session: str, number: int) -> Request:
        chance = self._chance
        name = f"{session}.{number}"
        headers = {"x-session-id": session}
        twin = ""
        if kind == "number":
            headers["x-request-index"] = str(number)
        elif kind == "key":
            headers["idempotency-key"] = name
        elif kind == "content":
            headers["x-index-order"] = "content"
            if number % 4 == 3:
                twin = name = f"{session}.{number - 1}"
        if kind == "score":
            body: dict[str, Any] = {"model": "reward", "input": name}
            if chance.random() < 0.15:
                body["input"] = [f"{name}#0", f"{name}#1"]
            path = "/classify"
        elif chance.random() < 0.1:
            body = {"model": "policy", "prompt": [f"{name}#0", f"{name}#1"]}
            path = "/v1/completions"
        else:
            body = {"model": "policy", "messages": [{"role": "user", "content": name}]}
            path = "/v1/chat/completions"
        if kind not in ("score", "content") and chance.random() < 0.4:
            body["stream"] = True
        return Request(
            f"{session}.{number}",
            session,
            kind,
            path,
            json.dumps(body).encode(),
            headers,
            twin,
            leaves=kind != "content" and chance.random() < 0.06,
            doubled=kind in ("key", "number") and chance.random() < 0.25,
        )

    # --- how it is asked
    async def _walk(self, requests: list[Request]) -> None:
        chance, kind = self._chance, requests[0].kind
        await asyncio.sleep(3 * chance.random())
        together = 1 if kind in ("walk", "key") else 4
        for first in range(0, len(requests), together):
            await asyncio.gather(*(self._persist(request) for request in requests[first : first + together]))
            if any(request.done == "fenced" for request in requests):
                for request in requests:
                    request.done = request.done or "fenced"
                return
            await asyncio.sleep(chance.choice([0.0, 0.05, 0.3, 1.0]))

    async def _persist(self, request: Request) -> None:
        chance = self._chance
        if request.kind == "race":
            await asyncio.sleep(0.02 * chance.random())
        for repeat in range(MOST):
            gateways = self._gateways()
            if not gateways:
                await asyncio.sleep(0.3)
                continue
            if request.doubled and repeat == 0:
                self._try(request, repeat, chance.choice(gateways), {})
            attempt = await self._once(request, repeat, chance.choice(gateways))
            if attempt.outcome == "whole" and attempt.status < 400:
                request.done = "served"
            elif attempt.outcome == "left" and request.leaves:
                request.done = "left"
            elif attempt.status in (400, 404, 413, 422):
                request.done = "refused"
            elif attempt.code in ("session_fenced", "index_conflict", "idempotency_conflict", "mixed_order"):
                request.done = "fenced" if attempt.code == "session_fenced" else "refused"
            if request.done:
                return
            await asyncio.sleep(chance.choice([0.02, 0.2, 0.5, 1.0]))
        request.done = "never"

    def _try(self, request: Request, repeat: int, gateway: str, headers: dict[str, str]) -> tuple[Attempt, Visit]:
        fields = {**request.headers, **headers, "content-type": "application/json"}
        scope = {
            "type": "http",
            "method": "POST",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        }
        attempt = Attempt(repeat, gateway, self._loop.time())
        request.attempts.append(attempt)
        cut = self._cuts.random() < CUT
        visit = self._ask(gateway, scope, request.body, cut)
        if cut:
            visit.said.put_nowait(Said("broken"))
        self.open[visit] = attempt
        return attempt, visit

    async def _once(self, request: Request, repeat: int, gateway: str) -> Attempt:
        chance = self._chance
        headers = {"x-stainless-retry-count": str(repeat)} if repeat else {}
        attempt, visit = self._try(request, repeat, gateway, headers)
        patience = chance.choice([20.0, 20.0, 20.0, 4.0, 1.0]) if repeat < 6 else 60.0
        leaves_after = chance.choice([0, 1, 1, 2]) if request.leaves else -1
        if request.leaves:
            patience = 1.5 * chance.random()
        try:
            async with asyncio.timeout(patience):
                while True:
                    said = await visit.said.get()
                    if not self._hear(attempt, said):
                        break
                    if leaves_after >= 0 and said.what == "body":
                        leaves_after -= 1
                        if leaves_after < 0:
                            visit.leave()
                            break
        except TimeoutError:
            visit.leave()
        attempt.until = self._loop.time()
        del self.open[visit]
        return attempt

    @staticmethod
    def _hear(attempt: Attempt, said: Said) -> bool:
        """Take in what came. False: there is no more."""
        if said.what == "start":
            attempt.status = said.status
            attempt.headers = {name.decode(): value.decode() for name, value in said.headers}
        elif said.what == "body":
            attempt.body += said.data
        else:
            whole = said.what == "end" and attempt.status > 0
            attempt.outcome = "whole" if whole else "broken"
            return False
        return True
