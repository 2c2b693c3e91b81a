"""The parts of the documents that are made from the code: settings, engines, metrics, vectors, timelines.

    python -m tests.docs_tables        brings docs/ up to date and names the files that changed

A part stands in a document between `<!-- begin: WHAT -->` and `<!-- end -->`; WHAT is one of `PARTS` and what it is
to show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import httpx
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway import engines, launch, schemes
from gateway.assembly import Gateway
from gateway.cli import _parser
from gateway.core import seeds
from gateway.core.types import Handling
from gateway.findings.flags import FLAGS, source
from gateway.routes import API_OF
from gateway.settings import Settings, schema
from gateway.sim import Fault
from tests import matrix
from tests.timelines import TIMELINES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

_PART = re.compile(r"(<!-- begin: (\w+)(?: ([^\n]*?))? -->\n).*?(<!-- end -->)", re.S)


def rendered(text: str) -> str:
    """A document with every part made anew."""
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]](match[3] or '').strip()}\n\n{match[4]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


# --- settings

_SHOWN: tuple[tuple[Any, str], ...] = (
    (schema.Seed, "0 … 2⁶³−1"),
    (schema.Count, "integer from 1"),
    (schema.Rank, "integer from 0"),
    (schema.Port, "0 … 65535"),
    (schema.FixedPort, "1 … 65535"),
    (schema.Seconds, "seconds"),
    (schema.Patience, "seconds, above 0"),
    (schema.Slack, "integer from 0, or `inf`"),
    (schema.Name, "name"),
    (schema.AdminKey, "secret"),
    (schema.SentKey, "secret"),
    (schema.Url, "URL"),
    (schema.Endpoint, "URL"),
    (schema.File, "file"),
    (schema.Keys, "secrets"),
    (schema.State, "`memory` or a URL"),
    (float, "number"),
    (bool, "`true`, `false`"),
    (str, "text"),
    (schema.Folder, "folder"),
)

_NAMES = {
    name: ", ".join(f"`{choice}`" for choice in choices)
    for name, choices in (("scheme", schemes.names()), ("engine", engines.names()))
}
"""Keys whose values are the files of a folder."""


def settings(section: str) -> str:
    """The keys of one section, or those at the top that are no section."""
    model: type[BaseModel] = Settings
    for name in filter(None, section.replace("[]", "").split(".")):
        model = _sections(get_type_hints(model, include_extras=True)[name])[0]
    hints = get_type_hints(model, include_extras=True)
    rows = (
        (f"`{name}`", _NAMES.get(name) or _values(hints[name]), _default(field), str(field.description))
        for name, field in model.model_fields.items()
        if not _sections(hints[name])
    )
    return table(("key", "values", "default", "meaning"), rows)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _sections(argument)]


def _values(annotation: Any) -> str:
    for known, words in _SHOWN:
        if annotation == known:
            return words
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_values(argument) for argument in get_args(annotation))
    if annotation is type(None):
        return "`null`"
    if get_origin(annotation) is tuple:
        return f"list: {_values(get_args(annotation)[0])}"
    raise TypeError(annotation)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "needed"
    if field.default == ():
        return "`[]`"
    value = field.default
    shown = int(value) if isinstance(value, float) and value.is_integer() else value
    return f"`{shown if isinstance(shown, str | Path) else json.dumps(shown)}`"


# --- engines


def engine(name: str) -> str:
    """What is done with each route of one engine."""
    rows = (
        (
            f"`{path}`",
            handling.kind if handling.role == "any" else f"{handling.kind}, {handling.role}",
            _field(handling.seed) if handling.kind == "sample" else "–",
            ", ".join(map(_field, handling.strays)) or "–",
            _fan_out(handling),
            _id(name, handling),
            "–" if handling.salt is None else f"`{handling.salt}`",
            "yes" if handling.priority else "–",
        )
        for path, handling in engines.load(name).ROUTES.items()
    )
    return table(
        ("route", "kind, role", "seed goes to", "seeds moved from", "parted by", "engine id in", "salt in", "priority"),
        rows,
    )


def _field(path: tuple[str, ...] | None) -> str:
    return "**none**" if path is None else f"`{'.'.join(path)}`"


def _fan_out(handling: Handling) -> str:
    if handling.merge is None:
        return "–"
    parted = [f"`{field}`" for field in handling.inputs]
    if handling.n is not None and (handling.clones or parted):
        parted.insert(0, _field(handling.n) + ("" if handling.clones else " (with a list)"))
    return ", ".join(parted) or "–"


def _id(name: str, handling: Handling) -> str:
    if handling.kind not in ("sample", "score"):
        return "–"
    if handling.engine_id is not None:
        return _field(handling.engine_id)
    return ", ".join(f"`{header.decode()}`" for header, _ in engines.load(name).id_headers("")) or "–"


# --- metrics

LABELS = {
    "pool": "names of pools",
    "replica": "names of replicas",
    "route": "the data plane's routes, else `unknown`",
    "status": "HTTP statuses; 499 where the client had left",
    "outcome": "how a sending ended",
    "guard": "names of guards",
    "code": "[codes of errors](errors.md)",
    "reason": "[reasons](guarantees.md#reasons)",
    "keys": "`counters`, `changes`, `sessions`, `guards` (of a run), `lanes` (of a pool)",
}
"""What a label's values are taken from: never from what a client sent."""


