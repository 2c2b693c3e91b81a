"""Doctor and verify before real vLLM servers, as the commands that people type."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import gates, servers
from tests.engines.asking import CHAT, ask, chat
from tests.engines.commands import Told, detgate
from tests.engines.servers import Server, Spec

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

ONE_EACH = {"scope": "replica", "limit": 1}
MID = Spec("vllm", "mid-llm", ("--no-enable-prefix-caching",), {"DTYPE": "bfloat16", "VLLM_SERVER_DEV_MODE": "1"})


@pytest.fixture(scope="module")
def mid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A replica whose answers depend on what else is in its batch, and that tells its settings."""
    with servers.running([MID], tmp_path_factory.mktemp("vllm-mid")) as [started]:
        yield started


def pool(*started: Server, **settings: Any) -> dict[str, Any]:
    return gates.pool("policy", "vllm", [server.url for server in started], **settings)


def canaries(told: Told, replica: str = "policy-0") -> dict[str, dict[str, str]]:
    """Outcomes by route and canary."""
    found: dict[str, dict[str, str]] = {}
    for canary in told.json["pools"]["policy"]["replicas"][replica]["canaries"]:
        found.setdefault(canary["endpoint"], {})[canary["canary"]] = canary["outcome"]
    return found


class TestVerify:
    def test_a_tiny_model_in_float32_passes_and_is_verified_from_then_on(
        self, vllm_pair: list[Server], tmp_path: Path
    ) -> None:
        with gates.gateway(tmp_path, pool(*vllm_pair)) as gate:
            assert ask(gate, CHAT, chat()).headers["x-detgate-guarantee"] == "balanced; unverified"
            told = detgate("verify", tmp_path, pool(*vllm_pair), "--budget", "10m", "--json")
            print(told.text)
            assert told.status == 0
            assert told.json["passed"] is True
            assert {outcome for each in canaries(told).values() for outcome in each.values()} == {"passed"}
            assert canaries(told).keys() == {CHAT, "/v1/completions", "/v1/responses"}
            assert {each["outcome"] for each in told.json["pools"]["policy"]["across"]} == {"passed"}
            gates.wait(lambda: ask(gate, CHAT, chat()).headers["x-detgate-guarantee"] == "balanced")

    def test_a_model_in_bfloat16_fails_in_company(self, mid: Server, tmp_path: Path) -> None:
        told = detgate("verify", tmp_path, pool(mid), "--budget", "10m", "--json")
        print(told.text)
        assert told.status == 1
        outcomes = canaries(told)[CHAT]
        assert (outcomes["seed-repeats"], outcomes["seeds-differ"], outcomes["crowded"]) == (
            "passed",
            "passed",
            "failed",
        )
        [crowded] = [
            canary
            for canary in told.json["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
            if (canary["endpoint"], canary["canary"]) == (CHAT, "crowded")
        ]
        assert crowded["distinct"] > 1
        assert crowded["first"] is not None

    def test_behind_a_lane_of_one_without_prefix_cache_it_passes(self, mid: Server, tmp_path: Path) -> None:
        told = detgate("verify", tmp_path, pool(mid, lane=ONE_EACH), "--budget", "10m", "--json")
        print(told.text)
        assert (told.status, told.json["passed"]) == (0, True)
        alone = detgate("verify", tmp_path, pool(mid, lane=ONE_EACH), "--no-lane", "--budget", "10m", "--json")
        assert (alone.status, canaries(alone)[CHAT]["crowded"]) == (1, "failed")

    def test_a_reward_model_passes_one_at_a_time(self, vllm_reward: Server, tmp_path: Path) -> None:
        reward = gates.pool("policy", "vllm", [vllm_reward.url], role="reward")
        told = detgate("verify", tmp_path, reward, "--budget", "10m", "--json")
        print(told.text)
        assert told.status == 0
        assert set(canaries(told)["/classify"].values()) == {"passed"}


class TestDoctor:
    @pytest.mark.smoke
    def test_what_is_not_told_is_said(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        told = detgate("doctor", tmp_path, pool(*vllm_pair), "--json")
        assert told.status == 0
        facts = told.json["pools"]["policy"]["replicas"]["policy-0"]["facts"]
        assert (facts["engine"], facts["version"], facts["prefix_cache"]) == ("vllm", "0.32.0", True)
        assert facts["model"].endswith("tiny-llm")
        assert "deterministic" not in facts
        found = {(finding["id"], finding["severity"], finding["sure"]) for finding in told.findings("policy")}
        assert found == {("unverified", "warning", "unknown")}
        prints = {each["fingerprint"] for each in told.json["pools"]["policy"]["replicas"].values()}
        assert len(prints) == 1

    def test_what_its_development_mode_tells(self, mid: Server, tmp_path: Path) -> None:
        told = detgate("doctor", tmp_path, pool(mid), "--json")
        facts = told.json["pools"]["policy"]["replicas"]["policy-0"]["facts"]
        print(json.dumps(facts, indent=1))
        assert {name: facts[name] for name in ("deterministic", "dtype", "prefix_cache", "is_generation")} == {
            "deterministic": False,
            "dtype": "bfloat16",
            "prefix_cache": False,
            "is_generation": True,
        }
        sizes = {name: facts[name] for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "max_running")}
        assert sizes == {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1, "max_running": 64}
        assert facts["quantization"] == "none"
        assert told.status == 1
        [fatal] = [finding for finding in told.findings("policy") if finding["severity"] == "fatal"]
        assert (fatal["id"], fatal["sure"]) == ("not-deterministic", "told")
        assert fatal["mend"].startswith("VLLM_BATCH_INVARIANT=1")
        with gates.gateway(tmp_path / "strict", pool(mid), profile="strict") as gate:
            assert ask(gate, CHAT, chat(model="mid-llm")).status_code == 503

    def test_a_lane_of_one_makes_good_for_the_mode(self, mid: Server, tmp_path: Path) -> None:
        told = detgate("doctor", tmp_path, pool(mid, lane=ONE_EACH), "--json")
        assert told.status == 0
        assert [finding for finding in told.findings("policy") if finding["severity"] == "fatal"] == []

    def test_an_engine_that_is_configured_as_another(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        wrong = gates.pool("policy", "sglang", [vllm_pair[0].url])
        told = detgate("doctor", tmp_path, wrong, "--json")
        # It does not answer SGLang's probe either.
        assert told.status == 1
        assert "engine-other" in {finding["id"] for finding in told.findings("policy")}
