"""Rules for a server of which nothing is known."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.findings import Case, Finding


def findings(case: Case) -> Iterator[Finding]:
    trusted = not case.generates or case.pool.deterministic == "declared" or case.told.verified is not None
    yield Finding(
        "unverified",
        "fatal",
        "is of an engine of which only the field for the seed is known",
        "equal requests with equal seeds may have different answers",
        sure="unknown",
        mend="engine: vllm or sglang, if it is one; else profile: balanced, after detgate verify",
        reason=None if trusted else "unverified",
    )
