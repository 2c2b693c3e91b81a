"""Each rule: what makes it speak, how bad it is, and what silences it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway import engines
from gateway.core.guarantee import LOWERS
from gateway.core.types import Facts
from gateway.findings import SEVERITIES, Finding, Told, flags, judge, reasons, report
from gateway.findings.versions import before
from gateway.settings import Pool, Settings

ONE_EACH = {"scope": "replica", "limit": 1}
VLLM = Facts(engine="vllm", version="0.32.0", deterministic=True, is_generation=True, prefix_cache=True)
SGLANG = Facts(
    engine="sglang",
    version="0.5.23",
    deterministic=True,
    is_generation=True,
    prefix_cache=True,
    attention_backend="fa3",
    sampling_backend="pytorch",
)
GOOD = {"vllm": VLLM, "sglang": SGLANG}


def pool(engine: str = "vllm", replicas: int = 1, **settings: Any) -> Pool:
    listed = [{"name": f"p-{n}", "url": f"http://p-{n}:1"} for n in range(replicas)]
    made = {"name": "p", "engine": engine, "replicas": listed} | settings
    return Settings.load(None, {}, {"pools": [made]}).pools[0]


def found(engine: str, facts: Facts, told: dict[str, Any] | None = None, **settings: Any) -> list[Finding]:
    """What is found in a pool of one replica."""
    return judge(pool(engine, **settings), {"p-0": Told(facts, **(told or {}))})


def brief(findings: list[Finding]) -> set[tuple[str, str, str | None]]:
    return {(finding.id, finding.severity, finding.reason) for finding in findings}


@pytest.mark.parametrize("engine", engines.names())
@pytest.mark.parametrize("role", ["generate", "reward"])
def test_each_engine_has_rules_that_bear_knowing_nothing(engine: str, role: str) -> None:
    untold = found(engine, Facts(), role=role)
    assert all(finding.sure != "told" for finding in untold)
    if role == "generate":
        assert [finding.id for finding in untold] == ["unverified"]
        assert [finding.reason for finding in found(engine, Facts(), {"verified": True}, role=role)] in ([], [None])
        assert [finding.reason for finding in found(engine, Facts(), deterministic="declared")] in ([], [None])


@pytest.mark.parametrize("engine", GOOD)
def test_an_engine_in_its_mode_is_no_worse_than_a_note(engine: str) -> None:
    assert {finding.severity for finding in found(engine, GOOD[engine])} <= {"note"}
    assert reasons(found(engine, GOOD[engine]), ["p-0"]) == {"p-0": ()}


CASES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, str, str | None]]] = [
    ("vllm", {"deterministic": False}, {}, ("not-deterministic", "fatal", "engine-not-deterministic")),
    ("vllm", {"deterministic": None, "version": "0.11.0"}, {}, ("too-old", "fatal", "engine-not-deterministic")),
    ("vllm", {"deterministic": None}, {}, ("unverified", "warning", "unverified")),
    ("vllm", {"deterministic": False}, {"lane": ONE_EACH}, ("prefix-cache", "fatal", "prefix-cache")),
    ("vllm", {"priority_scheduling": False}, {"priority": "index"}, ("priority-unused", "warning", None)),
    ("sglang", {"priority_scheduling": None}, {"priority": "header"}, ("priority-unused", "warning", None)),
    ("vllm", {"deterministic": None}, {"lane": ONE_EACH}, ("prefix-cache", "note", None)),
    ("vllm", {"overlapped": True}, {}, ("async-scheduling", "warning", "engine-doubted")),
    (
        "vllm",
        {"tensor_parallel": 2, "version": "0.25.1"},
        {},
        ("tensor-parallel", "warning", "engine-doubted"),
    ),
    ("vllm", {"sequence_parallel": True}, {}, ("sequence-parallel", "warning", "engine-doubted")),
    ("vllm", {"accelerator": "GPU 0: NVIDIA H100 80GB"}, {}, ("flash-attention-3", "warning", "engine-doubted")),
    ("vllm", {"data_parallel": 8, "expert_parallel": 8}, {}, ("expert-parallel", "warning", "engine-doubted")),
    ("vllm", {"max_running": 256}, {}, ("many-sequences", "note", None)),
    ("vllm", {"quantization": "fp8"}, {}, ("quantised", "note", None)),
    ("vllm", {"speculative": "eagle"}, {}, ("speculative", "warning", "engine-doubted")),
    ("vllm", {"sampling_defaults": "model"}, {}, ("sampling-defaults", "note", None)),
    ("vllm", {"priority_scheduling": True}, {}, ("priority-scheduling", "note", None)),
    ("sglang", {"deterministic": False}, {}, ("not-deterministic", "fatal", "engine-not-deterministic")),
    (
        "sglang",
        {"deterministic": False},
        {"lane": ONE_EACH},
        ("not-deterministic", "fatal", "engine-not-deterministic"),
    ),
    ("sglang", {"deterministic": None, "version": "0.5.2"}, {}, ("too-old", "fatal", "engine-not-deterministic")),
    ("sglang", {"deterministic": None}, {}, ("unverified", "warning", "unverified")),
    (
        "sglang",
        {"attention_backend": "torch_native"},
        {},
        ("attention-backend", "warning", "engine-doubted"),
    ),
    ("sglang", {"attention_backend": "torch_native"}, {}, ("prefix-cache", "warning", "engine-doubted")),
    ("sglang", {}, {}, ("prefix-cache", "note", None)),
    ("sglang", {"sampling_backend": "flashinfer"}, {}, ("sampling-backend", "warning", "engine-doubted")),
    ("sglang", {"dp_attention": True}, {}, ("dp-attention", "warning", "engine-doubted")),
    ("sglang", {"speculative": "EAGLE"}, {}, ("speculative", "warning", "engine-doubted")),
    ("sglang", {"mixture_of_experts": True}, {}, ("mixture-of-experts", "note", None)),
    ("sglang", {"expert_parallel": 2}, {}, ("mixture-of-experts", "note", None)),
    ("sglang", {"tensor_parallel": 2}, {}, ("tensor-parallel", "note", None)),
    ("sglang", {"quantization": "fp8"}, {}, ("quantised", "note", None)),
    ("sglang", {"default_min_p": 0.1}, {}, ("min-p", "warning", None)),
    ("sglang", {"sampling_defaults": "model"}, {}, ("sampling-defaults", "note", None)),
    ("openai", {"engine": "vllm"}, {}, ("engine-unused", "warning", None)),
    ("openai", {"engine": None}, {}, ("unverified", "fatal", "unverified")),
]
EITHER: list[tuple[dict[str, Any], dict[str, Any], tuple[str, str, str | None]]] = [
    ({"engine": "another"}, {}, ("engine-other", "fatal", "engine-other")),
    ({"is_generation": False}, {}, ("role-mismatch", "fatal", "role-mismatch")),
    ({"is_generation": True}, {"role": "reward"}, ("role-mismatch", "fatal", "role-mismatch")),
    ({"data_parallel": 2}, {}, ("dp-unpinned", "fatal", "dp-unpinned")),
    ({"prefix_cache": True}, {"role": "reward"}, ("prefix-cache", "fatal", "reward-batched")),
    ({}, {"role": "reward", "lane": {"scope": "none"}}, ("reward-batched", "fatal", "reward-batched")),
    ({}, {"role": "reward", "lane": {"scope": "replica", "limit": 2}}, ("reward-batched", "fatal", "reward-batched")),
]


@pytest.mark.parametrize(("engine", "changes", "settings", "expected"), CASES)
def test_a_rule_speaks(
    engine: str, changes: dict[str, Any], settings: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    facts = replace(GOOD.get(engine, Facts(is_generation=True)), **changes)
    assert expected in brief(found(engine, facts, **settings))


@pytest.mark.parametrize("engine", GOOD)
@pytest.mark.parametrize(("changes", "settings", "expected"), EITHER)
def test_a_rule_for_every_engine_speaks(
    engine: str, changes: dict[str, Any], settings: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    facts = replace(GOOD[engine], **changes)
    assert expected in brief(found(engine, facts, **settings))


@pytest.mark.parametrize(
    ("engine", "changes", "told", "settings", "silent"),
    [
        ("vllm", {"deterministic": False}, {}, {"lane": ONE_EACH}, "not-deterministic"),
        ("vllm", {"deterministic": False, "prefix_cache": False}, {}, {"lane": ONE_EACH}, "prefix-cache"),
        ("vllm", {"deterministic": None, "version": "0.11.1"}, {}, {}, "too-old"),
        ("vllm", {"deterministic": None}, {"verified": True}, {}, "unverified"),
        ("vllm", {"deterministic": None}, {}, {"deterministic": "declared"}, "unverified"),
        ("vllm", {"overlapped": True}, {}, {"lane": ONE_EACH}, "async-scheduling"),
        ("vllm", {"tensor_parallel": 2}, {}, {}, "tensor-parallel"),
        ("vllm", {"tensor_parallel": 1, "version": "0.25.1"}, {}, {}, "tensor-parallel"),
        ("vllm", {"max_running": 255}, {}, {}, "many-sequences"),
        ("vllm", {"quantization": "none"}, {}, {}, "quantised"),
        ("vllm", {"speculative": "none"}, {}, {}, "speculative"),
        ("sglang", {"deterministic": None}, {"verified": True}, {}, "unverified"),
        ("sglang", {"prefix_cache": False, "attention_backend": "torch_native"}, {}, {}, "prefix-cache"),
        ("sglang", {"data_parallel": 2}, {"pinned": True}, {}, "dp-unpinned"),
        ("sglang", {"sampling_defaults": "engine"}, {}, {}, "sampling-defaults"),
        ("sglang", {"is_generation": False, "prefix_cache": False}, {}, {"role": "reward"}, "prefix-cache"),
    ],
)
def test_a_rule_is_silenced(
    engine: str, changes: dict[str, Any], told: dict[str, Any], settings: dict[str, Any], silent: str
) -> None:
    facts = replace(GOOD[engine], **changes)
    assert silent not in {finding.id for finding in found(engine, facts, told, **settings)}


def test_rules_of_an_engine_are_not_asked_of_another() -> None:
    """A finding names flags, and those of the engine that the pool should have are none of this one's."""
    facts = replace(SGLANG, deterministic=False, prefix_cache=False)
    assert [finding.id for finding in found("vllm", facts)] == ["engine-other"]


