"""What tells one engine from another: a digest of all that it says and that may decide an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from gateway.core.types import Facts

_UNDECIDING = frozenset({"weight_version", "priority_scheduling", "scheduling_policy"})
"""Weights are meant to change under way, and are recorded with each answer; the rest sets an order, not a result."""


def fingerprint(facts: Facts, models: Iterable[str]) -> str:
    """The same for equal engines, in any process: engine, version and 16 hex digits, as in `vllm-0.32.0-…`.

    `models`: the names it serves. What an engine does not tell cannot tell it from another.
    """
    told = {name: value for name, value in facts.known().items() if name not in _UNDECIDING}
    text = json.dumps([told, sorted(models)], sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return "-".join(part for part in (facts.engine, facts.version, digest) if part)
