"""Streams cut into events; what is read of them, however they are cut, is in `test_observer`."""

from __future__ import annotations

import tracemalloc

from gateway.core.sse import Splitter, payload


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
