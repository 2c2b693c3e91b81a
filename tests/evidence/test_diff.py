"""Each cause made on purpose: two runs of a real gateway before simulated engines, told apart by `detgate diff`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.core import routing
from tests.evidence.ledger import request, write
from tests.evidence.runs import ask, converse, diff, recorded
from tests.harness import MODEL, Gate, chat

Capture = pytest.CaptureFixture[str]

TALK = ["What is there to see?", "And after that?", "And in the evening?"]


async def test_two_runs_of_the_same_are_equal(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run, profile="strict") as (gate, _):
            for task in range(3):
                await converse(gate, f"{task}:0", TALK)
            order = range(5) if run == "a" else reversed(range(5))
            content = {"X-Index-Order": "content"}
            await asyncio.gather(*[ask(gate, "siblings", f"branch {branch}", content) for branch in order])
            await gate.http.post("/v1/chat/completions", json=chat("of no session"))
    status, found = diff(capsys, tmp_path)
    assert (status, found["equal"], found["compared"], found["first"], found["causes"]) == (0, True, 15, None, {})
    assert found["sessions"] == {"compared": 5, "in_both": 5, "different": 0}


async def test_missing_request(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            await converse(gate, "7:0", TALK[: 3 if run == "a" else 2])
            await ask(gate, "7:1", "whole")
            if run == "b":
                await ask(gate, "7:2", "b alone")
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"], found["downstream"]) == (1, {"missing-request": 2}, {})
    first = found["first"]
    assert (first["identity"], first["index"], first["cause"]) == ("7:0", 2, "missing-request")
    assert first["detail"] == "B has no record of it"
    assert first["b"] is None


async def test_an_answer_that_one_run_never_got_is_missing(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run, replicas=1) as (gate, [server]):
            if run == "b":
                server.engine.faults.add(route="/v1/chat/completions", delay_head=30.0)
            asking = asyncio.create_task(ask(gate, "s", "hi"))
            if run == "b":
                await gate.until(lambda: bool(gate.in_flight("policy-0")))
                asking.cancel()
                await gate.until(lambda: not gate.in_flight("policy-0"))
            else:
                await asking
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"]) == (1, {"missing-request": 1})
    assert found["first"]["detail"] == "asked for in both runs, but in A delivered; in B abandoned"


async def test_other_prompt_and_what_follows_from_it(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            await converse(gate, "3:0", TALK if run == "a" else [TALK[0], "And before that?", TALK[2]])
            await converse(gate, "3:1", TALK)
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"], found["downstream"]) == (1, {"other-prompt": 1}, {"other-prompt": 1})
    first = found["first"]
    assert (first["identity"], first["index"], first["cause"]) == ("3:0", 1, "other-prompt")
    assert first["detail"] == 'messages[2].content: "And after that?" in A, "And before that?" in B'


async def test_other_prompt_without_bodies(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run, ledger={"bodies": False}) as (gate, _):
            await converse(gate, "3:0", TALK if run == "a" else [TALK[0], "And before that?", TALK[2]])
    _, found = diff(capsys, tmp_path)
    assert (found["causes"], found["downstream"]) == ({"other-prompt": 1}, {"other-prompt": 1})
    assert found["first"]["index"] == 1
    assert "ledger.bodies" in found["first"]["detail"]


async def test_other_prompt_in_content_order(tmp_path: Path, capsys: Capture) -> None:
    """The prompt is in the effective identity there: what belongs together has no key in common."""
    for run in "ab":
        async with recorded(tmp_path, run, index_order="content") as (gate, _):
            await converse(gate, "3:0", TALK if run == "a" else [TALK[0], "And before that?", TALK[2]])
    _, found = diff(capsys, tmp_path)
    assert (found["causes"], found["downstream"]) == ({"other-prompt": 1}, {"other-prompt": 1})
    assert found["first"]["detail"].startswith('messages[2].content: "And after that?" in A')


async def racing(gate: Gate, server: Any, first: str, second: str) -> None:
    """Two requests of one session, the second sent while the first is in flight."""
    server.engine.faults.add(route="/v1/chat/completions", times=1, delay_head=0.2)
    one = asyncio.create_task(ask(gate, "r", first))
    await gate.until(lambda: gate.in_flight("policy-0") == 1)
    await asyncio.gather(one, ask(gate, "r", second))


async def test_other_index_order_names_the_racing_siblings(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run, replicas=1) as (gate, [server]):
            await ask(gate, "r", "before")
            await racing(gate, server, *(("left", "right") if run == "a" else ("right", "left")))
            await ask(gate, "r", "after")
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"], found["downstream"]) == (1, {"other-order": 2}, {})
    first = found["first"]
    assert (first["identity"], first["index"], first["siblings"]) == ("r", 1, [1, 2])
    assert first["detail"] == (
        "what A asked here has index 2 in B; what B asked here has index 2 in A; they raced in A and B"
    )


async def test_a_request_too_many_is_told_from_those_that_it_moves(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            for text in ("one", "extra", "two", "three") if run == "b" else ("one", "two", "three"):
                await ask(gate, "s", text)
    _, found = diff(capsys, tmp_path)
    first = found["first"]
    assert (first["index"], first["cause"]) == (1, "missing-request")
    assert first["detail"].startswith("B has a request here that A has no record of")
    assert (found["causes"], sum(found["downstream"].values())) == ({"missing-request": 1}, 2)


async def test_a_request_that_strict_refused_for_racing_was_asked_for(tmp_path: Path, capsys: Capture) -> None:
    strict: dict[str, Any] = {"profile": "strict", "replicas": 1, "timeouts": {"settle": 0.05}}
    for run in "ab":
        async with recorded(tmp_path, run, **strict) as (gate, [server]):
            if run == "a":
                server.engine.faults.add(route="/v1/chat/completions", times=1, delay_head=0.5)
                first = asyncio.create_task(ask(gate, "s", "one"))
                await gate.until(lambda: gate.in_flight("policy-0") == 1)
                assert (await ask(gate, "s", "two")).status_code == 409
                await first
            else:
                await ask(gate, "s", "one")
                await ask(gate, "s", "two")
            await ask(gate, "s", "three")
    _, found = diff(capsys, tmp_path)
    assert (found["first"]["index"], found["first"]["cause"]) == (1, "missing-request")
    assert found["first"]["detail"].startswith(
        "B has a request here that A gave no index: A was asked for one with its"
    )


@pytest.mark.parametrize("last", [True, False])
def test_a_request_that_waited_for_a_rival_in_vain_was_asked_for(tmp_path: Path, capsys: Capture, last: bool) -> None:
    waited = {"event": "waited", "run": "r", "session": "s", "identity": "s", "digest": "0a", "asked": -1, "repeat": 0}
    vain = "A was asked for one with its bytes, which waited for a rival in vain (refused, or its client gave up)"
    first, second, after = request("s", 0), request("s", 1, prompt="0a"), request("s", 1 if last else 2, prompt="0b")
    moved = [] if last else [request("s", 1, prompt="0b")]
    write(tmp_path / "a", first, [waited], *moved)
    write(tmp_path / "b", first, second, *([] if last else [after]))
    _, found = diff(capsys, tmp_path)
    assert (found["first"]["index"], found["first"]["cause"]) == (1, "missing-request")
    assert found["first"]["detail"] == (
        vain if last else f"B has a request here that A gave no index: {vain}; what follows comes under other indices"
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"seed": 43}, "the master seed is 42 in A, 43 in B"),
        ({"scheme": "areal"}, "the scheme is v1 in A, areal in B"),
    ],
)
async def test_other_seed_by_the_settings(tmp_path: Path, capsys: Capture, settings: dict[str, Any], why: str) -> None:
    for run in "ab":
        async with recorded(tmp_path, run, **(settings if run == "b" else {})) as (gate, _):
            await converse(gate, "s", TALK)
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"], found["downstream"]) == (1, {"other-seed": 1}, {"other-prompt": 2})
    assert why in found["first"]["detail"]
    assert found["first"]["also"] == ["other-answer"]


@pytest.mark.parametrize("bodies", [True, False])
@pytest.mark.parametrize("order", ["arrival", "content"])
async def test_other_seed_by_the_client(tmp_path: Path, capsys: Capture, order: str, bodies: bool) -> None:
    """A client's seed stands in the body, and is no other prompt."""
    for run, seed in (("a", 5), ("b", 6)):
        async with recorded(tmp_path, run, ledger={"bodies": bodies}, index_order=order) as (gate, _):
            await converse(gate, "s", TALK, seed=seed)
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert sum(found["downstream"].values()) == 2
    assert "the client sent another seed" in found["first"]["detail"]