@pytest.mark.parametrize("field", ["version", "dtype", "tensor_parallel", "prefix_cache", "weight_version", "defaults"])
def test_replicas_that_differ_are_named_with_what_they_say(field: str) -> None:
    values: dict[str, tuple[Any, Any]] = {
        "tensor_parallel": (1, 2),
        "prefix_cache": (True, False),
        "defaults": ((("min_p", 0.1),), (("min_p", 0.2),)),
    }
    one, other = values.get(field, ("a1", "b2"))
    told = {
        "p-0": Told(replace(SGLANG, **{field: one})),
        "p-1": Told(replace(SGLANG, **{field: other})),
        "p-2": Told(Facts()),
    }
    differing = [finding for finding in judge(pool("sglang", 3), told) if finding.id == "replicas-differ"]
    assert len(differing) == 1
    assert "p-0" in differing[0].says
    assert "p-1" in differing[0].says
    assert "p-2" not in differing[0].says, "it does not tell"
    assert reasons(differing, ["p-0", "p-2"]) == dict.fromkeys(["p-0", "p-2"], ("replicas-differ",))


def test_equal_replicas_do_not_differ() -> None:
    told = {name: Told(SGLANG) for name in ("p-0", "p-1")}
    assert {finding.id for finding in judge(pool("sglang", 2), told)} == {"prefix-cache"}


