from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import engines, schemes
from gateway.core import plan, seeds
from gateway.core.document import Document
from gateway.core.errors import CallerFault
from gateway.core.types import Handling

V1 = schemes.load("v1")
CHAT = {name: engines.load(name).ROUTES["/v1/chat/completions"] for name in ("vllm", "sglang")}
GENERATE = engines.load("sglang").ROUTES["/generate"]
MESSAGES = engines.load("vllm").ROUTES["/v1/messages"]
COMPLETIONS = engines.load("vllm").ROUTES["/v1/completions"]


def document(**fields: Any) -> Document:
    return Document(json.dumps({"model": "m"} | fields).encode())


def made(handling: Handling, body: Document, *, mix: bool = False) -> plan.Plan:
    wish = plan.read_wish(handling, body)
    return plan.make(handling, wish, scheme=V1, master=42, mix=mix, identity="17:3", index=5)


def sent(handling: Handling, body: Document, **how: Any) -> list[dict[str, Any]]:
    """The bodies that the engine gets."""
    calls = made(handling, body, **how).calls
    return [json.loads(call.document.edited([*call.edits, *plan.seed_edits(handling, call)])) for call in calls]


def test_a_request_without_a_seed_gets_the_one_that_its_identity_and_index_give() -> None:
    decided = made(CHAT["vllm"], document())
    assert decided.seed == V1.seed(42, "17:3", 5, None)
    assert (decided.seed_source, decided.request_id) == ("derived", "17:3:5")
    assert sent(CHAT["vllm"], document()) == [{"seed": decided.seed, "model": "m"}]


@pytest.mark.parametrize("fields", [{"seed": 9}, {"sampling_seed": 9}, {"seed": 9, "sampling_seed": 9}])
def test_a_clients_seed_is_kept_and_moved_to_where_the_engine_reads_it(fields: dict[str, int]) -> None:
    decided = made(CHAT["sglang"], document(**fields))
    assert (decided.seed, decided.seed_source) == (9, "client")
    assert sent(CHAT["sglang"], document(**fields)) == [{"seed": 9, "model": "m"}]


def test_a_seed_in_a_field_that_sglang_refuses_is_moved_and_not_doubled() -> None:
    body = document(text="hi", sampling_params={"seed": 9, "top_p": 0.5})
    assert sent(GENERATE, body) == [{"model": "m", "text": "hi", "sampling_params": {"sampling_seed": 9, "top_p": 0.5}}]


def test_null_is_no_seed() -> None:
    assert made(CHAT["vllm"], document(seed=None)).seed_source == "derived"


def test_a_clients_seed_takes_the_master_seeds_place_where_it_is_mixed() -> None:
    decided = made(CHAT["vllm"], document(seed=7), mix=True)
    assert (decided.seed, decided.seed_source) == (V1.seed(7, "17:3", 5, None), "derived")


@pytest.mark.parametrize("seed", ["12", True, 1.5, -1, 2**63])
@pytest.mark.parametrize("name", ["seed", "sampling_seed"])
def test_a_malformed_seed_is_refused_with_its_field(seed: Any, name: str) -> None:
    with pytest.raises(CallerFault) as caught:
        made(CHAT["vllm"], document(**{name: seed}))
    assert (caught.value.code, caught.value.param) == ("invalid_seed", name)


@pytest.mark.parametrize("params", [True, "x", 1, [], [1], [None]])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_params_that_can_hold_no_seed_are_refused(engine: str, params: Any) -> None:
    route = {"vllm": "/inference/v1/generate", "sglang": "/generate"}[engine]
    with pytest.raises(CallerFault) as caught:
        plan.read_wish(engines.load(engine).ROUTES[route], document(text="a", sampling_params=params))
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("params", [None, {}])
def test_params_that_are_not_there_get_one(params: Any) -> None:
    body = document(text="a", sampling_params=params)
    assert sent(GENERATE, body)[0]["sampling_params"] == {"sampling_seed": made(GENERATE, body).seed}


def test_two_seeds_that_differ_are_refused() -> None:
    with pytest.raises(CallerFault, match="different seeds"):
        made(CHAT["vllm"], document(seed=1, sampling_seed=2))


def test_the_last_sample_of_a_client_seed_stays_in_range() -> None:
    assert made(CHAT["vllm"], document(seed=2**63 - 4, n=4)).seed == 2**63 - 4
    with pytest.raises(CallerFault) as caught:
        made(CHAT["vllm"], document(seed=2**63 - 3, n=4))
    assert caught.value.code == "invalid_seed"


def test_samples_that_the_engine_would_clone_go_alone_with_seeds_of_their_own() -> None:
    bodies = sent(CHAT["sglang"], document(n=8))
    assert len({body["seed"] for body in bodies}) == 8
    assert {body["n"] for body in bodies} == {1}
    assert bodies[0]["seed"] == V1.seed(42, "17:3", 5, None)


