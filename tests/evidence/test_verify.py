"""Verify before simulated engines that repeat, and before some that do not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gateway.cli import main
from gateway.evidence import canaries, verify
from gateway.evidence.canaries import First
from gateway.evidence.endpoints import Answer, sglang, vllm
from gateway.settings import Settings
from gateway.sim import SimServer, SimSettings
from tests.harness import MODEL, FakeWorker, Gate, Reply, Seen, chat, completion, gateway, pool

ONE_EACH = {"scope": "replica", "limit": 1}
QUICK: dict[str, Any] = {"token_seconds": 0.0}


def simulated(engine: str, **settings: Any) -> SimServer:
    return SimServer(SimSettings(**{"engine": engine, "model": MODEL, **QUICK, **settings}))


def loaded(folder: Path, *pools: dict[str, Any]) -> Settings:
    return Settings.load(None, {}, {"pools": list(pools), "ledger": {"path": str(folder)}})


@pytest.fixture
def one_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat, or classify: the canaries are the same on each route."""
    for engine in (vllm, sglang):
        monkeypatch.setattr(engine, "SAMPLING", engine.SAMPLING[:1])
        monkeypatch.setattr(engine, "SCORING", engine.SCORING[:1])


async def verified(folder: Path, *pools: dict[str, Any], lanes: bool = True, budget: float = 600.0) -> dict[str, Any]:
    """The report."""
    return verify.report(await verify.examine(loaded(folder, *pools), budget, lanes, lambda: None))


def outcomes(report: dict[str, Any], route: str, pool: str = "policy") -> dict[str, str]:
    """By canary."""
    canaries = report["pools"][pool]["replicas"][f"{pool}-0"]["canaries"]
    return {each["canary"]: each["outcome"] for each in canaries if each["endpoint"] == route}


PASSED = dict.fromkeys(("seed-repeats", "seeds-differ", "crowded", "prefill-mixed", "cold-warm"), "passed")
SCORED = dict.fromkeys(("score-repeats", "crowded", "batched", "cold-warm"), "passed")
ROUTES = {
    "vllm": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "sglang": ("/v1/chat/completions", "/v1/completions", "/generate"),
}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("engine", ROUTES)
async def test_an_engine_that_repeats_passes_on_each_route(engine: str, tmp_path: Path) -> None:
    async with simulated(engine) as one, simulated(engine) as other:
        report = await verified(tmp_path, pool("policy", one.url, other.url, engine=engine))
    assert report["passed"] is True
    for route in ROUTES[engine]:
        assert outcomes(report, route) == PASSED
    across = report["pools"]["policy"]["across"]
    assert [(each["endpoint"], each["outcome"], each["of"]) for each in across] == [
        (route, "passed", 2) for route in ROUTES[engine]
    ]


@pytest.mark.usefixtures("one_route")
async def test_company_really_shares_the_batch_unless_the_lane_keeps_it_out(tmp_path: Path) -> None:
    async with simulated("vllm") as engine:
        await verified(tmp_path, pool("policy", engine.url, lane=ONE_EACH))
        assert engine.engine.counters.peak_running == 1
        await verified(tmp_path, pool("policy", engine.url, lane=ONE_EACH), lanes=False)
        assert engine.engine.counters.peak_running >= canaries.CROWDS[-1]


@pytest.mark.usefixtures("one_route")
async def test_an_engine_that_hangs_on_its_batch_fails_in_company_and_passes_behind_a_lane(tmp_path: Path) -> None:
    async with simulated("vllm", batch_dependent=True, prefix_cache=False) as engine:
        open_ = await verified(tmp_path, pool("policy", engine.url))
        kept = await verified(tmp_path, pool("policy", engine.url, lane=ONE_EACH))
        bare = await verified(tmp_path, pool("policy", engine.url, lane=ONE_EACH), lanes=False)
    failed = PASSED | {"crowded": "failed", "prefill-mixed": "failed"}
    assert outcomes(open_, CHAT) == outcomes(bare, CHAT) == failed
    assert (open_["passed"], kept["passed"], bare["passed"]) == (False, True, False)
    assert any("--no-lane" in line for line in kept["cannot_tell"])
    assert not any("--no-lane" in line for line in bare["cannot_tell"])


