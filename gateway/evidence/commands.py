"""The commands `detgate diff` and `detgate replay`, from what was asked to an exit status."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from pydantic import SecretStr
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gateway.evidence import diff_text, ledgers, recorded, replay_plans, replay_requests, replay_text, report, started
from gateway.evidence.diff import Diff, compare
from gateway.evidence.ledgers import Unusable
from gateway.evidence.replay_requests import Failed, Notes, Target
from gateway.settings import Settings, hashed

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
"""Exit statuses."""


def diff(
    a: str, b: str, ledger: Path, *, as_json: bool = False, html: Path | None = None, answers_only: bool = False
) -> int:
    """Compare two recorded runs and say what was found."""
    try:
        mine, theirs = ledgers.find(a, ledger), ledgers.find(b, ledger)
        with _bar("reading", mine.bytes + theirs.bytes) as watch:
            found = compare(mine, theirs, answers_only=answers_only, watch=watch)
        if html is not None:
            html.write_text(report.page(found), encoding="utf-8")
    except (Unusable, OSError) as error:
        return unusable(error, as_json=as_json)
    return tell(found, as_json=as_json)


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
        replay_text.show(found, Console())
    return DIFFERENT if found.different else EQUAL


def replay_again(
    name: str, settings: Settings, *, url: str | None, config: Path | None, run: str | None, as_json: bool = False
) -> int:
    """Send a recorded run again, to the gateway at `url` or to one that is started with `config`, and compare."""
    try:
        script = recorded.script(ledgers.find(name, settings.ledger.path))
    except (Unusable, OSError) as error:
        return unusable(error, as_json=as_json)
    wanted = run or f"{script.run}-replay"
    notes = Notes.of(Path(f"{wanted}.replay.json"), wanted)
    try:
        found = asyncio.run(_again(script, settings, url, config, wanted, notes))
    except (Unusable, Failed, OSError) as error:
        print("detgate: the same command goes on where it stopped", file=sys.stderr)
        return unusable(error, as_json=as_json)
    except KeyboardInterrupt:
        print("detgate: stopped; the same command goes on from here", file=sys.stderr)
        raise
    return tell(found, as_json=as_json)


async def _again(
    script: recorded.Script, settings: Settings, url: str | None, config: Path | None, run: str, notes: Notes
) -> Diff:
    auth = settings.auth
    key = next(filter(None, map(plain, auth.api_keys)), os.environ.get("OPENAI_API_KEY"))
    admin = None if auth.admin_key is None else plain(auth.admin_key)
    async with AsyncExitStack() as stack:
        if url is None:
            assert config is not None
            url = await stack.enter_async_context(started.gateway(config, run))
        target = Target(url, run, key, admin)
        with progress() as shown:
            task = shown.add_task(f"run {run}", total=script.requests)
            return await replay_requests.send(script, target, notes, lambda done: shown.update(task, completed=done))


def plain(configured: SecretStr) -> str | None:
    """A key that can be sent: of some the configuration has the hash alone."""
    text = configured.get_secret_value()
    return None if hashed(text) is not None else text


def tell(found: Diff, *, as_json: bool) -> int:
    """Print what a comparison found; the exit status."""
    if as_json:
        print(json.dumps(diff_text.as_json(found), ensure_ascii=False))
    else:
        diff_text.show(found, Console())
    if not found.comparable:
        return NOT_COMPARABLE
    return EQUAL if found.equal else DIFFERENT


def unusable(error: Exception, *, as_json: bool) -> int:
    """Say why there is nothing to compare; the exit status."""
    print(f"detgate: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"equal": False, "comparable": False, "compared": 0, "first": None, "causes": {},
                          "error": str(error)}, ensure_ascii=False))  # fmt: skip
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
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
