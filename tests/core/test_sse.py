"""Streams cut into events; what is read of them, however they are cut, is in `test_observer`."""

from __future__ import annotations

import re
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.observer import Observer
from gateway.core.seen import Observed
from gateway.core.sse import Passing, Splitter, payload, payloads
from gateway.core.types import Api


def test_what_is_kept_of_a_long_event_is_bounded() -> None:
    splitter = Splitter(1000)
    piece = b"x" * 10_000
    tracemalloc.start()
    try:
        for _ in range(1000):
            assert splitter.feed(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert splitter.skipped == 1
    assert not splitter.empty
    assert splitter.feed(b"tail\n\nnext\n") == []
    assert splitter.feed(b"\n") == [b"next"]
    assert splitter.empty


def test_data_lines_are_joined() -> None:
    assert payload(b"event: x\nid: 7\ndata: {\ndata:}\r\n: comment") == b"{\n}"
    assert payload(b": keep-alive") == b""


@pytest.mark.parametrize(
    "before", ["", "id: 1\n", "retry: 10\r\n", "event: x\r", ": ping\n\n", "\ufeff", "\n\n", "\ufeffid:7\n"]
)
def test_a_kept_stream_is_known_by_how_it_begins(before: str) -> None:
    kept = before.encode() + b'data: {"a":1}\n\ndata: [DONE]'
    assert [data for data in payloads(kept) or () if data] == [b'{"a":1}', b"[DONE]"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b' {"data:": 1}', b"text", b"\xff"])
def test_what_is_no_stream_carries_no_events(body: bytes) -> None:
    assert payloads(body) is None


# --- what the standard says, as it says it: one character after the other


def read(stream: bytes) -> list[bytes]:
    """The data of each event that is not empty (html.spec.whatwg.org, 9.2.6)."""
    lines = re.sub(rb"\r\n?", b"\n", stream).split(b"\n")[:-1]
    found, data = [], list[bytes]()
    for line in lines:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return [each for each in found if each]


END = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINE = st.sampled_from(
    [
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}',
        b'data:{"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}',
        b'data: {"choices":[{"index":1,"delta":{"content":"c"}}],',
        b'data: "usage":{"total_tokens":3}}',
        b'data: {"error":{"message":"died"}}',
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}',
        b'data: {"type":"message_stop"}',
        b"data: [DONE]",
        b"data:  [DONE]",
        b"data",
        b"data:",
        b"event: message_delta",
        b"event:x",
        b"id: 7",
        b"retry: 10",
        b": keep-alive",
        b":",
    ]
)
EVENT = st.lists(st.tuples(LINE, END), min_size=1, max_size=3).flatmap(
    lambda lines: END.map(lambda end: b"".join(line + stop for line, stop in lines) + end)
)
CUTS = st.lists(st.integers(0, 1000), max_size=6)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(places)]


@given(events=st.lists(EVENT, max_size=6), cuts=CUTS)
def test_events_are_those_of_the_standard_however_lines_end_and_bytes_come(
    events: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(events)
    expected = read(stream)
    apis: tuple[Api, ...] = ("openai", "anthropic", "responses", "native")
    seen: list[list[Observed]] = []
    ways = (events, pieces(stream, cuts), [stream], [stream[at : at + 1] for at in range(len(stream))])
    for way in ways:
        splitter = Splitter(1 << 20)
        found = [payload(event) for chunk in way for event in splitter.feed(chunk)]
        assert [data for data in found if data] == expected
        seen.append([])
        for api in apis:
            observer = Observer(api, "sample")
            for chunk in way:
                observer.feed(chunk)
            seen[-1].append(observer.result()._replace(samples=()))
    plain = []
    for api in apis:
        observer = Observer(api, "sample")
        for data in expected:
            observer.feed(b"".join(b"data: %b\n" % line for line in data.split(b"\n")) + b"\n")
        plain.append(observer.result()._replace(samples=()))
    assert seen == [plain] * len(ways)


@given(events=st.lists(EVENT, max_size=6), cuts=CUTS, torn=st.integers(0, 200))
def test_what_passes_is_the_stream_and_ends_with_an_event(events: list[bytes], cuts: list[int], torn: int) -> None:
    stream = b"".join(events)
    stream = stream[: max(len(stream) - torn, 0)]
    passing = Passing(1 << 20)
    passed = b""
    for piece in pieces(stream, cuts):
        passed += passing.feed(piece)
        assert not passed or re.search(rb"(\r\n|\r|\n)(\r\n|\r|\n)\Z", passed)
    assert passed + passing.rest == stream
    if b"\r" not in stream:
        assert passed == stream[: stream.rfind(b"\n\n") + 2] or b"\n\n" not in stream


def test_an_event_too_long_to_be_kept_passes_as_it_comes() -> None:
    passing = Passing(10)
    assert (passing.feed(b"data: 1234"), passing.torn) == (b"", False)
    assert (passing.feed(b"5"), passing.torn) == (b"data: 12345", True)
    assert (passing.feed(b"6"), passing.torn) == (b"", True)
    assert (passing.feed(b"7\n\nda"), passing.torn, passing.rest) == (b"67\n\n", False, b"da")
    assert (passing.feed(b"ta: 123456789"), passing.torn) == (b"data: 123456789", True)
    assert (passing.feed(b"\n\n"), passing.torn) == (b"\n\n", False)
