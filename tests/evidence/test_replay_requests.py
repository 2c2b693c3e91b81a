"""A recorded run sent again: the same sessions, identities and indices in a new run, and nothing twice."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.evidence import commands, replay_plans
from gateway.evidence import recorded as recording
from gateway.evidence.ledgers import Unusable, find
from gateway.evidence.replay_requests import Failed, Notes, Refused, Target, send
from gateway.ledger.requests import Requests
from gateway.sim import SimServer, SimSettings
from tests.evidence.ledger import request, write
from tests.evidence.runs import ask, converse, recorded
from tests.harness import MODEL, Gate, chat, pool

CHAT = "/v1/chat/completions"
TALK = ["What is there to see?", "And after that?", "And in the evening?"]
BODY: dict[str, Any] = {"request_body": "{}", "request_bytes": 2}
HASH = f"sha256:{'0' * 64}"
SAME: dict[str, Any] = {"sim": {"prefix_cache": False}, "routing": {"slack": "inf", "on_home_down": "next"}}


async def varied(gate: Gate) -> None:
    """A run of everything that a replay must bring back."""
    await converse(gate, "3:0", TALK)
    for text in ("And", "And on"):
        await ask(gate, "3:0", text, {"X-Detgate-Resume": "3:0:1"})
    await ask(gate, "physical", "hi", {"X-Detgate-Identity": "3:1"})
    await asyncio.gather(*[ask(gate, "tree", f"branch {n // 2}", {"X-Index-Order": "content"}) for n in range(4)])
    await asyncio.gather(*[ask(gate, "raced", f"sibling {n}") for n in range(3)])
    for number in (4, 1):
        await ask(gate, "numbers", f"number {number}", {"X-Request-Index": str(number)})
    await ask(gate, "keys", "keyed", {"Idempotency-Key": "k"})
    first = await gate.http.post(CHAT, json=chat("of no session", max_tokens=4))
    resumed = {"X-Detgate-Resume": first.headers["x-detgate-request-id"]}
    await gate.http.post(CHAT, json=chat("of no session, gone on", max_tokens=4), headers=resumed)
    await ask(gate, "streams", "hi", stream=True)
    for wanted in ({"identity": "eval", "seed": 9}, {"identity": "eval"}, {"identity": "task", "group_size": 2}):
        created = (await gate.http.post("/sessions", json=wanted)).json()
        for session in created.get("sessions", [created]):
            key = {"Authorization": f"Bearer {session['api_key']}"}
            for text in ("one", "two"):
                await gate.http.post("/v1/chat/completions", json=chat(text, max_tokens=4), headers=key)
            await gate.http.delete(f"/sessions/{session['session_id']}", headers=key)


def asked(*servers: SimServer) -> int:
    """How many chats have reached these engines."""
    return sum(seen.route == CHAT for server in servers for seen in server.engine.counters.seen)


async def again(folder: Path, gate: Gate, run: str = "b", *, of: str = "a", **target: Any) -> Any:
    script = recording.script(find(of, folder))
    done: list[int] = []
    notes = Notes.kept(folder / "notes.json", run, script.run)
    found = await send(script, Target(gate.url, run, **target), notes, done.append)
    assert done == sorted(done)
    assert done[-1] == script.requests
    return found


async def test_a_run_sent_again_is_equal(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await varied(gate)
    planned = replay_plans.replay(find("a", tmp_path))
    assert (planned.requests, planned.different) == (27, 0), planned.deviations
    async with recorded(tmp_path, "own", **SAME) as (gate, servers):
        found = await again(tmp_path, gate)
        assert (found.equal, found.compared, found.skipped) == (True, 27, 0), found.kept
        for run in "ab":
            records = _records(tmp_path / run)
            assert [record["key"] for record in records if record.get("key")] == ["k"]
            ended = sorted(record["session"] for record in records if record["event"] == "session_ended")
            assert ended == ["eval", "eval-1", "task:0", "task:1"]
        with pytest.raises(Refused, match="run b is complete: all 27 requests of run a were sent and answered before"):
            await again(tmp_path, gate)
        assert asked(*servers) == 27
    assert not (tmp_path / "notes.json").exists()


async def test_a_run_that_is_none_of_this_replay_is_not_sent_to(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await converse(gate, "s", TALK)
    async with recorded(tmp_path, "own", **SAME) as (gate, servers):
        for run, session, texts in (("friday", "s", TALK[:1]), ("other", "t", TALK[:2])):
            for text in texts:
                await ask(gate, session, text, {"X-Detgate-Run": run})
        with pytest.raises(Refused, match=r"run friday has 1 of 3 requests already, and .*notes\.json"):
            await again(tmp_path, gate, "friday")
        assert not (tmp_path / "notes.json").exists()
        # Notes of a replay by that name do not make its requests those of the replay.
        Notes(tmp_path / "notes.json", "other", "a").add({})
        with pytest.raises(Refused, match="run other is none of this replay: 2 of its 2 requests are not of run a"):
            await again(tmp_path, gate, "other")
        assert asked(*servers) == 3


async def test_what_is_other_at_the_second_time_is_named(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await converse(gate, "3:0", TALK)
    async with recorded(tmp_path, "own", seed=43, **SAME) as (gate, _):
        found = await again(tmp_path, gate)
    assert dict(found.roots) == {"other-seed": 3}
    assert found.first is not None
    assert (found.first.one.identity, found.first.one.index) == ("3:0", 0)


async def test_master_seeds_that_differ_are_told_where_the_new_run_is_here(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await ask(gate, "s", "hi")
        created = (await gate.http.post("/sessions", json={"identity": "own", "seed": 9})).json()
        key = {"Authorization": f"Bearer {created['api_key']}"}
        await gate.http.post(CHAT, json=chat("hi", max_tokens=4), headers=key)
    async with recorded(tmp_path, "own", seed=7, **SAME) as (gate, _):
        found = await again(tmp_path, gate, "b", kept=tmp_path / "b")
        unknown = await again(tmp_path, gate, "c")
    assert [(each.one.identity, each.detail.partition(": ")[2]) for each in found.kept] == [
        ("s", "the master seed is 42 in A, 7 in B")
    ]
    assert "that of B is not known" in unknown.kept[0].detail


async def test_requests_are_in_flight_together_as_they_were(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"sim": {"prefix_cache": False, "token_seconds": 0.02}}
    async with recorded(tmp_path, "a", replicas=1, **slow) as (gate, _):
        await asyncio.gather(*[ask(gate, "raced", f"sibling {n}") for n in range(3)])
        await ask(gate, "raced", "after")
    async with recorded(tmp_path, "own", replicas=1, **slow) as (gate, _):
        await again(tmp_path, gate)
        events = [
            (record["event"], record["index"])
            for record in gate.records() + _records(tmp_path / "b")
            if record.get("run") == "b" and record["event"] in ("opened", "closed")
        ]
    events = list(dict.fromkeys(events))
    assert set(events[:3]) == {("opened", 0), ("opened", 1), ("opened", 2)}
    assert events[-2:] == [("opened", 3), ("closed", 3)]


async def test_what_goes_on_with_a_request_that_was_in_flight_is_sent_after_it(tmp_path: Path) -> None:
    """Or it would race with the request that the new gateway must know by then."""
    slow: dict[str, Any] = {"sim": {"prefix_cache": False, "token_seconds": 0.02}}
    async with recorded(tmp_path, "a", replicas=1, **slow) as (gate, _):
        whole = asyncio.create_task(ask(gate, "s", "begins"))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        await ask(gate, "s", "goes on", {"X-Detgate-Resume": "s:0"})
        await whole
    assert _order(tmp_path / "a")[:2] == [("opened", "s"), ("opened", "s/0.0")]
    async with recorded(tmp_path, "own", replicas=1, **slow) as (gate, _):
        assert (await again(tmp_path, gate)).equal
    assert _order(tmp_path / "b") == [("opened", "s"), ("closed", "s"), ("opened", "s/0.0"), ("closed", "s/0.0")]


def _order(folder: Path) -> list[tuple[str, str]]:
    """What began and ended, in this order."""
    kinds = ("opened", "closed")
    return [(each["event"], each["identity"]) for each in _records(folder) if each["event"] in kinds]


def _records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


async def test_what_was_not_delivered_is_left_out(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", replicas=1, **SAME) as (gate, [server]):
        await ask(gate, "s", "whole")
        server.engine.faults.add(route="/v1/chat/completions", delay_head=30.0)
        left = asyncio.create_task(ask(gate, "t", "left"))
        await gate.until(lambda: gate.in_flight("policy-0") == 1)
        left.cancel()
        await gate.until(lambda: not gate.in_flight("policy-0"))
    async with recorded(tmp_path, "own", replicas=1, **SAME) as (gate, _):
        found = await again(tmp_path, gate)
    assert (found.equal, found.compared, found.skipped) == (True, 1, 1)


async def test_a_gateway_that_is_gone_stops_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await varied(gate)
    ledger = {"path": str(tmp_path / "second"), "bodies": False}
    async with recorded(tmp_path, "own", ledger=ledger, **SAME) as (gate, servers):
        served = 0

        def count(done: int) -> None:
            nonlocal served
            served = done
            if done == 12:
                raise Failed("enough")

        script = recording.script(find("a", tmp_path))
        notes = Notes.kept(tmp_path / "notes.json", "b", "a")
        with pytest.raises(Failed, match="enough"):
            await send(script, Target(gate.url, "b"), notes, count)
        sent = asked(*servers)
        assert 12 <= sent < script.requests
        found = await again(tmp_path, gate)
        assert found.equal, found.kept
        assert asked(*servers) <= script.requests + script.at_once


def test_keys_are_kept_for_their_owner_alone_and_for_their_run(tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text('{"run": "other", "of": "a", "keys": {}}')
    file.chmod(0o644)
    Notes.kept(file, "b", "a").add({"s": "secret"})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    notes = Notes.kept(file, "b", "a")
    assert (notes.begun, notes.keys) == (True, {"s": "secret"})
    for other in (Notes.kept(file, "another", "a"), Notes.kept(file, "b", "another")):
        assert (other.begun, other.keys) == (False, {})
    notes.forget()
    assert not file.exists()


def test_without_bodies_there_is_nothing_to_send(tmp_path: Path) -> None:
    write(tmp_path / "a", request("s", 0))
    with pytest.raises(Unusable, match=r"ledger\.bodies: true"):
        recording.script(find("a", tmp_path))


async def test_a_url_where_nobody_listens_is_told(tmp_path: Path) -> None:
    async with recorded(tmp_path, "a", **SAME) as (gate, _):
        await ask(gate, "s", "hi")
    script = recording.script(find("a", tmp_path))
    notes = Notes(tmp_path / "notes.json", "b", "a")
    with pytest.raises(Failed, match="does not answer"):
        await send(script, Target("http://127.0.0.1:9", "b"), notes, lambda done: None)


async def test_the_command_starts_a_gateway_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """The whole of it: processes, CTRL-C, a second start, the verdict as JSON."""
    async with recorded(tmp_path / "ledger", "a", replicas=1, **SAME) as (gate, _):
        for number in range(6):
            await ask(gate, f"s:{number}", "hi")
    told: Any = {"engine": "vllm", "model": MODEL, "token_seconds": 0.0, "prefix_cache": False}
    async with SimServer(SimSettings(**told)) as server:
        settings = {"pools": [pool("policy", server.url)], "ledger": {"path": str(tmp_path / "ledger")}}
        (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
        server.engine.faults.add(route="/v1/chat/completions", delay_head=0.3)
        command = ("-m", "gateway", "replay", "requests", "a", "--config", str(tmp_path / "gateway.yaml"), "--json")
        process = await _started(tmp_path, *command)
        while asked(server) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert asked(server) < 6
        server.engine.faults.clear()
        process = await _started(tmp_path, *command)
        out, said = await process.communicate()
        assert process.returncode == 0, out
        found = json.loads(out)
        assert (found["equal"], found["compared"], found["b"]) == (True, 6, "a-replay")
        assert b"of 6 requests were sent before this replay was stopped" in said
        assert (sent := asked(server)) <= 7
        kept = {file.name: file.read_bytes() for file in (tmp_path / "ledger" / "a-replay").iterdir()}
        process = await _started(tmp_path, *command)
        out, said = await process.communicate()
        assert (process.returncode, json.loads(out)["equal"]) == (2, False)
        assert said.startswith(b"detgate: run a-replay is complete: all 6 requests of run a were sent")
        assert b"Nothing was sent" in said
        assert b"goes on" not in said
        assert asked(server) == sent
        assert {file.name: file.read_bytes() for file in (tmp_path / "ledger" / "a-replay").iterdir()} == kept


async def _started(folder: Path, *command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


def test_neither_url_nor_pools_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "requests", "a", "--ledger", str(tmp_path)]) == 2
    assert "pools: none" in capsys.readouterr().err


def test_that_it_can_go_on_is_said_after_what_stopped_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", request("s", 0, **BODY))
    assert main(["replay", "requests", "a", "--ledger", str(tmp_path), "--url", "http://127.0.0.1:9"]) == 2
    stopped, further = capsys.readouterr().err.splitlines()
    assert stopped.startswith("detgate: http://127.0.0.1:9 does not answer: ")
    assert further == "detgate: the same command goes on where it stopped"


def test_notes_that_cannot_be_kept_are_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.replay.json").mkdir()
    write(tmp_path / "a", request("s", 0, **BODY))
    command = ["replay", "requests", "a", "--ledger", str(tmp_path), "--url", "http://127.0.0.1:9"]
    assert main([*command, "--run", "b"]) == 2
    assert capsys.readouterr().err == "detgate: b.replay.json: cannot be written: is a directory\n"


@pytest.mark.parametrize(
    ("recorded", "named", "said"),
    [
        ("a", ["--run", "x/b"], "--run 'x/b' must be 1 to 128 letters, digits"),
        ("a", ["--run", ""], "--run '' must be 1 to 256 bytes"),
        ("a" * 125, [], f"--run '{'a' * 125}-replay' must be 1 to 128 letters, digits"),
        ("a", ["--run", "a"], "--run a is the recorded run itself"),
    ],
)
def test_a_name_that_no_new_run_can_have_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: str, named: list[str], said: str
) -> None:
    write(tmp_path / "a", request("s", 0, run=recorded, **BODY))
    command = ["replay", "requests", "a", "--ledger", str(tmp_path), "--url", "http://127.0.0.1:9"]
    assert main([*command, *named]) == 2
    assert capsys.readouterr().err.startswith(f"detgate: {said}")


@pytest.mark.parametrize("what", ["plans", "requests"])
def test_an_export_is_told_from_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    ledger = Requests(write(tmp_path / "a", request("s", 0, **BODY)))
    file = tmp_path / "export.jsonl"
    file.write_bytes(b"".join(ledger.lines(ledger.canonical())))
    url = ["--url", "http://127.0.0.1:9"] if what == "requests" else []
    assert main(["replay", what, str(file), "--ledger", str(tmp_path), *url]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"detgate: {file}: is an export")
    assert "The ledger's own files are needed" in said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"admin_key": HASH},
            "auth.admin_key: a hash, and the key itself is needed: give it by DETGATE_AUTH__ADMIN_KEY",
        ),
        ({"api_keys": [HASH]}, "auth.api_keys: hashes, and a key itself is needed: give one by OPENAI_API_KEY"),
    ],
)
def test_a_hash_is_no_key_to_send(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump({"pools": [pool("policy", "http://127.0.0.1:9")], "auth": keys}))
    assert main(["replay", "requests", "a", "--config", str(file), "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == f"detgate: {said}\n"


@pytest.mark.parametrize("url", [[], ["--url", "http://127.0.0.1:9"]])
def test_a_gateway_of_its_own_keeps_the_new_run_where_its_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: list[str]
) -> None:
    """`--ledger` is where this command looks for runs."""
    targets: list[Target] = []

    async def again(script: object, target: Target, *_: object) -> None:
        targets.append(target)
        raise Failed("enough")

    monkeypatch.setattr(commands, "_again", again)
    write(tmp_path / "here" / "a", request("s", 0, run="a", **BODY))
    file = tmp_path / "gateway.yaml"
    settings = {"pools": [pool("policy", "http://127.0.0.1:9")], "ledger": {"path": str(tmp_path / "there")}}
    file.write_text(yaml.safe_dump(settings))
    command = ["replay", "requests", "a", "--ledger", str(tmp_path / "here"), "--config", str(file), *url]
    assert main(command) == 2
    assert [target.kept for target in targets] == [tmp_path / ("here" if url else "there") / "a-replay"]
