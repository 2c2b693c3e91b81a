"""A replica is its name: the pod behind it may come back at another address, and its requests go there."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gateway.core import routing
from gateway.upstream import absent
from tests.harness import FakeWorker, Gate, chat, gateway, pool

NAMES = ("policy-0.policy.inference.svc", "policy-1.policy.inference.svc")


class NameServer:
    """What the cluster's name server knows; the system is asked for all other names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, str] = {}
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def _ask(self, host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name in NAMES and name not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(self.addresses.get(name, host), *rest, **more)


async def test_requests_follow_a_replica_to_its_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameServer(monkeypatch)
    first, other = FakeWorker(host="127.0.0.2"), FakeWorker(host="127.0.0.4")
    async with first:
        second = FakeWorker(host="127.0.0.3", port=first.port)
        other.port = first.port
        async with other:
            names.addresses = {NAMES[0]: first.host, NAMES[1]: other.host}
            fleet = pool("policy", *(f"http://{name}:{first.port}" for name in NAMES), deterministic="declared")
            async with gateway(fleet, profile="strict", health={"interval": 0.05, "timeout": 5.0}) as gate:
                assert await served(gate, HOMES[0]) == "policy-0"
                # The pod ends: nothing listens there, and its name is not known for a while.
                del names.addresses[NAMES[0]]
                await first.stop()
                waiting = asyncio.create_task(served(gate, HOMES[1]))
                await gate.until(lambda: not gate.gateway.fleet.pools["policy"].replicas["policy-0"].up)
                async with second:
                    names.addresses[NAMES[0]] = second.host
                    assert await waiting == "policy-0"
                    assert await served(gate, HOMES[2]) == "policy-0"
    assert (len(first.seen), len(second.seen), len(other.seen)) == (1, 2, 0)


@pytest.mark.parametrize(
    ("error", "proof"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (ConnectionRefusedError(), True),
        (TimeoutError(), False),
        (OSError(113, "No route to host"), False),
    ],
)
def test_a_name_server_that_is_silent_proves_nothing(error: OSError, proof: bool) -> None:
    assert absent(error) is proof


HOMES = [index for index in range(20) if routing.best(f"s:{index}", ["policy-0", "policy-1"]) == "policy-0"]
"""Requests of session `s` whose home is policy-0."""


async def served(gate: Gate, index: int) -> str:
    """The replica that answers a request of session `s`."""
    told = {"x-session-id": "s", "x-request-index": str(index)}
    answer = await gate.http.post("/v1/chat/completions", json=chat(), headers=told)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-detgate-replica"])
