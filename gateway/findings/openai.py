"""Rules for a server of which nothing is known."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.findings import Case, Finding


def findings(case: Case) -> Iterator[Finding]:
    if not case.generates or case.pool.deterministic == "declared" or case.told.verified:
        return
    yield Finding(
        "unverified",
        "warning",
        "does not tell whether it is deterministic",
        "equal requests with equal seeds may have different answers",
        sure="unknown",
        mend="detgate verify, or deterministic: declared",
        reason="unverified",
    )
