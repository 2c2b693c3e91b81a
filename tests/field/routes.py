"""The routes of the data plane, each with a request and the answers that a real engine gave to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests import captures, harness
from tests.harness import CarrierName, Reply, Seen

MODELS = ["tiny-llm", "tiny-rm"]
CARRIERS: tuple[CarrierName, ...] = ("http1", "asgi")

both_carriers = pytest.mark.parametrize("carrier", CARRIERS)


@dataclass(frozen=True)
class Route:
    """One route of one engine. `seed` and `rid`: whether the gateway puts them into the body."""

    engine: str
    path: str
    whole: str
    """Name of the capture that holds an answer in one piece."""
    stream: str | None = None
    role: str = "generate"
    seed: bool = True

    def __str__(self) -> str:
        return f"{self.engine}{self.path.replace('/', '-')}"

    @property
    def rid(self) -> bool:
        return self.engine == "sglang" and self.path not in ("/v1/messages", "/v1/responses")

    def pool(self, *urls: str, **settings: Any) -> dict[str, Any]:
        """A pool that serves this route; its replicas are named `generate-0` … or `reward-0` …"""
        own = {"engine": self.engine, "role": self.role, "models": MODELS}
        return harness.pool(self.role, *urls, **(own | settings))

    def body(self, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """The request, without a seed and an id of its own."""
        request = dict(_capture(self.engine, self.whole).request)
        for name in ("seed", "rid"):
            request.pop(name, None)
        if "sampling_params" in request:
            unseeded = {k: v for k, v in request["sampling_params"].items() if not k.endswith("seed")}
            request["sampling_params"] = unseeded
        return request | ({"stream": True} if stream else {}) | fields

    @property
    def answer(self) -> bytes:
        """The engine's answer in one piece."""
        return _capture(self.engine, self.whole).body

    @property
    def events(self) -> list[bytes]:
        """The engine's answer as a stream, event by event, each with the blank line that ends it."""
        assert self.stream is not None
        *events, rest = _capture(self.engine, self.stream).body.split(b"\n\n")
        assert rest == b""
        return [event + b"\n\n" for event in events]

    async def polite(self, seen: Seen, reply: Reply) -> None:
        """A script that answers as the engine did."""
        if seen.json.get("stream"):
            reply.sse()
            for event in self.events:
                reply.chunk(event)
            reply.end()
        else:
            self.reply(reply)

    def reply(self, reply: Reply) -> None:
        """The answer in one piece."""
        reply.head(200, ("content-type", "application/json"), length=len(self.answer))
        reply.writer.write(self.answer)

    def without_own(self, body: bytes) -> bytes:
        """A body as it reached an engine, less what the gateway put in front of the client's fields."""
        value = json.loads(body)
        if self.rid:
            body = _cut(body, b'"rid":', value["rid"])
        if self.seed and self.path == "/generate":
            body = _cut(body, b'"sampling_seed":', value["sampling_params"]["sampling_seed"])
        elif self.seed and "native" in self.whole:
            body = _cut(body, b'"seed":', value["sampling_params"]["seed"])
        elif self.seed:
            body = _cut(body, b'"seed":', value["seed"])
        return body


@cache
def _capture(engine: str, name: str) -> captures.Capture:
    return captures.load(engine, name)


def _cut(body: bytes, key: bytes, value: Any) -> bytes:
    member = key + json.dumps(value).encode()
    assert body.count(member) == 1
    return body.replace(member + b",", b"", 1)


CHAT = Route("vllm", "/v1/chat/completions", "chat", "chat-stream-usage")
COMPLETIONS = Route("vllm", "/v1/completions", "completions", "completions-stream")
MESSAGES = Route("vllm", "/v1/messages", "messages", "messages-stream", seed=False)
RESPONSES = Route("vllm", "/v1/responses", "responses", "responses-stream")
TOKENS = Route("vllm", "/inference/v1/generate", "native", "native-stream")
GENERATE = Route("sglang", "/generate", "native", "native-stream")
SGLANG_CHAT = Route("sglang", "/v1/chat/completions", "chat", "chat-stream-usage")
SGLANG_COMPLETIONS = Route("sglang", "/v1/completions", "completions", "completions-stream")
SGLANG_MESSAGES = Route("sglang", "/v1/messages", "messages", "messages-stream", seed=False)
CLASSIFY = Route("vllm", "/classify", "classify", role="reward", seed=False)
SGLANG_CLASSIFY = Route("sglang", "/classify", "classify", role="reward", seed=False)

SAMPLING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENS, GENERATE)
SCORING = (CLASSIFY, SGLANG_CLASSIFY)
EVERY = SAMPLING + SCORING


def over(routes: Sequence[Route]) -> pytest.MarkDecorator:
    """Run a test once on each of these routes."""
    return pytest.mark.parametrize("route", routes, ids=str)


def assert_shape(route: Route, error: Any, kind: str) -> None:
    """An error in the shape that the route's SDKs read."""
    if route is MESSAGES:
        assert error["type"] == "error"
        error = error["error"]
        assert set(error) == {"type", "message"}
    else:
        error = error["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == kind
    assert error["message"]