def test_samples_that_the_engine_tells_apart_stay_in_one_call() -> None:
    assert sent(CHAT["vllm"], document(n=4)) == [{"seed": V1.seed(42, "17:3", 5, None), "model": "m", "n": 4}]


def test_prompts_of_a_list_get_a_seed_each_and_their_own_bytes() -> None:
    body = Document(b'{"model": "m", "prompt": ["a", "\\u0061"], "n": 2}')
    calls = made(COMPLETIONS, body).calls
    raw = [call.document.edited([*call.edits, *plan.seed_edits(COMPLETIONS, call)]) for call in calls]
    assert [b'"\\u0061"' in each for each in raw] == [False, False, True, True]
    assert len({json.loads(each)["seed"] for each in raw}) == 4


def listed(*params: dict[str, Any], **fields: Any) -> Document:
    return document(text=[chr(97 + place) for place in range(len(params))], sampling_params=list(params), **fields)


def drawn(body: Document, **how: Any) -> list[int]:
    return [each["sampling_params"]["sampling_seed"] for each in sent(GENERATE, body, **how)]


@pytest.mark.parametrize("name", ["sampling_seed", "seed"])
def test_a_prompts_own_seed_is_kept_and_that_of_sample_0_is_told(name: str) -> None:
    derived = V1.seed(42, "17:3", 5, None)
    first, second = listed({name: 3}, {}), listed({}, {name: 4})
    decided = made(GENERATE, first)
    assert (decided.seed, decided.seed_source) == (3, "client")
    assert drawn(first) == [3, seeds.samples(derived, 2)[1]]
    decided = made(GENERATE, second)
    assert (decided.seed, decided.seed_source) == (derived, "derived")
    assert drawn(second) == [derived, 4]
    assert drawn(listed({name: 3, "n": 2}, {name: 3, "n": 2})) == seeds.samples(3, 2) * 2


def test_a_prompts_own_seed_takes_the_master_seeds_place_where_it_is_mixed() -> None:
    body = listed({"seed": 3, "n": 2}, {"n": 2}, {"seed": 3, "n": 2})
    mixed, derived = (seeds.samples(V1.seed(master, "17:3", 5, None), 6) for master in (3, 42))
    assert drawn(body, mix=True) == [*mixed[:2], *derived[2:4], *mixed[4:]]
    decided = made(GENERATE, body, mix=True)
    assert (decided.seed, decided.seed_source) == (mixed[0], "derived")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (listed({"seed": 3}, {}, seed=5), "seed"),
        (listed({}, {"sampling_seed": 3}, sampling_seed=5), "sampling_seed"),
        (listed({"seed": 3, "sampling_seed": 4}, {}), "sampling_params.seed"),
        (listed({}, {"seed": -1}), "sampling_params.seed"),
    ],
)
def test_seeds_of_prompts_that_contradict_or_are_none_are_refused(body: Document, param: str) -> None:
    with pytest.raises(CallerFault) as caught:
        plan.read_wish(GENERATE, body)
    assert (caught.value.code, caught.value.param) == ("invalid_seed", param)


def test_a_seed_that_stands_twice_in_the_params_of_a_prompt_is_refused() -> None:
    body = Document(b'{"text": ["a", "b"], "sampling_params": [{}, {"seed": 1, "\\u0073eed": 2}]}')
    with pytest.raises(CallerFault) as caught:
        plan.read_wish(GENERATE, body)
    assert (caught.value.code, caught.value.param) == ("duplicate_field", "sampling_params.seed")


def test_a_seed_for_all_goes_to_the_prompts_that_have_none() -> None:
    assert drawn(listed({"seed": 5}, {}, seed=5)) == drawn(listed({}, {}, seed=5)) == seeds.samples(5, 2)


@pytest.mark.parametrize(
    "body",
    [
        listed({"seed": 3, "top_p": 0.5}, {"sampling_seed": 4}, seed=3),
        listed({"top_p": 0.5}, {"sampling_seed": 4}),
        listed({"top_p": 0.5}, {}),
    ],
)
def test_what_is_asked_apart_from_its_seeds(body: Document) -> None:
    assert plan.unseeded(GENERATE, body).value == listed({"top_p": 0.5}, {}).value


def test_a_route_without_a_seed_gets_none_and_says_so() -> None:
    decided = made(MESSAGES, document())
    assert (decided.seed, decided.seed_source) == (None, "none")
    assert sent(MESSAGES, document()) == [{"model": "m"}]


def test_a_plan_is_made_again_from_the_same_inputs() -> None:
    body = document(n=8)
    assert made(CHAT["sglang"], body)._replace(calls=()) == made(CHAT["sglang"], body)._replace(calls=())
    assert sent(CHAT["sglang"], body) == sent(CHAT["sglang"], body)
