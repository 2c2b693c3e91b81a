"""What was asked and answered, where the ledger keeps it (`ledger.bodies`)."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Self

import orjson

from gateway.evidence import prompts
from gateway.evidence.ledgers import Place, Source
from gateway.evidence.requests import Request

LINE = 1 << 16
"""Bytes of a record that are read at once."""


class Records:
    """Single records of a source, by their place."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: dict[int, int] = {}

    def at(self, place: Place) -> dict[str, Any]:
        """The record that begins there."""
        descriptor = self._open.get(place.segment)
        if descriptor is None:
            descriptor = self._open[place.segment] = os.open(self._source.files[place.segment], os.O_RDONLY)
        line = bytearray()
        while b"\n" not in line[-LINE:] and (piece := os.pread(descriptor, LINE, place.offset + len(line))):
            line += piece
        record: dict[str, Any] = orjson.loads(line.partition(b"\n")[0])
        return record

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


class Bodies:
    """The bodies of two runs."""

    def __init__(self, a: Source, b: Source) -> None:
        self._a, self._b = Records(a), Records(b)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._a.close()
        self._b.close()

    def same(self, a: Request, b: Request) -> bool | None:
        """Whether two requests ask the same; None where their bodies were not kept."""
        mine, theirs = asked(self._a.at(a.opened)), asked(self._b.at(b.opened))
        if mine is None or theirs is None:
            return None
        return prompts.same(mine, theirs, a.route or "")

    def spots(self, a: Request, b: Request) -> list[prompts.Spot]:
        """Where two requests ask something else; nothing where their bodies were not kept."""
        mine, theirs = asked(self._a.at(a.opened)), asked(self._b.at(b.opened))
        return [] if mine is None or theirs is None else prompts.spots(mine, theirs)

    def same_but_seeds(self, a: Request, b: Request) -> bool | None:
        """Whether nothing but seeds differs in what they ask; None where their bodies were not kept."""
        mine, theirs = asked(self._a.at(a.opened)), asked(self._b.at(b.opened))
        if mine is None or theirs is None:
            return None
        return all(prompts.SEED.fullmatch(spot.path) for spot in prompts.spots(mine, theirs, sys.maxsize))

    def answers(self, a: Request, b: Request) -> list[prompts.Spot]:
        """Where the answers of two requests first differ; nothing where they were not kept."""
        if a.closed is None or b.closed is None:
            return []
        mine, theirs = answered(self._a.at(a.closed)), answered(self._b.at(b.closed))
        return [] if mine is None or theirs is None else prompts.answers(mine, theirs)


def asked(record: dict[str, Any]) -> bytes | None:
    """A request's body, as its client sent it."""
    return _whole(record, "request")


def answered(record: dict[str, Any]) -> bytes | None:
    """An answer's body, as its client got it."""
    return _whole(record, "answer")


def _whole(record: dict[str, Any], name: str) -> bytes | None:
    """A body that was kept whole, byte by byte; None: it was not."""
    text = record.get(f"{name}_body")
    if not isinstance(text, str) or record.get(f"{name}_cut"):
        return None
    body = text.encode()
    return body if len(body) == record.get(f"{name}_bytes", len(body)) else None
