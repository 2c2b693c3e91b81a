"""h1spec's cases, sent to a gateway that passes every body to an engine that sends it back (`profile: off`)."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from typing import Any

from tests.conformance import sources
from tests.conformance.outcome import Outcome
from tests.harness import FakeWorker, Reply, Seen, gateway, pool
from tests.hostile.answers import parse

SILENCE = 0.5


def cases() -> list[dict[str, Any]]:
    """The cases as the suite has them."""
    text = (sources.tree("h1spec") / "http_test.ts").read_text()
    found = re.search(r"const testCases: TestCase\[\] = (\[.*?\n\]);", text, re.S)
    assert found, "h1spec's cases stand otherwise than they did"
    read = subprocess.run(["node", "-p", f"JSON.stringify({found[1]})"], capture_output=True, text=True, check=True)
    return list(json.loads(read.stdout))


async def echo(seen: Seen, reply: Reply) -> None:
    reply.head(200, length=len(seen.body))
    reply.writer.write(seen.body)


def routed(request: str) -> bytes:
    """The request, for paths that there are here."""
    request = re.sub(r"(?<=POST )/(?= )", "/v1/completions", request)
    return re.sub(r"(?<=GET )/(?= )", "/livez", request).encode("latin-1")


async def ask(port: int, case: dict[str, Any]) -> str | None:
    """What is wrong; None: nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(routed(case["request"]))
    data = b""
    try:
        async with asyncio.timeout(SILENCE):
            while piece := await reader.read(65536):
                data += piece
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    if case.get("expectedTimeout"):
        return f"answered {data[:60]!r}" if data else None
    answers = parse(data)
    if not answers:
        return "no answer"
    status = answers[0].status
    if not any(low <= status <= high for low, high in case["expectedStatus"]):
        return f"status {status}"
    if status == 200 and "expectedBody" in case and answers[0].body.decode() != case["expectedBody"]:
        return f"body {answers[0].body!r}"
    return None


async def run() -> Outcome:
    """All cases. Raises `sources.Missing`."""
    read = cases()
    outcome = Outcome(f"h1spec ({sources.version('h1spec')})")
    async with FakeWorker(echo) as worker, gateway(pool("policy", worker.url), profile="off") as gate:
        await gate.http.get("/livez")
        for case, wrong in zip(read, await asyncio.gather(*(ask(gate.port, case) for case in read)), strict=True):
            if wrong is None:
                outcome.passed += 1
            else:
                outcome.failed.append(f"{case['description']}: {wrong}")
    return outcome
