"""Requests with their calls: what one request becomes so that no two samples share a seed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import fanout
from gateway.core.document import Document, Set
from gateway.core.errors import CallerFault, TooLarge
from gateway.core.types import Call, Handling
from gateway.engines import load
from tests.core.texts import FEWER

VLLM, SGLANG = load("vllm").ROUTES, load("sglang").ROUTES
SEEDS = range(1000, 10_000)


def parted(handling: Handling, body: str, **options: bool) -> list[tuple[int, int, int | None, object]]:
    """Sample, prompt, seed and parsed body of every call."""
    calls = fanout.calls(handling, Document(body.encode()), SEEDS, **options)
    return [(call.sample, call.prompt, call.seed, json.loads(sent(call))) for call in calls]


def sent(call: Call) -> bytes:
    return call.document.edited(call.edits)


def bodies(handling: Handling, body: str, **options: bool) -> list[bytes]:
    return [sent(call) for call in fanout.calls(handling, Document(body.encode()), SEEDS, **options)]


def whole(handling: Handling, body: str, **options: bool) -> None:
    """The request is sent as it came, with the first seed."""
    document = Document(body.encode())
    assert fanout.calls(handling, document, SEEDS, **options) == [Call(0, 0, 1000, document, ())]


CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize(
    ("handling", "body"),
    [
        (VLLM[CHAT], '{"messages":[],"n":4}'),
        (VLLM[CHAT], '{"messages":[]}'),
        (SGLANG[CHAT], '{"messages":[]}'),
        (SGLANG[CHAT], '{"messages":[],"n":1}'),
        (SGLANG[CHAT], '{"messages":[],"n":null}'),
        (VLLM[COMPLETIONS], '{"prompt":"a b"}'),
        (VLLM[COMPLETIONS], '{"prompt":[1,2,3],"n":3}'),
        (VLLM[COMPLETIONS], '{"prompt":["a"],"n":3}'),
        (VLLM[COMPLETIONS], '{"prompt":[[1,2]]}'),
        (VLLM[COMPLETIONS], '{"prompt":[]}'),
        (VLLM[COMPLETIONS], '{"prompt":["a","b"],"n":2,"use_beam_search":true}'),
        (SGLANG[COMPLETIONS], '{"prompt":[1,2,3]}'),
        (SGLANG[COMPLETIONS], '{"prompt":["a"]}'),
        (SGLANG[GENERATE], '{"text":"a"}'),
        (SGLANG[GENERATE], '{"text":["a"],"rid":["x"]}'),
        (SGLANG[GENERATE], '{"input_ids":[1,2,3]}'),
        (SGLANG[GENERATE], '{"input_embeds":[[0.5,1.0],[2.0,3.0]]}'),
        (SGLANG[GENERATE], '{"text":["a","b"],"sampling_params":{"n":2,"beam_width":4}}'),
        (VLLM["/v1/responses"], '{"input":["a","b"]}'),
        (VLLM["/v1/chat/completions/batch"], '{"messages":[[{"role":"user","content":"a"}]]}'),
    ],
)
def test_what_an_engine_does_not_clone_is_left_whole(handling: Handling, body: str) -> None:
    whole(handling, body)


@pytest.mark.parametrize(
    ("handling", "body"),
    [
        (VLLM["/classify"], '{"input":["a","b"]}'),
        (VLLM["/score"], '{"text_1":"q","text_2":["a","b"]}'),
        (SGLANG["/classify"], '{"text":["a","b"]}'),
    ],
)
def test_scoring_lists_are_split_only_where_asked(handling: Handling, body: str) -> None:
    whole(handling, body)
    assert len(fanout.calls(handling, Document(body.encode()), (), split_inputs=True)) == 2


def test_n_becomes_single_samples() -> None:
    assert parted(SGLANG[CHAT], '{"messages":[],"n":3,"x":1}') == [
        (i, 0, 1000 + i, {"messages": [], "n": 1, "x": 1}) for i in range(3)
    ]


def test_prompts_times_n_in_sample_order() -> None:
    assert parted(SGLANG[COMPLETIONS], '{"prompt":["a","b"],"n":2}') == [
        (0, 0, 1000, {"prompt": "a", "n": 1}),
        (1, 0, 1001, {"prompt": "a", "n": 1}),
        (2, 1, 1002, {"prompt": "b", "n": 1}),
        (3, 1, 1003, {"prompt": "b", "n": 1}),
    ]
    assert fanout.samples(SGLANG[COMPLETIONS], Document(b'{"prompt":["a","b"],"n":2}')) == 4


def test_vllm_gets_a_list_with_n_as_single_samples_too() -> None:
    assert parted(VLLM[COMPLETIONS], '{"prompt":[[1],[2]],"n":2,"stream":true}')[2] == (
        2,
        1,
        1002,
        {"prompt": [2], "n": 1, "stream": True},
    )


def test_a_list_of_one_prompt_with_n() -> None:
    assert parted(SGLANG[COMPLETIONS], '{"prompt":["a"],"n":2}') == [
        (0, 0, 1000, {"prompt": "a", "n": 1}),
        (1, 0, 1001, {"prompt": "a", "n": 1}),
    ]


def test_n_is_not_added_where_the_client_sent_none() -> None:
    assert bodies(SGLANG[COMPLETIONS], '{"prompt": ["a", "b"]}') == [b'{"prompt": "a"}', b'{"prompt": "b"}']


def test_every_byte_of_a_prompt_is_kept() -> None:
    first, second = r'"\u00e9\ud800 \"x\", ]"', "[1, 2 ,18446744073709551617]"
    body = f'{{"t": 0.10, "prompt" : [ {first} ,{second} ], "z":1e-7}}'
    assert bodies(VLLM[COMPLETIONS], body) == [
        b'{"t": 0.10, "prompt" : ' + part.encode() + b', "z":1e-7}' for part in (first, second)
    ]


def test_conversations() -> None:
    one, two = '[{"role":"user","content":"a, ]"}]', '[{"role":"user","content":"b"}]'
    body = f'{{"messages":[{one}, {two}],"model":"m"}}'
    assert bodies(VLLM["/v1/chat/completions/batch"], body) == [
        f'{{"messages":[{part}],"model":"m"}}'.encode() for part in (one, two)
    ]


def test_prompt_embeds() -> None:
    assert bodies(VLLM[COMPLETIONS], '{"prompt_embeds":["QQ==","Qg=="]}') == [
        b'{"prompt_embeds":"QQ=="}',
        b'{"prompt_embeds":"Qg=="}',
    ]
    with pytest.raises(CallerFault, match="one prompt a request"):
        bodies(VLLM[COMPLETIONS], '{"prompt":"a","prompt_embeds":"QQ=="}')


def test_generate_gives_each_prompt_what_is_its_own() -> None:
    body = """{"text":["a","b"],"sampling_params":[{"temperature":0.1,"n":2},{"temperature":0.2,"n":2}],
      "rid":["x","y"],"image_data":["u",["v","w"]],"return_logprob":true,"token_ids_logprob":[[1],[2,3]],
      "logprob_start_len":[0,5],"lora_path":[null,"l"]}"""
    found = parted(SGLANG[GENERATE], body)
    shared = {"return_logprob": True}
    first = {
        "text": "a",
        "sampling_params": {"temperature": 0.1, "n": 1},
        "image_data": "u",
        "token_ids_logprob": [1],
        "logprob_start_len": 0,
        "lora_path": None,
    }
    second = {
        "text": "b",
        "sampling_params": {"temperature": 0.2, "n": 1},
        "image_data": ["v", "w"],
        "token_ids_logprob": [2, 3],
        "logprob_start_len": 5,
        "lora_path": "l",
    }
    assert found == [
        (0, 0, 1000, first | shared),
        (1, 0, 1001, first | shared),
        (2, 1, 1002, second | shared),
        (3, 1, 1003, second | shared),
    ]


def test_the_seed_can_be_set_in_params_that_came_as_a_list() -> None:
    body = b'{"text":["a","b"],"sampling_params":[{"temperature":0.10},{}]}'
    calls = fanout.calls(SGLANG[GENERATE], Document(body), SEEDS)
    seed = Set(("sampling_params", "sampling_seed"), b"7")
    assert [json.loads(call.document.edited((*call.edits, seed))) for call in calls] == [
        {"text": "a", "sampling_params": {"sampling_seed": 7, "temperature": 0.1}},
        {"text": "b", "sampling_params": {"sampling_seed": 7}},
    ]
    assert b"0.10" in sent(calls[0])


def test_a_list_of_one_params_for_one_prompt_becomes_an_object() -> None:
    body = '{"text":["a"],"sampling_params":[{"temperature":0}]}'
    assert bodies(SGLANG[GENERATE], body) == [b'{"text":["a"],"sampling_params":{"temperature":0}}']


def test_lists_for_all_prompts_are_kept() -> None:
    assert parted(SGLANG[GENERATE], '{"text":["a","b"],"token_ids_logprob":[7,8]}')[1] == (
        1,
        1,
        1001,
        {"text": "b", "token_ids_logprob": [7, 8]},
    )


def test_images_of_a_single_prompt_stay_a_list() -> None:
    assert parted(SGLANG[GENERATE], '{"text":"a","image_data":["u","v"],"sampling_params":{"n":2}}')[1] == (
        1,
        0,
        1001,
        {"text": "a", "image_data": ["u", "v"], "sampling_params": {"n": 1}},
    )


@pytest.mark.parametrize(
    ("handling", "body", "param"),
    [
        (SGLANG[GENERATE], '{"text":["a","b"],"image_data":["u"]}', "image_data"),
        (SGLANG[GENERATE], '{"text":"a","sampling_params":[{},{}]}', "sampling_params"),
        (SGLANG[GENERATE], '{"text":["a","b"],"input_ids":[1,2]}', "text"),
        (SGLANG[GENERATE], '{"text":["a","b"],"bootstrap_room":7}', "bootstrap_room"),
        (SGLANG[GENERATE], '{"text":["a","b"],"sampling_params":[{"n":2},{}]}', "sampling_params.n"),
        (VLLM["/pooling"], '{"input":["a","b"],"encoding_format":"bytes"}', "encoding_format"),
        (SGLANG[CHAT], '{"messages":[],"n":"8"}', "n"),
        (SGLANG[CHAT], '{"messages":[],"n":true}', "n"),
        (SGLANG[CHAT], '{"messages":[],"n":2.0}', "n"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(handling: Handling, body: str, param: str) -> None:
    with pytest.raises(CallerFault) as caught:
        bodies(handling, body, split_inputs=True)
    assert caught.value.param == param


@pytest.mark.parametrize("body", ['{"n":1000000000}', '{"n":101}'])
def test_absurd_sizes_are_refused(body: str) -> None:
    document = Document(body.encode())
    with pytest.raises(CallerFault, match="at most 100"):
        fanout.samples(VLLM[CHAT], document, limit=100)
    with pytest.raises(CallerFault, match="at most 100"):
        fanout.calls(SGLANG[CHAT], document, SEEDS, limit=100)
    assert fanout.samples(VLLM[CHAT], Document(b'{"n":100}'), limit=100) == 100


def test_too_many_prompts_are_refused() -> None:
    document = Document(json.dumps({"prompt": ["a"] * 50, "n": 3}).encode())
    with pytest.raises(CallerFault, match="150 samples"):
        fanout.calls(VLLM[COMPLETIONS], document, SEEDS, limit=100)
    inputs = Document(json.dumps({"input": ["a"] * 101}).encode())
    with pytest.raises(CallerFault, match="101 samples"):
        fanout.calls(VLLM["/classify"], inputs, (), split_inputs=True, limit=100)


def test_the_params_of_each_prompt() -> None:
    body = b'{"text":["a","b","c"],"sampling_params":[{"sampling_seed":9007199254740993},{"seed":"x"},{}]}'
    listed = fanout.listed_params(SGLANG[GENERATE], Document(body))
    assert [params.raw for params in listed] == [b'{"sampling_seed":9007199254740993}', b'{"seed":"x"}', b"{}"]
    assert fanout.listed_params(SGLANG[GENERATE], Document(b'{"text":"a","sampling_params":{"seed":1}}')) == []
    assert fanout.listed_params(SGLANG[CHAT], Document(b'{"seed":1}')) == []
    with pytest.raises(CallerFault, match="must hold objects"):
        fanout.listed_params(SGLANG[GENERATE], Document(b'{"text":["a"],"sampling_params":[7]}'))


SCORING = [
    (VLLM["/classify"], '{"input":["a","b"],"x":[1]}', [{"input": "a", "x": [1]}, {"input": "b", "x": [1]}]),
    (VLLM["/pooling"], '{"input":[[1,2],[3]]}', [{"input": [1, 2]}, {"input": [3]}]),
    (VLLM["/v1/embeddings"], '{"input":[1,2]}', [{"input": [1, 2]}]),
    (VLLM["/score"], '{"text_1":"q","text_2":["a","b"]}', [
        {"text_1": "q", "text_2": "a"},
        {"text_1": "q", "text_2": "b"},
    ]),
    (VLLM["/score"], '{"text_1":["q"],"text_2":["a","b"]}', [
        {"text_1": "q", "text_2": "a"},
        {"text_1": "q", "text_2": "b"},
    ]),
    (VLLM["/v1/score"], '{"queries":["q","r"],"documents":["a","b"]}', [
        {"queries": "q", "documents": "a"},
        {"queries": "r", "documents": "b"},
    ]),
    (VLLM["/score"], '{"queries":"q","items":["a","b"]}', [
        {"queries": "q", "items": "a"},
        {"queries": "q", "items": "b"},
    ]),
    (VLLM["/score"], '{"text_1":"q","text_2":"a"}', [{"text_1": "q", "text_2": "a"}]),
    (VLLM["/score"], '{"text_1":["q","r"],"text_2":"a"}', [{"text_1": ["q", "r"], "text_2": "a"}]),
    (VLLM["/rerank"], '{"query":"q","documents":["a","b"],"top_n":1}', [
        {"query": "q", "documents": ["a"]},
        {"query": "q", "documents": ["b"]},
    ]),
    (VLLM["/rerank"], '{"query":"q","documents":["a"],"top_n":1}', [
        {"query": "q", "documents": ["a"], "top_n": 1},
    ]),
    (SGLANG["/v1/rerank"], '{"query":"q","documents":["a",[{"type":"text"}]],"return_documents":false}', [
        {"query": "q", "documents": ["a"], "return_documents": False},
        {"query": "q", "documents": [[{"type": "text"}]], "return_documents": False},
    ]),
    (SGLANG["/classify"], '{"text":["a","b"],"rid":["x","y"]}', [{"text": "a"}, {"text": "b"}]),
    (SGLANG["/classify"], '{"input_ids":[[1],[2]]}', [{"input_ids": [1]}, {"input_ids": [2]}]),
    (SGLANG["/encode"], '{"text":[["q","a"],["q","b"]]}', [{"text": [["q", "a"]]}, {"text": [["q", "b"]]}]),
    (SGLANG["/v1/embeddings"], '{"input":[{"text":"a"},{"image":"u"}]}', [
        {"input": [{"text": "a"}]},
        {"input": [{"image": "u"}]},
    ]),
    (SGLANG["/v1/embeddings"], '{"input":["a","b"],"embed_overrides":[null,[[0.5]]]}', [
        {"input": "a", "embed_overrides": [None]},
        {"input": "b", "embed_overrides": [[[0.5]]]},
    ]),
    (SGLANG["/v1/score"], '{"query":"q","items":["a","b"],"label_token_ids":[1,2]}', [
        {"query": "q", "items": ["a"], "label_token_ids": [1, 2]},
        {"query": "q", "items": ["b"], "label_token_ids": [1, 2]},
    ]),
    (SGLANG["/v1/score"], '{"query":[1],"items":[[2],[3]],"label_token_ids":[[1],[2]]}', [
        {"query": [1], "items": [[2]], "label_token_ids": [[1]]},
        {"query": [1], "items": [[3]], "label_token_ids": [[2]]},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("handling", "body", "expected"), SCORING)
def test_each_input_alone(handling: Handling, body: str, expected: list[object]) -> None:
    calls = fanout.calls(handling, Document(body.encode()), (), split_inputs=True)
    assert [json.loads(sent(call)) for call in calls] == expected
    assert [(call.sample, call.prompt, call.seed) for call in calls] == [(i, i, None) for i in range(len(calls))]


@pytest.mark.parametrize("top", ["-1", "1.5", '"2"', "true"])
def test_what_only_the_engine_can_refuse_goes_to_it_whole(top: str) -> None:
    document = Document(f'{{"query":"q","documents":["a","b"],"top_n":{top}}}'.encode())
    assert fanout.calls(VLLM["/rerank"], document, (), split_inputs=True) == [Call(0, 0, None, document, ())]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@FEWER
@given(
    prompts=st.lists(st.text(min_size=1) | st.lists(st.integers(), min_size=1), min_size=2, max_size=4),
    n=st.integers(1, 3),
    rest=st.dictionaries(st.text().filter(lambda key: key not in ("prompt", "n", "prompt_embeds")), JSON),
    indent=st.sampled_from([None, 1]),
    last=st.booleans(),
)
def test_children_are_the_request_with_one_prompt(
    prompts: list[object], n: int, rest: dict[str, object], indent: int | None, last: bool
) -> None:
    rest.pop("rid", None)
    own = {"prompt": prompts, "n": n}
    body = rest | own if last else own | rest
    document = Document(json.dumps(body, indent=indent).encode())
    calls = fanout.calls(SGLANG[COMPLETIONS], document, SEEDS)
    assert [call.seed for call in calls] == list(SEEDS[: len(prompts) * n])
    assert [json.loads(sent(call)) for call in calls] == [
        body | {"prompt": prompt, "n": 1} for prompt in prompts for _ in range(n)
    ]


def test_a_child_costs_its_own_length() -> None:
    body = json.dumps({"prompt": ["p" * 500] * 2000, "n": 1, "image": "i" * 100}).encode()
    for call in fanout.calls(VLLM[COMPLETIONS], Document(body), SEEDS):
        assert len(call.document.raw) < 200
        assert len(sent(call)) < 700


@pytest.mark.parametrize(
    ("handling", "body", "shared", "own"),
    [
        (SGLANG[CHAT], '{"messages":"abc","n":5}', 5 * '{"messages":"abc","n":5}', ""),
        (SGLANG[GENERATE], '{"text":["aa","b"]}', 2 * '{"text":null}', '"aa""b"'),
        (
            SGLANG[GENERATE],
            '{"text":"a","sampling_params":[{"n":2}]}',
            2 * '{"text":"a","sampling_params":null}',
            2 * '{"n":2}',
        ),
        (VLLM["/score"], '{"text_1":"c","text_2":["a","b"]}', 2 * '{"text_1":"c","text_2":null}', '"a""b"'),
    ],
)
def test_no_request_becomes_more_bytes_than_the_bound(
    monkeypatch: pytest.MonkeyPatch, handling: Handling, body: str, shared: str, own: str
) -> None:
    size = len(shared + own)
    monkeypatch.setattr(fanout, "LARGEST", size)
    assert fanout.calls(handling, Document(body.encode()), SEEDS, split_inputs=True)
    monkeypatch.setattr(fanout, "LARGEST", size - 1)
    with pytest.raises(TooLarge, match=f"is {size} bytes"):
        fanout.calls(handling, Document(body.encode()), SEEDS, split_inputs=True)
