"""TLS, towards clients and towards replicas."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.assembly import Gateway
from gateway.evidence import doctor
from gateway.serve import Server
from gateway.settings import InvalidSettings, Settings
from tests.harness import MODEL, FakeWorker, chat, gateway, pool

FIRST = Path(__file__).parents[1] / "shared" / "tls"
SECOND = Path(__file__).parent / "tls"
"""Two certificates for 127.0.0.1, each its own authority."""

CHAT = "/v1/chat/completions"


def shown(folder: Path) -> dict[str, str]:
    return {"cert": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}


def trusting(folder: Path, *, cert: Path | None = None) -> ssl.SSLContext:
    """A client's TLS that believes one certificate and shows another, if any."""
    context = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
    if cert is not None:
        context.load_cert_chain(cert / "certificate.pem", cert / "key.pem")
    return context


def client(port: int, tls: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=tls, timeout=10)


@asynccontextmanager
async def over_tls(worker: FakeWorker, *, clients: Path | None = None) -> AsyncIterator[str]:
    """A worker's address behind TLS. `clients`: whose certificate it wants to be shown."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(FIRST / "certificate.pem", FIRST / "key.pem")
    if clients is not None:
        context.load_verify_locations(clients / "certificate.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(worker._serve, "127.0.0.1", 0, limit=2**26, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_clients_are_served_over_tls_whole_streamed_and_refused() -> None:
    async with FakeWorker() as worker:
        limits = {"body_bytes": 3_000_000}
        async with gateway(pool("policy", worker.url), tls=shown(FIRST), limits=limits) as gate:
            async with client(gate.port, trusting(FIRST)) as http:
                answer = await http.post(CHAT, json=chat("x" * 2_000_000))
                assert answer.json()["choices"][0]["message"]["content"] == "hi"
                assert len(worker.seen[0].body) > 2_000_000
                assert (await http.post(CHAT, json=chat(stream=True))).text.endswith("data: [DONE]\n\n")
                assert (await http.post(CHAT, json=chat("x" * 4_000_000))).status_code == 413
                assert (await http.get("/readyz")).status_code == 200
                made = await http.post("/sessions", json={"identity": "a"})
                assert made.json()["base_url"] == f"https://127.0.0.1:{gate.port}/sessions/a/v1"
            async with client(gate.port, trusting(SECOND)) as http:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await http.get("/livez")
            with pytest.raises(httpx.RemoteProtocolError):
                await gate.http.get("/livez")


async def test_clients_without_a_certificate_are_turned_away_where_one_is_wanted() -> None:
    tls = shown(FIRST) | {"client_ca": str(SECOND / "certificate.pem")}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tls=tls) as gate:
        async with client(gate.port, trusting(FIRST, cert=SECOND)) as http:
            assert (await http.post(CHAT, json=chat())).status_code == 200
        for cert in (None, FIRST):
            async with client(gate.port, trusting(FIRST, cert=cert)) as http:
                with pytest.raises(httpx.TransportError):
                    await http.post(CHAT, json=chat())
        assert len(worker.seen) == 1


async def test_a_certificate_that_is_renewed_is_shown_without_a_restart(tmp_path: Path) -> None:
    def put(folder: Path, *names: str) -> None:
        for name in names:
            shutil.copyfile(folder / name, tmp_path / name)

    put(FIRST, "certificate.pem", "key.pem")
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tls=shown(tmp_path)) as gate:
        certificate = gate.server.certificate
        assert certificate is not None
        async with client(gate.port, trusting(FIRST)) as http:
            assert (await http.get("/livez")).status_code == 200
        put(SECOND, "certificate.pem")
        with pytest.raises(InvalidSettings, match=r"tls\.cert"):
            certificate.renewed()
        assert not certificate.renewed(), "said once"
        async with client(gate.port, trusting(FIRST)) as http:
            assert (await http.get("/livez")).status_code == 200, "half a pair changes nothing"
        put(SECOND, "key.pem")
        async with asyncio.timeout(30), client(gate.port, trusting(SECOND)) as http:
            while True:
                try:
                    assert (await http.get("/livez")).status_code == 200
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)


async def test_replicas_are_spoken_to_over_tls_and_believed_by_the_pools_authorities_alone() -> None:
    async with FakeWorker() as worker, over_tls(worker) as url:
        ours = {"tls": {"ca": str(FIRST / "certificate.pem")}}
        others = {"tls": {"ca": str(SECOND / "certificate.pem")}}
        pools = [
            pool("good", url, models=["good"], **ours),
            pool("wrong", url, models=["wrong"], **others),
            pool("system", url, models=["system"]),
        ]
        async with gateway(*pools) as gate:
            assert (await gate.http.post(CHAT, json=chat() | {"model": "good"})).status_code == 200
            states = {replica.name: (replica.state, replica.reason) for replica in gate.gateway.fleet.replicas}
            assert states["good-0"][0] == "up"
            for name in ("wrong-0", "system-0"):
                assert states[name][0] != "up"
                assert "certificate verify failed" in states[name][1]
            assert len(worker.seen) == 1
        told = await doctor.examine(gate.gateway.settings)
        assert told["pools"]["good"]["replicas"]["good-0"]["state"] == "up"
        assert told["pools"]["wrong"]["replicas"]["wrong-0"]["state"] == "down"


async def test_a_request_itself_is_not_sent_to_a_replica_that_shows_another_certificate() -> None:
    async with FakeWorker() as worker, over_tls(worker) as url:
        wrong = pool("policy", url, tls={"ca": str(SECOND / "certificate.pem")})
        async with gateway(wrong, health={"interval": 60, "failures": 100}) as gate:
            replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
            with pytest.raises(Exception, match="certificate verify failed"):
                await replica.connections.send(b"POST / HTTP/1.1\r\n\r\n", b"")
            assert worker.seen == []


async def test_a_replica_that_wants_a_certificate_is_shown_the_pools() -> None:
    async with FakeWorker() as worker, over_tls(worker, clients=SECOND) as url:
        ca = {"ca": str(FIRST / "certificate.pem")}
        async with gateway(pool("policy", url, tls=ca | shown(SECOND))) as gate:
            assert (await gate.http.post(CHAT, json=chat() | {"model": MODEL})).status_code == 200
        async with gateway(pool("policy", url, tls=ca)) as gate:
            assert (await gate.http.post(CHAT, json=chat() | {"model": MODEL})).status_code in (502, 503)
        assert len(worker.seen) == 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tls": {"cert": "/nowhere.pem"}}, "tls.cert: /nowhere.pem: No such file"),
        ({"tls": {"cert": str(FIRST / "key.pem")}}, "tls.cert: "),
        ({"tls": shown(FIRST) | {"key": str(SECOND / "key.pem")}}, "KEY_VALUES_MISMATCH"),
        ({"tls": shown(FIRST) | {"client_ca": str(FIRST / "key.pem")}}, "tls.client_ca: "),
        (
            {"pools": [pool("o", "https://g"), pool("p", "https://h", tls={"ca": "/nowhere.pem"})]},
            "pools[1].tls.ca: /nowhere.pem: No such",
        ),
    ],
)
def test_files_that_cannot_be_used_end_the_start(given: dict[str, Any], line: str, tmp_path: Path) -> None:
    settings = Settings.load(None, {}, {"ledger": {"path": str(tmp_path)}} | given)

    def start() -> None:
        made = Gateway(settings)
        with closing(made.runs):
            Server(made)

    with pytest.raises(InvalidSettings) as found:
        start()
    assert line in str(found.value)
    assert "PRIVATE KEY" not in str(found.value)
