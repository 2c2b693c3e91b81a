import asyncio
import subprocess
import sys

import httpx
import pytest

from gateway.sim import SimServer, SimSettings, build
from tests.sim.serving import TLS, serving

BODY = {"prompt": "a", "max_tokens": 4}


def test_many_servers_run_in_one_loop() -> None:
    async def main() -> None:
        async with serving("vllm") as (one, a), serving("sglang") as (other, b):
            answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for client in (a, b)))
            assert [answer.status_code for answer in answers] == [200, 200]
            assert one.engine.counters.requests == other.engine.counters.requests == 1

    asyncio.run(main())


def test_a_stopped_server_refuses_and_can_start_again_on_its_port() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, client):
            server.engine.pause()
            running = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
            await server.engine.reached(1)
            await server.stop()
            with pytest.raises(httpx.TransportError):
                await running
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
            server.engine.resume()
            await server.start()
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert server.engine.counters.requests == 2

    asyncio.run(main())


def test_a_taken_port_is_told() -> None:
    async def main() -> None:
        async with serving("vllm") as (server, _):
            with pytest.raises(OSError, match="in use"):
                await SimServer(SimSettings(engine="vllm"), server.port).start()

    asyncio.run(main())


def test_idle_connections_are_closed() -> None:
    async def main() -> None:
        async with serving("vllm", keep_alive_seconds=1) as (server, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            begun = asyncio.get_running_loop().time()
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
            assert 0.5 < asyncio.get_running_loop().time() - begun < 5
            writer.close()

    asyncio.run(main())


def test_the_application_runs_without_a_server() -> None:
    async def main() -> None:
        app = build(SimSettings(engine="sglang"))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sim") as client:
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert app.state.engine.counters.requests == 1
            with pytest.raises(ConnectionResetError):
                await client.post("/v1/completions", json={**BODY, "min_p": 0.5})

    asyncio.run(main())


def test_it_serves_in_a_process_of_its_own_until_told_to_end() -> None:
    program = "from gateway.sim import SimSettings, serve; serve(SimSettings(engine='vllm'), '127.0.0.1', 0)"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = next(line for line in process.stderr if "running on" in line)
        url = said.split("running on ")[1].split()[0]
        assert httpx.get(f"{url}/version", verify=TLS).json() == {"version": "0.32.0"}
        process.terminate()
        assert process.wait(20) in (0, -15)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
