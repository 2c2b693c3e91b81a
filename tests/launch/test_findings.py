"""Of a replica started by its launch profile doctor warns of nothing; what is left out is found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway import findings
from gateway.core.types import Facts
from gateway.findings import Finding, Told
from gateway.launch import Profile, Wish, load
from gateway.settings import Pool


def facts(profile: Profile) -> Facts:
    """What a server tells that was started so."""
    flags = {flag.name: flag.value for flag in profile.flags}
    common = Facts(
        engine=profile.engine,
        version=load(profile.engine).VERSION,
        model="m",
        is_generation=True,
        tensor_parallel=profile.wish.tensor_parallel,
    )
    if profile.engine == "vllm":
        return replace(
            common,
            deterministic=profile.variables.get("VLLM_BATCH_INVARIANT") == "1",
            prefix_cache="--no-enable-prefix-caching" not in flags,
            overlapped="--no-async-scheduling" not in flags,
            max_running=int(flags.get("--max-num-seqs") or 1024),
            sampling_defaults="engine" if flags.get("--generation-config") == "vllm" else "model",
        )
    return replace(
        common,
        deterministic="--enable-deterministic-inference" in flags,
        prefix_cache="--disable-radix-cache" not in flags,
        attention_backend=flags.get("--attention-backend", "trtllm_mha"),
        sampling_backend=flags.get("--sampling-backend", "flashinfer"),
        sampling_defaults=flags.get("--sampling-defaults", "model"),
    )


def found(profile: Profile, lane: dict[str, Any] | None = None) -> list[Finding]:
    """What doctor finds of such a replica alone in its pool."""
    replicas = [{"name": "policy-0", "url": "http://127.0.0.1:1"}]
    pool = Pool.model_validate(
        {"name": "policy", "engine": profile.engine, "replicas": replicas} | ({"lane": lane} if lane else {})
    )
    return findings.judge(pool, {"policy-0": Told(facts(profile), "f")})


def without(profile: Profile, name: str) -> Profile:
    """The profile with one setting left out."""
    left = replace(
        profile,
        environment=tuple(each for each in profile.environment if each.name != name),
        flags=tuple(each for each in profile.flags if each.name != name),
    )
    assert left != profile, name
    return left


ONE = {"scope": "replica", "limit": 1}


@pytest.mark.parametrize(
    ("engine", "hardware", "lane"),
    [
        ("vllm", "ampere", None),
        ("vllm", "hopper", None),
        ("vllm", "blackwell", None),
        ("vllm", "mi300", None),
        ("vllm", "cpu", ONE),
        ("sglang", "hopper", None),
        ("sglang", "blackwell", None),
        ("sglang", "mi300", None),
    ],
)
def test_the_whole_profile_leaves_nothing_to_warn_of(engine: str, hardware: str, lane: dict[str, Any] | None) -> None:
    assert [each for each in found(load(engine).profile(Wish(hardware)), lane) if each.severity != "note"] == []


@pytest.mark.parametrize(
    ("engine", "hardware", "lane", "left_out", "severity"),
    [
        ("vllm", "hopper", None, "VLLM_BATCH_INVARIANT", "fatal"),
        ("vllm", "hopper", None, "--no-async-scheduling", "warning"),
        ("vllm", "hopper", None, "--generation-config", "note"),
        ("vllm", "hopper", None, "--max-num-seqs", "note"),
        ("vllm", "cpu", ONE, "--no-enable-prefix-caching", "fatal"),
        ("sglang", "hopper", None, "--enable-deterministic-inference", "fatal"),
        ("sglang", "hopper", None, "--attention-backend", "warning"),
        ("sglang", "hopper", None, "--sampling-backend", "warning"),
        ("sglang", "hopper", None, "--disable-radix-cache", "note"),
        ("sglang", "hopper", None, "--sampling-defaults", "note"),
    ],
)
def test_what_is_left_out_is_found_and_named(
    engine: str, hardware: str, lane: dict[str, Any] | None, left_out: str, severity: str
) -> None:
    profile = load(engine).profile(Wish(hardware))
    more = set(found(without(profile, left_out), lane)) - set(found(profile, lane))
    assert [each.severity for each in more if each.mend is not None and left_out in each.mend] == [severity]
