"""Rules for SGLang: what its deterministic mode covers, as read at 0.5.23, and what was reported against it.

Out of that mode it ignores seeds, so no lane can stand in for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.findings import Case, Finding, doubted
from gateway.findings.versions import before

_DOCS = "https://docs.sglang.io/advanced_features/deterministic_inference.html"
_ISSUES = "https://github.com/sgl-project/sglang/issues/"
_PULLS = "https://github.com/sgl-project/sglang/pull/"

FIRST = "0.5.3"
"""The first release with the mode and with seeds."""

BACKENDS = ("ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton")
"""Attention backends that the mode covers."""


def findings(case: Case) -> Iterator[Finding]:
    if not case.generates:
        return
    yield from _mode(case)
    if case.facts.deterministic:
        yield from _beyond_the_mode(case)
    yield from _sampling(case)


def _mode(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if before(facts.version, FIRST):
        yield Finding(
            "too-old",
            "fatal",
            f"is SGLang {facts.version}, which knows no seeds",
            "each answer is drawn anew",
            mend=f"SGLang {FIRST} or newer with --enable-deterministic-inference",
            report=_DOCS,
            reason="engine-not-deterministic",
        )
    elif facts.deterministic is False:
        yield Finding(
            "not-deterministic",
            "fatal",
            "says that it is not in deterministic mode",
            "it ignores seeds and draws each answer anew",
            mend="--enable-deterministic-inference",
            report=_DOCS,
            reason="engine-not-deterministic",
        )
    elif facts.deterministic is None and case.pool.deterministic != "declared" and case.told.verified is None:
        yield Finding(
            "unverified",
            "warning",
            "does not tell whether it is in deterministic mode",
            "it may ignore seeds",
            sure="unknown",
            mend="an engine that answers /server_info; detgate verify; or deterministic: declared",
            report=_DOCS,
            reason="unverified",
        )


def _beyond_the_mode(case: Case) -> Iterator[Finding]:
    facts = case.facts

    if facts.attention_backend is not None and facts.attention_backend not in BACKENDS:
        yield doubted(
            "attention-backend",
            f"runs the attention backend {facts.attention_backend}",
            "its deterministic mode does not cover attention",
            f"--attention-backend {'|'.join(BACKENDS)}",
            _DOCS,
        )
    if facts.sampling_backend not in (None, "pytorch", "ascend"):
        yield doubted(
            "sampling-backend",
            f"runs the sampling backend {facts.sampling_backend}",
            "seeds are honoured by pytorch alone",
            "--sampling-backend pytorch",
            _DOCS,
        )
    if facts.dp_attention:
        yield doubted(
            "dp-attention",
            "runs with data-parallel attention",
            "mixture-of-experts models were seen to answer by the batch",
            "no --enable-dp-attention",
            _PULLS + "11023",
        )
    if facts.speculative not in (None, "none"):
        yield doubted(
            "speculative",
            f"drafts tokens by {facts.speculative}",
            "what is drafted may be drawn from noise that no seed fixes",
            "no --speculative-algorithm",
            _PULLS + "33395",
        )
    if case.warms and facts.attention_backend in (None, *BACKENDS):
        yield Finding(
            "prefix-cache",
            "note",
            "has a radix cache",
            "a cached prefix was seen to change greedy answers of some models out of the mode",
            sure="unknown",
            mend="detgate verify, or --disable-radix-cache",
            report=_ISSUES + "34683",
        )
    elif case.warms:
        yield doubted(
            "prefix-cache",
            "has a radix cache",
            "a prompt that is partly cached is computed in other pieces than a new one",
            "--disable-radix-cache",
            _ISSUES + "34683",
        )
    if facts.mixture_of_experts or (facts.expert_parallel or 1) > 1:
        yield Finding(
            "mixture-of-experts",
            "note",
            "serves a mixture of experts",
            "long rollouts were made repeatable elsewhere only without radix cache, overlap schedule and CUDA graphs",
            sure="unknown",
            mend="detgate verify, or --disable-radix-cache --disable-overlap-schedule --disable-cuda-graph",
        )
    if (facts.tensor_parallel or 1) > 1:
        yield Finding(
            "tensor-parallel",
            "note",
            f"runs on {facts.tensor_parallel} tensor-parallel ranks",
            "its answers are those of this number of ranks alone",
            mend="the same --tp-size in every run",
            report=_DOCS,
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
    if facts.default_min_p:
        yield Finding(
            "min-p",
            "warning",
            f"brings min_p {facts.default_min_p:g} to requests that send none",
            "/v1/messages would end it and is refused; elsewhere the gateway sends min_p 0",
            mend="no min_p in --preferred-sampling-params",
            report=_ISSUES + "33695",
        )


def _sampling(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.sampling_defaults == "model":
        danger = ", and a min_p there would end it" if facts.deterministic else ""
        yield Finding(
            "sampling-defaults",
            "note",
            "takes sampling parameters that a request leaves out from the model's generation_config.json",
            f"another revision of the model may sample otherwise{danger}",
            mend="--sampling-defaults openai, or every parameter in each request",
            report=_ISSUES + "33695" if facts.deterministic else None,
        )
