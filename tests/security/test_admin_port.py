"""A port for administration of its own."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from tests import ports
from tests.harness import FakeWorker, Reply, Seen, chat, completion, gateway, pool
from tests.processes import serving
from tests.redis_server import RedisServer

CHAT = "/v1/chat/completions"
BEHIND = ("/metrics", "/determinism", "/openapi.json", "/admin/replicas", "/ui/")
"""What the data plane's port refuses."""

DISGUISED = ("/%61dmin/replicas", "/sessions/../admin/replicas", "//admin/replicas", "/v1/../metrics")


def at(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=10)


async def test_each_port_has_what_is_its_own() -> None:
    port = ports.free()
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), admin_port=port) as gate, at(port) as admin:
            for path in (*BEHIND, *DISGUISED):
                refused = await gate.http.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "route_not_found"), path
            for path in BEHIND:
                assert (await admin.get(path)).status_code == 200, path
            assert (await gate.http.post(CHAT, json=chat())).status_code == 200
            for path in (CHAT, f"/sessions/s{CHAT}", "/generate"):
                assert (await admin.post(path, json=chat())).status_code in (404, 405), path
            assert len(worker.seen) == 1
            for client in (gate.http, admin):
                for path in ("/livez", "/readyz"):
                    assert (await client.get(path)).status_code == 200
                made = await client.post("/sessions", json={"identity": "a"})
                session = made.json()["session_id"]
                assert (await client.get(f"/sessions/{session}")).status_code == 200
                assert (await client.get(f"/runs/{gate.gateway.run}/sessions/{session}")).status_code == 200
            reward = await gate.http.post("/rl/start_session", json={"task_id": "t"})
            assert reward.status_code == 200


async def test_a_session_that_was_made_there_asks_at_the_data_planes_port() -> None:
    port = ports.free()
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), port=ports.free(), admin_port=port) as gate, at(port) as admin:
            made = (await admin.post("/sessions", json={"identity": "a"})).json()
            assert made["base_url"] == f"http://127.0.0.1:{gate.port}/sessions/a/v1"
            asked = await gate.http.post(
                f"{made['base_url']}/chat/completions",
                json=chat(),
                headers={"authorization": f"Bearer {made['api_key']}"},
            )
            assert asked.status_code == 200


async def test_with_one_port_all_stands_on_it() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for path in BEHIND:
            assert (await gate.http.get(path)).status_code == 200, path


async def test_both_ports_are_bounded_alike() -> None:
    port = ports.free()
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url), admin_port=port, limits={"head_bytes": 2000}) as gate:
            async with at(port) as admin:
                assert (await admin.get("/livez", headers={"x": "x" * 3000})).status_code == 431
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            await gate.until(gate.idle)


async def test_workers_share_it_and_a_drain_ends_both(tmp_path: Path) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        begun.set()
        await release.wait()
        reply.json(completion())

    port = ports.free()
    async with FakeWorker(held) as worker, RedisServer() as server:
        given = {"state": server.url, "run": "r", "workers": 2, "admin_port": port, "pools": [pool("p", worker.url)]}
        async with serving(tmp_path, yaml.safe_dump(given)) as gate:
            await gate.logged("worker ready", 2)
            for _ in range(6):
                async with at(gate.port) as data, at(port) as admin:
                    assert (await data.get("/metrics")).status_code == 404
                    assert (await admin.get("/metrics")).status_code == 200
            asked = asyncio.create_task(gate.http.post(CHAT, json=chat()))
            await begun.wait()
            gate.signal(signal.SIGTERM)
            release.set()
            assert (await asked).status_code == 200
            assert await gate.ended() == 0


async def test_a_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with FakeWorker() as worker:
        text = yaml.safe_dump({"admin_port": port, "pools": [pool("p", worker.url)]})
        with pytest.raises(AssertionError, match="cannot listen"):
            async with serving(tmp_path, text):
                pass
    taken.close()
