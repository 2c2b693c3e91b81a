"""Answers with what is read from them; every stream also byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.observer import NoAnswer, Observer, observe, scored
from gateway.core.seen import Observed
from gateway.core.sse import EVENT_LIMIT
from gateway.core.types import Api, Kind
from tests import captures

APIS: tuple[Api, ...] = ("openai", "anthropic", "responses", "native")
KINDS: tuple[Kind, ...] = ("sample", "score")


def api_of(path: str) -> Api:
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/v1/responses"):
        return "responses"
    return "openai" if path.startswith("/v1/") else "native"


def watched(chunks: Iterable[bytes], api: Api = "openai", choices: int = 1) -> Observed:
    observer = Observer(api, "sample", choices)
    for chunk in chunks:
        observer.feed(chunk)
    return observer.result()


def single(data: bytes) -> Iterator[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


def events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event.strip()]


def every_way(body: bytes, api: Api = "openai", choices: int = 1) -> Observed:
    """What is seen of a stream, having made sure that it is the same however it was cut."""
    seen = watched([body], api, choices)
    assert watched(single(body), api, choices) == seen
    assert watched(events(body), api, choices) == seen
    carried = body.replace(b"\n", b"\r\n")
    assert watched([carried], api, choices) == seen
    assert watched(single(carried), api, choices) == seen
    return seen


STREAMS = [
    (engine, name)
    for engine in ("vllm", "sglang")
    for name in captures.names(engine)
    if captures.load(engine, name).streamed
]


@pytest.mark.parametrize(("engine", "name"), STREAMS)
def test_real_streams_however_they_are_cut(engine: str, name: str) -> None:
    capture = captures.load(engine, name)
    seen = every_way(capture.body, api_of(capture.path))
    assert seen.done
    assert seen.ended == (seen.error is None)
    assert seen.ended == (len(seen.finish_reasons) > 0)
    assert seen.error is not None or seen.content is not None


PAIRS = [
    ("vllm", "chat", "chat-stream"),
    ("vllm", "chat", "chat-stream-usage"),
    ("vllm", "chat-logprobs", "chat-logprobs-stream"),
    ("vllm", "chat-n2", "chat-n2-stream"),
    ("vllm", "completions", "completions-stream"),
    ("vllm", "completions-list-n2", "completions-list-n2-stream"),
    ("vllm", "native", "native-stream"),
    ("sglang", "chat", "chat-stream"),
    ("sglang", "chat-n2", "chat-n2-stream"),
    ("sglang", "completions-list", "completions-list-stream"),
    ("sglang", "messages", "messages-stream"),
    ("sglang", "native", "native-stream"),
    ("sglang", "native-n2", "native-n2-stream"),
    ("sglang", "native-list", "native-list-stream"),
]


@pytest.mark.parametrize(("engine", "whole", "stream"), PAIRS)
def test_a_real_stream_and_the_same_answer_whole_have_one_content(engine: str, whole: str, stream: str) -> None:
    answer, streamed = captures.load(engine, whole), captures.load(engine, stream)
    first = observe(answer.body, api_of(answer.path), "sample")
    second = watched([streamed.body], api_of(streamed.path))
    assert first.content == second.content
    assert first.finish_reasons == second.finish_reasons
    assert first.ended
    assert second.ended


def test_different_answers_have_different_contents() -> None:
    names = ["chat", "chat-stop", "chat-seed-minus-one", "chat-n2", "completions", "chat-tools", "native"]
    contents = {observe(captures.load("vllm", name).body, "openai", "sample").content for name in names}
    assert len(contents) == len(names)


def test_ids_times_and_logprobs_are_no_content() -> None:
    plain, logged = (captures.load("vllm", name).body for name in ("chat", "chat-logprobs"))
    assert plain != logged
    assert observe(plain, "openai", "sample").content == observe(logged, "openai", "sample").content


def chunk(index: int = 0, finish: str | None = None, **delta: object) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_stream_without_a_finish_reason_has_not_ended() -> None:
    seen = every_way(chunk(content="a") + DONE)
    assert seen.done
    assert not seen.ended


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    seen = every_way(chunk(content="a") + chunk(finish="stop"))
    assert not seen.done
    assert seen.ended
    assert seen.finish_reasons == ("stop",)


def test_all_choices_must_finish() -> None:
    half = chunk(0, content="a") + chunk(1, content="b") + chunk(0, finish="stop")
    assert not every_way(half, choices=2).ended
    assert not every_way(half, choices=1).ended
    assert every_way(half + chunk(1, finish="length"), choices=2).finish_reasons == ("stop", "length")
    assert not every_way(chunk(0, finish="stop"), choices=2).ended


LONG = "x" * 2 * EVENT_LIMIT


def final(api: Api, text: str) -> bytes:
    """The last event of a stream, which holds a text or a part of one as JSON."""
    events = {
        "openai": '{"choices":[{"index":0,"delta":{"content":@},"finish_reason":"stop"}]}',
        "native": '{"text":@,"output_ids":[1],"meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":1}}',
        "responses": '{"type":"response.completed","response":{"status":"stop","output":[{"content":@}]}}',
        "anthropic": '{"type":"message","content":[{"type":"text","text":@}],"stop_reason":"stop"}',
    }
    return f"data: {events[api].replace('@', text)}\n\n".encode()


def in_pieces(data: bytes, api: Api) -> Observer:
    observer = Observer(api, "sample")
    for start in range(0, len(data), 65536):
        observer.feed(data[start : start + 65536])
    return observer


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("text", [f'"{LONG}"', '"\\ud83d"', "[NaN]", "[-Infinity]", "[1e999]"])
def test_a_stream_that_came_to_its_end_in_what_could_not_be_read_has_ended(api: Api, text: str) -> None:
    observer = in_pieces(final(api, text), api)
    assert observer.result().content is None
    seen = observer.result(over=True)
    assert seen.ended
    assert seen.content is None
    assert seen.finish_reasons == (() if LONG in text else ("stop",))


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"content": [{"type": "text", "text": "x"}]}, "finish_reason": "stop"},
        {"index": None, "delta": {"content": "x"}, "finish_reason": "stop"},
        {"index": "0", "delta": {"content": "x"}, "finish_reason": "stop"},
        {"index": 0, "delta": {"content": None, "tool_calls": [None]}, "finish_reason": "stop"},
        {"index": 0, "delta": {"content": 7}, "finish_reason": "stop"},
        {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop", "weight_versions": [7]},
    ],
)
def test_a_choice_of_another_shape_hides_no_end(choice: dict[str, object]) -> None:
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    seen = in_pieces(chunk(content="a") + event + DONE, "openai").result(over=True)
    assert seen.ended
    assert seen.content is None
    assert seen.finish_reasons == (("stop",) if choice["index"] == 0 else ())
    whole = {"choices": [choice | {"message": choice["delta"]}]}
    assert observe(json.dumps(whole).encode(), "openai", "sample").ended


@pytest.mark.parametrize("api", APIS)
def test_a_stream_that_could_be_read_and_said_nothing_of_its_end_has_not_ended(api: Api) -> None:
    said = chunk(content="a") if api == "openai" else b'data: {"type":"ping"}\n\n'
    for body in (b"", said, said + DONE, said + b'data: {"cho', said + b"data: " + LONG.encode()):
        assert not in_pieces(body, api).result(over=True).ended


def test_an_error_is_seen_whatever_else_is_in_its_event() -> None:
    deep = "[" * 300 + "]" * 300
    for error in ('{"message":"died \\ud83d"}', '{"message":"died","at":NaN}', deep):
        observer = in_pieces(b'data: {"error":' + error.encode() + b"}\n\n", "openai")
        seen = observer.result(over=True)
        assert seen.error
        assert not seen.ended


COUNTS: st.SearchStrategy[object] = st.sampled_from([None, "2", [1], {}, True, -1, 0, 4.5, 2**63])


@given(count=COUNTS, prompt=COUNTS)
def test_counts_that_are_none_break_nothing(count: object, prompt: object) -> None:
    usage = {"completion_tokens": count, "prompt_tokens": prompt}
    choices = [{"index": i, "message": {"content": f"a{i}"}, "finish_reason": "stop"} for i in range(2)]
    seen = observe(json.dumps({"choices": choices, "usage": usage}).encode(), "openai", "sample")
    assert seen.content is not None
    assert len(seen.samples) == 2
    answers = [{"text": f"a{i}", "meta_info": {"finish_reason": {"type": "stop"}} | usage} for i in range(2)]
    assert observe(json.dumps(answers).encode(), "native", "sample").ended


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("openai", b'data: {"error": {"message": "died", "code": 500}}\n\ndata: [DONE]\n\n'),
        ("openai", b'data: {"error": "died"}\n\n'),
        ("native", b'data: {"error": {"message": "died"}}\n\ndata: [DONE]\n\n'),
        ("anthropic", b'event: error\ndata: {"type":"error","error":{"type":"x","message":"died"}}\n\n'),
        ("responses", b'event: error\ndata: {"type":"error","message":"died","sequence_number":3}\n\n'),
        (
            "responses",
            b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed",'
            b'"error":{"code":"server_error","message":"died"},"output":[]}}\n\n',
        ),
    ],
)  # fmt: skip
def test_error_events(api: Api, body: bytes) -> None:
    before = chunk(content="a", finish="stop") if api in ("openai", "native") else b""
    seen = every_way(before + body, api)
    assert seen.error == "died"
    assert not seen.ended


def test_a_messages_stream_ends_with_its_stop_event() -> None:
    capture = captures.load("vllm", "messages-stream")
    head, stop = capture.body.split(b"event: message_stop")
    assert not every_way(head, "anthropic").ended
    assert every_way(head + b"event: message_stop" + stop, "anthropic").ended


def test_the_next_number_of_a_responses_stream() -> None:
    capture = captures.load("vllm", "responses-stream")
    observer = Observer("responses", "sample")
    assert observer.sequence == 0
    observer.feed(capture.body)
    assert observer.sequence == len(capture.events())


def test_aborts_are_seen_on_every_route() -> None:
    assert every_way(chunk(content="par", finish="abort") + DONE).aborted
    native = b'{"text":"par","output_ids":[1],"meta_info":{"finish_reason":{"type":"abort","message":"x"}}}'
    assert every_way(b"data: " + native + b"\n\n", "native").aborted
    assert observe(native, "native", "sample").aborted
    assert observe(b"[" + native + b"]", "native", "sample").aborted
    whole = b'{"choices":[{"index":0,"message":{"content":"par"},"finish_reason":"abort"}]}'
    assert observe(whole, "openai", "sample").aborted
    assert not every_way(chunk(content="a", finish="stop")).aborted


def test_the_final_usage_counts_though_it_is_cut_in_half() -> None:
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
    assert every_way(chunk(content="a", finish="stop") + usage + DONE).usage == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
    }


def test_usage_of_messages_is_gathered() -> None:
    assert every_way(captures.load("sglang", "messages-stream").body, "anthropic").usage == {
        "input_tokens": 18,
        "output_tokens": 6,
    }


def test_a_servers_stream_of_what_is_new_is_the_same_answer() -> None:
    def event(text: str, ids: list[int], count: int, reason: str | None = None) -> bytes:
        meta = {"completion_tokens": count, "finish_reason": reason and {"type": reason}}
        return b"data: " + json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    so_far = event("a", [1], 1) + event("ab", [1, 2], 2) + event("abb", [1, 2, 2], 3, "stop")
    new = event("a", [1], 1) + event("b", [2], 2) + event("b", [2], 3, "stop")
    assert every_way(so_far, "native").content == every_way(new, "native").content


def test_tool_calls_are_content_and_their_ids_are_not() -> None:
    def answer(identifier: str, arguments: str) -> bytes:
        call = {"id": identifier, "type": "function", "function": {"name": "f", "arguments": arguments}}
        choice = {
            "index": 0,
            "message": {"content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }
        return json.dumps({"choices": [choice]}).encode()

    stream = (
        chunk(role="assistant", content=None)
        + chunk(tool_calls=[{"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}])
        + chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}])
        + chunk(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}])
        + chunk(finish="tool_calls")
    )
    first = observe(answer("a", '{"a":1}'), "openai", "sample").content
    assert first == observe(answer("b", '{"a":1}'), "openai", "sample").content
    assert first != observe(answer("a", '{"a":2}'), "openai", "sample").content
    assert first == every_way(stream).content


def test_interleaved_tool_calls_are_kept_apart() -> None:
    def called(index: int, arguments: str) -> bytes:
        return chunk(tool_calls=[{"index": index, "function": {"arguments": arguments}}])

    end = chunk(finish="tool_calls")
    one = every_way(called(0, "a") + called(1, "x") + called(0, "b") + called(1, "y") + end).content
    assert one == every_way(called(0, "ab") + called(1, "xy") + end).content
    assert one != every_way(called(0, "ay") + called(1, "xb") + end).content


def test_the_finish_reason_and_the_place_of_a_choice_are_content() -> None:
    pieces = (
        chunk(content="a", finish="stop"),
        chunk(content="a", finish="length"),
        chunk(1, content="a", finish="stop"),
    )
    assert len({every_way(piece).content for piece in pieces}) == 3


def test_ids_of_responses_are_no_content() -> None:
    body = captures.load("vllm", "responses").body
    seen = observe(body, "responses", "sample").content
    assert seen is not None
    assert observe(body.replace(b'"msg_', b'"other_'), "responses", "sample").content == seen
    assert observe(body.replace(b"resp_", b"resp_other"), "responses", "sample").content == seen
    assert observe(body.replace(b" curard", b" card"), "responses", "sample").content != seen


def test_a_field_is_not_taken_for_another() -> None:
    end = chunk(finish="stop")
    contents = {
        every_way(piece + end).content
        for piece in (
            chunk(content="a"),
            chunk(reasoning="a"),
            chunk(1, content="a") + chunk(1, finish="stop"),
        )
    }
    assert len(contents) == 3


@pytest.mark.parametrize("name", ["classify-list", "pooling", "score", "rerank", "embeddings-base64"])
def test_scores_are_content_to_the_last_digit(name: str) -> None:
    body = captures.load("vllm", name).body
    seen = observe(body, "native", "score")
    assert seen.content is not None
    assert seen.usage is not None
    assert observe(body.replace(b'"id":"', b'"id":"other'), "native", "score").content == seen.content
    value = json.loads(body)
    value["created"] = 1
    assert observe(json.dumps(value).encode(), "native", "score").content == seen.content


def test_the_last_bit_of_a_score_counts() -> None:
    body = captures.load("sglang", "classify-list").body
    seen = observe(body, "native", "score").content
    value = json.loads(body)
    value[0]["meta_info"]["e2e_latency"] = 9.5
    assert observe(json.dumps(value).encode(), "native", "score").content == seen
    value[0]["embedding"][0] += 2**-40
    assert observe(json.dumps(value).encode(), "native", "score").content != seen


def test_an_answer_that_is_no_json() -> None:
    assert scored(b"\x00\x01").content != scored(b"\x00\x02").content
    for body in (b"", b"<html>", b"\x00\x01"):
        for kind in KINDS:
            with pytest.raises(NoAnswer):
                observe(body, "openai", kind)
    assert observe(b'{"tokens":[1]}', "native", "plain") == Observed(done=True, ended=True)


SHAPES: list[tuple[Api, Kind, bytes]] = [
    ("openai", "sample", b'{"choices":[{"text":"a"}]}'),
    ("anthropic", "sample", b'{"type":"message","content":[]}'),
    ("responses", "sample", b'{"output":[]}'),
    ("native", "sample", b'{"meta_info":{}}'),
    ("native", "sample", b'[{"meta_info":{}},{"meta_info":{}}]'),
    ("native", "sample", b'{"choices":[{"token_ids":[1]}]}'),
    ("native", "score", b'{"embedding":[1]}'),
    ("native", "score", b'[{"embedding":[1]}]'),
    ("openai", "score", b'{"data":[]}'),
    ("openai", "score", b'{"scores":[1]}'),
    ("openai", "score", b'[{"score":1}]'),
    ("native", "score", b'{"results":[{"relevance_score":NaN}]}'),
]


@pytest.mark.parametrize(("api", "kind", "body"), SHAPES)
def test_what_is_an_answer(api: Api, kind: Kind, body: bytes) -> None:
    assert observe(body, api, kind).done
    for other in (b"[" + body + b",null]", body.replace(b"[", b'["\xff",'), body.replace(b":", b'":null,"x":', 1)):
        if other != body:
            with pytest.raises(NoAnswer):
                observe(other, api, kind)


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b"{}", b"7", b'"a"', b'{"status":"ok"}', b'{"choices":null}', b'{"choices":[]}']
)
@pytest.mark.parametrize("kind", ["sample", "score"])
@pytest.mark.parametrize("api", APIS)
def test_json_that_is_no_answer(api: Api, kind: Kind, body: bytes) -> None:
    with pytest.raises(NoAnswer):
        observe(body, api, kind)


def test_weight_versions() -> None:
    assert observe(captures.load("sglang", "chat").body, "openai", "sample").weight_version == "default"
    assert observe(captures.load("vllm", "native").body, "native", "sample").weight_version == "default"
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 5}]
    body = {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}, "weight_versions": spans}}
    assert observe(json.dumps(body).encode(), "native", "sample").weight_version == "7,8"


def test_an_event_that_grows_too_long_is_passed_over_and_said() -> None:
    big = chunk(content="x" * 2 * EVENT_LIMIT)
    observer = Observer("openai", "sample")
    for start in range(0, len(big), 65536):
        observer.feed(big[start : start + 65536])
    observer.feed(chunk(finish="stop") + DONE)
    seen = observer.result()
    assert seen.content is None
    assert seen.ended
    assert seen.done


@pytest.mark.parametrize("garbage", [b"data: {\n\n", b"data: 7\n\n", b'data: {"choices":7}\n\n', b"data: [1]\n\n"])
def test_what_cannot_be_read_is_said(garbage: bytes) -> None:
    seen = every_way(garbage + chunk(content="a", finish="stop"))
    assert seen.content is None
    assert seen.ended


def test_comments_are_passed_over() -> None:
    plain = chunk(content="a", finish="stop")
    assert every_way(b": keep-alive\n\n" + plain) == every_way(plain)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(pieces=st.lists(TEXT, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_cuts_of_text_and_bytes_are_no_content(pieces: list[str], cuts: list[int]) -> None:
    body = b"".join(chunk(content=piece) for piece in pieces) + chunk(finish="stop") + DONE
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    seen = watched(body[a:b] for a, b in pairwise(places))
    whole = {"choices": [{"index": 0, "message": {"content": "".join(pieces)}, "finish_reason": "stop"}]}
    assert seen.content == observe(json.dumps(whole).encode(), "openai", "sample").content


@given(data=st.binary(max_size=60))
def test_nothing_raises(data: bytes) -> None:
    watched([b"data: " + data + b"\n\n", data])
    watched(single(data), "anthropic")
    for api in APIS:
        with suppress(NoAnswer):
            observe(data, api, "sample")


NAMES = ["choices", "delta", "index", "meta_info", "error", "type", "message", "usage", "content", "response"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["error", "message", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=10,
)


@given(value=JSON, api=st.sampled_from(["openai", "anthropic", "responses", "native"]))
def test_no_json_raises(value: object, api: Api) -> None:
    body = json.dumps(value).encode()
    watched([b"data: " + body + b"\n\n"], api)
    for kind in ("sample", "score"):
        with suppress(NoAnswer):
            observe(body, api, kind)


BITS = st.sampled_from([None, "", "a", "ü", 0, 1, [], {}, ["x"], {"a": 1}, [{"version": 7}], "abort"])
MESSAGES = st.fixed_dictionaries({}, optional={"role": BITS, "content": BITS, "reasoning": BITS, "tool_calls": BITS})
CHOICES = st.fixed_dictionaries(
    {"index": st.just(0) | BITS, "finish_reason": st.just("stop") | BITS},
    optional={"message": MESSAGES | BITS, "text": BITS, "weight_versions": BITS},
)
ANSWERS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, min_size=1, max_size=2), "usage": st.just({"total_tokens": 1}) | BITS},
    optional={"metadata": BITS, "error": BITS},
)


@given(ANSWERS)
@example({"choices": [{"index": 0, "finish_reason": "stop", "text": "a"}], "usage": {}})
def test_an_answer_of_one_text_is_read_as_any_other_is(answer: dict[str, object]) -> None:
    body = json.dumps(answer).encode()
    assert observe(body, "openai", "sample") == Observer("openai", "sample").whole(json.loads(body))


def test_versions_of_weights_are_told_each_once_in_order_over_all_answers_of_a_call() -> None:
    def said(version: str) -> dict[str, object]:
        meta = {"id": "x", "finish_reason": {"type": "stop"}, "weight_version": version}
        return {"text": "hi", "meta_info": meta}

    for versions, expected in ((["1", "2", "1"], "1,2"), (["7", "7"], "7")):
        body = json.dumps([said(version) for version in versions]).encode()
        assert observe(body, "native", "sample").weight_version == expected
        stream = Observer("native", "sample", len(versions))
        for index, version in enumerate(versions):
            stream.feed(f"data: {json.dumps({**said(version), 'index': index})}\n\n".encode())
        assert stream.result().weight_version == expected
