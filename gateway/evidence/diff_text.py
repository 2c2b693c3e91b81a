"""What a comparison found, as JSON and as text for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gateway.core.unseen import seen
from gateway.evidence.causes import CAUSES, Difference
from gateway.evidence.diff import Diff
from gateway.evidence.requests import Request

MORE = 10
"""Roots that are listed after the first."""


def as_json(diff: Diff) -> dict[str, Any]:
    """What a program needs to know."""
    return {
        "equal": diff.equal,
        "comparable": diff.comparable,
        "compared": diff.compared,
        "first": _as_json(diff.first),
        "causes": dict(diff.roots.most_common()),
        "downstream": dict(diff.downstream.most_common()),
        "harmless": dict(diff.harmless.most_common()),
        "first_answer": _as_json(diff.first_answer),
        "sessions": {"compared": diff.sessions, "in_both": diff.shared_sessions, "different": diff.diverged_sessions},
        "skipped": diff.skipped,
        "fenced": {"a": diff.fenced[0], "b": diff.fenced[1]},
        "torn": {"a": diff.torn[0], "b": diff.torn[1]},
        "a": diff.a.name,
        "b": diff.b.name,
    }


def show(diff: Diff, console: Console) -> None:
    """Say what was found."""
    if not diff.comparable:
        console.print("[bold yellow]not comparable[/]: the runs have no session in common.", highlight=False)
        console.print("Sessions are aligned by their identity: give each its logical name (X-Detgate-Identity).")
        return
    if diff.equal:
        console.print(f"[bold green]equal[/]: {diff.compared:,} requests, {diff.sessions:,} sessions", highlight=False)
    else:
        console.print(Group(*_found(diff)), highlight=False)
    for side, torn, fenced in zip("AB", diff.torn, diff.fenced, strict=True):
        if fenced:
            console.print(
                f"[yellow]{side} has {fenced} sessions with an index that was given twice[/]", highlight=False
            )
        if torn:
            console.print(f"[yellow]{side} has {torn} lines that are no record[/]", highlight=False)
    if diff.skipped:
        console.print(f"{diff.skipped:,} requests were left out: A delivered no answer to them", highlight=False)
    if diff.equal and diff.harmless:
        told = ", ".join(f"{count:,} {cause}" for cause, count in diff.harmless.most_common())
        console.print(f"Not counted, since the answers are equal: {told}", highlight=False)


def where(request: Request) -> str:
    """How a request is named."""
    ordinal = f"~{request.ordinal}" if request.ordinal else ""
    return f"{request.identity}{ordinal} index {request.index}"


def _found(diff: Diff) -> list[RenderableType]:
    different = f"{diff.different:,} of {diff.compared:,} requests, in {diff.diverged_sessions:,} of {diff.sessions:,}"
    parts: list[RenderableType] = [
        Text.from_markup(f"[bold red]different[/]: {different} sessions"),
        Text(""),
        _counts(diff),
        Text(""),
    ]
    if diff.first is not None:
        parts += [Text.from_markup("[bold]First divergence[/]"), _one(diff.first), Text("")]
    heard = diff.first_answer
    if heard is not None and heard is not diff.first:
        parts += [Text.from_markup("[bold]First that the client got another answer to[/]"), _one(heard), Text("")]
    others = [each for each in diff.kept if each.root and each is not diff.first and each is not heard]
    if others:
        parts.append(Text.from_markup("[bold]Further roots[/]"))
        parts += [_one(each) for each in others[:MORE]]
        rest = diff.roots.total() - sum(each.root for each in (diff.first, heard) if each) - len(others[:MORE])
        if rest > 0:
            parts.append(Padding.indent(Text(f"and {rest:,} more"), 2))
    return parts


def _counts(diff: Diff) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("cause", "left"), ("roots", "right"), ("downstream", "right"), ("", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for cause in CAUSES:
        if diff.roots[cause] or diff.downstream[cause]:
            table.add_row(
                cause, f"{diff.roots[cause]:,}", f"{diff.downstream[cause]:,}", Text(CAUSES[cause], style="dim")
            )
    return table


def _one(difference: Difference) -> RenderableType:
    also = f" [dim](also {', '.join(difference.also)})[/]" if difference.also else ""
    head = f"[bold]{escape(seen(where(difference.one)))}[/]  [red]{difference.cause}[/]{also}"
    detail = Text(seen(difference.detail))
    return Padding.indent(Group(Text.from_markup(head, emoji=False), Padding.indent(detail, 2)), 2)


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    one = difference.one
    told: dict[str, Any] = {
        "identity": one.identity,
        "index": one.index,
        "cause": difference.cause,
        "detail": difference.detail,
        "ordinal": one.ordinal,
        "also": list(difference.also),
        "siblings": list(difference.siblings),
        "request_id": one.request_id,
    }
    for side, request in (("a", difference.a), ("b", difference.b)):
        told[side] = None if request is None else side_of(request)
    return told


def side_of(request: Request) -> dict[str, Any]:
    """What one ledger tells of a request, as far as it is compared or explains."""
    return {
        "session": request.session,
        "identity": request.identity,
        "index": request.index,
        "order": request.order,
        "prompt": request.content or request.digest,
        "seed": request.seed,
        "seed_source": request.seed_source,
        "scheme": request.scheme,
        "attempts": [list(attempt) for attempt in request.attempts],
        "asked": request.claims,
        "engine": request.engine,
        "weight_version": request.weight_version,
        "outcome": request.outcome,
        "error": request.error,
        "status": request.status,
        "finish_reasons": request.finish_reasons,
        "answer": request.answer,
        "tokens": request.tokens,
        "racing": request.racing,
        "flags": request.flags,
        "in_flight": request.crowd,
        "group": request.group,
        "member": request.member,
    }
