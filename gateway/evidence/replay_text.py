"""What came of decisions made again, as JSON and as text for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.core.unseen import seen
from gateway.evidence.replay_plans import Replayed

SHOWN = 20
"""Decisions that are listed one by one."""

_NONE: Counter[str] = Counter()


def as_json(found: Replayed) -> dict[str, Any]:
    """What a program needs to know."""
    return {
        "equal": not found.different,
        "compared": found.requests,
        "different": found.different,
        "checked": dict(found.checked),
        "undetermined": {what: dict(why) for what, why in found.undetermined.items()},
        "differences": [
            {"request_id": each.request_id, "what": each.what, "recorded": each.recorded, "now": each.now}
            for each in found.deviations
        ],
    }


def show(found: Replayed, console: Console) -> None:
    """Say what was found."""
    verdict = f"[bold red]{found.different:,} decisions differ[/]" if found.different else "[bold green]the same[/]"
    console.print(f"{verdict}: {found.checked.total():,} decisions of {found.requests:,} requests", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("decision")
    table.add_column("made again", justify="right")
    table.add_column("undetermined")
    for what in sorted({*found.checked, *found.undetermined}):
        told = "; ".join(f"{count:,} {reason}" for reason, count in found.undetermined.get(what, _NONE).items())
        table.add_row(what, f"{found.checked[what]:,}", told)
    console.print(table)
    for each in found.deviations[:SHOWN]:
        told = f"{each.request_id}  {each.what}: recorded {each.recorded}, now {each.now}"
        console.print(seen(told), markup=False)