def metrics(_: str) -> str:
    """Every series that a gateway exports."""
    rows = []
    for family in exported():
        suffix = {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in family._labelnames) or "–"
        rows.append((f"`{family.name}{suffix}`", family.type, labels, family.documentation))
    return table(("series", "kind", "labels", "meaning"), rows)


def exported() -> list[Any]:
    """The metric families of a gateway."""
    with _gateway() as gateway:
        return list(gateway.telemetry.collect())


@contextmanager
def _gateway() -> Iterator[Gateway]:
    replicas = [{"name": "policy-0", "url": "http://127.0.0.1:1"}]
    with TemporaryDirectory() as folder:
        settings = Settings.load(
            None,
            {},
            {
                "ledger": {"path": folder},
                "pools": [{"name": "policy", "engine": "vllm", "replicas": replicas}],
            },
        )
        gateway = Gateway(settings)
        try:
            yield gateway
        finally:
            gateway.runs.close()


def labels(_: str) -> str:
    """Where the values of labels come from."""
    used = {label for family in exported() for label in family._labelnames}
    return table(("label", "values"), ((f"`{label}`", LABELS[label]) for label in sorted(used)))


def alerts(_: str) -> str:
    """The alert rules, by what they tell."""
    [group] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "detgate.yml").read_text())["groups"]
    rows = (
        (f"`{rule['alert']}`", rule["labels"]["severity"], rule["annotations"]["summary"]) for rule in group["rules"]
    )
    return table(("alert", "severity", "says"), rows)


# --- commands and routes


def commands(_: str) -> str:
    """Every command with its arguments."""
    return "\n\n".join(_command("detgate", _parser(), ""))


def _command(name: str, parser: argparse.ArgumentParser, text: str) -> Iterator[str]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if text:
        yield f"## {name}\n{text[0].upper()}{text[1:]}."
        if rows := [_argument(action) for action in parser._actions if action not in below and action.dest != "help"]:
            yield table(("argument", "value", "meaning"), rows)
    for action in below:
        # Commands without a help text are not for people.
        for choice in action._choices_actions:
            yield from _command(f"{name} {choice.dest}", action.choices[choice.dest], choice.help or "")


