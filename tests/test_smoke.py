from __future__ import annotations

from typing import Literal

import pytest

from tests.harness import FakeWorker, chat, gateway, pool


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
async def test_one_request_whole_and_streamed(carrier: Literal["http1", "asgi"]) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        answer = await gate.http.post("/sessions/s/v1/chat/completions", json=chat())
        assert answer.status_code == 200
        assert answer.headers["x-detgate-request-id"] == "s:0"
        assert str(worker.seen[0].json["seed"]) == answer.headers["x-detgate-seed"]
        async with gate.http.stream("POST", "/sessions/s/v1/chat/completions", json=chat(stream=True)) as stream:
            body = await stream.aread()
        assert stream.headers["x-detgate-index"] == "1"
        assert body.endswith(b"data: [DONE]\n\n")
        events = [(record["event"], record["index"]) for record in gate.records()]
        assert events == [("opened", 0), ("closed", 0), ("opened", 1), ("closed", 1)]
        assert gate.in_flight("policy-0") == 0
