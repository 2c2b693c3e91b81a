"""Requests that end an engine, or fool it, reach none: on every route that an engine has."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gateway.core.types import Handling
from tests import matrix
from tests.harness import MODEL, FakeWorker, Reply, Seen, gateway, pool

SAMPLING = [
    (engine, path)
    for engine in matrix.ENGINES
    for path, handling in matrix.routes(engine).items()
    if handling.kind == "sample"
]
SEEDED = [(engine, path) for engine, path in SAMPLING if matrix.routes(engine)[path].seed is not None]
SGLANG = [path for engine, path in SAMPLING if engine == "sglang"]


def telling(**facts: Any) -> Any:
    """Probes of a server that says this of itself."""

    async def probes(seen: Seen, reply: Reply) -> None:
        if seen.target == "/v1/models":
            reply.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            reply.json(facts)

    return probes


def put(body: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The body with one field set."""
    if len(place) == 1:
        return body | {place[0]: value}
    return body | {place[0]: body.get(place[0], {}) | {place[1]: value}}


def places(handling: Handling, name: str) -> list[tuple[str, ...]]:
    """Where a sampling parameter may stand on a route."""
    return [("sampling_params", name)] if handling.api == "native" else [(name,)]


@pytest.mark.parametrize(("engine", "path"), SEEDED)
async def test_no_seed_that_an_engine_would_misread(engine: str, path: str) -> None:
    """-1 is none to vLLM; a number beyond int64 or a text kills older SGLang; both coerce what is no integer."""
    handling = matrix.routes(engine)[path]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        assert handling.seed is not None
        for place, streamed in product((handling.seed, *handling.strays), (False, True)):
            body = matrix.request(engine, path, MODEL, streamed=streamed)
            for seed in (-1, 2**63, "12", True, 1.5):
                answer = await gate.http.post(path, json=put(body, place, seed))
                assert answer.status_code == 400, (place, seed)
                assert answer.json()["error"]["code"] == "invalid_seed"
        assert not worker.seen


@pytest.mark.parametrize("path", SGLANG)
@pytest.mark.parametrize("told", [True, None])
async def test_no_min_p_in_deterministic_mode(path: str, told: bool | None) -> None:
    handling = matrix.routes("sglang")[path]
    probes = telling(**({} if told is None else {"enable_deterministic_inference": told}))
    async with FakeWorker(probes=probes) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        for place, streamed in product(places(handling, "min_p"), (False, True)):
            body = matrix.request("sglang", path, MODEL, streamed=streamed)
            for min_p in (0.1, 1e-9, "0.1", True):
                answer = await gate.http.post(path, json=put(body, place, min_p))
                assert answer.status_code == 400, (place, min_p)
                if handling.api != "anthropic":
                    assert answer.json()["error"]["code"] == "min_p_unsupported"
        assert not worker.seen


@pytest.mark.parametrize("path", SGLANG)
async def test_the_models_own_min_p_is_overruled_or_the_request_refused(path: str) -> None:
    probes = telling(enable_deterministic_inference=True, preferred_sampling_params={"min_p": 0.05})
    async with FakeWorker(probes=probes) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        answer = await gate.http.post(path, json=matrix.request("sglang", path, MODEL, streamed=False))
        if path == "/v1/messages":
            assert answer.status_code == 400
            assert not worker.seen
        elif path != "/v1/completions":
            params = worker.seen[0].json
            assert params.get("sampling_params", params)["min_p"] == 0


@pytest.mark.parametrize("path", SGLANG)
async def test_nothing_is_generated_by_a_server_that_embeds(path: str) -> None:
    probes = telling(is_generation=False)
    async with FakeWorker(probes=probes) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        for streamed in (False, True):
            answer = await gate.http.post(path, json=matrix.request("sglang", path, MODEL, streamed=streamed))
            assert answer.status_code == 400
        assert not worker.seen


@pytest.mark.parametrize("engine", matrix.ENGINES)
async def test_what_is_no_route_of_the_data_plane_is_not_forwarded(engine: str) -> None:
    """One runs any route by the body's shape, past the engine's own key; others read seeds where none is looked for."""
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        paths = ("/invocations", "/api/generate", "/api/chat", "/v1/audio/speech", "/update_weights")
        for prefix, path in product(("", "/sessions/s", "/runs/r/sessions/s"), paths):
            answer = await gate.http.post(prefix + path, json={"model": MODEL, "prompt": "a", "seed": -1})
            assert answer.status_code == 404
        assert not worker.seen


@pytest.mark.parametrize(("engine", "path"), SAMPLING)
async def test_nothing_that_reads_a_seed_leaves_without_one(engine: str, path: str) -> None:
    handling = matrix.routes(engine)[path]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        for streamed in (False, True):
            body = matrix.request(engine, path, MODEL, streamed=streamed)
            await gate.http.post(path, json=body)
            if handling.seed is not None:
                await gate.http.post(path, json=put(body, handling.seed, None))
        for seen in worker.seen:
            value = seen.json
            for name in handling.seed or ():
                value = value[name]
            assert handling.seed is None or (type(value) is int and value > 0)
        assert worker.seen
