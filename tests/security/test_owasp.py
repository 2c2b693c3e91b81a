"""The rows of the OWASP API Security Top 10 (2023) that apply, as docs/security.md tells them."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from gateway import findings
from gateway.keys import entry
from gateway.reader import Reader
from gateway.routes import API_OF
from tests.harness import FakeWorker, Gate, Reply, Seen, Wire, chat, completion, gateway, pool

CHAT = "/v1/chat/completions"
KEYS: dict[str, Any] = {"auth": {"api_keys": [entry("one", "alice"), "two"], "admin_key": entry("boss")}}


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def created(gate: Gate, identity: str, key: str = "one") -> dict[str, Any]:
    made = await gate.http.post("/sessions", json={"identity": identity}, headers=bearing(key))
    assert made.status_code == 201, made.text
    told: dict[str, Any] = made.json()
    return told


def without_name(answer: httpx.Response, name: str) -> tuple[int, str]:
    return answer.status_code, answer.text.replace(name, "NAME")


async def test_api1_the_key_of_a_session_opens_no_other() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **KEYS) as gate:
        mine, theirs = await created(gate, "mine"), await created(gate, "theirs", "two")
        group = await gate.http.post("/sessions", json={"identity": "g", "group_size": 2}, headers=bearing("one"))
        key = bearing(mine["api_key"])
        run = gate.gateway.run

        async def asked(name: str) -> list[tuple[int, str]]:
            ways: list[tuple[str, str, dict[str, Any]]] = [
                ("POST", f"/sessions/{name}{CHAT}", {"json": chat()}),
                ("POST", f"/runs/{run}/sessions/{name}{CHAT}", {"json": chat()}),
                ("POST", f"/runs/other/sessions/{name}{CHAT}", {"json": chat()}),
                ("POST", CHAT, {"json": chat(), "headers": {"x-session-id": name}}),
                ("GET", f"/sessions/{name}", {}),
                ("GET", f"/sessions/{name}/requests", {}),
                ("GET", f"/runs/{run}/sessions/{name}", {}),
                ("DELETE", f"/sessions/{name}", {}),
                ("POST", f"/sessions/{name}/rl/set_reward", {"json": {"reward": 1.0}}),
                ("POST", f"/sessions/{name}/rl/end_session", {}),
            ]
            answers = []
            for method, path, given in ways:
                headers = key | given.pop("headers", {})
                answers.append(without_name(await gate.http.request(method, path, headers=headers, **given), name))
            return answers

        to_others, to_none = await asked("theirs"), await asked("nowhere")
        assert {status for status, _ in to_others} == {404}
        assert to_others == to_none, "whether there is one is not told"
        groups = f"/groups/{group.json()['group_id']}"
        assert [(await gate.http.request(method, groups, headers=key)).status_code for method in ("GET", "DELETE")] == [
            404,
            404,
        ]
        assert worker.seen == []
        path = f"/sessions/theirs{CHAT}"
        assert (await gate.http.post(path, json=chat())).status_code == 401
        assert (await gate.http.post(path, json=chat(), headers=bearing(theirs["api_key"]))).status_code == 200
        assert (await gate.http.get("/sessions/theirs", headers=bearing("boss"))).json()["state"] == "open"


async def test_api2_without_a_key_nothing_is_served_and_nothing_is_counted() -> None:
    wrong = [{}, bearing("on"), bearing(entry("one")), bearing(entry("one", "alice")), bearing("dgs-made-up")]
    wrong += [{"x-api-key": "ONE"}, {"authorization": "Basic b25lOm9uZQ=="}, {"cookie": "detgate_ui=1.x"}]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **KEYS) as gate:
        for route in API_OF:
            for headers in wrong[:2]:
                answer = await gate.http.post(route, content=b"{", headers=headers)
                assert (answer.status_code, "error" in answer.json()) == (401, True), route
        for headers in wrong:
            for path in (CHAT, f"/sessions/s{CHAT}", f"/runs/r{CHAT}", "/sessions", "/rl/start_session"):
                answer = await gate.http.post(path, json=chat(), headers=headers)
                assert answer.status_code == 401, (path, headers)
        twice = [("authorization", "Bearer one"), ("authorization", "Bearer two")]
        assert (await gate.http.post(CHAT, json=chat(), headers=twice)).status_code == 400
        assert worker.seen == []
        assert gate.records() == []
        assert gate.gateway.sessions.live == 0
        first = await gate.http.post(f"/sessions/s{CHAT}", json=chat(), headers=bearing("one"))
        assert first.headers["x-detgate-index"] == "0"


async def test_api3_no_answer_shows_more_than_it_should() -> None:
    secret: dict[str, Any] = {"auth": {"api_keys": ["one", entry("two", "bob")], "admin_key": "boss"}}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url, api_key="of-the-pool"), **secret) as gate:
        made = await created(gate, "s")
        shown = ""
        for path in ("/sessions/s", "/sessions/s/requests", "/admin/replicas", "/determinism", "/metrics", "/readyz"):
            answer = await gate.http.get(path, headers=bearing("boss"))
            assert answer.status_code == 200, path
            shown += answer.text + str(answer.headers)
        for kept in ("of-the-pool", "boss", made["api_key"], entry("two")[7:], 'one"'):
            assert kept not in shown
        for path, body in (
            ("/sessions", {"identity": "x", "api_key": "mine"}),
            ("/sessions", {"identity": "x", "state": "ended"}),
            ("/admin/pools/policy/replicas", {"name": "x", "url": worker.url, "draining": True}),
            ("/admin/weights", {"version": "1", "shut": False}),
        ):
            answer = await gate.http.post(path, json=body, headers=bearing("boss"))
            assert answer.status_code == 400, path


async def test_api4_what_one_client_may_hold_is_bounded() -> None:
    limits = {"body_bytes": 2000, "head_bytes": 2000, "sessions": 2, "runs": 2}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits=limits) as gate:
        statuses = [
            (await gate.http.post(CHAT, json=chat("x" * 3000))).status_code,
            (await gate.http.get("/livez", headers={"x": "x" * 3000})).status_code,
            (await gate.http.post("/sessions", content=b" " * 70_000)).status_code,
            (await gate.http.post(CHAT, json=chat(), headers={"x-session-id": "x" * 257})).status_code,
        ]
        assert statuses == [413, 431, 413, 400]
        made = [(await gate.http.post("/sessions", json={"identity": str(n)})).status_code for n in range(3)]
        assert made == [201, 201, 503]
        runs = [(await gate.http.post(f"/runs/r{n}{CHAT}", json=chat())).status_code for n in range(4)]
        assert runs == [200] * 4
        assert len(gate.gateway.runs._open) == 2


async def test_api5_no_other_key_administers() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **KEYS) as gate:
        key = (await created(gate, "s"))["api_key"]
        described = (await gate.http.get("/openapi.json")).json()["paths"]
        routes = [
            (method, re.sub(r"\{\w+\}", "policy", path))
            for path, methods in described.items()
            for method in methods
            if path.startswith("/admin")
        ]
        assert len(routes) >= 9
        for method, path in [*routes, ("get", "/ui/"), ("get", "/ui/sessions")]:
            for headers in ({}, bearing("one"), bearing(key), bearing(entry("boss"))):
                answer = await gate.http.request(method, path, json={}, headers=headers, follow_redirects=False)
                assert answer.status_code in (401, 303), (method, path, headers)
        assert not any(replica.draining for replica in gate.gateway.fleet.replicas)


async def test_api7_a_request_goes_to_configured_replicas_alone() -> None:
    async with FakeWorker() as elsewhere:

        async def leads_away(seen: Seen, reply: Reply) -> None:
            if b"lead" in seen.body:
                reply.json({}, 307, ("location", elsewhere.url + CHAT))
            else:
                reply.json(completion())

        async def leading(seen: Seen, reply: Reply) -> None:
            reply.head(302, ("location", elsewhere.url + seen.target), length=0)

        async with FakeWorker(leads_away) as worker, FakeWorker(probes=leading) as led:
            async with gateway(pool("policy", worker.url), pool("led", led.url, models=["x"])) as gate:
                host = f"127.0.0.1:{elsewhere.port}"
                for headers in (
                    {"host": host},
                    {"x-forwarded-host": host, "forwarded": f"host={host}", "x-original-url": elsewhere.url},
                    {"x-detgate-replica": elsewhere.url},
                ):
                    assert (await gate.http.post(CHAT, json=chat(), headers=headers)).status_code == 200
                named = await gate.http.post(CHAT, json=chat(), headers={"x-detgate-pool": elsewhere.url})
                assert named.status_code in (400, 404)
                for field in ("base_url", "url", "api_base"):
                    await gate.http.post(CHAT, json=chat(**{field: elsewhere.url}))
                for target in (f"{elsewhere.url}{CHAT}", f"//{host}{CHAT}", f"/{elsewhere.url}{CHAT}", f"/..//{host}/"):
                    async with Wire(gate.port) as wire:
                        wire.post(target, chat())
                        assert await wire.head() in (200, 400, 404)
                assert (await gate.http.post(CHAT, json=chat("lead"), follow_redirects=False)).status_code == 502
                assert {seen.target for seen in worker.seen} == {CHAT}
                for bad in ("file:///etc/passwd", "gopher://h", "http://u:p@h", "http://h?x", "//h", "http://"):
                    added = await gate.http.post("/admin/pools/policy/replicas", json={"name": "x", "url": bad})
                    assert added.status_code == 400, bad
        assert elsewhere.connections == 0


async def test_api8_errors_and_headers_tell_nothing_of_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_to_all(seen: Seen, reply: Reply) -> None:
        cors = ("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true")
        if seen.json.get("stream"):
            reply.head(200, ("content-type", "text/event-stream"), *cors)
            reply.end()
        else:
            reply.json(completion(), 200, *cors)

    def fails(*_: Any) -> None:
        raise RuntimeError("the inside, /etc/inside")

    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with FakeWorker(open_to_all) as worker, gateway(pool("policy", worker.url)) as gate:
        answers = [await gate.http.options(path, headers=origin) for path in (CHAT, "/admin/replicas", "/sessions")]
        assert {answer.status_code for answer in answers} == {405}
        answers += [await gate.http.post(CHAT, json=chat(), headers=origin)]
        answers += [await gate.http.get(path, headers=origin) for path in ("/readyz", "/v1/models", "/admin/replicas")]
        assert worker.seen[0].header("origin") is None
        monkeypatch.setattr(Reader, "read", fails)
        monkeypatch.setattr(findings, "report", fails)
        failed = [await gate.http.post(CHAT, json=chat()), await gate.http.get("/determinism")]
        assert [answer.status_code for answer in failed] == [500, 500]
        for answer in [*answers, *failed]:
            assert not any(name.startswith("access-control") for name in answer.headers)
            assert "inside" not in answer.text
            assert "Traceback" not in answer.text
            assert answer.headers.get("server", "detgate") == "detgate"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_api8_a_page_of_another_site_changes_nothing(site: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        from_page = {"sec-fetch-site": site, "content-type": "text/plain"}
        for path, body in (
            ("/admin/pools/policy/replicas/policy-0/drain", b""),
            ("/admin/weights/pause", b""),
            ("/sessions", b'{"identity": "x"}'),
            ("/rl/start_session", b'{"task_id": "x"}'),
        ):
            refused = await gate.http.post(path, content=body, headers=from_page)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cross_site"), path
        await gate.http.post(f"/sessions/s{CHAT}", json=chat())
        for path in ("/admin/replicas", "/sessions/s", "/sessions/s/requests", "/groups/g", "/ui/"):
            rebound = await gate.http.get(path, headers={"host": "evil.example"})
            assert rebound.status_code == 403, path
        assert (await gate.http.get("/sessions/s")).status_code == 200
        [replica] = gate.gateway.fleet.replicas
        assert not replica.draining
        assert gate.gateway.sessions.live == 0
        own = await gate.http.post("/sessions", json={"identity": "x"}, headers={"sec-fetch-site": "same-origin"})
        assert own.status_code == 201


AREALS = r"/v1(?=/(?:rl/|grant_capacity|export_trajectories))"
"""What its clients and its trainer append to a base URL, which may end in /v1."""


async def test_api9_no_route_is_open_that_is_not_listed() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for path in (
            "/collective_rpc", "/update_weights_from_disk", "/flush_cache", "/server_info", "/get_server_info",
            "/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/start_profile", "/shutdown", "/docs", "/redoc",
            "/pause", "/release_memory_occupation", "/v1/../collective_rpc", "/sessions/s/collective_rpc", "/.env",
        ):  # fmt: skip
            for method in ("GET", "POST"):
                answer = await gate.http.request(method, path, json={})
                assert answer.status_code in (404, 405), (method, path)
        assert worker.seen == []
        described = set((await gate.http.get("/openapi.json")).json()["paths"])
        there = {route.path for route in gate.gateway.administration.routes}
        for prefix in (r"/runs/\{run\}", r"/sessions/\{session_id\}(?=/(?:v1/)?rl/)", AREALS):
            there = {re.sub(f"^{prefix}", "", path) for path in there}
        assert there - described == {"/openapi.json", "/ui"}
