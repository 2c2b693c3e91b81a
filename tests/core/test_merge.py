"""Answers of children with the one answer made of them, held against what real engines answered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from gateway.core import fanout
from gateway.core.document import Document
from gateway.core.errors import UpstreamFault
from gateway.core.merge import StreamMerger, merge
from gateway.core.observer import Observer, observe
from gateway.core.types import Call
from gateway.engines import load, names
from tests import captures

SEEDS = range(1000)


def asked(engine: str, path: str, request: Any) -> tuple[str, Document, list[Call]]:
    """The rule, the document and the calls of a request whose inputs are parted."""
    handling = load(engine).ROUTES[path]
    document = Document(json.dumps(request).encode())
    calls = fanout.calls(handling, document, SEEDS, split_inputs=True)
    return handling.merge or "", document, calls


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return counts | {"prompt_tokens_details": None} | more


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def parts(engine: str, name: str, field: str, counts: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """What an engine would have answered for each element alone, made of what it answered for all."""
    whole = captures.load(engine, name).json()
    return [
        whole | {"id": f"child-{i}", field: [element | {"index": 0}], "usage": whole["usage"] | usage(*count)}
        for i, (element, count) in enumerate(zip(whole[field], counts, strict=True))
    ]


LISTED = [
    ("vllm", "completions-list", "choices", [(5, 5), (4, 5)]),
    ("vllm", "completions-list-n2", "choices", [(5, 5), (5, 5), (4, 5), (4, 5)]),
    ("vllm", "chat-batch", "choices", [(23, 5), (23, 5)]),
    ("sglang", "chat-n2", "choices", [(18, 6), (18, 6)]),
    ("sglang", "completions-n2", "choices", [(5, 5), (5, 5)]),
    ("sglang", "completions-list-n2", "choices", [(5, 5), (5, 5), (4, 5), (4, 5)]),
    ("vllm", "classify-list", "data", [(8, 0), (3, 0), (5, 0)]),
    ("vllm", "classify-labels", "data", [(4, 0), (5, 0)]),
    ("vllm", "pooling-list", "data", [(4, 0), (5, 0)]),
    ("vllm", "embeddings-list", "data", [(4, 0), (5, 0)]),
    ("vllm", "embeddings-base64", "data", [(4, 0), (5, 0)]),
    ("vllm", "score", "data", [(13, 0), (12, 0)]),
    ("vllm", "score-pairs", "data", [(9, 0), (9, 0)]),
    ("sglang", "classify-v1", "data", [(4, 0), (5, 0)]),
    ("sglang", "embeddings-list", "data", [(4, 0), (5, 0)]),
]


@pytest.mark.parametrize(("engine", "name", "field", "counts"), LISTED)
def test_the_engines_own_answer_to_a_list(engine: str, name: str, field: str, counts: list[tuple[int, int]]) -> None:
    capture = captures.load(engine, name)
    rule, document, calls = asked(engine, capture.path, capture.request)
    bodies = [dumped(part) for part in parts(engine, name, field, counts)]
    assert len(calls) == len(bodies)
    merged = json.loads(merge(rule, document, calls, bodies))
    assert merged == capture.json() | {"id": "child-0"}


def test_bytes_are_moved_and_not_written_anew() -> None:
    capture = captures.load("vllm", "classify-list")
    rule, document, calls = asked("vllm", capture.path, capture.request)
    digits = ["0.1000000000000000055511151231257827", "-0.0", "1e-7"]
    bodies = [b'{ "id":"c", "data": [ {"index" : 0,"probs":[%b ]} ]}' % value.encode() for value in digits]
    assert merge(rule, document, calls, bodies) == (
        b'{ "id":"c", "data": [{"index" : 0,"probs":[0.1000000000000000055511151231257827 ]},'
        b'{"index" : 1,"probs":[-0.0 ]},{"index" : 2,"probs":[1e-7 ]}]}'
    )


def test_details_of_a_prompt_are_counted_once_and_those_of_completions_always() -> None:
    rule, document, calls = asked("sglang", "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    bodies = [
        dumped({"choices": [{"index": 0}], "usage": counts})
        for counts in (
            usage(5, 1, prompt_tokens_details={"cached_tokens": 3}, reasoning_tokens=2),
            usage(5, 2, prompt_tokens_details={"cached_tokens": 4}, reasoning_tokens=0),
            usage(7, 3, prompt_tokens_details={"cached_tokens": 1}, completion_tokens_details={"x": 2}),
            usage(7, 4, prompt_tokens_details=None, completion_tokens_details={"x": 3}),
        )
    ]
    assert json.loads(merge(rule, document, calls, bodies))["usage"] == {
        "prompt_tokens": 12,
        "total_tokens": 22,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "reasoning_tokens": 2,
        "completion_tokens_details": {"x": 5},
    }


NATIVE = ["native-list", "native-list-n2", "native-n2", "classify-list", "classify-ids-list", "encode-list"]


@pytest.mark.parametrize("name", NATIVE)
def test_native_lists(name: str) -> None:
    capture = captures.load("sglang", name)
    rule, document, calls = asked("sglang", capture.path, capture.request)
    elements = Document(b'{"a":' + capture.body + b"}").elements(("a",)) or []
    assert len(calls) == len(elements)
    assert merge(rule, document, calls, [element + b"\n" for element in elements]).replace(b"\n", b"") == capture.body
    # A child that was sent as a list of one answers a list of one.
    assert merge(rule, document, calls, [b" [" + element + b"]" for element in elements]) == capture.body


def test_sglang_scores() -> None:
    capture = captures.load("sglang", "score")
    rule, document, calls = asked("sglang", capture.path, capture.request)
    whole = capture.json()
    bodies = [
        dumped(whole | {"scores": [row], "usage": whole["usage"] | usage(prompt, 0)})
        for row, prompt in zip(whole["scores"], (13, 12), strict=True)
    ]
    assert json.loads(merge(rule, document, calls, bodies)) == whole


@pytest.mark.parametrize(("name", "top"), [("rerank", None), ("rerank-top", 1)])
def test_vllm_rerank(name: str, top: int | None) -> None:
    capture, full = captures.load("vllm", name), captures.load("vllm", "rerank").json()
    rule, document, calls = asked("vllm", capture.path, capture.request)
    by_document = sorted(full["results"], key=lambda result: int(result["index"]))
    bodies = [
        dumped(full | {"id": "child", "results": [result | {"index": 0}], "usage": count})
        for result, count in zip(
            by_document,
            ({"prompt_tokens": 13, "total_tokens": 13}, {"prompt_tokens": 12, "total_tokens": 12}),
            strict=True,
        )
    ]
    merged = json.loads(merge(rule, document, calls, bodies))
    assert merged == capture.json() | {"id": "child"}
    assert len(merged["results"]) == (top or 2)


def test_sglang_rerank() -> None:
    capture = captures.load("sglang", "rerank")
    rule, document, calls = asked("sglang", capture.path, capture.request)
    by_document = sorted(capture.json(), key=lambda result: int(result["index"]))
    bodies = [dumped([result | {"index": 0}]) for result in by_document]
    assert json.loads(merge(rule, document, calls, bodies)) == capture.json()
    rule, document, calls = asked("sglang", capture.path, capture.request | {"top_n": 1})
    assert json.loads(merge(rule, document, calls, bodies)) == capture.json()[:1]


def test_equal_scores_stay_in_the_order_of_the_documents() -> None:
    rule, document, calls = asked("sglang", "/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]})
    bodies = [dumped([{"score": score, "index": 0}]) for score in (0.5, 0.75, 0.5)]
    assert [result["index"] for result in json.loads(merge(rule, document, calls, bodies))] == [1, 0, 2]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"choices":7}', b'{"error":"x"}', b'{"choices":[7]}'])
def test_a_body_of_another_shape_fails_the_request(body: bytes) -> None:
    rule, document, calls = asked("sglang", "/v1/chat/completions", {"messages": [], "n": 2})
    good = b'{"choices":[{"index":0}]}'
    with pytest.raises(UpstreamFault, match="cannot be joined"):
        merge(rule, document, calls, [good, body])


def test_a_merged_answer_is_observed_as_the_engines_own() -> None:
    capture = captures.load("sglang", "chat-n2")
    rule, document, calls = asked("sglang", capture.path, capture.request)
    bodies = [dumped(part) for part in parts("sglang", "chat-n2", "choices", [(18, 6), (18, 6)])]
    merged = observe(merge(rule, document, calls, bodies), "openai", "sample")
    assert merged == observe(capture.body, "openai", "sample")._replace(id=merged.id)


# Streams


def separated(engine: str, name: str) -> tuple[str, Document, list[Call], list[list[bytes]]]:
    """The streams that children would have given, as events, made of what an engine streamed for all."""
    capture = captures.load(engine, name)
    rule, document, calls = asked(engine, capture.path, capture.request)
    streams: list[list[bytes]] = [[] for _ in calls]
    for event in capture.events():
        if "meta_info" in event:
            streams[event.pop("index")].append(data(event))
        elif event["choices"]:
            child = event["choices"][0]["index"]
            event["choices"][0]["index"] = 0
            streams[child].append(data(event | {"id": f"cmpl-17:3:0.{child}!"}))
    asks = (capture.request.get("stream_options") or {}).get("include_usage")
    for child, stream in enumerate(streams):
        if asks:
            counts = usage(10 + calls[child].prompt, 1)
            stream.append(data({"id": f"cmpl-17:3:0.{child}!", "choices": [], "usage": counts}))
        stream.append(b"data: [DONE]\n\n")
    return rule, document, calls, streams


def data(event: Any) -> bytes:
    return b"data: " + dumped(event) + b"\n\n"


def joined(merger: StreamMerger, pieces: Iterable[tuple[int, bytes]], children: int) -> bytes:
    out = b"".join(merger.feed(child, piece) for child, piece in pieces)
    out += b"".join(merger.end(child) for child in range(children))
    return out + merger.finish()


def read(stream: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    return ["[DONE]" if event == b"[DONE]" else json.loads(event) for event in events]


STREAMS = [
    ("sglang", "chat-n2-stream"),
    ("sglang", "completions-list-stream"),
    ("sglang", "completions-list-n2-stream"),
    ("sglang", "native-n2-stream"),
    ("sglang", "native-list-stream"),
    ("vllm", "completions-list-stream"),
    ("vllm", "completions-list-n2-stream"),
]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("engine", "name"), STREAMS)
def test_streams_in_any_order_and_cut_anywhere(engine: str, name: str, seed: int) -> None:
    chance = Random(seed)
    rule, document, calls, streams = separated(engine, name)
    rest = [b"".join(stream) for stream in streams]
    pieces = []
    while any(rest):
        child = chance.choice([i for i, left in enumerate(rest) if left])
        size = chance.randint(1, 900)
        pieces.append((child, rest[child][:size]))
        rest[child] = rest[child][size:]
    check(engine, name, calls, joined(StreamMerger(rule, document, calls), pieces, len(calls)))


@pytest.mark.parametrize(("engine", "name"), STREAMS)
def test_streams_byte_by_byte(engine: str, name: str) -> None:
    rule, document, calls, streams = separated(engine, name)
    queues = [b"".join(stream) for stream in streams]
    longest = max(map(len, queues))
    pieces = [(i, queue[at : at + 1]) for at in range(longest) for i, queue in enumerate(queues) if at < len(queue)]
    check(engine, name, calls, joined(StreamMerger(rule, document, calls), pieces, len(calls)))


@pytest.mark.parametrize(("engine", "name"), STREAMS)
def test_streams_with_carriage_returns(engine: str, name: str) -> None:
    rule, document, calls, streams = separated(engine, name)
    pieces = [(i, b"".join(stream).replace(b"\n", b"\r\n")) for i, stream in enumerate(streams)]
    check(engine, name, calls, joined(StreamMerger(rule, document, calls), pieces, len(calls)))


def check(engine: str, name: str, calls: list[Call], merged: bytes) -> None:
    """The merged stream says of each choice what the engine's own stream said, in the same order."""
    capture = captures.load(engine, name)
    events = read(merged)
    assert events.pop() == "[DONE]"
    assert "[DONE]" not in events
    own = [event for event in capture.events() if event.get("choices") != []]
    if capture.request.get("stream_options"):
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(calls)
        assert last["usage"]["prompt_tokens"] == sum(10 + prompt for prompt in {call.prompt for call in calls})
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + len(calls)
        events.append({"id": last["id"]})
    ids = {event["id"] for event in events if "id" in event}
    assert ids <= {"cmpl-17:3:0.0!"}
    for sample in range(len(calls)):
        assert [bare(event) for event in events if at(event) == sample] == [
            bare(event) for event in own if at(event) == sample
        ]
    observer, original = Observer("openai", "sample", len(calls)), Observer("openai", "sample", len(calls))
    observer.feed(merged)
    original.feed(capture.body)
    assert observer.result().content == original.result().content
    assert observer.result().ended


