"""What a gateway did in a run, for a store that may have forgotten it: from its memory, or from the ledger."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import structlog

from gateway.core.indexing import MANY, NONE
from gateway.ledger.about import Broken, about, read
from gateway.ledger.shapes import Unreadable, unsound, wrong
from gateway.shared.part import Deed, Memory, Telling, Terms

log = structlog.get_logger("detgate.store")

MEMORY = "store.json"

GATEWAYS = "gateways.txt"
"""All that were known to take part, those of other folders too: a line each."""

KINDS = {"arrival": "a", "content": "c", "client": "n"}
"""Orders as the scripts write them."""


def session_name(session: str) -> bytes:
    """What the store calls a session."""
    return blake2b(session.encode(), digest_size=16).digest()


def scope_name(session: str, identity: str) -> bytes:
    """What the store calls a counter."""
    return blake2b(f"{session}\0{identity}".encode(), digest_size=16).digest()


@dataclass(slots=True)
class Fate:
    """What became of one index, as far as one gateway knows."""

    session: str
    identity: str
    index: int
    order: str = ""
    raw: bytes = b""
    content: str = ""
    key: str = ""
    repeat: int = -1
    many: bool = False
    """Its claims were not all of one request and its retries."""
    raced: bool = False
    used: bool = False
    twice: bool = False
    """Another request was found to have it too."""
    tokens: list[str] = field(default_factory=list)
    """Live claims, each with `o`, or `e` where its answer has ended."""
    open: dict[str | None, int] = field(default_factory=dict)
    """Gateway → its claims that the ledger does not tell the end of."""

    def claimed(self, order: str, raw: bytes, content: str | None, key: str | None, repeat: int) -> None:
        """One more claim, in their order."""
        self.order, self.raw = order, raw
        self.content, self.key = content or self.content, key or self.key
        self.many |= repeat <= self.repeat
        self.repeat = max(self.repeat, repeat)

    def deed(self) -> Deed:
        stands = "x" if self.twice else "m" if self.used and self.many else "u" if self.used else "r"
        return (
            scope_name(self.session, self.identity),
            session_name(self.session),
            KINDS[self.order],
            self.raw,
            self.index,
            self.content,
            self.key,
            max(self.repeat, 0),
            int(self.raced),
            stands,
            orjson.dumps((self.session, self.identity)),
            ",".join(self.tokens),
        )


def wait(session: str, identity: str, raw: bytes, asked: int, repeat: int) -> Deed:
    """What one has to tell that waited for a rival in vain: what was known of its bytes (`core.indexing.Asked`)."""
    about = orjson.dumps((session, identity))
    return (scope_name(session, identity), session_name(session), "", raw, asked, "", "", repeat, 0, "w", about, "")


Live = dict[tuple[str, str, int], list[str]]
"""Claims that are live here, by session, identity and index."""


def told(folder: Path, gateway: str, live: Live) -> Telling:
    """What the ledger in a run's folder tells of this gateway, and of others that can tell no more.

    Raises `Unreadable`.
    """
    fates: dict[tuple[str, str, int], Fate] = {}
    waits: dict[tuple[str, str, str], tuple[int, int]] = {}
    """Session, identity and bytes → what was known of these when one of them had waited in vain, the last time."""
    gateways: set[str] = set()
    for owner, record in _records(folder):
        if record["event"] == "gateway":
            if isinstance(record.get("gateway"), str):
                gateways.add(record["gateway"])
            continue
        if record["event"] == "waited":
            what = (record["session"], record["identity"], record["digest"])
            asked, repeat = waits.get(what, (NONE, 0))
            # What one that waits was told first may be written down last.
            asked = asked if asked == MANY or record["asked"] < MANY <= asked else record["asked"]
            waits[what] = asked, max(repeat, record["repeat"])
            continue
        place = (record["session"], record["identity"], record["index"])
        fate = fates.get(place) or fates.setdefault(place, Fate(*place))
        if record["event"] in ("opened", "given_back"):
            whose, repeat = record.get("gateway"), record["repeat"]
            before = waits.get((record["session"], record["identity"], record["digest"]))
            fate.many |= before is not None and repeat <= before[1]
            fate.claimed(record["order"], bytes.fromhex(record["digest"]), record["content"], record["key"], repeat)
            fate.raced |= "racing" in record["flags"]
            if record["event"] == "opened":
                fate.open[whose] = fate.open.get(whose, 0) + 1
            if whose is not None:
                gateways.add(whose)
        elif record["event"] == "complete":
            fate.used = True
        elif record["event"] == "fenced":
            fate.twice = True
        else:
            whose = record.get("gateway", owner)
            if fate.open.get(whose):
                fate.open[whose] -= 1
            fate.used |= record["used"]
            fate.raced |= bool(record.get("racing"))
    alive = living(folder) - {gateway}
    for place, tokens in live.items():
        if place in fates:
            fates[place].tokens = tokens
    deeds = (
        fate.deed()
        for fate in fates.values()
        if fate.order and (fate.tokens or not any(count and whose in alive for whose, count in fate.open.items()))
    )
    vain = (wait(session, identity, bytes.fromhex(raw), *asked) for (session, identity, raw), asked in waits.items())
    return Telling(chain(deeds, vain), sorted(gateways - alive - {gateway}))


_TOLD = ("gateway", "opened", "given_back", "waited", "complete", "closed", "fenced")


def _records(folder: Path) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """All that there is to tell, and which gateway wrote it. What another process is just writing is passed over."""
    for file in sorted(folder.glob("*.jsonl")):
        owner = None
        with file.open("rb") as segment:
            for number, line in enumerate(segment, 1):
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(record, dict) and record.get("event") in _TOLD:
                    if (why := wrong(record)) is not None:
                        raise unsound(f"{file}, line {number}", why)
                    if record["event"] == "opened":
                        owner = record.get("gateway")
                    yield owner, record


# --- what was known of the store's memory when this run was last served from here


@contextmanager
def _sound() -> Iterator[None]:
    """A file that is broken keeps its run from being served: what it told nobody else knows."""
    try:
        yield
    except Broken as broken:
        raise Unreadable(
            f"{broken}. It says what was known of the store when the run was last served from this folder. Put it back "
            "from a copy, or begin another run; if it is removed, what the store has forgotten may not be noticed."
        ) from None


def recall(folder: Path) -> Memory:
    """What a process that served the run from this folder knew; nothing if there was none. Raises `Unreadable`."""
    with _sound():
        match read(folder / MEMORY):
            case None:
                return Memory()
            case [int(epoch), str(name)] if type(epoch) is int and epoch >= -1:
                return Memory(epoch, name)
        raise Broken(folder / MEMORY, "it is no epoch and its name")


def terms(folder: Path, ours: Terms) -> Terms:
    """`ours`, with the settings by which the server knows the run, where a reload has brought other names since.

    Raises `Unreadable`.
    """
    with _sound():
        told = about(folder) or {}
    began = told.get("deciding") if told.get("reloaded") else None
    return ours if began is None else ours._replace(deciding=orjson.dumps(began, option=orjson.OPT_SORT_KEYS))


def remember(folder: Path, gateway: str, memory: Memory) -> None:
    """Keep it for those who come later."""
    partial = folder / f"{MEMORY}.{gateway}"
    try:
        partial.write_bytes(orjson.dumps(tuple(memory)))
        partial.replace(folder / MEMORY)
    except OSError as error:
        log.error("the epoch cannot be kept", file=str(folder / MEMORY), why=error.strerror)


def met(folder: Path, gateways: Iterable[str]) -> None:
    """Keep in mind that these take part, or did: who goes on from this folder must know whose deeds it cannot tell."""
    try:
        with (folder / GATEWAYS).open("a", encoding="utf-8") as file:
            file.write("".join(f"{gateway}\n" for gateway in gateways))
    except OSError as error:
        log.error("the gateways of a run cannot be kept", file=str(folder / GATEWAYS), why=error.strerror)


def known(folder: Path) -> list[str]:
    """All that those who served the run from this folder knew to take part. Raises `Unreadable`."""
    file = folder / GATEWAYS
    with _sound():
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except UnicodeDecodeError:
            raise Broken(file, "it is no UTF-8") from None
        except OSError as error:
            raise Broken(file, error.strerror or "it cannot be read") from None
    return [line.rstrip() for line in lines if line.endswith("\n")]


# --- who lives beside this gateway: each holds a lock on a file of its name


def show(folder: Path, gateway: str) -> int:
    """Show those who share the folder that this gateway lives, until the descriptor is closed."""
    descriptor = os.open(folder / f"{gateway}.gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def hide(folder: Path, gateway: str, shown: int) -> None:
    """Show it no more."""
    (folder / f"{gateway}.gateway").unlink(missing_ok=True)
    os.close(shown)


def living(folder: Path) -> set[str]:
    """The gateways that live. The files of others are removed."""
    alive = set()
    for file in folder.glob("*.gateway"):
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            alive.add(file.stem)
        else:
            file.unlink(missing_ok=True)
        os.close(descriptor)
    return alive
