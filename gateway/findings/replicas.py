"""Rules for one replica of whatever engine."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.findings import Case, Finding


def findings(case: Case) -> Iterator[Finding]:
    yield from _other_engine(case)
    yield from _role(case)
    yield from _ranks(case)
    yield from _reward(case)
    yield from _unordered(case)
    if case.told.foreign:
        yield Finding(
            "foreign-traffic",
            "fatal",
            "has others' requests in its batches",
            "what shares a batch with a request is not known",
            sure="measured",
            mend="keep everyone but this gateway off the replica",
            reason="foreign-traffic",
        )
    if case.told.verified is False:
        yield Finding(
            "canaries-failed",
            "fatal",
            "failed canaries of detgate verify",
            "equal requests have had different answers",
            sure="measured",
            mend="what its report says; then detgate verify again",
            reason="engine-not-deterministic",
        )
    if case.told.changed:
        yield Finding(
            "fingerprint-changed",
            "warning",
            "came back as another engine than it was",
            "what it answers now need not be what it answered before",
            mend="bring back the engine that was, or POST /admin/pools/{pool}/replicas/{name}/accept",
            reason="fingerprint-changed",
        )


def _other_engine(case: Case) -> Iterator[Finding]:
    engine, configured = case.facts.engine, case.pool.engine
    if engine is None or engine == configured:
        return
    if configured == "openai":
        yield Finding(
            "engine-unused",
            "warning",
            f"says that it is {engine}, and the pool says openai",
            "nothing that only this engine tells or does is used",
            mend=f"engine: {engine}",
        )
        return
    yield Finding(
        "engine-other",
        "fatal",
        f"says that it is {engine}, and the pool says {configured}",
        "seeds, ids and aborts go into fields that it does not read",
        mend=f"engine: {engine}",
        reason="engine-other",
    )


def _role(case: Case) -> Iterator[Finding]:
    generates = case.facts.is_generation
    if generates is None or generates == case.generates:
        return
    if case.generates:
        says, breaks = "scores, and its pool generates", "each request fails, and on SGLang ends the server"
        mend = "role: reward"
    else:
        says, breaks, mend = "generates, and its pool scores", "each request to score fails", "role: generate"
    yield Finding("role-mismatch", "fatal", says, breaks, mend=mend, reason="role-mismatch")


def _ranks(case: Case) -> Iterator[Finding]:
    ranks = case.facts.data_parallel
    if ranks is None or ranks < 2 or case.told.pinned:
        return
    yield Finding(
        "dp-unpinned",
        "fatal",
        f"has {ranks} data-parallel ranks and none is named",
        "which of them answers is decided by arrival",
        mend="list each rank as a replica of its own, with dp_rank: 0, 1 …",
        reason="dp-unpinned",
    )


def _unordered(case: Case) -> Iterator[Finding]:
    if case.pool.priority == "off" or case.facts.priority_scheduling:
        return
    told = case.facts.priority_scheduling is False
    yield Finding(
        "priority-unused",
        "warning",
        "does not order requests by priority" if told else "does not tell whether it orders requests by priority",
        f"the pool's priority: {case.pool.priority} is not sent to it",
        sure="told" if told else "unknown",
        mend={
            "vllm": "--scheduling-policy priority, with VLLM_SERVER_DEV_MODE=1, in which alone it tells",
            "sglang": "--enable-priority-scheduling",
        }.get(case.pool.engine),
    )


def _reward(case: Case) -> Iterator[Finding]:
    if case.generates:
        return
    if case.warms:
        yield Finding(
            "prefix-cache",
            "fatal",
            "has a prefix cache",
            "a warm score differs from a cold one",
            mend={"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache"}.get(case.pool.engine),
            reason="reward-batched",
        )
    if not case.alone:
        yield Finding(
            "reward-batched",
            "fatal",
            "may have several requests in one batch",
            "a score hangs on what it shares the batch with",
            mend="lane: {scope: replica, limit: 1}",
            reason="reward-batched",
        )