def at(event: dict[str, Any]) -> int | None:
    index = event["choices"][0]["index"] if event.get("choices") else event.get("index")
    return index if isinstance(index, int) else None


def bare(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "id"}


def two(**request: Any) -> StreamMerger:
    rule, document, calls = asked("sglang", "/v1/chat/completions", {"messages": [], "n": 2} | request)
    return StreamMerger(rule, document, calls)


def chunk(text: str, identifier: str = "x") -> bytes:
    return data({"id": identifier, "choices": [{"index": 0, "delta": {"content": text}}]})


def test_a_character_cut_in_two_survives() -> None:
    merger = two()
    event = chunk("北京")
    cut = event.index("北".encode()) + 1
    assert merger.feed(1, event[:cut]) == b""
    assert merger.feed(0, chunk("a")) != b""
    assert "北京".encode() in merger.feed(1, event[cut:])


def test_only_index_and_id_are_the_gateways() -> None:
    event = b'data: { "id" : "b", "x":1e-7 ,"choices":[ {"logprob":-0.10, "index": 0} ]}\n\n'
    merger = two()
    assert merger.feed(0, chunk("a", "a")) == chunk("a", "a")
    assert merger.feed(1, event) == (b'data: { "id" : "a", "x":1e-7 ,"choices":[{"logprob":-0.10, "index": 1}]}\n\n')


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("chatcmpl-17:3:0.1!", "chatcmpl-17:3:0.0!"),
        ("17:3:0.1-2!", "17:3:0.0-2!"),
        ("chatcmpl-17:3:0.0!", "chatcmpl-17:3:0.0!"),
        ("whatever.7", "whatever.7"),
    ],
)
def test_one_id_whoever_speaks_first(first: str, expected: str) -> None:
    merger = two()
    out = merger.feed(1, chunk("b", first)) + merger.feed(0, chunk("a", "later"))
    assert [event["id"] for event in read(out)] == [expected] * 2


