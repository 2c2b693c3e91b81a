"""Whose trace a request belongs to: W3C's `traceparent` and `tracestate`. They are passed on and decide nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gateway.core.types import Headers

PARENT, STATE = b"traceparent", b"tracestate"

_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The span that a request comes from."""

    trace: int
    span: int
    flags: int


def parent(fields: Mapping[bytes, bytes]) -> Parent | None:
    """The span that a request names; None where it names none, or not as it should."""
    match = _PARENT.fullmatch(fields.get(PARENT, b""))
    if match is None or (match[1] == b"00" and match[5] is not None):
        return None
    return Parent(int(match[2], 16), int(match[3], 16), int(match[4], 16))


def state(headers: Headers) -> bytes:
    """What vendors say beside it: of several lines one."""
    return b",".join([value for name, value in headers if name == STATE and value])


def lines(traceparent: bytes, tracestate: bytes) -> bytes:
    """The header lines of both."""
    told = b"%b: %b\r\n" % (PARENT, traceparent)
    return told + b"%b: %b\r\n" % (STATE, tracestate) if tracestate else told


def passed(headers: Headers, fields: Mapping[bytes, bytes]) -> bytes:
    """The lines that go on as they came. A trace that is not named as it should be ends here, as W3C wants it."""
    if parent(fields) is None or sum(name == PARENT for name, _ in headers) > 1:
        return b""
    return lines(fields[PARENT], state(headers))