def test_the_worst_comes_first_and_each_names_pool_and_replica() -> None:
    bad = replace(SGLANG, deterministic=False, data_parallel=2, sampling_defaults="model", dp_attention=True)
    findings = judge(pool("sglang", 2), {"p-0": Told(SGLANG), "p-1": Told(bad, changed=True)})
    ranks = [SEVERITIES.index(finding.severity) for finding in findings]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert {finding.pool for finding in findings} == {"p"}
    assert {finding.replica for finding in findings} == {"p-0", "p-1", None}
    assert findings[0].text.startswith("p-1 ")


def test_what_is_seen_from_outside_is_measured() -> None:
    (foreign,) = (finding for finding in found("vllm", VLLM, {"foreign": True}) if finding.id == "foreign-traffic")
    assert (foreign.severity, foreign.sure, foreign.reason) == ("fatal", "measured", "foreign-traffic")


@pytest.mark.parametrize("engine", engines.names())
@pytest.mark.parametrize("settings", [{}, {"deterministic": "declared"}, {"lane": ONE_EACH}, {"role": "reward"}])
def test_what_canaries_have_shown_outweighs_what_is_told(engine: str, settings: dict[str, Any]) -> None:
    facts = replace(GOOD.get(engine, Facts()), is_generation=None, prefix_cache=False)
    findings = found(engine, facts, {"verified": False}, **settings)
    (shown,) = (finding for finding in findings if finding.id == "canaries-failed")
    assert (shown.severity, shown.sure, shown.reason) == ("fatal", "measured", "engine-not-deterministic")
    assert not any(finding.reason == "unverified" for finding in findings)


def test_an_answer_carries_each_reason_once() -> None:
    bad = replace(VLLM, overlapped=True, sequence_parallel=True, speculative="eagle")
    assert reasons(found("vllm", bad), ["p-0", "p-9"]) == {"p-0": ("engine-doubted",), "p-9": ()}


