"""The commands `detgate diff` and `detgate replay`, from what was asked to an exit status."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gateway.core import identity
from gateway.core.errors import CallerFault
from gateway.evidence import (
    diff_text,
    files,
    ledgers,
    recorded,
    replay_plans,
    replay_requests,
    replay_text,
    report,
    started,
)
from gateway.evidence.diff import Diff, compare
from gateway.evidence.ledgers import Unusable
from gateway.evidence.output import output
from gateway.evidence.replay_requests import Failed, Notes, Refused, Target
from gateway.ledger.requests import Requests
from gateway.settings import InvalidSettings, Settings, hashed

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
"""Exit statuses."""


def diff(
    a: str, b: str, ledger: Path, *, as_json: bool = False, html: Path | None = None, answers_only: bool = False
) -> int:
    """Compare two recorded runs and say what was found."""
    try:
        if html is not None and (why := files.unwritable([html])) is not None:
            raise Unusable(why)
        mine, theirs = ledgers.find(a, ledger), ledgers.find(b, ledger)
        with _bar("reading", mine.bytes + theirs.bytes) as watch:
            found = compare(mine, theirs, answers_only=answers_only, watch=watch)
    except (Unusable, OSError) as error:
        return unusable(error, as_json=as_json)
    kept = html is None or files.write(html, report.page(found).encode())
    status = tell(found, as_json=as_json)
    return status if kept else NOT_COMPARABLE


def replay_decisions(name: str, ledger: Path, *, as_json: bool = False) -> int:
    """Make every decision of a recorded run again; 1: today's code makes one otherwise."""
    try:
        source = ledgers.find(name, ledger)
        with _bar("deciding again", source.bytes) as watch:
            found = replay_plans.replay(source, lambda done: watch("read", done))
    except (Unusable, OSError) as error:
        return unusable(error, as_json=as_json)
    if as_json:
        print(json.dumps(replay_text.as_json(found), ensure_ascii=False))
    else:
        with output() as console:
            replay_text.show(found, console)
    return DIFFERENT if found.different else EQUAL


def replay_again(
    name: str, settings: Settings, *, url: str | None, config: Path | None, run: str | None, as_json: bool = False
) -> int:
    """Send a recorded run again, to the gateway at `url` or to one that is started with `config`, and compare.

    Raises `InvalidSettings` where the configuration has the hash alone of a key that is needed.
    """
    keys = _api_key(settings), admin_key(settings)
    try:
        script = recorded.script(ledgers.find(name, settings.ledger.path))
        wanted = _new_run(script.run, run)
        file = Path(f"{wanted}.replay.json")
        if (why := files.unwritable([file])) is not None:
            raise Unusable(why)
        notes = Notes.kept(file, wanted, script.run)
    except (Unusable, OSError) as error:
        return unusable(error, as_json=as_json)
    # A gateway of its own has the file's settings, without what this command was told beside them.
    ledger = (settings if url else Settings.load(config, os.environ, {})).ledger.path
    target = Target(url or "", wanted, *keys, ledger / wanted)
    try:
        found = asyncio.run(_again(script, target, config, notes))
    except Refused as error:
        return unusable(error, as_json=as_json)
    except (Unusable, Failed, OSError) as error:
        status = unusable(error, as_json=as_json)
        print("detgate: the same command goes on where it stopped", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        print("detgate: stopped; the same command goes on from here", file=sys.stderr)
        raise
    if notes.before:
        print(
            f"detgate: {notes.before} of {script.requests} requests were sent before this replay was stopped; "
            "they were not sent again",
            file=sys.stderr,
        )
    return tell(found, as_json=as_json)


def _new_run(recorded: str, wanted: str | None) -> str:
    """The name of the new run. Raises `Unusable` where it can be none."""
    new = f"{recorded}-replay" if wanted is None else wanted
    try:
        identity.run_name(os.fsencode(new), f"--run {new!r}")
    except CallerFault as fault:
        raise Unusable(fault.message) from None
    if new == recorded:
        raise Unusable(f"--run {new} is the recorded run itself: name a new one. Nothing was sent")
    return new


async def _again(script: recorded.Script, target: Target, config: Path | None, notes: Notes) -> Diff:
    async with AsyncExitStack() as stack:
        if not target.url:
            _look_back(script, target, notes)
            target.url = await stack.enter_async_context(started.gateway(config, target.run))
        with progress() as shown:
            task = shown.add_task(f"run {target.run}", total=script.requests)
            return await replay_requests.send(script, target, notes, lambda done: shown.update(task, completed=done))


def _look_back(script: recorded.Script, target: Target, notes: Notes) -> None:
    """Refuse a run that is here before a gateway is started, which would go on with it. Raises `Refused`."""
    if target.kept is not None and target.kept.is_dir():
        there = Requests(target.kept)
        lines = (line for part in there.lines(there.canonical()) for line in part.splitlines())
        replay_requests.look_back(lines, script, target.run, notes)


def admin_key(settings: Settings) -> str | None:
    """The admin key, to be sent. Raises `InvalidSettings` where the configuration has its hash alone."""
    if settings.auth.admin_key is None:
        return None
    text = settings.auth.admin_key.get_secret_value()
    if hashed(text) is not None:
        raise InvalidSettings(
            ["auth.admin_key: a hash, and the key itself is needed: give it by DETGATE_AUTH__ADMIN_KEY"]
        )
    return text


def _api_key(settings: Settings) -> str | None:
    """A key for requests, to be sent; raises as `admin_key`."""
    keys = [key.get_secret_value() for key in settings.auth.api_keys]
    plain = next((key for key in keys if hashed(key) is None), os.environ.get("OPENAI_API_KEY"))
    if keys and plain is None:
        raise InvalidSettings(["auth.api_keys: hashes, and a key itself is needed: give one by OPENAI_API_KEY"])
    return plain


def tell(found: Diff, *, as_json: bool) -> int:
    """Print what a comparison found; the exit status."""
    if as_json:
        print(json.dumps(diff_text.as_json(found), ensure_ascii=False))
    else:
        with output() as console:
            diff_text.show(found, console)
    if not found.comparable:
        return NOT_COMPARABLE
    return EQUAL if found.equal else DIFFERENT


def unusable(error: Exception, *, as_json: bool) -> int:
    """Say why there is nothing to compare; the exit status."""
    why = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        why = f"{error.filename}: {files.because(error)}"
    print(f"detgate: {why}", file=sys.stderr)
    if as_json:
        print(json.dumps({"equal": False, "comparable": False, "compared": 0, "first": None, "causes": {},
                          "error": why}, ensure_ascii=False))  # fmt: skip
    return NOT_COMPARABLE


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    with progress() as shown:
        task = shown.add_task(what, total=total)

        def watch(phase: str, done: int) -> None:
            if phase == "read":
                shown.update(task, completed=done)
            else:
                shown.update(task, description=f"comparing {done:,}")

        yield watch


def progress() -> Progress:
    """A progress bar that is gone when it is done; nothing where nobody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
