"""What makes another engine of one, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from gateway.core.fingerprint import fingerprint
from gateway.core.types import Facts

FACTS = Facts(engine="vllm", version="0.32.0", dtype="bfloat16", defaults=(("min_p", 0.1),))
UNDECIDING = {"weight_version", "priority_scheduling", "scheduling_policy"}


def other(field: str) -> Any:
    """A value of the field's kind that FACTS does not have."""
    if field == "defaults":
        return (("min_p", 0.2),)
    return "another"


def test_it_names_engine_and_version() -> None:
    """Kept: passes are written down for it, and outlive a new release of the gateway."""
    assert fingerprint(FACTS, ["m"]) == "vllm-0.32.0-affeb135b25f965a"
    assert len(fingerprint(Facts(), [])) == 16


@pytest.mark.parametrize("field", [field.name for field in fields(Facts)])
def test_each_fact_that_may_decide_an_answer_changes_it(field: str) -> None:
    changed = fingerprint(replace(FACTS, **{field: other(field)}), ["m"]) != fingerprint(FACTS, ["m"])
    assert changed == (field not in UNDECIDING)


def test_the_models_served_are_part_of_it_in_any_order() -> None:
    assert fingerprint(FACTS, ["a", "b"]) == fingerprint(FACTS, ["b", "a"]) != fingerprint(FACTS, ["a"])


def test_it_does_not_depend_on_the_process() -> None:
    program = (
        "from gateway.core.fingerprint import fingerprint; from gateway.core.types import Facts;"
        "facts = Facts(engine='vllm', version='0.32.0', dtype='bfloat16', defaults=(('min_p', 0.1),));"
        "print(fingerprint(facts, ['m']))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {fingerprint(FACTS, ["m"])}