def test_an_error_passes_and_no_done_follows() -> None:
    merger = two()
    error = b'data: {"error":{"message":"died"}}\n\n'
    assert merger.feed(0, error + b"data: [DONE]\n\n") == error
    merger.feed(1, chunk("a") + b"data: [DONE]\n\n")
    assert merger.finish() == b""


def test_no_done_where_a_child_sent_none() -> None:
    merger = two()
    merger.feed(0, chunk("a") + b"data: [DONE]\n\n")
    merger.feed(1, chunk("a"))
    assert merger.end(1) == b""
    assert merger.finish() == b""


def test_comments_and_what_is_no_json_pass() -> None:
    merger = two()
    odd = b': keep-alive\n\ndata: {\n\ndata: [1]\n\ndata: {"choices":[7]}\n\ndata: {"choices":7}\n\n'
    assert merger.feed(1, odd) == odd


def test_other_events_without_choices_keep_their_place() -> None:
    merger = two()
    event = data({"id": "x", "choices": [], "usage": None, "sglext": {"a": 1}})
    assert read(merger.feed(0, event)) == [{"id": "x", "choices": [], "usage": None, "sglext": {"a": 1}}]
    assert b"usage" not in merger.finish()


def test_an_unfinished_event_is_none() -> None:
    merger = two()
    assert merger.feed(0, b'data: {"choices":') == b""
    assert merger.end(0) == b""
    assert merger.feed(0, chunk("a")) != b""


def test_an_endless_event_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.core.merge._EVENT_LIMIT", 1000)
    merger = two()
    with pytest.raises(UpstreamFault, match="more than 1000 bytes"):
        merger.feed(0, b"data: " + b"x" * 2000)


RULES = {handling.merge for name in names() for handling in load(name).ROUTES.values() if handling.merge}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_that_an_engine_names_is_there(rule: str) -> None:
    with pytest.raises(UpstreamFault):
        merge(rule, Document(b"{}"), [], [b"{"])
