"""Who may see the pages."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie
from typing import Any

import httpx
import pytest

from gateway.ui import door
from tests.harness import FakeWorker, Gate, gateway, pool

KEY = "s3cret & more"
ADDRESSES = ("/ui/", "/ui/lanes", "/ui/sessions", "/ui/requests", "/ui/runs", "/ui/diff?a=x&b=y")


async def login(gate: Gate, key: str = KEY, to: str = ".", **headers: str) -> httpx.Response:
    return await gate.http.post("/ui/login", data={"key": key, "to": to}, headers=headers)


def cookie(answer: httpx.Response) -> Any:
    return SimpleCookie(answer.headers["set-cookie"])[door.COOKIE]


async def test_nothing_is_shown_without_the_key() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        for address in ADDRESSES:
            answer = await gate.http.get(address)
            assert answer.status_code == 401, address
            assert "policy" not in answer.text
            assert 'type="password"' in answer.text
        wrong = await gate.http.get("/ui/", headers={"authorization": "Bearer other"})
        assert wrong.status_code == 401
        right = await gate.http.get("/ui/", headers={"authorization": f"Bearer {KEY}"})
        assert right.status_code == 200
        assert "policy-0" in right.text


async def test_the_form_gives_a_cookie_that_opens_the_pages_and_no_other_route() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        asked = await gate.http.get("/ui/runs?x=1")
        (to,) = re.findall(r'name="to" value="([^"]*)"', asked.text)
        entered = await login(gate, to=to)
        assert (entered.status_code, entered.headers["location"]) == (303, "runs?x=1")
        given = cookie(entered)
        assert given["httponly"]
        assert given["samesite"].lower() == "strict"
        assert given["path"] == "/ui"
        assert not given["secure"]
        assert KEY not in entered.headers["set-cookie"]
        assert (await gate.http.get("/ui/runs")).status_code == 200
        assert (await gate.http.get("/admin/replicas")).status_code == 401
        assert "Log out" in (await gate.http.get("/ui/")).text
        left = await gate.http.post("/ui/logout")
        assert (left.status_code, left.headers["location"]) == (303, "login")
        assert (await gate.http.get("/ui/")).status_code == 401


async def test_a_wrong_key_is_refused_and_gives_no_cookie() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        for key in ("", "s3cret", KEY + "\0", "ключ"):
            answer = await login(gate, key)
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
            assert 'role="alert"' in answer.text


async def test_a_cookie_is_good_until_it_says_so_and_cannot_be_made_without_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        good = cookie(await login(gate)).value
        until, _, seal = good.partition(".")
        gate.http.cookies.clear()

        async def status(value: str) -> int:
            return (await gate.http.get("/ui/", headers={"cookie": f"{door.COOKIE}={value}"})).status_code

        assert await status(good) == 200
        for forged in (
            f"{int(until) + 1}.{seal}",
            f"{until}.{seal[:-1]}0",
            until,
            f"{until}.",
            "",
            "x.y",
            f"9e9.{seal}",
        ):
            if forged != good:
                assert await status(forged) == 401, forged
        monkeypatch.setattr("gateway.ui.door.time.time", lambda: float(until))
        assert await status(good) == 401
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": "another"}) as gate:
        monkeypatch.undo()
        assert (await gate.http.get("/ui/", headers={"cookie": f"{door.COOKIE}={good}"})).status_code == 401


async def test_the_cookie_stays_on_tls_where_it_was_given_there() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        assert cookie(await login(gate, **{"x-forwarded-proto": "https"}))["secure"]


@pytest.mark.parametrize("to", ["//evil.example", "https://evil.example", "/\\evil", "../v1/models", "diff?\\", "x"])
async def test_nobody_is_sent_elsewhere_after_logging_in(to: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        assert (await login(gate, to=to)).headers["location"] == "."


async def test_the_form_of_another_site_does_not_log_in() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        answer = await login(gate, **{"sec-fetch-site": "cross-site"})
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


async def test_a_form_is_bounded() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": KEY}) as gate:
        assert (await login(gate, "k" * 10_000)).status_code == 413


async def test_without_an_admin_key_the_pages_are_for_this_machine() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        assert (await gate.http.get("/ui/")).status_code == 200
        for host, status in (("localhost:1", 200), ("[::1]:1", 200), ("rebound.example", 403)):
            assert (await gate.http.get("/ui/", headers={"host": host})).status_code == status, host
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url), host="0.0.0.0", auth={"api_keys": ["k"]}) as gate,
    ):
        closed = await gate.http.get("/ui/")
        assert closed.status_code == 403
        assert "admin_closed" in closed.text


async def test_every_answer_binds_the_browser() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for address in ("/ui/", "/ui/nowhere", "/ui/login", "/ui/style.css", "/ui/requests?after=!"):
            headers = (await gate.http.get(address)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy, address
            assert "unsafe" not in policy
            assert "script" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
