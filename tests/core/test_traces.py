"""Which trace headers are good, and what goes on."""

from __future__ import annotations

import pytest

from gateway.core import traces
from gateway.core.types import Headers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def passed(*headers: tuple[bytes, bytes]) -> bytes:
    given: Headers = list(headers)
    return traces.passed(given, dict(given))


def test_a_good_parent_is_read() -> None:
    assert traces.parent({b"traceparent": GOOD.encode()}) == (int(TRACE, 16), int(SPAN, 16), 1)


@pytest.mark.parametrize("later", [f"01-{TRACE}-{SPAN}-00-more", f"cc-{TRACE}-{SPAN}-00"])
def test_versions_to_come_are_read_as_far_as_they_are_known(later: str) -> None:
    assert traces.parent({b"traceparent": later.encode()}) == (int(TRACE, 16), int(SPAN, 16), 0)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"{GOOD}, {GOOD}",
    ],
)
def test_one_that_is_not_as_it_should_be_ends_here_and_its_state_with_it(bad: str) -> None:
    assert traces.parent({b"traceparent": bad.encode()}) is None
    assert passed((b"traceparent", bad.encode()), (b"tracestate", b"a=1")) == b""


def test_what_is_good_goes_on_as_it_came_and_lines_of_state_become_one() -> None:
    parent = (b"traceparent", GOOD.encode())
    assert passed(parent) == b"traceparent: %b\r\n" % GOOD.encode()
    told = passed((b"tracestate", b"a=1"), parent, (b"x", b"y"), (b"tracestate", b"b=2"))
    assert told == b"traceparent: %b\r\ntracestate: a=1,b=2\r\n" % GOOD.encode()


def test_two_parents_are_none() -> None:
    assert passed((b"traceparent", GOOD.encode()), (b"traceparent", GOOD.encode())) == b""
