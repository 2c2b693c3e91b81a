"""Runs, their sessions and requests, and what parts two of them, as parts of pages."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from gateway.evidence.causes import CAUSES, MARKS, Cause
from gateway.ledger.about import Broken, about
from gateway.ui.frame import count, note, sign, table
from gateway.ui.html import Inner, Markup, link, name, render, tag

RUNS = 500
"""Runs that are listed, the latest."""

_OUTCOME = {"delivered": "good", "refused": "warn", "abandoned": "warn", "failed": "bad"}


class About(NamedTuple):
    """What is known of a run without its records."""

    name: str
    state: str
    started: float
    bytes: int
    broken: str | None = None
    """Why no more is known."""


def listed(ledger: Path) -> tuple[list[About], int]:
    """The latest runs, the last first, and how many there are in all."""
    if not ledger.is_dir():
        return [], 0
    folders = []
    for folder in ledger.iterdir():
        with suppress(OSError):  # it was removed meanwhile, or is no folder
            if (folder / "run.json").lstat():
                folders.append((folder.stat().st_ctime, folder.name, folder))
    found = [_about(folder) for *_, folder in nlargest(RUNS, folders)]
    found.sort(key=lambda about: (-about.started, about.name))
    return found, len(folders)


def _about(folder: Path) -> About:
    try:
        told = about(folder) or {}
        size = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
    except Broken as broken:
        return About(folder.name, "broken", 0, 0, f"{broken.file.name}: {broken.why}")
    except OSError as error:
        return About(folder.name, "broken", 0, 0, error.strerror or "it cannot be read")
    return About(folder.name, str(told.get("state")), float(told.get("started") or 0), size)


def runs(found: list[About], total: int, own: str) -> Iterator[Markup]:
    """The runs, and the form that chooses two of them."""
    before = next((about.name for about in found if about.name != own), own)
    yield choice(found, (before, own))
    rows: list[tuple[Inner, ...]] = [
        (
            (name(about.name), " ", tag("small", "this gateway's own") if about.name == own else None),
            _state(about, own),
            moment(about.started) if about.started else "not known",
            size(about.bytes) if about.broken is None else "not known",
            (
                link("requests", "requests", tag("span", f" of {about.name}", class_="sr"), run=about.name),
                " · ",
                link("sessions", "sessions", tag("span", f" of {about.name}", class_="sr"), run=about.name),
            ),
        )
        for about in found
    ]
    yield table("Runs, the latest first", ("Run", "State", "Began", "Ledger", "Look at"), rows)
    if total > len(found):
        yield note(f"These are the latest {len(found):,} of {total:,}.")


def choice(found: list[About], chosen: tuple[str, str], answers: bool = False) -> Markup:
    """The form that compares two runs; `chosen` stand there at first."""
    names = list(dict.fromkeys([*(about.name for about in found), *chosen]))
    fields = [
        tag(
            "div",
            tag("label", label, for_=f"run-{side}"),
            tag(
                "select",
                (tag("option", each, value=each, selected=each == preset) for each in names),
                name=side,
                id=f"run-{side}",
            ),
            class_="field",
        )
        for side, label, preset in (("a", "Run A", chosen[0]), ("b", "Run B", chosen[1]))
    ]
    box = tag("input", type="checkbox", name="answers", value="on", checked=answers)
    return tag(
        "form",
        fields,
        tag("label", box, "Only what the client got"),
        tag("button", "Compare"),
        method="get",
        action="diff",
        class_="filter",
    )


def _state(one: About, own: str) -> Markup:
    if one.name == own:
        return sign("good", "goes on")
    if one.broken is not None:
        return render((sign("bad", "broken"), ": ", tag("bdi", one.broken)))
    known = {
        "open": ("warn", "another process has it, or died with it"),
        "ended": ("good", "ended"),
        "shared": ("quiet", "of several gateways"),
    }
    return sign(*known.get(one.state, ("quiet", "not known")))


# --- sessions


def sessions(told: dict[str, Any], run: str, racing: bool, gateways: Collection[str]) -> Iterator[Markup]:
    """A page of a run's sessions."""
    yield tag(
        "form",
        tag("input", type="hidden", name="run", value=run),
        tag(
            "label",
            tag("input", type="checkbox", name="racing", value="on", checked=racing),
            "Only sessions with racing indices",
        ),
        tag("button", "Show"),
        method="get",
        action="sessions",
        class_="filter",
    )
    rows: list[tuple[Inner, ...]] = [
        (
            link("requests", name(each["session"]), run=run, session=each["session"]),
            name(each["identity"]) if each["identity"] else "–",
            _standing(each),
            each["claims"],
            each["delivered"],
            each["open"],
            _racing(each),
        )
        for each in told["sessions"]
    ]
    if rows:
        head = ("Session", "First identity", "State", "Claims", "Delivered", "Open", "Racing indices")
        yield table(f"Sessions of {run}, by their ids", head, rows)
    else:
        yield tag("p", "No session raced." if racing else "No request was recorded yet.")
    yield from _missing(told, gateways)
    yield _pages("sessions", told["next"], run=run, racing="on" if racing else None)


