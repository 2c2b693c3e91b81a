"""Server-sent events: a stream cut into events, and what each carries.

A line ends with LF, CRLF or CR, and an event with an empty line, as the standard has it: SDKs read each of them.
"""

from __future__ import annotations

import re

EVENT_LIMIT = 1 << 20
"""Bytes of one event that are kept until it is whole; of a longer one nothing is read."""

_BLANK = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


class Splitter:
    """Cuts a byte stream into events at blank lines, across any chunk borders.

    Bytes after the last blank line are kept for the next chunk, up to `limit`; an event that grows beyond
    it is passed over and counted in `skipped`."""

    __slots__ = ("_limit", "_partial", "_returned", "_searched", "empty", "skipped", "skipping")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._searched = 0
        self._returned = False
        """The last event ended with a CR, to which a LF that comes next belongs."""
        self.skipping = False
        """It is in an event that is passed over."""
        self.empty = True
        """Nothing is kept: the next chunk begins an event."""
        self.skipped = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes, without the blank line that ends each."""
        if self._returned and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._returned = False
        partial = self._partial
        partial += chunk
        events = []
        start = 0
        at = max(self._searched - 2, 0)
        while (found := _blank(partial, at)) is not None:
            stop, at = found
            if not self.skipping:
                events.append(bytes(partial[start:stop]))
            self.skipping = False
            start = at
        self._returned = self._returned or (0 < start == len(partial) and partial.endswith(b"\r"))
        del partial[:start]
        if len(partial) > self._limit:
            self.skipped += not self.skipping
            self.skipping = True
            del partial[:-3]
        self._searched = len(partial)
        self.empty = not partial and not self._returned
        return events


class Passing:
    """Lets a stream pass event by event, as it is: where it breaks off, it breaks off between two events.

    A client that met half an event could not read what is said of the break after it. Of an event longer than
    `limit` the pieces pass as they come."""

    __slots__ = ("_limit", "_rest", "torn")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self.torn = False
        """What has passed ends within an event."""

    @property
    def rest(self) -> bytes:
        """The beginning of an event that has not passed."""
        return bytes(self._rest)

    def feed(self, chunk: bytes) -> bytes:
        """What may pass now."""
        rest = self._rest
        if not rest and chunk.endswith(b"\n\n"):
            self.torn = False
            return chunk
        new = max(len(rest) - 2, 0)
        rest += chunk
        end = max([found + len(blank) for blank in _ENDS if (found := rest.rfind(blank, new)) >= 0], default=0)
        if end:
            self.torn = False
        if len(rest) - end > self._limit:
            self.torn = True
            end = len(rest)
        passes = bytes(rest[:end])
        del rest[:end]
        return passes


_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")


def _blank(data: bytearray, at: int) -> tuple[int, int] | None:
    """Where the next event ends and the one after it begins."""
    if data.find(b"\r", at) < 0:
        plain = data.find(b"\n\n", at)
        return (plain, plain + 2) if plain >= 0 else None
    match = _BLANK.search(data, at)
    return None if match is None else match.span()


def payload(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for comments such as keep-alives."""
    start = event.find(b"\n") + 1 if event.startswith(b"event: ") else 0
    if event.startswith(b"data: ", start) and event.find(b"\n", start) < 0 and event.find(b"\r") < 0:
        return event[start + 6 :]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


_BEGINNINGS = (b"data:", b"event:", b"id:", b"retry:", b":")


def payloads(stream: bytes) -> list[bytes] | None:
    """What each event of a stream carries that was kept; None where it is no stream. A torn last one counts too."""
    stream = stream.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    if not stream.startswith(_BEGINNINGS):
        return None
    return [payload(event) for event in Splitter(len(stream) + 4).feed(stream + b"\n\n")]
