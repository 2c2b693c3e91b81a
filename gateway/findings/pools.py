"""Rules for a pool as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.findings import Finding, Told
from gateway.settings import Pool

_ALIKE = (
    ("version", "versions"),
    ("accelerator", "accelerators"),
    ("libraries", "builds of torch and what it calls"),
    ("model", "models"),
    ("revision", "revisions of the model"),
    ("weight_version", "versions of the weights"),
    ("dtype", "dtypes"),
    ("quantization", "quantisations"),
    ("kv_cache_dtype", "dtypes of the KV cache"),
    ("deterministic", "deterministic modes"),
    ("attention_backend", "attention backends"),
    ("sampling_backend", "sampling backends"),
    ("tensor_parallel", "tensor-parallel sizes"),
    ("pipeline_parallel", "pipeline-parallel sizes"),
    ("expert_parallel", "expert-parallel sizes"),
    ("prefix_cache", "settings of the prefix cache"),
    ("speculative", "ways to draft tokens"),
    ("max_running", "bounds of a batch"),
    ("sampling_defaults", "sources of sampling parameters"),
    ("defaults", "default sampling parameters"),
)


def findings(pool: Pool, told: Mapping[str, Told]) -> Iterator[Finding]:
    """Replicas that are not alike."""
    for field, words in _ALIKE:
        values = {name: getattr(each.facts, field) for name, each in told.items()}
        known = {name: value for name, value in values.items() if value not in (None, ())}
        if len(set(known.values())) < 2:
            continue
        each = ", ".join(f"{name} {_shown(value)}" for name, value in known.items())
        yield Finding(
            "replicas-differ",
            "warning",
            f"has replicas of different {words}: {each}",
            "an answer hangs on the replica that gives it",
            mend="start all replicas of a pool alike, or make pools of them",
            reason="replicas-differ",
        )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"{name}={number:g}" for name, number in value)
    return str(value)