async def test_other_client_seeds_of_single_prompts(tmp_path: Path, capsys: Capture) -> None:
    for run, seed in (("a", 5), ("b", 9)):
        async with recorded(tmp_path, run, engine="sglang", replicas=1) as (gate, _):
            params = [{"seed": seed + place, "max_new_tokens": 4} for place in range(8)]
            await gate.http.post("/sessions/s/generate", json={"text": [*"abcdefgh"], "sampling_params": params})
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert "the client sent another seed" in found["first"]["detail"]


async def test_a_client_seed_in_one_run_alone(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            own: dict[str, Any] = {"seed": 5} if run == "b" else {}
            await ask(gate, "s", "hi", **own)
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert "in A it is derived, in B the client's own" in found["first"]["detail"]


async def test_a_client_seed_that_is_mixed_in(tmp_path: Path, capsys: Capture) -> None:
    for run, setting in (("a", "mix"), ("b", "keep")):
        async with recorded(tmp_path, run, client_seed=setting) as (gate, _):
            await ask(gate, "s", "hi", seed=5)
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert "in A it is derived, in B the client's own" in found["first"]["detail"]


async def test_a_session_with_another_master_seed(tmp_path: Path, capsys: Capture) -> None:
    for run, seed in (("a", 1), ("b", 2)):
        async with recorded(tmp_path, run) as (gate, _):
            created = (await gate.http.post("/sessions", json={"identity": "s", "seed": seed})).json()
            key = {"Authorization": f"Bearer {created['api_key']}"}
            await gate.http.post("/v1/chat/completions", json=chat("hi", max_tokens=12), headers=key)
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert "the session's own master seed is 1 in A, 2 in B" in found["first"]["detail"]


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ("a", "the session's own master seed is 7 in A, the master seed is 42 in B"),
        ("b", "the master seed is 42 in A, the session's own master seed is 7 in B"),
    ],
)
def test_a_master_seed_is_the_sessions_own_in_one_run_alone(
    tmp_path: Path, capsys: Capture, own: str, why: str
) -> None:
    for run in "ab":
        created = {"event": "session", "session": "s", "identity": "s", "ordinal": 0, "index_order": None}
        created |= {"seed": 7 if run == own else None, "group": None, "member": None, "key_digest": "00"}
        write(tmp_path / run, [created], request("s", 0, seed=7 if run == own else 42))
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-seed": 1}
    assert found["first"]["detail"].endswith(why)


