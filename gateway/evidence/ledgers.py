"""Where recorded requests are: a file, a folder, a glob or a run's name, and what is kept beside them."""

from __future__ import annotations

import glob
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gateway.evidence.files import because
from gateway.ledger import about as kept
from gateway.ledger.requests import timed
from gateway.ledger.shapes import odd


class Unusable(Exception):
    """What was named holds no requests that could be looked at; the text says why and what to do."""


class Unsound(Unusable):
    """A record, or what is kept with the run, cannot be made out."""


class Place(NamedTuple):
    """Where a record begins: which file of its source, and which byte of that."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Source:
    """The records of one run."""

    name: str
    """As it was named by whoever asked."""
    files: tuple[Path, ...]
    """Oldest first."""
    about: dict[str, Any] = field(default_factory=dict)
    """What is kept with the run (`run.json`): empty where the files were moved away from it."""

    @property
    def deciding(self) -> dict[str, Any]:
        """The settings that the run began with, as far as they decide."""
        return dict(self.about.get("deciding") or {})

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def record(self, place: Place) -> dict[str, Any]:
        """The record that stands there."""
        with self.files[place.segment].open("rb") as segment:
            segment.seek(place.offset)
            found: dict[str, Any] = orjson.loads(segment.readline())
            return found


Line = tuple[dict[str, Any], tuple[int, int]]
"""A record, and its place."""


@dataclass(slots=True)
class Lines:
    """Every record of a source with its place; those of several gateways in the order of their times.

    `torn` counts, while reading, the lines that are no record. `judged` says what is wrong with a record: then
    `Unusable` is raised that names file and line.
    """

    source: Source
    judged: Callable[[dict[str, Any]], str | None] = odd
    torn: int = 0
    read: int = 0
    """Bytes read so far."""

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for record, (segment, offset) in self._in_order():
            yield segment, offset, record

    def _in_order(self) -> Iterable[Line]:
        files = self.source.files
        gateways = [gateway_of(file) for file in files] if len(files) > 1 else []
        by_writer: dict[str, list[Iterator[Line]]] = {}
        for number, file in enumerate(files):
            writer = (gateways[number] or file.name) if any(gateways) else ""
            by_writer.setdefault(writer, []).append(self._segment(number, file))
        each = [chain.from_iterable(segments) for segments in by_writer.values()]
        if len(each) == 1:
            return each[0]
        return ((record, place) for _, record, place in heapq.merge(*map(timed, each), key=itemgetter(0)))

    def _segment(self, number: int, file: Path) -> Iterator[Line]:
        offset = 0
        for at, line in enumerate(_lines(file), 1):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                self.torn += 1
            else:
                if type(record) is dict:
                    if (why := self.judged(record)) is not None:
                        raise Unsound(f"{file}, line {at}, is no sound record: {why}. Mend it, or leave the line out.")
                    yield record, (number, offset)
            offset += len(line)
            self.read += len(line)


def is_merged(record: dict[str, Any]) -> bool:
    """Whether it is a request as an export tells of it: one object, made of its records."""
    return "event" not in record and "identity" in record and "index" in record


def without_requests(source: Source, *, exported: bool) -> Unusable:
    """Why there is nothing to be done again. `exported`: there are merged requests."""
    if not exported:
        return Unusable(f"{source.name}: holds no request")
    return Unusable(
        f"{source.name}: is an export, which holds each request as one object and not what came when. The ledger's own "
        "files are needed: name the run, or its folder under ledger.path"
    )


def gateway_of(file: Path) -> str | None:
    """The gateway that wrote a segment, where it was one of several."""
    for line in _lines(file, 1 << 14):
        with suppress(orjson.JSONDecodeError):
            record = orjson.loads(line)
            if type(record) is dict and record.get("event") in ("gateway", "opened"):
                gateway = record.get("gateway")
                return gateway if isinstance(gateway, str) else None
    return None


def writer_of(file: Path) -> str:
    """Which process wrote a segment: its gateway's name, or the end of the file's, which is a process id."""
    return gateway_of(file) or file.stem.rpartition("-")[2]


def _lines(file: Path, at_once: int = 1 << 20) -> Iterator[bytes]:
    """Raises `Unusable` where they cannot be read."""
    try:
        with file.open("rb", buffering=at_once) as segment:
            yield from segment
    except OSError as error:
        raise Unusable(f"{file}: cannot be read: {because(error)}") from None


def find(name: str, ledger: Path) -> Source:
    """What is meant by `name`; `ledger` is where runs are looked for by their name. Raises `Unusable`."""
    path = Path(name)
    if path.is_file():
        return Source(name, (path,), about(path.parent))
    for folder in (path, ledger / name):
        if folder.is_dir():
            return _folder(name, folder)
    files = sorted(Path(found) for found in glob.glob(name, recursive=True) if os.path.isfile(found))
    files = [file for file in files if file.suffix == ".jsonl"] or files
    if not files:
        raise Unusable(f"{name}: no such file, folder or run (runs are looked for in {ledger})")
    if len({file.parent for file in files}) > 1:
        raise Unusable(f"{name}: files of several folders, each of which is a run: name one")
    return Source(name, tuple(files), about(files[0].parent))


def _folder(name: str, folder: Path) -> Source:
    try:
        os.listdir(folder)  # a glob takes what it cannot read for empty
    except OSError as error:
        raise Unusable(f"{folder}: cannot be read: {because(error)}") from None
    files = sorted(folder.glob("*.jsonl"))
    if files:
        return Source(name, tuple(files), about(folder))
    runs = sorted({file.parent for file in folder.glob("*/*.jsonl")})
    if not runs:
        raise Unusable(f"{name}: no *.jsonl in this folder, so no run was recorded here")
    if len(runs) > 1:
        raise Unusable(f"{name}: holds several runs, name one: {', '.join(str(run) for run in runs[:10])}")
    return _folder(name, runs[0])


def about(folder: Path) -> dict[str, Any]:
    """What is kept with the run of this folder; nothing where there is none. Raises `Unusable` where it cannot be."""
    file = folder / "run.json"
    try:
        told = kept.about(folder)
    except kept.Broken as broken:
        raise Unsound(f"{broken}. Put it back from a copy, or take it away: then it is not known.") from None
    if told is None:
        return {}
    match told.get("deciding") or {}:
        case {"seed": seed} if type(seed) is not int:
            raise Unsound(f"{file}: seed cannot be {seed!r:.100}")
        case {"pools": pools} if not _names(pools):
            raise Unsound(f"{file}: pools cannot be {pools!r:.100}")
        case dict():
            return told
        case other:
            raise Unsound(f"{file}: deciding cannot be {other!r:.100}")


def _names(pools: Any) -> bool:
    """Whether these are pools with the names of their replicas."""
    return isinstance(pools, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in pools.values()
    )
