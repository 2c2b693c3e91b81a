"""More than fits into memory is sorted, and does not stay there."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from gateway.evidence.sorting import Sorter


@pytest.mark.parametrize("held_bytes", [64, 1000, 1 << 20])
def test_all_comes_out_sorted(held_bytes: int) -> None:
    items = [random.Random(number).randbytes(number % 40) for number in range(3000)]
    sorter = Sorter(held_bytes)
    for item in items:
        sorter.add(item)
    assert len(sorter) == 3000
    assert list(sorter) == sorted(items)
    sorter.close()


def test_memory_does_not_grow_with_what_is_sorted() -> None:
    peaks = []
    for count in (10_000, 40_000):
        tracemalloc.start()
        sorter = Sorter(held_bytes=200_000)
        for number in range(count):
            sorter.add(b"%0100d" % (number * 7919 % count))
        assert sum(1 for _ in sorter) == count
        sorter.close()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 4
    assert peaks[1] < 40_000 * 100 / 2
