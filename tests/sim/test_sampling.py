import math
from collections import Counter

import pytest

from gateway.sim.sampling import Sampling, choose, fold, hashed_noise, random_noise, stream_noise

EVEN = [(token, 0.0) for token in range(4)]
LIKELY = [(0, math.log(0.6)), (1, math.log(0.3)), (2, math.log(0.09)), (3, math.log(0.01))]


def drawn(sampling: Sampling, draws: int = 2000) -> Counter[int]:
    return Counter(choose(LIKELY, sampling, key) for key in range(draws))


def test_draws_follow_the_distribution() -> None:
    counts = drawn(Sampling())
    assert [counts[token] / 2000 for token in range(3)] == pytest.approx([0.6, 0.3, 0.09], abs=0.04)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(temperature=0.0), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.95), {0, 1, 2}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(min_p=0.4), {0, 1}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_only_what_the_parameters_leave_is_drawn(sampling: Sampling, tokens: set[int]) -> None:
    assert set(drawn(sampling)) == tokens


def test_a_low_temperature_sharpens() -> None:
    assert drawn(Sampling(temperature=0.5))[0] > drawn(Sampling())[0]


def test_hashed_noise_is_bound_to_the_position() -> None:
    noise = hashed_noise(7)
    assert noise(0, 12) == noise(9, 12)
    assert noise(0, 12) != noise(0, 13)
    assert noise(0, 12) != hashed_noise(8)(0, 12)


def test_stream_noise_is_bound_to_the_draw() -> None:
    noise = stream_noise(7)
    assert noise(3, 12) == noise(3, 40)
    assert noise(3, 12) != noise(4, 12)


def test_random_noise_never_repeats() -> None:
    assert random_noise()(0, 0) != random_noise()(0, 0)


def test_the_folds_collide_where_the_real_ones_do() -> None:
    assert fold(7) == fold(53023623507391)
    assert len({fold(seed) for seed in range(2**32 - 3000, 2**32)}) == 3000
    assert stream_noise(5)(0, 0) == stream_noise(5 + 2**32)(0, 0)
    assert fold(5) != fold(5 + 2**32)