async def test_other_replica_with_the_same_answer(tmp_path: Path, capsys: Capture) -> None:
    second = ""
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            await ask(gate, "s", "hi")
            if run == "b":
                gate.gateway.changes.drain(gate.gateway.fleet.pools["policy"], second)
            second = (await ask(gate, "s", "more")).headers["x-detgate-replica"]
            await ask(gate, "s", "and more")
    status, found = diff(capsys, tmp_path)
    assert status == 1
    assert set(found["causes"]) == {"other-replica"}
    assert "it could go to policy-0, policy-1 in A, policy-" in found["first"]["detail"]
    assert found["first_answer"] is None
    status, found = diff(capsys, tmp_path, "--answers-only")
    assert (status, found["equal"], set(found["harmless"])) == (0, True, {"other-replica"})


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (
            {"profile": "balanced"},
            {"profile": "strict"},
            "profile is balanced in A, strict in B; routing.slack is 0 in A, inf in B",
        ),
        (
            {"profile": "strict"},
            {"profile": "strict", "pools[policy].routing.key": "session"},
            "routing.key is request in A, session in B",
        ),
        (
            {"profile": "balanced", "pools[policy].routing.slack": 2},
            {"profile": "balanced"},
            "routing.slack is 2 in A, 0 in B",
        ),
    ],
)
def test_other_replica_by_another_rule(
    tmp_path: Path, capsys: Capture, a: dict[str, Any], b: dict[str, Any], why: str
) -> None:
    for run, replica, deciding in (("a", "policy-0", a), ("b", "policy-1", b)):
        sent = request("s", 0, attempts=[{"replica": replica, "outcome": "answered"}])
        sent[1]["loads"] = {"policy-0": 0, "policy-1": 0} if deciding["profile"] == "balanced" else None
        write(tmp_path / run, sent, pools={"policy": ["policy-0", "policy-1"]}, **deciding)
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-replica": 1}
    assert found["first"]["detail"] == f"policy-0 in A, policy-1 in B: the rule was another: {why}"