@pytest.mark.usefixtures("one_route")
async def test_pools_that_share_a_server_are_not_each_others_company(tmp_path: Path) -> None:
    async with simulated("vllm", batch_dependent=True, prefix_cache=False) as engine:
        pools = [pool(name, engine.url, lane=ONE_EACH) for name in ("policy", "other")]
        report = await verified(tmp_path, *pools)
        assert engine.engine.counters.peak_running == 1
    assert report["passed"]


@pytest.mark.usefixtures("one_route")
async def test_a_prefix_cache_that_changes_answers_is_found_behind_a_lane_too(tmp_path: Path) -> None:
    async with simulated("vllm", batch_dependent=True, prefix_cache=True) as engine:
        first, again = [await verified(tmp_path, pool("policy", engine.url, lane=ONE_EACH)) for _ in range(2)]
    assert outcomes(first, CHAT) == PASSED | {"cold-warm": "failed"}
    assert outcomes(again, CHAT) == PASSED | {"cold-warm": "failed"}, "what was sent before is warm by now"


@pytest.mark.usefixtures("one_route")
async def test_what_differs_is_counted_and_shown(tmp_path: Path) -> None:
    async with simulated("vllm", batch_dependent=True, prefix_cache=False) as engine:
        report = await verified(tmp_path, pool("policy", engine.url))
    (crowded,) = (
        each
        for each in report["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
        if (each["endpoint"], each["canary"]) == (CHAT, "crowded")
    )
    assert 1 < crowded["distinct"] <= crowded["of"] == 1 + len(canaries.CROWDS)
    assert 0 < crowded["differing"] <= crowded["prompts"] == len(canaries.PROMPTS)
    first = crowded["first"]
    assert first["expected"] != first["got"] or first["values"][0] != first["values"][1]
    assert 0 <= first["at"] < canaries.TOKENS


async def test_seeds_that_are_ignored_fail_alone_and_nothing_is_blamed_on_company(tmp_path: Path) -> None:
    async with simulated("sglang", deterministic=False) as engine:
        report = await verified(tmp_path, pool("policy", engine.url, engine="sglang"))
    for route in ROUTES["sglang"]:
        told = outcomes(report, route)
        assert (told["seed-repeats"], told["crowded"], told["cold-warm"]) == ("failed", "skipped", "skipped")
    assert any("whether seeds are ignored" in line for line in report["cannot_tell"])


async def test_clones_are_found(tmp_path: Path) -> None:
    """A server that answers every seed alike repeats perfectly."""

    async def same(seen: Seen, reply: Reply) -> None:
        reply.json(completion("always this") if seen.target == CHAT else {"choices": [{"text": "always this"}]})

    async with FakeWorker(same) as worker:
        report = await verified(tmp_path, pool("policy", worker.url, engine="openai"))
    assert outcomes(report, CHAT) == PASSED | {"seeds-differ": "failed"}
    assert not report["passed"]


@pytest.mark.usefixtures("one_route")
@pytest.mark.parametrize(("engine", "route"), [("vllm", "/classify"), ("sglang", "/classify")])
async def test_scores_are_compared_to_the_last_bit(engine: str, route: str, tmp_path: Path) -> None:
    role = {"role": "reward", "engine": engine}
    async with simulated(engine, role="reward", batch_dependent=True, prefix_cache=False) as scorer:
        kept = await verified(tmp_path, pool("policy", scorer.url, **role))
        bare = await verified(tmp_path, pool("policy", scorer.url, **role), lanes=False)
    assert outcomes(kept, route) == SCORED
    assert kept["passed"]
    assert outcomes(bare, route) == SCORED | {"crowded": "failed", "batched": "failed"}


@pytest.mark.usefixtures("one_route")
async def test_a_warm_score_that_differs_is_found(tmp_path: Path) -> None:
    async with simulated("vllm", role="reward", batch_dependent=True) as scorer:
        report = await verified(tmp_path, pool("policy", scorer.url, role="reward"))
    assert outcomes(report, "/classify")["cold-warm"] == "failed"


async def test_replicas_that_answer_differently_are_found(tmp_path: Path) -> None:
    """Each repeats, and yet they are not alike."""

    def answering(text: str) -> Any:
        async def script(seen: Seen, reply: Reply) -> None:
            said = f"{text} {seen.json['seed']}"
            reply.json(completion(said) if seen.target == CHAT else {"choices": [{"text": said}]})

        return script

    async with FakeWorker(answering("one")) as one, FakeWorker(answering("other")) as other:
        report = await verified(tmp_path, pool("policy", one.url, other.url, engine="openai"))
    assert all(replica["passed"] for replica in report["pools"]["policy"]["replicas"].values())
    across = report["pools"]["policy"]["across"]
    assert [(each["outcome"], each["distinct"], each["of"]) for each in across] == [("failed", 2, 2)] * 2
    assert not report["passed"]


@pytest.mark.usefixtures("one_route")
@pytest.mark.parametrize(
    ("simulated_role", "settings"),
    [("reward", {}), ("generate", {"engine": "vllm"})],
    ids=["it would end the server", "another engine"],
)
async def test_who_is_not_what_the_pool_says_is_never_asked(
    simulated_role: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    async with simulated("sglang", role=simulated_role) as engine:
        report = await verified(tmp_path, pool("policy", engine.url, **({"engine": "sglang"} | settings)))
        assert engine.engine.counters.requests == 0
        assert not engine.engine.dead
    (asked,) = report["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
    assert (asked["outcome"], report["passed"]) == ("broken", False)


async def test_a_min_p_that_the_model_brings_does_not_end_the_server(tmp_path: Path) -> None:
    async with simulated("sglang", preferred_sampling_params={"min_p": 0.1}) as engine:
        report = await verified(tmp_path, pool("policy", engine.url, engine="sglang"))
        assert not engine.engine.dead
    assert report["passed"]


async def test_a_route_that_is_not_served_fails_nobody(tmp_path: Path) -> None:
    async with simulated("vllm") as engine:
        engine.engine.faults.add(route="/v1/responses", status=404)
        report = await verified(tmp_path, pool("policy", engine.url))
        assert set(outcomes(report, "/v1/responses").values()) == {"skipped"}
        assert report["passed"]
        for route in ROUTES["vllm"]:
            engine.engine.faults.add(route=route, status=404)
        assert not (await verified(tmp_path, pool("policy", engine.url)))["passed"], "nothing was tried"


@pytest.mark.usefixtures("one_route")
@pytest.mark.parametrize("fault", [{"reset_before_head": True}, {"status": 500}, {"status": 401}])
async def test_an_answer_that_breaks_is_told_and_passes_nowhere(fault: dict[str, Any], tmp_path: Path) -> None:
    async with simulated("vllm") as engine:
        engine.engine.faults.add(route=CHAT, **fault)
        report = await verified(tmp_path, pool("policy", engine.url))
    assert outcomes(report, CHAT)["seed-repeats"] == "broken"
    assert not report["passed"]


@pytest.mark.usefixtures("one_route")
async def test_what_the_budget_does_not_reach_is_skipped_and_not_passed(tmp_path: Path) -> None:
    async with simulated("vllm") as engine:
        report = await verified(tmp_path, pool("policy", engine.url), budget=0.0)
        assert engine.engine.counters.requests == 0
    assert set(outcomes(report, CHAT).values()) == {"skipped"}
    assert not report["passed"]
    assert "Nothing of what was skipped for the budget." in report["cannot_tell"]


@pytest.mark.usefixtures("one_route")
async def test_a_pass_lifts_unverified_from_a_running_gateway_and_a_failure_is_held_against_the_engine(
    tmp_path: Path,
) -> None:
    async def guarantee(gate: Gate) -> str:
        answer = await gate.http.post(CHAT, json=chat("hi", max_tokens=2))
        return str(answer.headers["x-detgate-guarantee"])

    async def verdict(gate: Gate, *settings: dict[str, Any]) -> int:
        file = tmp_path / "gateway.yaml"
        file.write_text(json.dumps({"pools": list(settings), "ledger": {"path": str(tmp_path)}}))
        return await asyncio.to_thread(main, ["verify", "--config", str(file), "--budget", "10m"])

    kept: dict[str, Any] = {"ledger": {"path": tmp_path}, "health": {"interval": 0.02}}
    async with simulated("vllm", batch_dependent=True, prefix_cache=False) as engine:
        apart, crowd = pool("policy", engine.url, lane=ONE_EACH), pool("policy", engine.url)
        async with gateway(apart, **kept) as gate:
            replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
            assert await guarantee(gate) == "balanced; unverified"
            assert await verdict(gate, apart) == 0
            await gate.until(lambda: replica.verified is True)
            assert await guarantee(gate) == "balanced"
            determinism = (await gate.http.get("/determinism")).json()
            assert determinism["pools"]["policy"]["replicas"]["policy-0"]["verified"] is True
        async with gateway(crowd, **kept) as gate:
            replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
            assert await guarantee(gate) == "balanced; unverified", "it passed one at a time"
            assert await verdict(gate, crowd) == 1
            await gate.until(lambda: replica.verified is False)
            assert await guarantee(gate) == "none; engine-not-deterministic"


@pytest.mark.usefixtures("one_route")
async def test_the_command_hands_its_report_to_a_gateway_with_a_ledger_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with simulated("vllm") as engine:
        listed = pool("policy", engine.url, lane=ONE_EACH)
        file = tmp_path / "gateway.yaml"
        keys = {"admin_key": "boss"}
        file.write_text(json.dumps({"pools": [listed], "ledger": {"path": str(tmp_path / "here")}, "auth": keys}))
        command = ["verify", "--config", str(file), "--budget", "10m", "--json", str(tmp_path / "report.json")]
        async with gateway(listed, auth=keys) as gate:
            replica = gate.gateway.fleet.pools["policy"].replicas["policy-0"]
            assert await asyncio.to_thread(main, [*command, "--tell", gate.url]) == 0
            assert "took the verdicts on 1 replicas" in capsys.readouterr().err
            assert replica.verified is True
    settings, report = Settings.load(file, {}, {}), json.loads((tmp_path / "report.json").read_text())
    async with FakeWorker() as worker, gateway(pool("other", worker.url), auth=keys) as gate:
        assert not await asyncio.to_thread(verify.hand, settings, gate.url, report)
        assert "did not take that on policy, policy-0: there is no such replica" in capsys.readouterr().err
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth={"admin_key": "another"}) as gate:
        assert not await asyncio.to_thread(verify.hand, settings, gate.url, report)
        assert "did not take the report: 401" in capsys.readouterr().err
    for url in ("http://127.0.0.1:9", "nowhere"):
        assert not await asyncio.to_thread(verify.hand, settings, url, report)
        assert "did not take the report" in capsys.readouterr().err


async def test_a_report_that_a_gateway_did_not_take_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    listed = pool("policy", "http://127.0.0.1:9")
    file.write_text(json.dumps({"pools": [listed], "ledger": {"path": str(tmp_path)}}))
    assert await asyncio.to_thread(main, ["verify", "--config", str(file), "--tell", "http://127.0.0.1:9"]) == 2


async def _examined(*_: object) -> verify.Verification:
    raise AssertionError("canaries were sent")


@pytest.mark.parametrize("flag", ["--json", "--junit"])
def test_a_report_that_cannot_be_written_is_told_before_canaries_are_sent(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "examine", _examined)
    file = tmp_path / "nowhere" / "report"
    assert main(["verify", "--worker-urls", "http://127.0.0.1:9", flag, str(file)]) == 2
    assert capsys.readouterr().err == f"detgate: {file}: cannot be written: no such file or directory\n"


async def test_a_report_that_can_be_written_no_more_is_shown_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, examine = tmp_path / "reports", verify.examine
    folder.mkdir()

    async def meanwhile(*given: Any) -> verify.Verification:
        folder.rmdir()
        return await examine(*given)

    monkeypatch.setattr(verify, "examine", meanwhile)
    command = ["verify", "--worker-urls", "http://127.0.0.1:9", "--ledger", str(tmp_path / "ledger")]
    assert await asyncio.to_thread(main, [*command, "--json", str(folder / "report.json")]) == 2
    told = capsys.readouterr()
    assert told.err == f"detgate: {folder / 'report.json'}: cannot be written: no such file or directory\n"
    assert told.out.rstrip().endswith("not passed")


def test_a_hash_is_no_key_to_tell_a_gateway_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "examine", _examined)
    file = tmp_path / "gateway.yaml"
    keys = {"admin_key": f"sha256:{'0' * 64}"}
    file.write_text(json.dumps({"pools": [pool("policy", "http://127.0.0.1:9")], "auth": keys}))
    assert main(["verify", "--config", str(file), "--tell", "http://127.0.0.1:9"]) == 2
    said = "auth.admin_key: a hash, and the key itself is needed: give it by DETGATE_AUTH__ADMIN_KEY"
    assert capsys.readouterr().err == f"detgate: {said}\n"


@pytest.mark.usefixtures("one_route")
async def test_the_command_reports_as_text_json_and_junit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with simulated("vllm", batch_dependent=True, prefix_cache=False) as engine:
        file = tmp_path / "gateway.yaml"
        file.write_text(json.dumps({"pools": [pool("policy", engine.url)], "ledger": {"path": str(tmp_path)}}))
        arguments = ["verify", "--config", str(file), "--json", str(tmp_path / "report.json")]
        arguments += ["--junit", str(tmp_path / "report.xml"), "--budget", "10m"]
        assert await asyncio.to_thread(main, arguments) == 1
    out = capsys.readouterr().out
    assert "passed /v1/chat/completions: seed-repeats 1 of 3, seeds-differ 4 of 4" in out
    assert "failed /v1/chat/completions crowded: " in out
    assert "Not told by this:" in out
    assert out.rstrip().endswith("not passed")
    report = json.loads((tmp_path / "report.json").read_text())
    assert outcomes(report, CHAT)["crowded"] == "failed"
    suites = ElementTree.parse(tmp_path / "report.xml").getroot()
    (suite,) = suites
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    told = report["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
    failed = sum(each["outcome"] == "failed" for each in told)
    assert counts == {"tests": len(told), "failures": failed, "errors": 0, "skipped": 0}
    assert len(suite.findall("testcase/failure")) == failed >= 1


async def test_json_alone_is_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    listed = pool("policy", "http://127.0.0.1:9")
    file.write_text(json.dumps({"pools": [listed], "ledger": {"path": str(tmp_path)}}))
    assert await asyncio.to_thread(main, ["verify", "--config", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert not (tmp_path / "verified.jsonl").exists(), "nothing was seen of it"


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60.0), ("90", 90.0), ("2m", 120.0), ("1.5h", 5400.0), ("0s", 0.0)]
)
def test_budgets(text: str, seconds: float) -> None:
    from gateway.cli import _parser

    assert _parser().parse_args(["verify", "--budget", text]).budget == seconds


@pytest.mark.parametrize("text", ["", "s", "1d", "-1s", "1 s"])
def test_a_budget_that_is_no_time(text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["verify", f"--budget={text}"])


# --- how answers are judged


def tokens(*parts: str, values: tuple[float, ...] = ()) -> Answer:
    return Answer(parts, values)


A, B = tokens("a", "b", values=(-1.0, -2.0)), tokens("a", "b", values=(-1.0, -2.0000000001))
C, D = tokens("a", "c", values=(-1.0, -3.0)), tokens("a", values=(-1.0,))


@pytest.mark.parametrize(
    ("answers", "outcome", "distinct", "of", "differing", "first"),
    [
        ([[A, A, A]], "passed", 1, 3, 0, None),
        ([[A, B]], "failed", 2, 2, 1, First(0, 1, "b", "b", (-2.0, -2.0000000001))),
        ([[A, B, C]], "failed", 3, 3, 1, First(0, 1, "b", "c", (-2.0, -3.0))),
        ([[A, A], [A, D]], "failed", 2, 2, 1, First(1, 1, "b", "the end", (-2.0, None))),
        ([[A, A, A], [A, C, C], [A, C, B]], "failed", 3, 3, 2, First(1, 1, "b", "c", (-2.0, -3.0))),
        (
            [[Answer((), (0.5,)), Answer((), (0.25,))]],
            "failed",
            2,
            2,
            1,
            First(0, -1, "score", "score", (0.5, 0.25)),
        ),
    ],
)
def test_answers_are_counted_by_prompt_and_tokens_come_before_bits(
    answers: list[list[Answer]], outcome: str, distinct: int, of: int, differing: int, first: First | None
) -> None:
    judged = canaries.judge("crowded", answers)
    assert (judged.outcome, judged.distinct, judged.of, judged.differing, judged.first) == (
        outcome,
        distinct,
        of,
        differing,
        first,
    )