def _standing(session: dict[str, Any]) -> Inner:
    if session["state"] is None:
        return sign("quiet", "not created")
    word = sign({"open": "good", "ended": "quiet", "failed": "bad"}[session["state"]], session["state"])
    return (word, (" ", tag("small", session["why"])) if session["why"] else None)


def _racing(session: dict[str, Any]) -> Inner:
    if not session["racing"]:
        return sign("quiet", "none")
    shown = session["first_racing"]
    more = session["racing"] - len(shown)
    return (
        sign("warn", count(session["racing"], "index", "indices")),
        ": ",
        ", ".join(map(str, shown)),
        f" and {more:,} more" if more else None,
    )


# --- requests


def requests(
    told: dict[str, Any], run: str, session: str | None, live: bool, gateways: Collection[str]
) -> Iterator[Markup]:
    """A page of a run's requests."""
    if session is not None:
        yield tag("p", "Session ", name(session), ". ", link("requests", "All requests of the run", run=run))
    if live:
        yield note("The run goes on: requests may come in between. Load the page again to see them.")
    if told["requests"]:
        yield tag("ol", map(_request, told["requests"]), class_="rows", aria_label="Requests in canonical order")
    else:
        yield tag("p", "No request was recorded.")
    yield from _missing(told, gateways)
    yield _pages("requests", told["next"], run=run, session=session)


def _request(one: dict[str, Any]) -> Markup:
    outcome = one.get("outcome")
    status = f" {one['status']}" if one.get("status") else ""
    flags = one.get("flags") or []
    racing = one.get("racing") is True or "racing" in flags
    others = [flag for flag in flags if flag != "racing"]
    summary = tag(
        "summary",
        name(one["identity"]),
        tag("span", "index ", tag("b", str(one["index"]))),
        tag("span", sign(_OUTCOME.get(outcome or "", "quiet"), f"{outcome or 'open'}{status}")),
        tag("span", sign("warn", "racing")) if racing else None,
        tag("small", _seed(one)),
        tag("small", "at ", name(one["replica"])) if one.get("replica") else None,
        tag("small", ", ".join(map(str, others))) if others else None,
    )
    return tag("li", tag("details", summary, tag("div", _fields(one), class_="inside")))


def _seed(one: dict[str, Any]) -> str:
    seed = one.get("seed")
    return "no seed" if seed is None else f"seed {seed} ({one.get('seed_source')})"


def _fields(one: dict[str, Any]) -> Markup:
    rows: list[tuple[Inner, ...]] = [(tag("code", key), _value(key, value)) for key, value in one.items()]
    return table("All that the ledger tells of it", ("Field", "Value"), rows)


def _value(key: str, value: Any) -> Inner:
    if value is None or value == [] or value == {}:
        return sign("quiet", "none")
    if key == "time" and isinstance(value, float | int):
        return moment(value)
    if isinstance(value, str):
        return tag("pre", tag("bdi", value))
    return tag("pre", tag("bdi", orjson.dumps(value).decode()))


# --- two runs


