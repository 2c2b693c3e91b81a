import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sim import model


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_give_their_text_back(text: str) -> None:
    assert model.decode(model.encode(text)) == text


def test_its_own_words_are_single_tokens() -> None:
    assert len(model.encode(" The keeper writes in 北京.")) == 6
    assert model.encode(" Zürich") == [*" Zürich".encode()]


def test_a_token_that_does_not_exist_has_no_text() -> None:
    with pytest.raises(KeyError):
        model.decode([model.VOCABULARY])


def test_generated_text_reads_back_as_the_same_tokens() -> None:
    prompt = model.encode("Where is the keeper?")
    tokens = model.encode(" The lamp turns, the sea turns.")
    assert model.encode(model.decode([*prompt, *tokens])) == [*prompt, *tokens]


def test_what_follows_depends_on_every_token_before() -> None:
    here, there = (model.states(model.encode(text))[-1] for text in ("a The keeper", "b The keeper"))
    last = model.encode(" keeper")[0]
    assert model.logits(here, last) != model.logits(there, last)


def test_logprobs_are_those_of_a_distribution() -> None:
    pairs = model.log_softmax(model.logits(5, model.encode(".")[0]))
    assert math.isclose(sum(math.exp(logprob) for _, logprob in pairs), 1)
    assert model.END in dict(pairs)


def test_the_prompt_is_scored_by_the_same_model() -> None:
    prompt = model.encode(" The keeper")
    [_, (logprob, top)] = model.prompt_logprobs(prompt)
    expected = dict(model.log_softmax(model.logits(model.states(prompt)[0], prompt[0])))
    assert logprob == model.single(expected[prompt[1]])
    assert top[0][1] == model.single(max(expected.values()))