def _argument(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
    values = "–"
    if action.choices is not None:
        values = ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs != 0 and action.option_strings and not isinstance(action, argparse.BooleanOptionalAction):
        values = f"{action.metavar or action.dest.upper()}{' …' if action.nargs == '+' else ''}"
    return names, values, action.help or ""


def sim_faults(_: str) -> str:
    """Every fault that a simulated engine can be told to have."""
    told = dict(re.findall(r"^    (\w+) {2,}(.+)$", Fault.__doc__ or "", re.M))
    values = {
        bool: "`true`",
        float: "seconds",
        int | None: "integer",
        tuple[tuple[str, str], ...]: "`[[name, value], …]`",
    }
    rows = [(f"`{name}`", values[kind], told[name]) for name, kind in get_type_hints(Fault).items()]
    return table(("field", "value", "the engine"), rows)


def api(_: str) -> str:
    """The routes of the control plane."""
    with _gateway() as gateway:
        described = asyncio.run(_described(gateway))
    rows = (
        (f"`{method.upper()} {path}`", told["summary"])
        for path, methods in described["paths"].items()
        if path not in API_OF
        for method, told in methods.items()
    )
    return table(("route", "what"), rows)


async def _described(gateway: Gateway) -> Any:
    transport = httpx.ASGITransport(app=gateway.application)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return (await http.get("/openapi.json")).json()


# --- launch profiles


def launched(_: str) -> str:
    """The profiles that there are, and since when the engine's makers say that the mode holds."""
    rows = (
        (engine, f"`{hardware}`", profile.since, _linked(profile.claim.rstrip(".")))
        for engine in launch.names()
        for hardware in launch.load(engine).HARDWARE
        for profile in [launch.load(engine).profile(launch.Wish(hardware))]
    )
    return table(("engine", "`--hardware`", "from version", "what its makers say"), rows)


def _linked(text: str) -> str:
    return re.sub(r"https://[^\s;,)]+", lambda found: f"<{found[0]}>", text)


# --- seeds


def vectors(scheme: str) -> str:
    """Golden seeds of one scheme, computed."""
    seed = schemes.load(scheme).seed
    asked = (
        [(42, "17:3", 0, None), (42, "17:3", 1, None), (42, "17:4", 0, None), (7, "17:3", 0, None)]
        if scheme != "offset"
        else [(42, "17:0", 0, 0), (42, "17:1", 0, 1), (42, "99:0", 0, 0), (42, "17:0", 1, 0)]
    )
    rows = (
        (str(master), f"`{identity}`", str(index), "–" if member is None else str(member), f"`{drawn}`")
        for master, identity, index, member in asked
        for drawn in [seed(master, identity, index, member)]
    )
    return table(("master seed", "identity", "index", "member", "seed"), rows)


def samples(seed: str) -> str:
    """The seeds of the samples of a call."""
    found = seeds.samples(int(seed), 4)
    return table(("sample", "seed"), ((str(number), f"`{drawn}`") for number, drawn in enumerate(found)))


# --- decisions


def decisions(_: str) -> str:
    """All decisions, by their headings."""
    files = sorted((DOCS / "decisions").glob("0*.md"))
    return "\n".join(f"- [{file.read_text().splitlines()[0].removeprefix('# ')}]({file.name})" for file in files)


# --- timelines


def timeline(name: str) -> str:
    """One of the timelines that the store is tested with."""
    lines = [line.strip() for line in TIMELINES[name].strip().splitlines()]
    return "\n".join(["```text", *lines, "```"])


# --- what holds


def holds(name: str) -> str:
    """What holds for the answers of an engine, by route; found by asking its simulation."""
    return table(("route", "whole", "streamed"), matrix.table(name))


def flags(name: str) -> str:
    """Since when an engine has what findings ask for."""
    rows = []
    for flag, since in sorted(FLAGS[name].items()):
        lacked = "–" if since.lacked is None else since.lacked
        rows.append((f"`{flag}`", since.version, lacked, f"[{since.file}]({source(name, since)})"))
    return table(("flag, variable or field", "least version", "not in", "read in"), rows)


PARTS: dict[str, Callable[[str], str]] = {
    "settings": settings,
    "engine": engine,
    "holds": holds,
    "metrics": metrics,
    "labels": labels,
    "alerts": alerts,
    "commands": commands,
    "sim_faults": sim_faults,
    "api": api,
    "launch": launched,
    "flags": flags,
    "vectors": vectors,
    "samples": samples,
    "decisions": decisions,
    "timeline": timeline,
}


def documents() -> Iterator[Path]:
    """All documents for people, README first."""
    yield ROOT / "README.md"
    yield ROOT / "README.zh.md"
    yield from sorted(DOCS.rglob("*.md"))


def main() -> None:
    """Bring the documents up to date."""
    for document in documents():
        text = document.read_text()
        if (fresh := rendered(text)) != text:
            document.write_text(fresh)
            print(document.relative_to(ROOT))


if __name__ == "__main__":
    main()
