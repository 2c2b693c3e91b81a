"""nginx and HAProxy before the gateway, as lenient as they can be set: `make test-fronts` sends 10,000 fuzzed requests.

What the engine sees must be what the front answered, each on the connection that asked for it: else front and gateway
took another byte for a request's last, and one client can ask in another's name.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests import ports
from tests.harness import FakeWorker, Reply, Seen, gateway, pool
from tests.hostile.fuzzed import messages

LAST = b"GET /livez HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"
AT_ONCE = 150
LOST = (500, 502, 504)
"""Statuses that tell of a request without an answer."""

_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log crit;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    client_header_timeout 1s; client_body_timeout 1s; keepalive_timeout 1s; lingering_close off;
    underscores_in_headers on; ignore_invalid_headers off; merge_slashes off;
    upstream gateway {{ server 127.0.0.1:{behind}; keepalive 8; keepalive_timeout 1s; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://gateway; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header Host $http_host; proxy_request_buffering {buffering};
        }}
    }}
}}
"""

_HAPROXY = """
global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 2s
    timeout http-request 1s
    timeout http-keep-alive 2s
    timeout server 30s
    http-reuse always
    option accept-invalid-http-request
frontend front
    bind 127.0.0.1:{port}
    default_backend gateway
backend gateway
    server gateway 127.0.0.1:{behind}
"""

FRONTS = {
    "nginx": _NGINX.replace("{buffering}", "on"),
    "nginx-unbuffered": _NGINX.replace("{buffering}", "off"),
    "haproxy": _HAPROXY,
}


def program(front: str) -> str | None:
    """Where a front is installed; None: it is not."""
    return shutil.which(front.partition("-")[0], path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


@asynccontextmanager
async def before(behind: int, front: str) -> AsyncIterator[int]:
    """A front before a port; the port that it listens on."""
    found = program(front)
    assert found is not None, f"{front} is not installed"
    port = ports.free()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "front.conf"
        file.write_text(FRONTS[front].format(folder=folder, port=port, behind=behind))
        arguments = ["-f", str(file), "-db"] if front == "haproxy" else ["-c", str(file), "-e", f"{folder}/error.log"]
        process = await asyncio.create_subprocess_exec(found, *arguments, stderr=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(20):
                while not await _listens(port):
                    assert process.returncode is None, f"{front} has ended"
                    await asyncio.sleep(0.02)
            yield port
        finally:
            process.kill()
            await process.wait()


async def _listens(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


async def marked(seen: Seen, reply: Reply) -> None:
    """Answers with the mark of the request."""
    reply.json({"choices": [{"text": "a"}], "mark": seen.json["messages"][0]["content"]})


async def answered(port: int, sent: bytes) -> bytes:
    """All that comes back on a connection."""
    data = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent + LAST)
        async with asyncio.timeout(60):
            while piece := await reader.read(65536):
                data += piece
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return data


class Report:
    """What was asked and what came of it."""

    def __init__(self) -> None:
        self.asked = 0
        self.statuses: Counter[int] = Counter()
        self.answered: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.astray: list[str] = []
        """Answers that came to a connection that had not asked for them."""

    def add(self, number: int, data: bytes) -> None:
        self.asked += 1
        self.statuses.update(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data))
        for mark in re.findall(rb'"mark": "(\w+)"', data):
            self.answered[mark.decode()] += 1
            if mark[1:] != b"%d" % number:
                self.astray.append(f"{mark.decode()} to {number}")

    @property
    def faults(self) -> list[str]:
        """Where front and gateway parted."""
        unseen, unanswered = self.answered - self.seen, self.seen - self.answered
        found = [*self.astray]
        found += [f"{mark} was not seen" for mark in unseen]
        found += [f"{mark} was not answered" for mark in unanswered]
        return found + [f"{status} x {count}" for status, count in self.statuses.items() if status in LOST]


async def fuzz(front: str | None, count: int, seed: int) -> Report:
    """Send so many fuzzed requests through a front, or straight to the gateway."""
    report = Report()
    limit = asyncio.Semaphore(AT_ONCE)
    timeouts = {"head": 1, "body": 1, "keep_alive": 2 if front is None else 75}
    async with FakeWorker(marked) as worker, gateway(pool("policy", worker.url), timeouts=timeouts) as gate:

        async def one(port: int, number: int, sent: bytes) -> None:
            async with limit:
                report.add(number, await answered(port, sent))

        async def all_of_them(port: int) -> None:
            asked = enumerate(message.render() for message in messages(seed, count))
            await asyncio.gather(*(one(port, number, sent) for number, sent in asked))

        if front is None:
            await all_of_them(gate.port)
        else:
            async with before(gate.port, front) as port:
                await all_of_them(port)
        await gate.until(gate.idle, 30)
        report.seen.update(seen.json["messages"][0]["content"] for seen in worker.seen)
        opened = sum(record["event"] == "opened" for record in gate.records())
        assert opened == report.seen.total(), f"{opened} indices for {report.seen.total()} requests"
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--front", action="append", choices=[*FRONTS, "none"])
    given = parser.parse_args()
    failed = False
    for front in given.front or [*FRONTS, "none"]:
        report = asyncio.run(fuzz(None if front == "none" else front, given.requests, given.seed))
        hidden = sum(count for mark, count in report.seen.items() if mark.startswith("s"))
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(report.statuses.items()))
        print(
            f"{front}: {report.asked} sent, {report.seen.total()} seen by the engine ({hidden} of them behind another)"
        )
        print(f"    answered {report.answered.total()}; statuses {statuses}")
        for fault in report.faults:
            print(f"    {fault}")
        failed = failed or bool(report.faults)
    sys.exit(failed)


if __name__ == "__main__":
    main()
