"""Doctor and verify before real SGLang servers, in and out of deterministic mode, radix cache on and off."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import gates, servers
from tests.engines.asking import CHAT, ask, chat
from tests.engines.commands import Told, detgate
from tests.engines.servers import SGLANG, SGLANG_REWARD, Server, Spec

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

LOOSE = replace(SGLANG, deterministic=False)
UNCACHED = replace(SGLANG, options=(*SGLANG.options, "--disable-radix-cache"))
CACHING_REWARD = Spec("sglang", "tiny-rm", ("--is-embedding",))
COVERED = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")


def pool(server: Server, **settings: Any) -> dict[str, Any]:
    return gates.pool("policy", "sglang", [server.url], **settings)


def facts(told: Told) -> dict[str, Any]:
    found: dict[str, Any] = told.json["pools"]["policy"]["replicas"]["policy-0"]["facts"]
    return found


def found(told: Told) -> dict[str, str]:
    """Severities by rule."""
    return {finding["id"]: finding["severity"] for finding in told.findings("policy")}


class TestInDeterministicMode:
    def test_doctor_with_radix_cache(self, sglang: Server, tmp_path: Path) -> None:
        told = detgate("doctor", tmp_path, pool(sglang), "--json")
        print(json.dumps(told.json, indent=1))
        assert told.status == 0
        known = facts(told)
        assert (known["engine"], known["version"], known["deterministic"]) == ("sglang", "0.5.23", True)
        assert (known["prefix_cache"], known["sampling_backend"], known["dtype"]) == (True, "pytorch", "float32")
        assert known["attention_backend"] not in COVERED
        sizes = [known[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "data", "expert")]
        assert sizes == [1, 1, 1, 1]
        # A CPU runs an attention backend that the mode does not cover.
        assert found(told) == {"attention-backend": "warning", "prefix-cache": "warning", "sampling-defaults": "note"}
        with gates.gateway(tmp_path / "gate", pool(sglang)) as gate:
            assert ask(gate, CHAT, chat()).headers["x-detgate-guarantee"] == "balanced; engine-doubted"

    def test_doctor_without_radix_cache(self, tmp_path: Path) -> None:
        with servers.running([UNCACHED], tmp_path) as [uncached]:
            told = detgate("doctor", tmp_path, pool(uncached), "--json")
        assert told.status == 0
        assert facts(told)["prefix_cache"] is False
        assert found(told) == {"attention-backend": "warning", "sampling-defaults": "note"}

    def test_verify(self, sglang: Server, tmp_path: Path) -> None:
        told = detgate("verify", tmp_path, pool(sglang), "--budget", "10m", "--json")
        print(told.text)
        canaries = told.json["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
        assert {each["endpoint"] for each in canaries} == {CHAT, "/v1/completions", "/generate"}
        alone = {each["outcome"] for each in canaries if each["canary"] in ("seed-repeats", "seeds-differ")}
        assert alone == {"passed"}


class TestOutOfDeterministicMode:
    def test_doctor_refuses_and_verify_sees_why(self, tmp_path: Path) -> None:
        with servers.running([LOOSE], tmp_path) as [loose]:
            told = detgate("doctor", tmp_path, pool(loose), "--json")
            assert (told.status, told.json["strict"], found(told)["not-deterministic"]) == (1, False, "fatal")
            assert facts(told)["deterministic"] is False
            lane = detgate("doctor", tmp_path, pool(loose, lane={"scope": "replica", "limit": 1}), "--json")
            assert lane.status == 1, "no lane stands in for seeds"
            verified = detgate("verify", tmp_path, pool(loose), "--budget", "10m", "--json")
            print(verified.text)
        assert verified.status == 1
        canaries = verified.json["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
        assert {each["outcome"] for each in canaries if each["canary"] == "seed-repeats"} == {"failed"}


class TestReward:
    def reward(self, server: Server) -> dict[str, Any]:
        return pool(server, role="reward")

    def test_radix_cache_off(self, sglang_reward: Server, tmp_path: Path) -> None:
        assert sglang_reward.spec == SGLANG_REWARD
        told = detgate("doctor", tmp_path, self.reward(sglang_reward), "--json")
        assert (told.status, found(told)) == (0, {})
        assert facts(told)["is_generation"] is False
        verified = detgate("verify", tmp_path, self.reward(sglang_reward), "--budget", "10m", "--json")
        print(verified.text)
        assert verified.status == 0
        generating = detgate("verify", tmp_path, pool(sglang_reward), "--json")
        assert generating.status == 1
        assert "not asked" in generating.out
        # It lives.
        assert detgate("doctor", tmp_path, self.reward(sglang_reward)).status == 0

    def test_radix_cache_on(self, tmp_path: Path) -> None:
        with servers.running([CACHING_REWARD], tmp_path) as [caching]:
            told = detgate("doctor", tmp_path, self.reward(caching), "--json")
            assert (told.status, found(told)) == (1, {"prefix-cache": "fatal"})
            [fatal] = told.findings("policy")
            assert fatal["mend"] == "--disable-radix-cache"
            verified = detgate("verify", tmp_path, self.reward(caching), "--budget", "10m", "--json")
            print(verified.text)
        canaries = verified.json["pools"]["policy"]["replicas"]["policy-0"]["canaries"]
        outcomes = {(each["endpoint"], each["canary"]): each["outcome"] for each in canaries}
        print(outcomes)
        assert outcomes["/classify", "cold-warm"] == "failed"
