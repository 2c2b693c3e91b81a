"""Every file of gateway/engines keeps the contract of the package, whatever engine it is."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from gateway.core.document import Document, Set
from gateway.core.errors import CallerFault
from gateway.core.types import Api, Facts, Kind
from gateway.engines import load, names
from tests import captures

ENGINES = names()
ROUTES = [(name, path) for name in ENGINES for path in load(name).ROUTES]
DETERMINISTIC = Facts(deterministic=True, is_generation=True, default_min_p=0.05)


def document(**value: object) -> Document:
    return Document(json.dumps(value).encode())


def test_the_engines_of_the_contract_are_there() -> None:
    assert {"vllm", "sglang", "openai"} <= set(ENGINES)


def test_an_unknown_engine_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'tgi'.*openai, sglang, vllm"):
        load("tgi")


@pytest.mark.parametrize("name", ENGINES)
def test_module(name: str) -> None:
    engine = load(name)
    assert name == engine.NAME
    assert engine.PROBE.startswith("/")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(engine.ROUTES)
    assert engine.ROUTES["/v1/models"].kind == "models"
    for header, value in engine.id_headers("17:3:0.0!"):
        assert header == header.lower()
        assert value == b"17:3:0.0!"
    if engine.ABORT is not None:
        path, body = engine.ABORT
        assert engine.ROUTES[path].kind == "abort"
        assert b"17:3:0.0!" in body("17:3:0.0!")


@pytest.mark.parametrize(("name", "path"), ROUTES)
def test_route(name: str, path: str) -> None:
    handling = load(name).ROUTES[path]
    assert path.startswith("/")
    assert not path.endswith("/")
    assert handling.kind in get_args(Kind)
    assert handling.api in get_args(Api)
    assert set(handling.methods) <= {"GET", "POST", "PUT"}
    assert (handling.api == "anthropic") == path.startswith("/v1/messages")
    assert (handling.api == "native") == (not path.startswith("/v1/"))
    assert handling.seed not in handling.strays
    assert handling.kind == "sample" or handling.seed is None
    assert handling.seed is not None or not handling.strays
    # What the engine would clone must be something the gateway can take apart and put together again.
    assert handling.merge is not None or not (handling.clones or handling.inputs)


@pytest.mark.parametrize(("name", "path"), ROUTES)
def test_a_harmless_request_is_neither_refused_nor_changed(name: str, path: str) -> None:
    engine = load(name)
    plain = document(prompt="a", text="a", input="a", messages=[{"role": "user", "content": "a"}])
    engine.check(path, plain, Facts(deterministic=True, is_generation=True), 1)
    assert engine.extra(path, plain, Facts(deterministic=True)) == ()


@pytest.mark.parametrize(("name", "path"), ROUTES)
def test_seed_field(name: str, path: str) -> None:
    handling = load(name).ROUTES[path]
    expected = {
        ("vllm", "/v1/messages"): None,
        ("sglang", "/v1/messages"): None,
        ("sglang", "/v1/responses"): None,
        ("openai", "/v1/responses"): None,
        ("sglang", "/generate"): ("sampling_params", "sampling_seed"),
        ("vllm", "/inference/v1/generate"): ("sampling_params", "seed"),
    }
    if handling.kind == "sample":
        assert handling.seed == expected.get((name, path), ("seed",))


def test_only_vllm_draws_n_samples_that_differ() -> None:
    clones = {name: load(name).ROUTES["/v1/chat/completions"].clones for name in ("vllm", "sglang", "openai")}
    assert clones == {"vllm": False, "sglang": True, "openai": True}


def test_ids() -> None:
    assert load("vllm").id_headers("a:0.0!") == [(b"x-request-id", b"a:0.0!")]
    assert load("sglang").id_headers("a:0.0!") == []
    assert load("sglang").ROUTES["/generate"].engine_id == ("rid",)
    assert load("vllm").ROUTES["/v1/chat/completions"].engine_id is None


def test_aborts() -> None:
    assert load("vllm").ABORT is None
    abort = load("sglang").ABORT
    assert abort is not None
    assert abort[0] == "/abort_request"
    assert json.loads(abort[1]("17:3:0.0!")) == {"rid": "17:3:0.0!"}


def test_probes_generate_nothing() -> None:
    # SGLang's /health generates a token and blocks for 20 s during a pause.
    assert load("sglang").PROBE == "/ready"
    assert load("vllm").PROBE == "/health"


SAMPLED = [path for path, handling in load("sglang").ROUTES.items() if handling.kind == "sample"]
MIN_P = [
    {"min_p": 0.1},
    {"min_p": 1},
    {"min_p": "0.1"},
    {"min_p": True},
    {"sampling_params": {"min_p": 0.1}},
    {"sampling_params": [{"min_p": 0}, {"min_p": 1e-3}]},
]


@pytest.mark.parametrize("path", SAMPLED)
@pytest.mark.parametrize("body", MIN_P, ids=json.dumps)
@pytest.mark.parametrize("deterministic", [True, None])
def test_min_p_is_kept_from_a_deterministic_sglang(
    path: str, body: dict[str, object], deterministic: bool | None
) -> None:
    with pytest.raises(CallerFault, match="Leave it out or send 0") as caught:
        load("sglang").check(path, document(**body), Facts(deterministic=deterministic), 1)
    assert caught.value.status == 400
    assert caught.value.param == "min_p"


@pytest.mark.parametrize("path", SAMPLED)
@pytest.mark.parametrize("body", [{}, {"min_p": 0}, {"min_p": 0.0}, {"min_p": None}, {"sampling_params": [{}]}])
def test_min_p_of_zero_passes(path: str, body: dict[str, object]) -> None:
    load("sglang").check(path, document(**body), Facts(deterministic=True), 1)


@pytest.mark.parametrize("path", SAMPLED)
def test_min_p_passes_where_seeds_are_ignored_anyway(path: str) -> None:
    load("sglang").check(path, document(min_p=0.1), Facts(deterministic=False), 1)


def test_vllm_takes_min_p() -> None:
    load("vllm").check("/v1/chat/completions", document(min_p=0.1), Facts(deterministic=True), 1)


def test_a_models_own_min_p_is_overruled() -> None:
    extra = load("sglang").extra
    assert extra("/v1/chat/completions", document(messages=[]), DETERMINISTIC) == (Set(("min_p",), b"0"),)
    assert extra("/v1/responses", document(input="a"), DETERMINISTIC) == (Set(("min_p",), b"0"),)
    assert extra("/generate", document(text="a"), DETERMINISTIC) == (Set(("sampling_params", "min_p"), b"0"),)
    assert extra("/v1/chat/completions", document(min_p=None), DETERMINISTIC) == (Set(("min_p",), b"0"),)


def test_a_models_own_min_p_is_left_alone() -> None:
    extra = load("sglang").extra
    assert extra("/v1/chat/completions", document(min_p=0), DETERMINISTIC) == ()
    assert extra("/v1/completions", document(prompt="a"), DETERMINISTIC) == ()
    calm = Facts(deterministic=False, default_min_p=0.05)
    assert extra("/v1/chat/completions", document(messages=[]), calm) == ()
    assert load("vllm").extra("/v1/chat/completions", document(messages=[]), DETERMINISTIC) == ()


def test_messages_cannot_overrule_a_models_min_p() -> None:
    with pytest.raises(CallerFault, match="Use /v1/chat/completions"):
        load("sglang").check("/v1/messages", document(messages=[]), DETERMINISTIC, 1)


@pytest.mark.parametrize("path", SAMPLED)
def test_nothing_generates_on_an_embedding_server(path: str) -> None:
    with pytest.raises(CallerFault, match="role generate"):
        load("sglang").check(path, document(text="a"), Facts(deterministic=False, is_generation=False), 1)


def test_an_embedding_server_still_scores() -> None:
    load("sglang").check("/classify", document(text="a", min_p=1), Facts(is_generation=False), 1)


def test_each_engines_count_is_read_where_it_stands() -> None:
    """Of both real engines an idle one; and one with requests in every place that counts."""
    vllm, sglang = load("vllm"), load("sglang")
    assert vllm.running(captures.load("vllm", "metrics").body.decode()) == 0
    assert sglang.running(captures.load("sglang", "loads").body.decode()) == 0
    lines = ['vllm:num_requests_running{engine="0"} 2.0', 'vllm:num_requests_running{engine="1"} 1.0']
    assert vllm.running("\n".join([*lines, 'vllm:num_requests_waiting{engine="0"} 4.0'])) == 7
    ranks = [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 5}]
    assert sglang.running(json.dumps({"loads": ranks})) == 8


def test_what_was_scored_is_read_from_the_same_answer() -> None:
    vllm, sglang = load("vllm"), load("sglang")
    lines = [
        'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 9.0',
        'http_requests_total{handler="/tokenize",method="POST",status="2xx"} 8.0',
    ]
    assert vllm.done("\n".join(lines)) == 0
    lines += [
        'http_requests_total{handler="/classify",method="POST",status="2xx"} 3.0',
        'http_requests_total{handler="/classify",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/score",method="POST",status="2xx"} 2.0',
    ]
    assert vllm.done("\n".join(lines)) == 6
    assert (vllm.EXACT, sglang.EXACT) == (True, False)
    ranks = [{"total_prefill_uncached_tokens": 20}, {"total_prefill_uncached_tokens": 5}]
    assert sglang.done(json.dumps({"loads": ranks})) == 25


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("told", ["", "{}", "[]", "null", '{"loads": [{}]}', '{"loads": []}', "<html>"])
def test_a_count_that_is_not_there_is_unknown_not_zero(name: str, told: str) -> None:
    assert load(name).running(told) is None
    assert load(name).done(told) is None
