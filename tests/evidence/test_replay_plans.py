"""Recorded decisions made again: the golden ledgers of every release come out the same, and a change is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway import __version__, schemes
from gateway.cli import main
from gateway.core import canonical, ids, indexing, routing
from gateway.evidence.replay_plans import TWICE
from tests.evidence.ledger import Records, request, write
from tests.evidence.runs import ask, recorded
from tests.golden.make import FOLDER

Capture = pytest.CaptureFixture[str]

GOLDEN = sorted(file.parent for file in FOLDER.glob("*/*/run.json"))
POLICY = ["policy-0", "policy-1", "policy-2"]
BALANCED = FOLDER / "0.1.0" / "balanced"


def replay(capsys: Capture, recorded: Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["replay", "plans", str(recorded), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("run", GOLDEN, ids=lambda run: str(run.relative_to(FOLDER)))
def test_golden_ledgers_come_out_the_same(run: Path, capsys: Capture) -> None:
    status, found = replay(capsys, run)
    assert (status, found["equal"], found["differences"]) == (0, True, [])
    requests = found["compared"]
    assert found["checked"]["request id"] == found["checked"]["digest"] == requests
    for what in ("seed", "index", "replica"):
        assert found["checked"][what] >= requests * 0.4, what


def test_every_release_keeps_its_ledgers() -> None:
    assert (FOLDER / __version__).is_dir(), "run: python -m tests.golden.make"


def test_golden_ledgers_use_all_that_decides() -> None:
    records = [
        json.loads(line) for run in GOLDEN for file in run.glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    opened = [record for record in records if record["event"] == "opened"]
    closed = [record for record in records if record["event"] == "closed"]
    assert {record["scheme"] for record in opened} == set(schemes.names())
    assert {record["order"] for record in opened} == {"arrival", "content", "client"}
    assert {record["seed_source"] for record in opened} == {"derived", "client", "none"}
    assert any(record["racing"] for record in closed)
    assert any(record["repeat"] for record in opened)
    assert any(record["key"] for record in opened)
    assert any(record["member"] for record in opened)
    assert any(record["ordinal"] for record in opened)
    assert any(record["n"] > 1 for record in opened)
    assert any(len({each["replica"] for each in record["attempts"]}) > 1 for record in closed)
    assert any(record["outcome"] == "failed" and not record["used"] for record in closed)
    assert any(record["sticky"] for record in closed)
    assert {record["outcome"] for record in closed} >= {"delivered", "abandoned"}


def _other_seed(master: int, identity: str, index: int, member: int | None) -> int:
    return schemes.load("areal").seed(master, identity, index, member)


class _Forgetful(indexing.Scope):
    """What is released is never taken again."""

    def settle(self, index: int, *, used: bool) -> bool:
        return super().settle(index, used=True)


@pytest.mark.parametrize(
    ("place", "name", "changed", "what"),
    [
        (schemes.load("v1"), "seed", _other_seed, {"seed"}),
        (ids, "request_id", lambda identity, index, ordinal=0: f"{identity}:{index}", {"request id"}),
        (routing, "_scoring", lambda key: str.encode, {"replica"}),
        (canonical, "content", lambda document, route: "0" * 32, {"content digest"}),
        (canonical, "raw", lambda route, body: bytes(16), {"digest"}),
    ],
)
def test_a_change_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, place: Any, name: str, changed: Any, what: set[str]
) -> None:
    monkeypatch.setattr(place, name, changed)
    status, found = replay(capsys, BALANCED)
    assert (status, found["equal"]) == (1, False)
    assert {each["what"] for each in found["differences"]} == what


def test_another_rule_for_indices_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("gateway.evidence.replay_plans.Scope", _Forgetful)
    status, found = replay(capsys, BALANCED)
    assert status == 1
    assert {each["what"] for each in found["differences"]} == {"index"}


def altered(tmp_path: Path, event: str, **changes: Any) -> Path:
    """The golden ledger with one record forged: the first that has other values there."""
    copy = tmp_path / "balanced"
    shutil.copytree(BALANCED, copy)
    [file] = copy.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    one = next(each for each in records if each["event"] == event and all(each[name] is not None for name in changes))
    one.update(changes)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return copy


@pytest.mark.parametrize(
    ("event", "changes", "what"),
    [
        ("opened", {"seed": 5}, "seed"),
        ("opened", {"request_id": "17:3:9"}, "request id"),
        ("opened", {"content": "0" * 32}, "content digest"),
        ("closed", {"candidates": ["policy-2", "policy-0", "policy-1"]}, "replica"),
    ],
)
def test_a_forged_record_is_named(
    tmp_path: Path, capsys: Capture, event: str, changes: dict[str, Any], what: str
) -> None:
    status, found = replay(capsys, altered(tmp_path, event, **changes))
    assert status == 1
    assert what in {each["what"] for each in found["differences"]}


def test_of_a_session_with_an_index_that_was_given_twice_none_is_issued_again(tmp_path: Path, capsys: Capture) -> None:
    copy = altered(tmp_path, "opened", index=77)
    [file] = copy.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    forged = next(each for each in records if each.get("index") == 77)
    assert "index" in {each["what"] for each in replay(capsys, copy)[1]["differences"]}
    with file.open("a") as ledger:
        ledger.write(json.dumps({**forged, "event": "fenced"}) + "\n")
    _, found = replay(capsys, copy)
    assert "index" not in {each["what"] for each in found["differences"]}
    own = [each for each in records if each["event"] == "opened" and each["session"] == forged["session"]]
    assert found["undetermined"]["index"][TWICE] == len(own)


def test_all_choices_of_a_pool_follow_from_one_kind_of_key(tmp_path: Path, capsys: Capture) -> None:
    """A run that routes by session, in which one choice is made by request id."""
    copy = tmp_path / "areal"
    shutil.copytree(BALANCED.parent / "areal", copy)
    [file] = copy.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    ids = {(each["session"], each["index"]): each["request_id"] for each in records if each["event"] == "opened"}
    forged = 0
    for record in reversed(records):
        if record["event"] != "closed" or record["sticky"] or record["session"] == "anonymous":
            continue
        ranked = routing.ranked(ids[record["session"], record["index"]], record["loads"], 2)
        if set(ranked) == set(record["candidates"]) and ranked != record["candidates"]:
            record["candidates"] = ranked
            forged += 1
            break
    assert forged == 1
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    status, found = replay(capsys, copy)
    assert (status, found["different"]) == (1, 1)


def test_what_the_ledger_does_not_tell_is_undetermined(tmp_path: Path, capsys: Capture) -> None:
    [file] = BALANCED.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        for name in ("request_body", "candidates"):
            record.pop(name, None)
    records.insert(3, {"event": "gap", "run": "balanced", "missing": 1})
    (tmp_path / "alone.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    status, found = replay(capsys, tmp_path / "alone.jsonl")
    assert status == 0
    assert set(found["undetermined"]) == {"seed", "index", "replica"}
    assert set(found["undetermined"]["index"]) == {"the ledger has gaps"}


def test_where_two_gateways_wrote_at_once_the_order_of_claims_is_not_known(tmp_path: Path, capsys: Capture) -> None:
    copy = tmp_path / "balanced"
    shutil.copytree(BALANCED, copy)
    (copy / "1.jsonl").write_bytes((copy / "0.jsonl").read_bytes())
    status, found = replay(capsys, copy)
    assert status == 0
    assert set(found["undetermined"]["index"]) == {
        "several gateways recorded at once, so the order of claims is not known"
    }


async def test_a_home_is_among_the_replicas_that_there_were(tmp_path: Path, capsys: Capture) -> None:
    async with recorded(tmp_path, "a", replicas=3, routing={"slack": "inf", "on_home_down": "wait"}) as (gate, _):
        for number in range(4):
            await ask(gate, f"before:{number}", "hi")
        gate.gateway.changes.drain(gate.gateway.fleet.pools["policy"], routing.best("after:0:0", POLICY))
        for number in range(4):
            await ask(gate, f"after:{number}", "hi")
    status, found = replay(capsys, tmp_path / "a")
    assert (status, found["checked"]["replica"]) == (0, 8)
    [file] = (tmp_path / "a").glob("*.jsonl")
    lines = [line for line in file.read_text().splitlines() if '"draining"' not in line]
    file.write_text("\n".join(lines) + "\n")
    status, found = replay(capsys, tmp_path / "a")
    assert status == 1
    assert {each["what"] for each in found["differences"]} == {"replica"}


def _sent(session: str, names: list[str], at: float, gateway: str | None, **told: Any) -> Records:
    """A request of a session, sent to its home among these replicas."""
    home = [routing.best(f"{session}:0", names)]
    seed = schemes.load("v1").seed(told.pop("master", 42), session, 0, None)
    opened, closed = request(session, 0, seed=seed, digest="00" * 16, gateway=gateway, time=at, repeat=0, **told)
    return [opened, closed | {"candidates": home, "replicas": home, "loads": None, "time": at + 1}]


def _written(folder: Path, *segments: Records) -> Path:
    write(folder, [], pools={"policy": POLICY[:2]})
    (folder / "1-1.jsonl").unlink()
    for number, records in enumerate(segments):
        (folder / f"{number}-{number}.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    return folder


def _gateway(name: str) -> dict[str, Any]:
    return {"event": "gateway", "time": 1.0, "run": "r", "gateway": name}


def _changed(at: float, *names: str) -> dict[str, Any]:
    return {"event": "fleet", "time": at, "run": "r", "change": "added", "pool": "policy", "replicas": list(names)}


MOVED = next(
    str(n)
    for n in range(99)
    if routing.best(f"{n}:0", POLICY[:2]) not in {routing.best(k, POLICY) for k in (f"{n}", f"{n}:0")}
)
"""A session whose home another replica becomes, by either key."""


def test_each_of_several_gateways_has_its_own_fleet_whatever_another_wrote_before(
    tmp_path: Path, capsys: Capture
) -> None:
    first = [_gateway("a"), _changed(50.0, *POLICY), *_sent(f"{MOVED}-2", POLICY, 60.0, "a")]
    second = [_gateway("b"), *_sent(MOVED, POLICY[:2], 10.0, "b"), _changed(50.1, *POLICY)]
    rotated = _sent(MOVED, POLICY, 70.0, "b", identity=MOVED)
    status, found = replay(capsys, _written(tmp_path / "r", first, second, rotated))
    assert (status, found["differences"], found["checked"]["replica"]) == (0, [], 3)


def test_a_fleet_is_that_of_the_configuration_when_its_gateway_starts_anew(tmp_path: Path, capsys: Capture) -> None:
    first = [*_sent(MOVED, POLICY[:2], 10.0, None), _changed(20.0, *POLICY)]
    status, found = replay(capsys, _written(tmp_path / "r", first, _sent(MOVED, POLICY[:2], 30.0, None)))
    assert (status, found["differences"], found["checked"]["replica"]) == (0, [], 2)


def test_a_fleet_may_change_while_a_request_is_in_flight(tmp_path: Path, capsys: Capture) -> None:
    opened, closed = _sent(MOVED, POLICY[:2], 10.0, "a")
    status, found = replay(capsys, _written(tmp_path / "r", [opened, _changed(10.5, *POLICY), closed]))
    assert (status, found["differences"], found["checked"]["replica"]) == (0, [], 1)
    status, found = replay(capsys, _written(tmp_path / "s", [_changed(9.0, *POLICY), opened, closed]))
    assert (status, found["checked"]["replica"], found["different"]) == (1, 1, 1)


def test_a_session_that_another_gateway_created_has_its_master_seed(tmp_path: Path, capsys: Capture) -> None:
    used = [_gateway("a"), *_sent("s", POLICY[:2], 10.0, "a", master=9)]
    created = [_gateway("b"), {"event": "session", "time": 5.0, "run": "r", "session": "s", "seed": 9}]
    status, found = replay(capsys, _written(tmp_path / "r", used, created))
    assert (status, found["differences"], found["checked"]["seed"]) == (0, [], 1)


def test_a_folder_without_records_is_unusable(tmp_path: Path, capsys: Capture) -> None:
    assert main(["replay", "plans", str(tmp_path)]) == 2
    assert "no *.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["keep", "mix"])
async def test_seeds_of_single_prompts_come_out_the_same(tmp_path: Path, capsys: Capture, policy: str) -> None:
    params = [{"seed": 3, "n": 2}, {"n": 2}]
    async with recorded(tmp_path, "a", engine="sglang", client_seed=policy) as (gate, _):
        for listed in (params, params[::-1]):
            told = await gate.http.post("/sessions/s/generate", json={"text": ["x", "y"], "sampling_params": listed})
            assert told.status_code == 200
    status, found = replay(capsys, tmp_path / "a")
    assert (status, found["checked"]["seed"], found["differences"]) == (0, 2, [])


def test_an_index_that_no_request_has_because_its_own_had_left_is_issued_all_the_same(
    tmp_path: Path, capsys: Capture
) -> None:
    each = [request("s", index, digest=f"{index:032x}", key=None, repeat=0) for index in (0, 1, 2)]
    given = write(tmp_path / "run", *each)
    [file] = given.glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    left = next(each for each in records if each["event"] == "opened" and each["index"] == 1)
    rest = [each for each in records if each.get("index") != 1]
    names = ("run", "session", "identity", "index", "order", "digest", "content", "key", "repeat", "flags")
    gone = {"event": "given_back", **{name: left[name] for name in names}}
    for told, differs in ((rest, True), ([*rest[:2], gone, *rest[2:]], False)):
        file.write_text("".join(json.dumps(each) + "\n" for each in told))
        _, found = replay(capsys, given)
        assert ("index" in {each["what"] for each in found["differences"]}) is differs