def test_other_candidates_are_told_where_the_rule_was_the_same(tmp_path: Path, capsys: Capture) -> None:
    for run, replica, slack in (("a", "policy-0", "inf"), ("b", "policy-1", None)):
        sent = request("s", 0, attempts=[{"replica": replica, "outcome": "answered"}])
        told = {"profile": "strict"} if slack is None else {"profile": "balanced", "pools[policy].routing.slack": slack}
        write(tmp_path / run, sent, **told)
    _, found = diff(capsys, tmp_path)
    assert "the candidates were not the same" in found["first"]["detail"]


async def test_other_weight_version(tmp_path: Path, capsys: Capture) -> None:
    for run, version in (("a", "step-1"), ("b", "step-2")):
        async with recorded(tmp_path, run, engine="sglang", replicas=1, sim={"weight_version": version}) as (gate, _):
            await ask(gate, "s", "hi")
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-engine": 1}
    assert "weights step-1 in A, step-2 in B" in found["first"]["detail"]


@pytest.mark.parametrize("version", ["default", "step-1"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_does_not_tell_of_its_weights_is_no_difference(
    tmp_path: Path, capsys: Capture, version: str, n: int
) -> None:
    for run, stream in (("a", False), ("b", True)):
        async with recorded(tmp_path, run, engine="sglang", replicas=1, sim={"weight_version": version}) as (gate, _):
            await ask(gate, "s", "hi", stream=stream, n=n)
    status, found = diff(capsys, tmp_path)
    assert (status, found["equal"], found["compared"]) == (0, True, 1)


def test_the_name_of_weights_that_nobody_named_is_none(tmp_path: Path, capsys: Capture) -> None:
    for run, version in (("a", "default"), ("b", "step-1")):
        write(tmp_path / run, request("s", 0, weight_version=version))
    assert diff(capsys, tmp_path)[0] == 0


async def test_other_engine_fingerprint(tmp_path: Path, capsys: Capture) -> None:
    for run, cache in (("a", True), ("b", False)):
        async with recorded(tmp_path, run, replicas=1, sim={"prefix_cache": cache}) as (gate, _):
            await ask(gate, "s", "hi")
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-engine": 1}
    assert found["first"]["detail"].startswith("policy-0: engine fingerprint vllm-")


async def test_other_retry_history(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, servers):
            if run == "b":
                home = routing.best("s:0", ["policy-0", "policy-1"])
                server = servers[int(home[-1])]
                server.engine.faults.add(route="/v1/chat/completions", times=1, reset_before_head=True)
            await ask(gate, "s", "hi")
            await ask(gate, "s", "more")
    status, found = diff(capsys, tmp_path)
    assert (status, found["causes"]) == (1, {"other-retries": 1})
    other = "policy-1" if home == "policy-0" else "policy-0"
    assert found["first"]["index"] == 0
    assert found["first"]["detail"] == f"{home} (answered) in A, {home} (broken) → {other} (answered) in B"
    assert found["first_answer"] is None


async def test_other_answer_from_equal_inputs(tmp_path: Path, capsys: Capture) -> None:
    """The engine's answers hang on what shares the batch: alone in A, among many in B."""
    sim = {"batch_dependent": True, "prefix_cache": False, "token_seconds": 0.01}
    for run in "ab":
        async with recorded(tmp_path, run, replicas=1, sim=sim) as (gate, _):
            asking = [ask(gate, f"s{number}", "Tell me all.", temperature=1.0) for number in range(16)]
            if run == "a":
                for each in asking:
                    await each
            else:
                await asyncio.gather(*asking)
    status, found = diff(capsys, tmp_path)
    assert status == 1
    assert set(found["causes"]) == {"other-answer"}
    detail = found["first"]["detail"]
    assert detail.startswith("equal inputs, another answer: replica policy-0; 1 of this run in flight in A, ")
    assert 'choices[0].message.content: "' in detail
    assert found["first"]["b"]["in_flight"] > 1


async def test_three_causes_at_once(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            await converse(gate, "1:0", TALK)
            await converse(gate, "1:1", TALK if run == "a" else ["What is there?", *TALK[1:]])
            await converse(gate, "1:2", TALK, seed=5 if run == "a" else 6)
            await converse(gate, "1:3", TALK[: 3 if run == "a" else 2])
    _, found = diff(capsys, tmp_path)
    assert found["causes"] == {"other-prompt": 1, "other-seed": 1, "missing-request": 1}
    assert found["downstream"] == {"other-prompt": 4}
    assert (found["first"]["identity"], found["first"]["index"]) == ("1:1", 0)
    assert found["sessions"] == {"compared": 4, "in_both": 4, "different": 3}


async def test_ids_that_engines_invent_are_no_difference(tmp_path: Path, capsys: Capture) -> None:
    """A tool loop sends back ids that are new in every run; without bodies too."""
    for run in "ab":
        async with recorded(tmp_path, run, ledger={"bodies": False}) as (gate, _):
            call = {"id": f"call-{run}1234", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
            ]
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "user": f"of run {run}"}
            assert (await gate.http.post("/sessions/s/v1/chat/completions", json=body)).status_code == 200
    status, found = diff(capsys, tmp_path)
    assert (status, found["equal"], found["compared"]) == (0, True, 1)


async def test_a_ledger_of_many_segments_is_one_run(tmp_path: Path, capsys: Capture) -> None:
    for run, size in (("a", 4096), ("b", 1 << 20)):
        async with recorded(tmp_path, run, ledger={"segment_bytes": size}) as (gate, _):
            await converse(gate, "3:0", TALK)
            await asyncio.gather(*[ask(gate, f"s:{number}", "hi") for number in range(8)])
            await converse(gate, "3:1", TALK if run == "a" else ["What is there?", *TALK[1:]])
    assert len(list((tmp_path / "a").glob("*.jsonl"))) > 3
    _, found = diff(capsys, tmp_path)
    assert (found["compared"], found["causes"], found["downstream"]) == (14, {"other-prompt": 1}, {"other-prompt": 2})
    assert found["first"]["detail"].startswith('messages[0].content: "What is there to see?" in A')
    assert main(["replay", "plans", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undetermined"] == {}


async def test_runs_without_a_session_in_common_cannot_be_compared(tmp_path: Path, capsys: Capture) -> None:
    for run in "ab":
        async with recorded(tmp_path, run) as (gate, _):
            await ask(gate, f"session-{run}", "hi")
    status, found = diff(capsys, tmp_path)
    assert (status, found["comparable"], found["equal"]) == (2, False, False)
