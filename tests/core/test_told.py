"""What servers tell is read if it has the kind that it should have, and is unknown otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core import told


@pytest.mark.parametrize(
    ("value", "as_flag", "as_count", "as_text"),
    [
        (True, True, None, None),
        (False, False, None, None),
        (0, None, 0, None),
        (2, None, 2, None),
        ("a", None, None, "a"),
        ("", None, None, None),
        (None, None, None, None),
        (1.5, None, None, None),
        ([], None, None, None),
    ],
)
def test_values_of_another_kind_are_unknown(
    value: Any, as_flag: bool | None, as_count: int | None, as_text: str | None
) -> None:
    assert (told.flag(value), told.count(value), told.text(value)) == (as_flag, as_count, as_text)


@pytest.mark.parametrize("said", [None, [], "text", {"a": None}, {"a": []}, {"a": {"b": 1}}])
def test_a_place_that_is_not_there_is_empty(said: Any) -> None:
    assert told.at(said, "a", "b") == {}


def test_a_choice_that_is_told_to_be_none_is_known() -> None:
    assert told.named({"quantization": None}, "quantization") == "none"
    assert told.named({"quantization": "fp8"}, "quantization") == "fp8"
    assert told.named({}, "quantization") is None


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"min_p": 0.1, "temperature": 1, "stop": "x", "flag": True}, (("min_p", 0.1), ("temperature", 1))),
        ('{"min_p": 0.1}', (("min_p", 0.1),)),
        ("no json", ()),
        (None, ()),
        ([1], ()),
    ],
)
def test_sampling_parameters_are_the_numbers_of_an_object_or_of_its_text(said: Any, read: Any) -> None:
    assert told.numbers(said) == read


@pytest.mark.parametrize(
    ("models", "owner"),
    [
        ({"data": [{"owned_by": "vllm", "root": "/m"}]}, "vllm"),
        ({"data": [{"owned_by": "someone"}, {"owned_by": "sglang"}]}, "sglang"),
        ({"data": [{"owned_by": "someone"}]}, None),
        ({"data": ["x", 5]}, None),
        ({"data": 5}, None),
        ("text", None),
        (None, None),
    ],
)
def test_the_engine_is_the_owner_of_its_models(models: Any, owner: str | None) -> None:
    assert told.owner({"/v1/models": models}) == owner
    assert told.root({"/v1/models": {"data": [{"root": "/m"}]}}) == "/m"
    assert told.root({"/v1/models": models}) in ("/m", None)
