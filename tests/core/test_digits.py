from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.digits import natural


def test_runs_of_digits_compare_as_numbers() -> None:
    names = ["17:10", "17:2", "2:1", "a10", "a9", "17:02"]
    assert sorted(names, key=natural) == ["2:1", "17:02", "17:2", "17:10", "a9", "a10"]


@given(st.lists(st.text(max_size=8)))
def test_any_texts_have_one_order_and_different_texts_different_keys(texts: list[str]) -> None:
    backwards = texts[::-1]
    assert sorted(backwards, key=natural) == sorted(texts, key=natural)
    assert len({natural(text) for text in texts}) == len(set(texts))
