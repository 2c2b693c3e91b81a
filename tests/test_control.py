"""Probes, metrics, the API's own description, models, logs, and the plain proxy of `profile: off`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.routes import API_OF
from tests.harness import MODEL, FakeWorker, Reply, Seen, chat, completion, gateway, pool

SERIES = {
    "detgate_requests": {"pool", "route", "status"},
    "detgate_in_flight": {"pool", "replica"},
    "detgate_replica_up": {"pool", "replica"},
    "detgate_sendings": {"pool", "replica", "outcome"},
    "detgate_overhead_seconds": {"le"},
    "detgate_first_byte_seconds": {"le"},
    "detgate_request_seconds": {"le"},
    "detgate_lane_wait_seconds": {"pool", "le"},
    "detgate_lane_waiting": {"pool"},
    "detgate_inside": {"pool"},
    "detgate_paused": {"pool"},
    "detgate_paused_since_seconds": {"pool"},
    "detgate_paused_waiting": {"pool"},
    "detgate_connections": set(),
    "detgate_fenced_sessions": set(),
    "detgate_held_bytes": set(),
    "detgate_readings": set(),
    "detgate_refusals": {"code"},
    "detgate_reasons": {"reason"},
    "detgate_scopes": set(),
    "detgate_sessions": set(),
    "detgate_store_owed": set(),
    "detgate_store_refused": {"keys"},
    "detgate_racing": set(),
    "detgate_index_reused": set(),
    "detgate_unseeded": {"route"},
    "detgate_guard": {"guard"},
    "detgate_store_errors": set(),
    "detgate_ledger_errors": set(),
    "detgate_worker_restarts": set(),
    "detgate_lane_takeovers": {"pool"},
}


async def test_metrics_parse_and_have_the_names_and_labels_that_others_build_on() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        await gate.http.post("/v1/chat/completions", json=chat())
        await gate.http.post("/v1/messages", json=chat(max_tokens=4))
        await gate.http.post("/v1/chat/completions", content=b"{")
        scrape = await gate.http.get("/metrics")
        assert scrape.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(scrape.text)}
        assert set(families) == set(SERIES)
        for name, labels in SERIES.items():
            found: set[str] = set()
            for sample in families[name].samples:
                found |= set(sample.labels)
            assert found <= labels, name
        counted = {tuple(sorted(s.labels.items())): s.value for s in families["detgate_requests"].samples}
        chat_200 = (("pool", "policy"), ("route", "/v1/chat/completions"), ("status", "200"))
        assert counted[chat_200] == 1
        refused = (("pool", ""), ("route", "unknown"), ("status", "400"))
        assert counted[refused] == 1
        unseeded = {s.labels["route"]: s.value for s in families["detgate_unseeded"].samples}
        assert unseeded == {"/v1/messages": 1}
        overhead = [s for s in families["detgate_overhead_seconds"].samples if s.name.endswith("_count")]
        assert overhead[0].value == 2


async def test_label_values_never_come_from_a_request() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for n in range(20):
            await gate.http.post(f"/sessions/s{n}/v1/chat/completions", json=chat() | {"model": f"model-{n}"})
            await gate.http.get(f"/nowhere/{n}")
            await gate.http.post(f"/v1/models/{n}")
        scrape = await gate.http.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(scrape.text)}
        assert len(families["detgate_requests"].samples) <= 3


async def test_the_description_lists_the_routes_of_the_data_plane_too() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        described = (await gate.http.get("/openapi.json")).json()
        assert set(API_OF) <= set(described["paths"])
        assert {"/livez", "/readyz", "/metrics", "/determinism", "/admin/replicas"} <= set(described["paths"])


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("POST", "/livez", 405)])
async def test_errors_of_the_control_plane_have_the_one_shape(method: str, path: str, status: int) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "empty", "meant"),
    [
        ("GET", "/sessions//requests", "session_id", "/sessions/{session_id}/requests"),
        ("DELETE", "/sessions/", "session_id", "/sessions/{session_id}"),
        ("GET", "/groups/", "group_id", "/groups/{group_id}"),
        ("GET", "/runs//sessions/a%2Fb", "run", "/runs/{run}/sessions/{session_id}"),
        ("GET", "/runs/r/sessions//requests", "session_id", "/runs/{run}/sessions/{session_id}/requests"),
        ("GET", "/admin/runs//requests", "run", "/admin/runs/{run}/requests"),
        ("POST", "/admin/pools/policy/replicas//drain", "name", "/admin/pools/{pool}/replicas/{name}/drain"),
        ("DELETE", "/admin/pools/policy/replicas/", "name", "/admin/pools/{pool}/replicas/{name}"),
    ],
)
async def test_an_empty_part_of_a_path_is_named_with_the_route_that_was_meant(
    method: str, path: str, empty: str, meant: str
) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_header", empty)
        assert error["message"] == f"{empty} must not be empty in {path}: ask for {meant}."


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/nowhere", 404, "There is no route /nowhere here. GET /openapi.json lists those there are."),
        ("POST", "/v1/nowhere", 404, "There is no route /v1/nowhere here. GET /openapi.json lists those there are."),
        ("POST", "/generate", 404, "No pool's engine has the route /generate."),
        ("GET", "/v1/models/other", 404, "No pool serves the model 'other'. Served: test-model."),
        ("PUT", "/admin/weights", 405, "/admin/weights takes GET, POST, not PUT."),
        ("POST", "/runs/r/sessions/s", 405, "/runs/r/sessions/s takes DELETE, GET, not POST."),
        ("POST", "/openapi.json", 405, "/openapi.json takes GET, HEAD, not POST."),
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET."),
    ],
)
async def test_a_wrong_route_or_method_is_told_what_to_ask_instead(
    method: str, path: str, status: int, says: str
) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.request(method, path, json={})
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith(says)


async def test_models_are_merged_over_pools_each_once_and_found_by_name() -> None:
    async def second(seen: Seen, reply: Reply) -> None:
        reply.json({"object": "list", "data": [{"id": "other", "object": "model"}, {"id": MODEL, "object": "model"}]})

    async with (
        FakeWorker() as one,
        FakeWorker(probes=second) as two,
        gateway(pool("a", one.url, models=[]), pool("b", two.url, models=["other"])) as gate,
    ):
        listed = (await gate.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [MODEL, "other"]
        assert (await gate.http.get("/v1/models/other")).json()["id"] == "other"
        missing = await gate.http.get("/v1/models/none")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert (await gate.http.post("/v1/models")).status_code == 405


async def test_a_request_goes_to_the_pool_that_serves_its_model() -> None:
    async with FakeWorker() as one, FakeWorker() as two:
        pools = (pool("a", one.url, models=["m1"]), pool("b", two.url, models=["m2"]))
        async with gateway(*pools) as gate:
            for model, replica in (("m1", "a-0"), ("m2", "b-0")):
                answer = await gate.http.post("/v1/chat/completions", json=chat() | {"model": model})
                assert answer.headers["x-detgate-replica"] == replica
            body = {key: value for key, value in chat().items() if key != "model"}
            several = await gate.http.post("/v1/chat/completions", json=body)
            assert (several.status_code, several.json()["error"]["code"]) == (400, "ambiguous_pool")
            other = await gate.http.get("/v1/chat/completions")
            assert (other.status_code, other.headers["allow"]) == (405, "POST")
            named = await gate.http.post("/v1/chat/completions", json=body, headers={"x-detgate-pool": "b"})
            assert named.headers["x-detgate-replica"] == "b-0"
            unknown = await gate.http.post("/v1/chat/completions", json=chat() | {"model": "m3"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_profile_off_is_a_plain_proxy_and_says_so() -> None:
    async def blind(seen: Seen, reply: Reply) -> None:
        reply.json(completion())

    async with FakeWorker(blind) as worker, gateway(pool("policy", worker.url), profile="off") as gate:
        body = b'{"model": "test-model", "seed": -1, "seed": "x", "messages": []}'
        answer = await gate.http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 200
        assert worker.seen[0].body == body
        assert worker.seen[0].header("x-request-id") is None
        assert answer.headers["x-detgate-guarantee"] == "none; off"
        assert "x-detgate-seed" not in answer.headers
        assert "x-detgate-index" not in answer.headers
        unread = await gate.http.post("/v1/chat/completions", content=b"not json at all")
        assert unread.status_code == 200
        assert worker.seen[1].body == b"not json at all"
        assert gate.records() == []


async def test_one_line_a_request_at_debug_and_none_at_info(capsys: pytest.CaptureFixture[str]) -> None:
    async def weighted(seen: Seen, reply: Reply) -> None:
        reply.json(completion() | {"metadata": {"weight_version": "7"}})

    for level in ("info", "debug"):
        async with FakeWorker(weighted) as worker:
            async with gateway(pool("policy", worker.url), log={"level": level, "format": "json"}) as gate:
                from gateway.logs import configure

                configure(gate.gateway.settings.log)
                headers = {"x-member-index": "3", "authorization": "Bearer very-secret"}
                await gate.http.post("/sessions/s/v1/chat/completions", json=chat(), headers=headers)
        written = capsys.readouterr().err
        lines: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
        requests = [line for line in lines if line["event"] == "request"]
        assert "very-secret" not in written
        if level == "info":
            assert requests == []
            continue
        [line] = requests
        told = {key: line[key] for key in ("session", "identity", "member", "index", "replica", "mode", "status")}
        assert told == {
            "session": "s",
            "identity": "s",
            "member": 3,
            "index": 0,
            "replica": "policy-0",
            "mode": "balanced",
            "status": 200,
        }
        assert {"run", "seed", "lane", "weight_version"} <= set(line)
