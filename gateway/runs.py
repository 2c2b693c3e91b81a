"""Runs: which one a process serves, its folder, and what of it must be known again after a crash.

A run's folder is `{ledger.path}/{run}`: `run.json` says what it is, `lock` that a process has it, `*.jsonl` are the
records. One process has a run's folder at a time.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from gateway.core.errors import Busy, NotFound
from gateway.ledger.reader import Segments, forget, unmarked
from gateway.ledger.writer import Ledger, LedgerFault
from gateway.sessions import Sessions
from gateway.settings import InvalidSettings, Settings
from gateway.stores import Store

OPEN, ENDED, SHARED = "open", "ended", "shared"


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

    Raises `RunBusy`, `OtherState`, and `LedgerFault` where its folder cannot be written.
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
    ) -> None:
        self.name = name
        self.folder = settings.ledger.path / name
        self._store, self._sessions = store, sessions
        known = _known(self.folder)
        if known and (known.get("state") == SHARED) != store.shared:
            raise OtherState(name, shared=store.shared)
        self.resumed = bool(known)
        deciding = settings.deciding()
        self.differs = sorted(
            key for key, value in deciding.items() if known.get("deciding", deciding).get(key) != value
        )
        """Deciding settings that are not those the run began with: the process must not serve it."""
        self._lock: int | None = None
        self._begun: Ledger | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not store.shared:
                self._lock = _locked(self.folder)
            lost = self._restore(sessions)
            self.ledger = self._begun = Ledger(
                self.folder,
                name,
                segment_bytes=settings.ledger.segment_bytes,
                on_error=settings.ledger.on_error,
                failed=failed,
            )
            self._about = {
                "run": name,
                "named": named,
                "started": known.get("started") or time.time(),
                "epoch": self.epoch,
                "deciding": known.get("deciding", deciding),
            }
            self._write(SHARED if store.shared else OPEN)
            store.serve(name, self.folder, self.ledger)
            sessions.serve(name, self.ledger)
            self.ledger.opened(*lost)
            if store.gateway is not None:
                self.ledger.opened({"event": "gateway", "time": time.time(), "run": name, "gateway": store.gateway})
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
            self.epoch = 0
            return []
        segments = Segments(self.folder)
        lost = self._store.restore(self.name, self.folder, sessions.restoring(self.name, self.folder, segments))
        gaps = [{"event": "gap", "run": self.name, "time": time.time(), "missing": None}] * unmarked(self.folder)
        self.epoch = segments.gaps + len(gaps)
        if self.epoch:
            self._store.fence(self.name)
        return gaps + lost

    def _write(self, state: str) -> None:
        partial = self.folder / f"run.json.{os.getpid()}"
        partial.write_bytes(orjson.dumps({**self._about, "state": state}, option=orjson.OPT_INDENT_2))
        partial.replace(self.folder / "run.json")


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
        name = _chosen(settings, resume=resume, new=new)
        try:
            self.own = Run(settings, name, store, sessions, failed, named=settings.run is not None)
        except LedgerFault as fault:
            raise InvalidSettings([f"ledger.path: {fault.message}"]) from None
        except OtherState as fault:
            raise InvalidSettings([f"state: {fault.message}"]) from None
        except RunBusy as fault:
            raise InvalidSettings([f"run: {fault.message} Name another run, or use state: redis://."]) from None
        self._open = {name: self.own}

    def find(self, name: str) -> Run:
        """The run of that name, opened if need be. Raises `Busy` where it cannot be served here."""
        run = self._open.get(name)
        if run is None:
            limit = self._settings.limits.runs
            if len(self._open) >= limit:
                raise Busy(f"{limit} runs are open already. End some, or raise limits.runs.", code="too_many_runs")
            run = self._open[name] = Run(self._settings, name, self._store, self._sessions, self._failed, named=True)
        if run.differs:
            raise Busy(
                f"Run {name} began with other settings: {', '.join(run.differs)}. "
                "Put them back, or begin another run (--new-run, or another name).",
                code="run_differs",
                retry_after=60,
            )
        return run

    def revive(self, name: str) -> None:
        """Open a run that is there already: what it knew may be asked for before a request counts in it."""
        if name not in self._open and _known(self._settings.ledger.path / name):
            self.find(name)

    def reading(self, name: str) -> tuple[Path, bool]:
        """Where a run's records are, all of them written, and whether this process still adds to them.

        Raises `NotFound`, and `Busy` where another process adds to them.
        """
        run = self._open.get(name)
        if run is not None:
            run.ledger.flush()
            return run.folder, True
        folder = self._settings.ledger.path / name
        known = _known(folder)
        if not known:
            raise NotFound(f"There is no run {name} here.", code="run_not_found", param="run")
        if known.get("state") == OPEN:
            os.close(_locked(folder))
        return folder, known.get("state") == SHARED

    def close(self) -> None:
        """End all of them cleanly."""
        for run in self._open.values():
            run.close()


def _chosen(settings: Settings, *, resume: bool, new: bool) -> str:
    """The run to serve. After an unclean end it is that run again; raises `InvalidSettings` where a name was used."""
    path = settings.ledger.path
    if settings.run is not None:
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
    try:
        known = orjson.loads((folder / "run.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return known if isinstance(known, dict) else {}


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