def test_every_finding_says_all_that_it_must() -> None:
    every = [
        finding
        for engine, changes, settings, _ in CASES
        for finding in found(engine, replace(GOOD.get(engine, Facts(is_generation=True)), **changes), **settings)
    ]
    every += [
        finding
        for engine in GOOD
        for changes, settings, _ in EITHER
        for finding in found(engine, replace(GOOD[engine], **changes), **settings)
    ]
    for finding in every:
        assert finding.says, finding
        assert finding.breaks, finding
        assert finding.mend, finding
        assert finding.report is None or finding.report.startswith("https://"), finding
        assert finding.severity != "fatal" or finding.reason, finding
        lowered = finding.reason in LOWERS
        assert lowered or finding.reason in (None, "unverified", "engine-doubted", "replicas-differ")


def test_a_report_is_json() -> None:
    import json

    told = {"p-0": Told(replace(VLLM, defaults=(("top_k", 20.0),)), "vllm-x", verified=True)}
    findings = judge(pool("vllm"), told)
    shown = json.loads(json.dumps(report(pool("vllm"), told, findings)))
    assert shown["replicas"]["p-0"]["facts"]["defaults"] == {"top_k": 20.0}
    assert shown["replicas"]["p-0"]["verified"] is True
    assert [finding["id"] for finding in shown["findings"]] == [finding.id for finding in findings]


@pytest.mark.parametrize(
    ("version", "other", "older"),
    [
        ("0.5.2", "0.5.3", True),
        ("0.5.3", "0.5.3", False),
        ("0.5.10", "0.5.3", False),
        ("0.5.3rc1", "0.5.3", False),
        ("0.5.3.post2", "0.5.3", False),
        ("0.5.2.post1", "0.5.3", True),
        ("0.32.0+cpu", "0.32", False),
        ("v0.11.0", "0.11.1", True),
        ("0.11.1.dev3+g12ab", "0.11.1", False),
        ("1", "0.11.1", False),
        ("0.32", "0.32.0", False),
        (None, "0.5.3", False),
        ("unknown", "0.5.3", False),
    ],
)
def test_versions(version: str | None, other: str, older: bool) -> None:
    assert before(version, other) is older


@pytest.mark.parametrize("engine", GOOD)
def test_a_cache_in_which_each_request_is_alone_warms_nothing(engine: str) -> None:
    doubtful = replace(GOOD[engine], deterministic=engine == "sglang", attention_backend="torch_native")
    told = {
        isolate: brief(found(engine, doubtful, lane=ONE_EACH, isolate_cache=isolate))
        for isolate in ("off", "request", "run")
    }
    warm = {finding for finding in told["off"] if finding[0] == "prefix-cache"}
    assert warm
    assert told["run"] == told["off"]
    assert told["request"] == told["off"] - warm


@pytest.mark.parametrize("engine", GOOD)
def test_an_engine_that_goes_by_priority_is_told_it(engine: str) -> None:
    going = replace(GOOD[engine], priority_scheduling=True)
    assert "priority-unused" not in {finding.id for finding in found(engine, going, priority="index")}


# --- since when


_NAMED = re.compile(r"--[a-z][a-z-]+|\bVLLM_[A-Z_]+\b")


@pytest.mark.parametrize("engine", flags.FLAGS)
def test_of_every_flag_that_a_rule_names_it_is_known_since_when_there_is_one(engine: str) -> None:
    source = (Path(flags.__file__).parent / f"{engine}.py").read_text()
    named = set(_NAMED.findall(source))
    assert named
    assert named <= set(flags.FLAGS[engine])
    for since in flags.FLAGS[engine].values():
        assert since.lacked is None or before(since.lacked, since.version) or since.version.startswith(since.lacked)


@pytest.mark.parametrize(
    ("engine", "mend", "since"),
    [
        ("vllm", "VLLM_BATCH_INVARIANT=1, or a lane with --no-enable-prefix-caching", "0.11.1"),
        ("vllm", "--attention-config.flash_attn_version=2", "0.13.0"),
        ("vllm", """--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""", "0.12.0"),
        ("vllm", "no --speculative-config", None),
        ("vllm", "detgate verify", None),
        ("vllm", None, None),
        ("sglang", "detgate verify, or --disable-radix-cache --disable-overlap-schedule", "0.3.6"),
        ("sglang", "--sampling-defaults openai", "0.5.3.post1"),
        ("openai", "--sampling-defaults openai", None),
    ],
)
def test_what_mends_a_finding_is_there_since_the_last_of_what_it_needs(
    engine: str, mend: str | None, since: str | None
) -> None:
    assert flags.since(engine, mend) == since


def test_a_finding_says_since_when_there_is_what_mends_it() -> None:
    [mode] = [each for each in found("vllm", replace(VLLM, deterministic=False)) if each.id == "not-deterministic"]
    assert mode.since == "0.11.1"
    [caches] = [each for each in found("sglang", replace(SGLANG, attention_backend="torch_native"))
                if each.id == "prefix-cache"]  # fmt: skip
    assert caches.since == "0.1.13"