def difference(told: dict[str, Any], a: str, b: str, answers: bool, start: int) -> Iterator[Markup]:
    """What parts two runs: the verdict, the causes, the first, and a page of all."""
    summary = told["summary"]
    what = "what the client got" if answers else "all that was recorded"
    yield tag("p", "A ", name(a), " · B ", name(b), " · ", what)
    yield _verdict(summary)
    if summary["first"] is not None:
        first = summary["first"]
        yield tag(
            "section",
            tag("h2", "First divergence"),
            tag("p", name(first["identity"]), f" index {first['index']}: ", _cause(first["cause"])),
            tag("p", tag("bdi", first["detail"])),
            class_="card",
        )
    if summary["causes"] or summary["downstream"]:
        rows: list[tuple[Inner, ...]] = [
            (_cause(cause), summary["causes"].get(cause, 0), summary["downstream"].get(cause, 0), means)
            for cause, means in CAUSES.items()
            if cause in summary["causes"] or cause in summary["downstream"]
        ]
        yield tag("h2", "Causes")
        yield table(
            "Roots began it; what is downstream follows from an earlier difference of its session",
            ("Cause", "Roots", "Downstream", "Means"),
            rows,
        )
    if told["differences"]:
        last = start + len(told["differences"])
        yield tag("h2", f"Differences {start + 1:,} to {last:,} of {told['kept']:,}")
        yield tag("ol", map(_difference, told["differences"]), class_="rows", start=start + 1)
        total = sum(summary["causes"].values()) + sum(summary["downstream"].values())
        if total > told["kept"]:
            yield note(f"There are {total:,} in all; of these the first are kept, and all are counted.")
        following = str(last) if last < told["kept"] else None
        yield _pages("diff", following, "start", a=a, b=b, answers="on" if answers else None)


def _verdict(summary: dict[str, Any]) -> Markup:
    in_sessions = count(summary["sessions"]["compared"], "session")
    compared = render((count(summary["compared"], "request"), " in ", in_sessions))
    if not summary["comparable"]:
        text = "They have no session in common. Sessions are aligned by their identity: give each its logical name."
        return tag("p", sign("warn", "Not comparable"), ": ", text)
    if summary["equal"]:
        return tag("p", sign("good", "Equal"), ": ", compared)
    roots, after = sum(summary["causes"].values()), sum(summary["downstream"].values())
    return tag(
        "p", sign("bad", "Different"), ": ", count(roots, "root"), ", and ", after, " that follow, of ", compared
    )


def _cause(cause: Cause) -> Markup:
    return render((tag("span", MARKS[cause], class_="mark", aria_hidden="true"), " ", cause))


def _difference(each: dict[str, Any]) -> Markup:
    summary = tag(
        "summary",
        name(each["where"]),
        tag("span", _cause(each["cause"])),
        tag("small", "root" if each["root"] else "downstream"),
        tag("span", tag("bdi", each["detail"]), class_="what"),
    )
    a, b = each["a"] or {}, each["b"] or {}
    rows: list[tuple[Inner, ...]] = [
        (
            (tag("code", key), (" ", sign("warn", "differs")) if a.get(key) != b.get(key) else None),
            _value(key, a.get(key)) if a else sign("quiet", "not in A"),
            _value(key, b.get(key)) if b else sign("quiet", "not in B"),
        )
        for key in dict.fromkeys([*a, *b])
    ]
    both = table("Both sides", ("Field", "A", "B"), rows)
    return tag("li", tag("details", summary, tag("div", both, class_="inside")))


# --- parts


def _missing(told: dict[str, Any], gateways: Collection[str]) -> Iterator[Markup]:
    missing = sorted(set(gateways) - set(told["gateways"]))
    if missing:
        yield tag("p", sign("warn", "Not all is here"), ": elsewhere are the records of ", ", ".join(missing), ".")


def _pages(to: str, following: str | None, parameter: str = "after", **query: str | None) -> Markup:
    last = tag("span", "This is the last page.")
    onwards = last if following is None else link(to, "Next page", **query, **{parameter: following})
    return tag("p", link(to, "First page", **query), onwards, class_="pages")


def moment(seconds: float) -> Markup:
    """A time for people, in UTC."""
    told = time.gmtime(seconds)
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", told)
    return tag("time", shown, datetime=time.strftime("%Y-%m-%dT%H:%M:%SZ", told))


def size(number: int) -> str:
    """Bytes for people."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
