"""Runs: which one a process serves, its folder, and what of it must be known again after a crash.

A run's folder is `{ledger.path}/{run}`: `run.json` says what it is, `lock` that a process has it, `*.jsonl` are the
records. One process has a run's folder at a time.

A run that a request names is opened when it is named. Where that would take long its ledger is read beside the loop,
into counters and sessions that nobody else sees until all of it is known. Where no more may be open, that one is closed
in which nothing has happened for longest.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import structlog

from gateway.core.errors import Busy, NotFound
from gateway.ledger.about import ENDED, OPEN, SHARED, Broken, about
from gateway.ledger.reader import Segments, asked, forget, own, unmarked
from gateway.ledger.shapes import Unreadable, foreign, unsound, wrong
from gateway.ledger.writer import Ledger, LedgerFault
from gateway.sessions import Sessions
from gateway.settings import InvalidSettings, Settings
from gateway.settings.deciding import differing
from gateway.stores import Store
from gateway.stores.memory import MemoryStore
from gateway.tasks import start

log = structlog.get_logger("detgate.runs")

LARGE = 8 << 20
"""Bytes of a ledger above which it is read beside the loop: some tenth of a second."""

REST = 10
"""With redis, times `timeouts.store` after a run was named until it may be closed: whoever named it may wait for the
store several times before the store or its sessions know that it is used."""

PACE = 32 << 20
"""Bytes a second that are read there at least: when to ask again."""


class RunBusy(Busy):
    code = "run_busy"


class OtherState(Busy):
    """The run's indices are kept elsewhere: here nobody knows which were given away."""

    code = "run_differs"

    def __init__(self, run: str, *, shared: bool) -> None:
        there, here = ("memory", "redis://…") if shared else ("redis://…", "memory")
        super().__init__(
            f"Run {run} began with state: {there}, and this gateway has state: {here}. Name another run.",
            retry_after=60,
        )


