"""Rules for vLLM: what its batch-invariant mode covers, as documented at 0.32, and what was reported against it.

It honours seeds in any mode. What the mode adds is that a request's logits do not hang on the rest of its batch; a lane
of one request a replica gives that too.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.findings import Case, Finding, doubted
from gateway.findings.versions import before

_DOCS = "https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"

FIRST = "0.11.1"
"""The first release with the mode."""

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def findings(case: Case) -> Iterator[Finding]:
    if not case.generates:
        return
    yield from _mode(case)
    if not case.alone and (case.facts.deterministic or case.pool.deterministic == "declared"):
        yield from _beyond_the_mode(case)
    yield from _sampling(case)


def _mode(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.deterministic:
        return
    if before(facts.version, FIRST) and not case.alone:
        yield Finding(
            "too-old",
            "fatal",
            f"is vLLM {facts.version}, which has no batch-invariant mode",
            "its answers hang on the rest of the batch",
            mend=f"vLLM {FIRST} or newer with VLLM_BATCH_INVARIANT=1, or lane: {{scope: replica, limit: 1}}",
            report=_DOCS,
            reason="engine-not-deterministic",
        )
    elif facts.deterministic is False and not case.alone:
        yield Finding(
            "not-deterministic",
            "fatal",
            "says that it is not in deterministic mode",
            "its answers hang on the rest of the batch",
            mend="VLLM_BATCH_INVARIANT=1, or lane: {scope: replica, limit: 1} with --no-enable-prefix-caching",
            report=_DOCS,
            reason="engine-not-deterministic",
        )
    if case.alone and case.warms:
        told = facts.deterministic is False
        yield Finding(
            "prefix-cache",
            "fatal" if told else "note",
            "has a prefix cache and no batch-invariant kernels" if told else "has a prefix cache",
            "a prompt that is partly cached is computed in other pieces than a new one",
            mend="--no-enable-prefix-caching",
            report=_ISSUES + "42019",
            reason="prefix-cache" if told else None,
        )
    if facts.deterministic is None and case.pool.deterministic != "declared" and case.told.verified is None:
        yield Finding(
            "unverified",
            "warning",
            "does not tell whether it is batch-invariant",
            "equal requests with equal seeds may have different answers",
            sure="unknown",
            mend="detgate verify; or deterministic: declared; or VLLM_SERVER_DEV_MODE=1, which tells the setting and"
            " opens routes that nobody but this gateway may reach",
            report=_DOCS,
            reason="unverified",
        )


def _beyond_the_mode(case: Case) -> Iterator[Finding]:
    """What was seen to break the mode although it was on."""
    facts = case.facts

    parallel = facts.tensor_parallel or 1
    if facts.overlapped:
        yield doubted(
            "async-scheduling",
            "puts batches together before the last step has ended",
            "how many requests a step holds hangs on timing, and some kernels on that",
            "--no-async-scheduling",
            _PULLS + "51287",
        )
    if parallel > 1 and before(facts.version, "0.32"):
        yield doubted(
            "tensor-parallel",
            f"is vLLM {facts.version} with {parallel} tensor-parallel ranks",
            "its fused all-reduce adds in an order that hangs on the batch",
            """vLLM 0.32 or newer, or --compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""",
            _ISSUES + "51290",
        )
    if facts.sequence_parallel:
        yield doubted(
            "sequence-parallel",
            "runs with sequence parallelism",
            "its reduce-scatter adds in an order that hangs on the batch",
            """vLLM 0.32, which has none; or --compilation-config '{"pass_config": {"enable_sp": false}}'""",
            _ISSUES + "56370",
        )
    if any(name in (facts.accelerator or "") for name in _HOPPER):
        yield doubted(
            "flash-attention-3",
            "runs on Hopper, where FlashAttention 3 is the default",
            "a prefill that shares the step may change a decode",
            "--attention-config.flash_attn_version=2",
            _ISSUES + "51902",
        )
    if (facts.data_parallel or 1) > 1 and (facts.expert_parallel or 1) > 1:
        yield doubted(
            "expert-parallel",
            f"spreads experts over {facts.data_parallel} data-parallel ranks",
            "answers were seen to hang on the batch above two ranks",
            "tensor parallelism in place of data and expert parallelism",
            _ISSUES + "30321",
        )
    if facts.max_running is not None and facts.max_running >= 256:
        yield Finding(
            "many-sequences",
            "note",
            f"takes up to {facts.max_running} requests into one batch",
            "a norm was seen to change its order of addition at 256 in a step, and logprobs at about 44",
            mend="--max-num-seqs 255, and VLLM_USE_FLASHINFER_SAMPLER=0 where logprobs matter",
            report=_ISSUES + "48271",
        )
    if facts.quantization not in (None, "none"):
        yield Finding(
            "quantised",
            "note",
            f"serves weights quantised as {facts.quantization}",
            "other kernels run than those that the mode was tested with",
            sure="unknown",
            mend="detgate verify",
            report=_DOCS,
        )


def _sampling(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.speculative not in (None, "none"):
        yield Finding(
            "speculative",
            "warning",
            f"drafts tokens by {facts.speculative}",
            "which tokens are drafted together may change the last bits of their logits",
            mend="no --speculative-config",
            report=_DOCS,
            reason="engine-doubted",
        )
    if facts.sampling_defaults == "model" or facts.defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in facts.defaults)
        yield Finding(
            "sampling-defaults",
            "note",
            f"takes sampling parameters that a request leaves out from the model{f': {shown}' if shown else ''}",
            "another revision of the model may sample otherwise",
            mend="--generation-config vllm, or every parameter in each request",
            report=_PULLS + "11164",
        )
    if facts.priority_scheduling:
        yield Finding(
            "priority-scheduling",
            "note",
            "orders requests by priority",
            "equal priorities and n above 1 were reported to stop it",
            mend="--scheduling-policy fcfs: the gateway's lanes order by priority",
        )
