"""What doctor found, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

_STYLES = {"fatal": "bold red", "warning": "yellow", "note": "cyan"}

_SURE = {"told": "told by the replica", "measured": "measured", "unknown": "not told by the replica"}

_WORDS = {
    "deterministic": "deterministic mode",
    "is_generation": "generates",
    "default_min_p": "min_p of the model",
    "priority_scheduling": "priority scheduling",
    "overlapped": "overlapped scheduling",
    "dp_attention": "DP attention",
    "kv_cache_dtype": "KV cache dtype",
    "max_running": "requests in a batch",
    "quantization": "quantisation",
    "mixture_of_experts": "mixture of experts",
    "sampling_defaults": "sampling defaults from",
    "defaults": "sampling defaults",
}

_ORDER = ("engine", "version", "deterministic", "attention_backend", "sampling_backend", "prefix_cache")
"""Facts that stand first; the others follow as they come."""


def show(told: dict[str, Any], console: Console) -> None:
    """Say what was found."""
    for name, pool in told["pools"].items():
        lane = ", one request at a time" if pool["one_at_a_time"] else ""
        console.print(f"[bold]{escape(name)}[/] · {pool['engine']} · {pool['role']}{lane}", highlight=False)
        for replica, state in pool["replicas"].items():
            if state["state"] != "up":
                console.print(f"  [bold red]{escape(replica)} is {state['state']}[/]: {escape(state['reason'])}")
        console.print(Padding.indent(_facts(pool["replicas"]), 2))
        for indent, line in _findings(pool["findings"]):
            console.print(Padding.indent(line, indent), highlight=False)
        console.print()
    replicas = [each for pool in told["pools"].values() for each in pool["replicas"].items()]
    down = [name for name, replica in replicas if replica["state"] != "up"]
    if told["strict"] is None:
        unknown = "[bold yellow]whether strict would serve is not known[/] while a replica is down"
        console.print(f"{unknown}: {escape(', '.join(down))}", highlight=False)
    elif told["strict"]:
        console.print("[bold green]strict would serve[/]", highlight=False)
    else:
        console.print("[bold red]strict would refuse[/]: each finding marked fatal has to be mended", highlight=False)


def _facts(replicas: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=len(replicas) > 1)
    table.add_column("")
    for name in replicas:
        table.add_column(name, overflow="fold")
    names = [name for replica in replicas.values() for name in replica["facts"]]
    for name in dict.fromkeys([fact for fact in _ORDER if fact in names] + names):
        table.add_row(_words(name), *(_shown(replica["facts"].get(name)) for replica in replicas.values()))
    table.add_row("fingerprint", *(escape(replica["fingerprint"] or "–") for replica in replicas.values()))
    return table


def _words(fact: str) -> str:
    return _WORDS.get(fact, fact.replace("_", " "))


def _shown(value: Any) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{escape(name)} {number:g}" for name, number in value.items())
    return escape(str(value))


def _findings(found: Iterable[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    """Each once, with the replicas that it concerns: indented lines."""

    def same(finding: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in finding.items() if name != "replica")

    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for finding in found:
        alike.setdefault(same(finding), []).append(finding)
    for group in sorted(alike.values(), key=lambda group: list(_STYLES).index(group[0]["severity"])):
        finding = group[0]
        who = ", ".join(escape(each["replica"] or each["pool"]) for each in group)
        style = _STYLES[finding["severity"]]
        said = f"{escape(finding['says'])}, so {escape(finding['breaks'])}"
        yield 2, f"[{style}]{finding['severity']}[/] [bold]{who}[/] {said} [dim]({_SURE[finding['sure']]})[/]"
        if finding["mend"]:
            since = f" (since {finding['since']})" if finding["since"] else ""
            yield 6, f"[bold]{escape(finding['mend'])}[/]{since}"
        if finding["report"]:
            yield 6, finding["report"]