class Run:
    """One run that this process serves: its folder locked, its counters restored, its ledger open.

    Raises `RunBusy`, `OtherState`, `Unreadable`, and `LedgerFault` where its folder cannot be written.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        store: Store,
        sessions: Sessions,
        failed: Callable[[], None],
        *,
        named: bool,
        told: Told | None = None,
    ) -> None:
        """`told`: what its ledger tells, where that was read already, and its lock."""
        self.name = name
        self.folder = settings.ledger.path / name
        self.used_at = time.monotonic()
        """When a request named it last."""
        self._store, self._sessions = store, sessions
        self._lock: int | None = None if told is None else told.lock
        self._begun: Ledger | None = None
        try:
            known = _known(self.folder)
            if known and (known.get("state") == SHARED) != store.shared:
                raise OtherState(name, shared=store.shared)
            self.resumed = bool(known)
            self.named = known.get("named", named)
            """It has a name that somebody gave it."""
            deciding = settings.deciding()
            if store.shared and not any(asked(self.folder)):
                # The server knows with what it began; a process that it has refused may have left other settings here.
                known.pop("deciding", None)
                known.pop("reloaded", None)
            began = known.get("deciding", deciding)
            self.began: dict[str, Any] = began.get("pools") or {}
            """The pools with which the run began, and the names of their replicas."""
            reloaded = known.get("reloaded", {})
            self.differs = differing(deciding, {**began, "pools": {**self.began, **reloaded}})
            """Deciding settings that are not those the run began with, nor reloaded: the process must not serve it."""
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None and not store.shared:
                self._lock = _locked(self.folder)
            lost = self._restore(sessions) if told is None else self._take(told)
            self.ledger = self._begun = Ledger(
                self.folder,
                name,
                segment_bytes=settings.ledger.segment_bytes,
                on_error=settings.ledger.on_error,
                failed=failed,
            )
            self._about = {
                "run": name,
                "named": self.named,
                "started": known.get("started", time.time()),
                "epoch": self.epoch,
                "deciding": began,
                **({"reloaded": reloaded} if reloaded else {}),
            }
            self._write(SHARED if store.shared else OPEN)
            # Written before anything lives in it that would outlive a failure.
            if store.gateway is not None:
                self.ledger.opened({"event": "gateway", "time": time.time(), "run": name, "gateway": store.gateway})
            self.ledger.opened(*lost)
            store.serve(name, self.folder, self.ledger)
            sessions.serve(name, self.ledger)
        except OSError as error:
            self._give_up()
            raise LedgerFault(
                f"The folder of run {name} cannot be written: {error.strerror}.", retry_after=5
            ) from error
        except BaseException:
            self._give_up()
            raise
        if not store.shared:
            forget(self.folder, but=self.ledger)

    def reloaded(self, settings: Settings) -> None:
        """The replicas of its pools were brought to those of `settings`: it goes on with them after a restart too."""
        names = {name: each for name, each in settings.deciding()["pools"].items() if name in self.began}
        if names.items() <= {**self.began, **self._about.get("reloaded", {})}.items():
            return
        self._about["reloaded"] = names
        try:
            self._write(OPEN if self._lock is not None else SHARED)
        except OSError as error:
            log.error("the reload cannot be kept: a restart will find other names", run=self.name, why=error.strerror)

    def close(self) -> None:
        """End it cleanly: nothing is in flight any more. Where the ledger lacks something, it stays unclean."""
        self._begun = None
        whole = self.ledger.close()
        if whole and self._lock is not None:
            with suppress(OSError):
                self._write(ENDED)
        self._give_up()

    def _give_up(self) -> None:
        """Know nothing of it any more, and leave its folder to others."""
        self._store.close(self.name)
        self._sessions.end_run(self.name)
        if self._begun is not None:
            self._begun.abandon()
        if self._lock is not None:
            os.close(self._lock)

    def _restore(self, sessions: Sessions) -> list[dict[str, Any]]:
        """Read the ledger, unless others may be writing it. Gives what it lacks: ends, and gaps it does not know."""
        if self._store.shared:
            own(self.folder, self.name)
            self.epoch = 0
            return []
        lost, self.epoch = _restored(self.name, self.folder, self._store, sessions)
        return lost

    def _take(self, told: Told) -> list[dict[str, Any]]:
        """The same where the ledger was read already."""
        assert isinstance(self._store, MemoryStore)
        told.hand_over(self._store, self._sessions)
        self.epoch = told.epoch
        return told.lost

    def _write(self, state: str) -> None:
        # Gateways that share the folder may have the same process id, each in a container of its own.
        partial = self.folder / f"run.json.{self._store.gateway or os.getpid()}"
        try:
            partial.write_bytes(orjson.dumps({**self._about, "state": state}, option=orjson.OPT_INDENT_2))
            partial.replace(self.folder / "run.json")
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


class Told:
    """What the ledger of a run tells, read in a thread of its own. The run is locked from the start.

    Raises `RunBusy`, and `LedgerFault` where it cannot be locked.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        self._folder = settings.ledger.path / name
        try:
            self.lock = _locked(self._folder)
        except OSError as error:
            raise LedgerFault(f"The folder of run {name} cannot be written: {error.strerror}.") from error
        self._store = MemoryStore(settings.limits.scopes)
        self._sessions = Sessions(settings, self._store)
        self._mutex = threading.Lock()
        self._busy = self._unwanted = False
        self.lost: list[dict[str, Any]] = []
        """What the ledger lacks."""
        self.epoch = 0

    def read(self) -> None:
        """Read it all."""
        with self._mutex:
            if self._unwanted:
                return
            self._busy = True
        try:
            # Sessions look at the clock of the loop that they are in.
            asyncio.run(self._restore())
        finally:
            with self._mutex:
                self._busy = False
                if self._unwanted:
                    self._forget()

    def give_up(self) -> None:
        """Nobody wants it any more: unlock the run, as soon as it is not read."""
        with self._mutex:
            self._unwanted = True
            if not self._busy:
                self._forget()

    def hand_over(self, store: MemoryStore, sessions: Sessions) -> None:
        """Let what was read be known: all of it in one turn of the loop."""
        store.take_over(self._store)
        sessions.take_over(self._sessions)

    async def _restore(self) -> None:
        self.lost, self.epoch = _restored(self.name, self._folder, self._store, self._sessions, self._wanted)

    def _wanted(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            if self._unwanted:
                return
            yield record

    def _forget(self) -> None:
        self._store.close(self.name)
        self._sessions.end_run(self.name)
        os.close(self.lock)


class Runs:
    """All runs that this process serves: its own, and those that requests name."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        sessions: Sessions,
        failed: Callable[[], None],
        *,
        resume: bool = False,
        new: bool = False,
    ) -> None:
        self._settings = settings
        self._store = store
        self._sessions = sessions
        self._failed = failed
        try:
            name = _chosen(settings, resume=resume, new=new)
            self.own = Run(settings, name, store, sessions, failed, named=settings.run is not None)
        except (LedgerFault, Unreadable) as fault:
            raise InvalidSettings([f"ledger.path: {fault.message}"]) from None
        except OtherState as fault:
            raise InvalidSettings([f"state: {fault.message}"]) from None
        except RunBusy as fault:
            raise InvalidSettings([f"run: {fault.message} Name another run, or use state: redis://."]) from None
        self._open = {name: self.own}
        self._opening: dict[str, asyncio.Task[None]] = {}
        """Those whose ledger is being read, and those where that came to nothing until they are named again."""
        self._reading = asyncio.Lock()
        """One ledger is read at a time."""

    def find(self, name: str) -> Run:
        """The run of that name, opened if need be. Raises `Busy` where it cannot be served here, or not yet."""
        run = self._open.get(name)
        if run is None:
            run = self._opened(name)
        if run is not self.own:
            run.used_at = time.monotonic()
        if run.differs:
            raise Busy(
                f"Run {name} began with other settings: {', '.join(run.differs)}. Put them back, or begin another run: "
                + ("start with --new-run." if run is self.own and not run.named else "give it another name."),
                code="run_differs",
                retry_after=60,
            )
        return run

    def _opened(self, name: str) -> Run:
        """Open a run; one whose ledger is long, beside the loop."""
        opening = self._opening.get(name)
        if opening is not None:
            if not opening.done():
                raise self._not_yet(name)
            del self._opening[name]
            opening.result()
        self._make_room()
        if isinstance(self._store, MemoryStore) and self._size(name) > LARGE:
            known = _known(self._settings.ledger.path / name)
            if known.get("state") == SHARED:
                raise OtherState(name, shared=False)
            self._opening[name] = start(self._open_beside(Told(self._settings, name)), f"run {name}")
            raise self._not_yet(name)
        run = self._open[name] = Run(self._settings, name, self._store, self._sessions, self._failed, named=True)
        return run

    async def _open_beside(self, told: Told) -> None:
        try:
            async with self._reading:
                await asyncio.to_thread(told.read)
        except OSError as error:
            told.give_up()
            raise LedgerFault(f"The ledger of run {told.name} cannot be read: {error.strerror}.") from error
        except BaseException:
            told.give_up()
            raise
        self._open[told.name] = Run(
            self._settings, told.name, self._store, self._sessions, self._failed, named=True, told=told
        )
        del self._opening[told.name]

    def _size(self, name: str) -> int:
        """Bytes of a run's ledger."""
        return sum(file.stat().st_size for file in (self._settings.ledger.path / name).glob("*.jsonl"))

    def _not_yet(self, name: str) -> Busy:
        return Busy(
            f"Run {name} is being opened: its ledger is long. Ask again.",
            code="run_opening",
            retry_after=1 + self._size(name) // PACE,
        )

    def _make_room(self) -> None:
        """Close the run in which nothing has happened for longest, if no more may be open. Raises `Busy`."""
        limit = self._settings.limits.runs
        opening = sum(not task.done() for task in self._opening.values())
        if len(self._open) + opening < limit:
            return
        used = self._store.busy | self._sessions.busy
        since = time.monotonic() - (REST * self._settings.timeouts.store if self._store.shared else 0.0)
        idle = [
            run for run in self._open.values() if run is not self.own and run.name not in used and run.used_at <= since
        ]
        if not idle:
            raise Busy(
                f"{limit} runs are open already, and each has open requests or sessions, or was named just now. Ask "
                "again later, end sessions, or raise limits.runs.",
                code="too_many_runs",
            )
        run = min(idle, key=lambda run: run.used_at)
        del self._open[run.name]
        run.close()
        self._store.leave(run.name)

    def revive(self, name: str) -> None:
        """Open a run that is there already: what it knew may be asked for before a request counts in it."""
        if name not in self._open and _known(self._settings.ledger.path / name):
            self.find(name)

    def reading(self, name: str) -> tuple[Path, bool]:
        """Where a run's records are, all of them written, and whether this process still adds to them.

        Raises `NotFound`, `Unreadable`, and `Busy` where another process adds to them.
        """
        run = self._open.get(name)
        if run is not None:
            run.ledger.flush()
            return run.folder, True
        folder = self._settings.ledger.path / name
        known = _known(folder)
        if not known:
            raise NotFound(f"There is no run {name} here.", code="run_not_found", param="run")
        if known.get("state") == OPEN and name not in self._opening:
            os.close(_locked(folder))
        return folder, known.get("state") == SHARED

    def past(self, name: str | None) -> Path | None:
        """The folder of a run that has ended and is not open here: who reads it need not open it.

        Raises `Unreadable`.
        """
        if name is None or name in self._open or name in self._opening:
            return None
        folder = self._settings.ledger.path / name
        return folder if _known(folder).get("state") == ENDED else None

    def look(self) -> None:
        """Notice what was taken away of the ledgers, and what is back."""
        for run in self._open.values():
            run.ledger.look()

    def close(self) -> None:
        """End all of them cleanly."""
        for opening in self._opening.values():
            opening.cancel()
        for run in self._open.values():
            run.close()


def _restored(
    name: str,
    folder: Path,
    store: Store,
    sessions: Sessions,
    through: Callable[[Iterable[dict[str, Any]]], Iterable[dict[str, Any]]] = iter,
) -> tuple[list[dict[str, Any]], int]:
    """Bring counters and sessions to where a run's ledger left them. Gives what that lacks, and the epoch.

    `through`: what the records go through. Raises `Unreadable`.
    """
    segments = Segments(folder)
    lost = store.restore(name, folder, sessions.restoring(name, folder, through(_sound(segments, name))))
    gaps = [{"event": "gap", "run": name, "time": time.time(), "missing": None}] * unmarked(folder)
    epoch = segments.gaps + len(gaps)
    if epoch:
        store.fence(name)
    return gaps + lost, epoch


def _sound(segments: Segments, run: str) -> Iterator[dict[str, Any]]:
    """All records. Raises `Unreadable` at the first from which this run cannot go on."""
    for record in segments:
        if (why := wrong(record) or foreign(record, run)) is not None:
            raise unsound(f"{segments.file}, line {segments.line}", why)
        yield record


def _chosen(settings: Settings, *, resume: bool, new: bool) -> str:
    """The run to serve. After an unclean end it is that run again.

    Raises `InvalidSettings` where a name was used, and `Unreadable` where nobody can tell which run was the last.
    """
    path = settings.ledger.path
    if settings.run is not None:
        if new:
            raise InvalidSettings(
                [
                    f"run: {settings.run} names the run, and --new-run begins one with a name of its own: give run"
                    " another name, or leave out one of the two"
                ]
            )
        known = _known(path / settings.run)
        if known and known.get("state") == ENDED and not resume:
            raise InvalidSettings(
                [f"run: {settings.run} has ended already; --resume goes on with it, another name begins a new one"]
            )
        return settings.run
    if not new:
        unnamed = [
            known
            for folder in (path.iterdir() if path.is_dir() else ())
            if (known := _known(folder)) and not known.get("named")
        ]
        last = max(unnamed, key=lambda known: float(known.get("started", 0)), default=None)
        if last is not None and (resume or last.get("state") == OPEN) and _free(path / str(last["run"])):
            return str(last["run"])
    stem = f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    names = (stem if number == 0 else f"{stem}-{number}" for number in count())
    return next(name for name in names if not (path / name).exists())


def _known(folder: Path) -> dict[str, Any]:
    """What is kept with a run; nothing where there is no such run. Raises `Unreadable`."""
    try:
        known = about(folder)
        if known is not None and "deciding" not in known:
            raise Broken(folder / "run.json", "deciding is missing")
    except Broken as broken:
        raise _unreadable(broken.file, broken.why) from None
    return known or {}


def _unreadable(file: Path, why: str) -> Unreadable:
    return Unreadable(
        f"{file} does not say with which settings run {file.parent.name} began: {why}. Put it back from a copy, or "
        "begin another run: by another name, or, where run names none, by --new-run. If it is removed, the run goes on "
        "from its records and its settings are not checked."
    )


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RunBusy(
            f"Another process has run {folder.name}. One process serves a run with state: memory.", retry_after=60
        ) from None
    return descriptor


def _free(folder: Path) -> bool:
    try:
        os.close(_locked(folder))
    except RunBusy:
        return False
    return True
