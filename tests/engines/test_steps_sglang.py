"""A trainer's steps over real servers, all started anew between two runs: `make test-sglang`, not `make test`."""

from pathlib import Path

import pytest

from tests.engines import steps

pytestmark = pytest.mark.timeout(1800)


def test_every_text_and_the_reward_curve_are_equal_to_the_bit(tmp_path: Path) -> None:
    first, second = (steps.through_gateway(tmp_path / str(run), "sglang", hash_seed=run) for run in (1, 2))
    assert first.texts == second.texts
    assert [reward.hex() for reward in first.rewards] == [reward.hex() for reward in second.rewards]
    assert len({text for step in first.texts for text in step}) > steps.STEPS * steps.PROMPTS
    assert len(set(first.rewards)) == steps.STEPS
