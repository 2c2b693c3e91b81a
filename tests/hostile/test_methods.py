"""What a path does not take is told with what it takes."""

from __future__ import annotations

import pytest

from tests.harness import FakeWorker, gateway, pool


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("TRACE", "/livez", "GET"),
        ("PUT", "/sessions/a%2Fb", "DELETE, GET"),
        ("DELETE", "/sessions", "POST"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allow: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        answer = await gate.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow)
        assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_a_group_that_can_never_be_is_refused_for_good() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), limits={"sessions": 3}) as gate:
        answer = await gate.http.post("/sessions", json={"identity": "a", "group_size": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "group_size")
        assert (await gate.http.post("/sessions", json={"identity": "a", "group_size": 3})).status_code == 201


async def test_the_description_names_every_part_of_a_path_and_every_type() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        paths = (await gate.http.get("/openapi.json")).json()["paths"]
        (told,) = paths["/sessions/{session_id}"]["get"]["parameters"]
        assert (told["name"], told["in"], told["required"]) == ("session_id", "path", True)
        assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
        assert all("422" not in one["responses"] for many in paths.values() for one in many.values())
