"""The simulated engines answer in the shapes that the real ones were seen to answer in."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests import captures
from tests.captures import Capture
from tests.sim.serving import serving

# What the simulation leaves out: a classifier with several labels.
NOT_SIMULATED = {"vllm/classify-labels"}
# Left out, or another from sample to sample.
VARIES = {"prompt_logprobs": "left out", "bytes": "bytes"}
PARTS_ONLY = ("server-info", "model-info", "reward-model-info", "loads")
NAMES = [
    f"{engine}/{name}"
    for engine in ("vllm", "sglang")
    for name in captures.names(engine)
    if f"{engine}/{name}" not in NOT_SIMULATED
]


def shape(value: Any) -> Any:
    """What kind of JSON it is, down to the leaves; lists by the kinds of their items."""
    match value:
        case dict() if value and all(type(item) is float for item in value.values()):
            return "numbers by token"
        case dict():
            return {name: VARIES.get(name) or shape(item) for name, item in value.items()}
        case list():
            kinds: list[Any] = []
            for item in value:
                if shape(item) not in kinds:
                    kinds.append(shape(item))
            return kinds
        case bool() | None:
            return value
        case int() | float():
            return "number"
    return "text"


def told(error: Any) -> Any:
    """An error's members that programs read."""
    found = error.get("error", error) if isinstance(error, dict) else error
    return {name: found.get(name) for name in ("type", "code", "param")} if isinstance(found, dict) else None


def frames(body: bytes) -> list[Any]:
    """A stream's event names with the shapes of their data, each kind once, in order of appearance."""
    kinds: list[Any] = []
    for frame in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if line)
        data = lines.get("data", "")
        kind = (lines.get("event"), shape(json.loads(data)) if data.startswith("{") else data)
        if kind not in kinds and not textless(data):
            kinds.append(kind)
    return kinds


def textless(data: str) -> bool:
    """Whether it tells of a token that is only a part of a character, which the simulated model never draws."""
    return '"delta":{"reasoning_content":null}' in data and '"finish_reason":null' in data


def request(capture: Capture) -> str | None:
    """The body to send; where the real model did not end early, this one must not either."""
    body = capture.request
    if body is None or isinstance(body, str):
        return body
    if "tools" in body:
        body = {**body, "max_tokens": 300}
    elif "error" not in capture.name:
        body = {**body, "ignore_eos": True}
        match body.get("sampling_params"):
            case dict(one):
                body["sampling_params"] = {**one, "ignore_eos": True}
            case list(several):
                body["sampling_params"] = [{**one, "ignore_eos": True} for one in several]
    return json.dumps(body)


async def ask(capture: Capture) -> httpx.Response:
    """The answer to the same request of a simulated engine of the same kind."""
    async with serving(
        capture.engine,
        role="generate" if capture.server == "generate" else "reward",
        model="tiny-llm" if capture.server in ("generate", "embed") else "tiny-rm",
        max_model_len=2048,
        dev_mode=True,
        scale_out=True,
        health_seconds=0.0,
    ) as (server, client):
        if capture.name.startswith("abort") and capture.path != "/abort_request":
            server.engine.faults.add(abort_after_tokens=3)
        id = capture.headers.get("x-request-id", "")
        headers = {"content-type": "application/json", "x-request-id": id}
        return await client.request(capture.method, capture.path, content=request(capture), headers=headers)


@pytest.mark.parametrize("name", NAMES)
def test_answers_like_the_real_engine(name: str) -> None:
    capture = captures.load(*name.split("/"))
    answer = asyncio.run(ask(capture))
    assert answer.status_code == capture.status
    assert media(answer.headers) == media(capture.headers)
    if capture.streamed:
        assert frames(answer.content) == frames(capture.body)
    elif capture.status >= 400:
        assert shape(answer.json()) == shape(capture.json())
        assert told(answer.json()) == told(capture.json())
    elif capture.name.endswith(PARTS_ONLY):
        assert parts(shape(answer.json()), shape(capture.json()))
    elif b"# HELP" in capture.body:
        names = {line.split("{")[0] for line in capture.body.decode().split("\n")}
        assert names <= {line.split("{")[0] for line in answer.text.split("\n")}
    elif capture.body:
        assert shape(answer.json()) == shape(capture.json())
    else:
        assert answer.content == b""


def media(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").split(";")[0]


def parts(whole: dict[str, Any], some: dict[str, Any]) -> bool:
    """Whether the common members have the same shape, and there are some."""
    common = whole.keys() & some.keys()
    same = all(
        parts(whole[name], some[name]) if isinstance(some[name], dict) else isinstance(whole[name], type(some[name]))
        for name in common
    )
    return bool(common) and same
