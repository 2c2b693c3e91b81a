import asyncio

import pytest

from gateway.sim import model
from gateway.sim.jobs import Generation, Piece, logit_vector
from gateway.sim.sampling import Sampling, hashed_noise

PROMPT = model.encode("Tell me")


def generated(sampling: Sampling, *, budget: int = 60, seed: int = 1, company: int = 0) -> list[Piece]:
    feed: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    job = Generation(id="a", tokens=PROMPT, sampling=sampling, noise=hashed_noise(seed), budget=budget, feed=feed)
    while not job.ended:
        job.step(company)
    return [feed.get_nowait()[1] for _ in range(feed.qsize())]


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def reason(pieces: list[Piece]) -> tuple[str, int | str | None]:
    finish = pieces[-1].finish
    assert finish is not None
    return finish.reason, finish.matched


WHOLE = text(generated(Sampling(ignore_eos=True)))


def test_a_budget_ends_by_length() -> None:
    pieces = generated(Sampling(ignore_eos=True), budget=5)
    assert reason(pieces) == ("length", None)
    assert len(pieces) == 5
    assert WHOLE.startswith(text(pieces))


def test_the_end_token_ends_without_text_and_not_before_min_tokens() -> None:
    ended = [pieces for seed in range(40) if reason(pieces := generated(Sampling(), seed=seed)) == ("stop", None)]
    assert ended
    assert all(pieces[-1].token == model.END and pieces[-1].text == "" for pieces in ended)
    assert min(map(len, ended)) < 30
    longer = [generated(Sampling(min_tokens=30), seed=seed) for seed in range(40)]
    assert min(map(len, longer)) >= 30


@pytest.mark.parametrize("stop", [WHOLE[20:22], WHOLE[30:47], WHOLE[9:10]])
@pytest.mark.parametrize("include", [False, True])
def test_text_ends_at_a_stop_string(stop: str, include: bool) -> None:
    pieces = generated(Sampling(ignore_eos=True, stop=(stop, "never there"), include_stop=include))
    assert reason(pieces) == ("stop", stop)
    assert text(pieces) == WHOLE[: WHOLE.index(stop) + len(stop) * include]


def test_what_may_become_a_stop_string_is_held_back_and_then_told() -> None:
    begin = WHOLE[10:25]
    pieces = generated(Sampling(ignore_eos=True, stop=(begin + "never there",)))
    assert text(pieces) == WHOLE
    told = ""
    for piece in pieces[:-1]:
        told += piece.text
        assert not told.endswith(begin)


def test_a_stop_token_is_not_told() -> None:
    tokens = [piece.token for piece in generated(Sampling(ignore_eos=True), budget=4)]
    assert tokens[3] is not None
    pieces = generated(Sampling(ignore_eos=True, stop_token_ids=frozenset({tokens[3]})))
    assert reason(pieces) == ("stop", tokens[3])
    assert WHOLE.startswith(text(pieces))
    assert [piece.token for piece in pieces] == tokens


def test_company_changes_logprobs_always_and_tokens_sometimes() -> None:
    alone, crowded = (generated(Sampling(ignore_eos=True), company=company) for company in (0, 5))
    assert alone[0].logprob != crowded[0].logprob
    seeds = range(30)
    same = [
        text(generated(Sampling(ignore_eos=True), seed=seed, budget=12))
        == text(generated(Sampling(ignore_eos=True), seed=seed, budget=12, company=5))
        for seed in seeds
    ]
    assert 0 < sum(same) < len(same)


def test_logprobs_are_float32() -> None:
    assert all(piece.logprob == model.single(piece.logprob) for piece in generated(Sampling(), budget=5))


def test_scores_are_a_function_of_the_text_and_the_company() -> None:
    first, second = model.encode("good"), model.encode("bad")
    assert logit_vector(first, 2) == logit_vector(first, 2)
    assert logit_vector(first, 1) != logit_vector(second, 1)
    assert logit_vector(first, 1)[0] == pytest.approx(logit_vector(first, 1, company=3)[0], abs=1e-3)
    assert logit_vector(first, 1) != logit_vector(first, 1, company=3)
