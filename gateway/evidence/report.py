"""A page that shows where two runs parted: one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from gateway.core.unseen import seen
from gateway.evidence.causes import CAUSES, MARKS, Difference
from gateway.evidence.diff import Diff
from gateway.evidence.diff_text import as_json, side_of, where

PLACE = "/*DATA*/"
"""Where the data stands in the template."""


def page(diff: Diff) -> str:
    """The page, as HTML."""
    template = (files("gateway.evidence") / "report.html").read_text(encoding="utf-8")
    data = json.dumps(_seen(_data(diff)), ensure_ascii=False, separators=(",", ":"))
    # Nothing that a prompt or an id holds may end the script that it stands in.
    return template.replace(PLACE, data.replace("<", "\\u003c"))


def _seen(told: Any) -> Any:
    """The same with texts in which all can be seen."""
    if isinstance(told, str):
        return seen(told)
    if isinstance(told, dict):
        return {name: _seen(value) for name, value in told.items()}
    return [_seen(each) for each in told] if isinstance(told, list | tuple) else told


def _data(diff: Diff) -> dict[str, Any]:
    return {
        "summary": as_json(diff),
        "meanings": [{"cause": cause, "means": means, "mark": MARKS[cause]} for cause, means in CAUSES.items()],
        "differences": [_difference(each) | {"first": each is diff.first} for each in diff.kept],
        "sessions": list(_sessions(diff)),
        "bins": [{"roots": dict(roots), "downstream": after} for roots, after in
                 zip(diff.bins, diff.bins_downstream, strict=True)],
    }  # fmt: skip


def _difference(each: Difference) -> dict[str, Any]:
    return {
        "where": where(each.one),
        "cause": each.cause,
        "root": each.root,
        "detail": each.detail,
        "also": list(each.also),
        "a": None if each.a is None else side_of(each.a),
        "b": None if each.b is None else side_of(each.b),
    }


def _sessions(diff: Diff) -> Iterator[dict[str, Any]]:
    for row in diff.rows:
        yield {
            "identity": row.identity if not row.ordinal else f"{row.identity}~{row.ordinal}",
            "group": row.group,
            "total": row.total,
            "cells": [[cell.number, cell.kept] for cell in row.cells],
        }
