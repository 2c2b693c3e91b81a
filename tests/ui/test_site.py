"""What the pages tell, and that names cannot speak in them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from gateway.ui import runs as run_parts
from tests.evidence.ledger import request, write
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool
from tests.ui.test_html import Read

HOSTILE = "</bdi></title><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LETTER = '\u202e"><b>'


async def ask(gate: Gate, session: str, text: str = "hello", **fields: object) -> None:
    path = f"/sessions/{quote(session, safe='')}/v1/chat/completions"
    answer = await gate.http.post(path, json=chat(text, **fields), headers={"x-detgate-pool": "policy"})
    assert answer.status_code == 200, answer.text


async def read(gate: Gate, page: str, status: int = 200) -> Read:
    answer = await gate.http.get(f"/ui/{page}")
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    found = Read(answer.text)
    assert not {"script", "img", "iframe", "u"} & set(found.tags)
    assert not [name for each in found.attributes for name in each if name.startswith("on")]
    return found


async def test_replicas_their_state_load_and_findings_are_told() -> None:
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    async with FakeWorker(held) as worker:
        async with gateway(pool("policy", worker.url, "http://127.0.0.1:9", models=["m", "<u>"])) as gate:
            running = asyncio.create_task(ask(gate, "s", model="m"))
            await gate.until(lambda: gate.in_flight("policy-0") == 1)
            await gate.until(lambda: gate.gateway.fleet.pools["policy"].replicas["policy-1"].state == "down")
            text = (await read(gate, "")).text
            rows = text[text.index("Replicas of policy") :]
            assert "✓ up" in rows
            assert "✕ down" in rows
            assert "Models<u>, m" in text
            first = rows[rows.index("policy-0") : rows.index("policy-1")]
            assert "1– not told" in first
            shown = (await gate.http.get("/determinism")).json()["pools"]["policy"]["findings"]
            assert shown
            for finding in shown:
                assert finding["says"] in text
                assert finding["mend"] is None or finding["mend"] in text
            release.set()
            await running


async def test_what_keeps_a_pool_from_serving_is_told() -> None:
    async with (
        FakeWorker() as worker,
        FakeWorker() as other,
        gateway(pool("policy", worker.url, other.url), health={"interval": 3600}) as gate,
    ):
        await gate.http.post("/admin/pools/policy/replicas/policy-1/drain")
        await gate.http.post("/admin/weights", json={"version": "<u>step-1"})
        await gate.http.post("/admin/weights/pause")
        of_pool = gate.gateway.fleet.pools["policy"]
        of_pool.contradicts = "it draws its own seeds"
        of_pool.replicas["policy-0"].fingerprint = "another"
        text = (await read(gate, "")).text
        assert "▲ draining" in text
        assert "Weights<u>step-1 ▲ paused" in text
        assert "✕ would be refused" in text
        assert "another ✕ changed" in text


def test_whose_records_are_elsewhere_is_told() -> None:
    told = {"sessions": [], "requests": [], "next": None, "gateways": ["here"]}
    for parts in (
        run_parts.sessions(told, "r", False, {"here", "<u>there"}),
        run_parts.requests(told, "r", None, True, {"here", "<u>there"}),
    ):
        assert "▲ Not all is here: elsewhere are the records of <u>there." in Read("".join(parts)).text
    for parts in (run_parts.sessions(told, "r", False, ["here"]), run_parts.requests(told, "r", None, True, [])):
        assert "elsewhere" not in "".join(parts)


async def test_lanes_are_told_by_the_names_of_who_waits() -> None:
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    async with FakeWorker(held) as worker:
        lane = {"scope": "session", "limit": 1}
        async with gateway(pool("policy", worker.url, lane=lane), sessions={"required": True}) as gate:
            asked = [asyncio.create_task(ask(gate, LETTER, str(number))) for number in range(3)]
            lanes = gate.gateway.fleet.pools["policy"].lanes
            await gate.until(lambda: lanes.waiting == 2)
            text = (await read(gate, "lanes")).text
            assert '\\u202e"><b>1 of 12' in text
            assert "Waiting now2" in text
            release.set()
            await asyncio.gather(*asked)
            assert "No lane is in use." in (await read(gate, "lanes")).text


async def test_a_run_is_told_by_sessions_and_requests_whatever_they_are_called(tmp_path: Path) -> None:
    kept = {"path": str(tmp_path), "bodies": True}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), ledger=kept) as gate:
        for session in (HOSTILE, LETTER, "17:10", "17:2"):
            await ask(gate, session, HOSTILE, user=HOSTILE)
        await ask(gate, "17:2", model=HOSTILE)
        text = (await read(gate, "requests")).text
        assert text.index("17:2index 0") < text.index("17:2index 1") < text.index("17:10index 0")
        assert HOSTILE in text
        assert '\\u202e"><b>' in text
        assert "\u202e" not in text
        sessions = await read(gate, "sessions")
        assert HOSTILE in sessions.text
        to = next(each["href"] for each in sessions.attributes if "session=%3C" in (each.get("href") or ""))
        one = await read(gate, str(to))
        assert f"Session {HOSTILE}" in one.text
        assert "17:2" not in one.text
        raced = (await read(gate, "sessions?racing=on")).text
        assert "No session raced." in raced


async def test_runs_are_chosen_and_compared_in_place() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        write(gate.ledger / "a", request(HOSTILE, 0, run="a"), request("t", 0, run="a"))
        write(gate.ledger / "b", request(HOSTILE, 0, run="b", answer=HOSTILE), request("t", 0, run="b"))
        runs = await read(gate, "runs")
        chosen = [each["value"] for tag, each in zip(runs.tags, runs.attributes, strict=True) if tag == "option"]
        assert set(chosen) == {"a", "b", gate.gateway.run}
        text = (await read(gate, "diff?a=a&b=b")).text
        assert "✕ Different: 1 root, and 0 that follow, of 2 requests in 2 sessions" in text
        assert f"{HOSTILE} index 0" in text
        assert "answer ▲ differs" in text
        assert str(gate.ledger) not in text
        assert "✓ Equal: 2 requests in 2 sessions" in (await read(gate, "diff?a=a&b=a")).text


async def test_what_cannot_be_shown_is_told_as_a_page() -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for page, status, code in (
            ("nowhere", 404, "route_not_found"),
            ("requests?run=none", 404, "run_not_found"),
            (f"requests?run={quote('../../etc')}", 400, "invalid_header"),
            (f"diff?a={gate.gateway.run}&b={quote('../x')}", 400, "invalid_header"),
            (f"diff?a={gate.gateway.run}&b={gate.gateway.run}", 404, "run_not_found"),
            ("diff?a=x&b=y&start=-1", 400, "invalid_cursor"),
            ("sessions?after=!", 400, "invalid_cursor"),
        ):
            assert f"Code {code}" in (await read(gate, page, status)).text, page
        assert "method_not_allowed" in (await gate.http.post("/ui/runs")).text


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"event": "opened"}, "session cannot be None"),
        ({"event": "session", "session": "s"}, "identity is missing"),
        ({"event": "gateway"}, "gateway is missing"),
        ({"event": "opened", "session": "s", "identity": "s", "index": "1"}, "index cannot be '1'"),
        ({"event": "closed", "session": "s", "identity": "s", "index": 0, "flags": 5}, "flags cannot be 5"),
    ],
)
async def test_a_run_with_a_record_that_cannot_be_made_out_is_told_with_its_place(
    broken: dict[str, Any], why: str
) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        write(gate.ledger / "good", request("s", 0))
        file = write(gate.ledger / "bad", request("s", 0), [broken]) / "1-1.jsonl"
        # Whoever compares reads nothing of who wrote, or whose session it was.
        compared = ["diff?a=good&b=bad"] if broken["event"] in ("opened", "closed") else []
        for page in ("requests?run=bad", "sessions?run=bad", *compared):
            text = (await read(gate, page, 503)).text
            assert "Code run_unreadable" in text
            assert re.search(rf"{file}, (line 3|byte \d+),? is no sound record: {why}", text), text


async def test_a_failure_says_nothing_of_the_inside_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:

        def fail(*_: object) -> None:
            raise RuntimeError(f"Traceback: {gate.ledger}")

        monkeypatch.setattr(run_parts, "requests", fail)
        with capture_logs() as logged:
            text = (await read(gate, "requests", 500)).text
        assert [(each["event"], str(each["exc_info"])) for each in logged if each["log_level"] == "error"] == [
            ("a page failed", f"Traceback: {gate.ledger}")
        ]
        assert "its log says why" in text
        assert "Traceback" not in text
        assert str(gate.ledger) not in text


BROKEN = {"empty": b"", "half-written": b'{"run": "r", "sta', "no UTF-8": b'{"run": "\xff"}', "no object": b"[]"}
BROKEN |= {"typed": b'{"run": "r", "started": "soon"}', "stately": b'{"run": "r", "state": "ajar"}'}


async def test_a_list_of_runs_shows_those_that_are_broken_and_why(tmp_path: Path) -> None:
    for name, content in BROKEN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(content)
    (tmp_path / "a folder" / "run.json").mkdir(parents=True)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "run.json").symlink_to("nowhere")
    given: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "run": "own"}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), **given) as gate:
        text = (await read(gate, "runs")).text
        assert "✓ goes on" in text
        for name, why in {
            **dict.fromkeys(("empty", "half-written", "no UTF-8"), "it is no JSON"),
            "no object": "it is no JSON object",
            "typed": "started is of another type",
            "stately": "state is none that a run has",
            "a folder": "Is a directory",
        }.items():
            row = text[text.rindex(name, 0, text.rindex("requests of " + name)) :]
            assert row[len(name) :].lstrip().startswith(f"✕ broken: run.json: {why}"), name
        told = await read(gate, "diff?a=empty&b=own", 503)
        assert "empty/run.json" in told.text
