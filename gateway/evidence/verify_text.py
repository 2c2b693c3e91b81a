"""What verify saw, as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

_STYLES = {"passed": "green", "failed": "bold red", "broken": "bold red", "skipped": "yellow"}


def show(told: dict[str, Any], console: Console) -> None:
    """Say what was seen."""
    for name, pool in told["pools"].items():
        lane = " · one request at a time, as its lane" if pool["one_at_a_time"] else ""
        console.print(f"[bold]{escape(name)}[/]{lane}", highlight=False)
        for replica, state in pool["replicas"].items():
            word = "[green]passed[/]" if state["passed"] else "[bold red]not passed[/]"
            console.print(f"  {escape(replica)} {word} · {state['fingerprint'] or 'unknown'}", highlight=False)
            for line in _lines(state["canaries"]):
                console.print(Padding.indent(line, 4), highlight=False)
        if pool["across"]:
            console.print("  replicas against each other", highlight=False)
            for line in _lines(pool["across"]):
                console.print(Padding.indent(line, 4), highlight=False)
    console.print("\nNot told by this:", highlight=False)
    for line in told["cannot_tell"]:
        console.print(Padding.indent(f"· {escape(line)}", 2), highlight=False)
    word = "[bold green]passed[/]" if told["passed"] else "[bold red]not passed[/]"
    console.print(f"\n{word}", highlight=False)


def _lines(results: list[dict[str, Any]]) -> Iterator[str]:
    """What passed on one line a route; anything else with all that is known of it."""
    for endpoint in dict.fromkeys(result["endpoint"] for result in results):
        of_one = [result for result in results if result["endpoint"] == endpoint]
        if passed := [each for each in of_one if each["outcome"] == "passed"]:
            counts = ", ".join(f"{each['canary']} {each['distinct']} of {each['of']}" for each in passed)
            yield f"[green]passed[/] {escape(endpoint)}: {counts}"
        for detail, group in _alike([each for each in of_one if each["outcome"] != "passed"]):
            style = _STYLES[group[0]["outcome"]]
            names = ", ".join(each["canary"] for each in group)
            yield f"[{style}]{group[0]['outcome']}[/] {escape(endpoint)} [bold]{names}[/]: {escape(detail)}"


def _alike(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Results of which the same is to be said, one after the other."""
    for (detail, _), group in groupby(results, key=lambda result: (sentence(result), result["outcome"])):
        yield detail, list(group)


def sentence(result: dict[str, Any]) -> str:
    """What came of a canary, without its name."""
    if not result["of"]:
        return str(result["detail"])
    said = f"{result['distinct']} of {result['of']} answers distinct"
    if result["differing"]:
        said += f", for {result['differing']} of {result['prompts']} prompts"
    if result["detail"]:
        said += f"; {result['detail']}"
    if (first := result["first"]) is not None:
        said += f"; {_first(first)}"
    return said


def _first(first: dict[str, Any]) -> str:
    expected, got = first["values"]
    if first["at"] < 0:
        return f"text {first['prompt']}: {expected!r}, then {got!r}"
    where = f"prompt {first['prompt']}, token {first['at']}"
    if first["expected"] == first["got"]:
        return f"{where} {first['expected']!r}: logprob {expected!r}, then {got!r}"
    said = f"{where}: {first['expected']!r}, then {first['got']!r}"
    return said if expected is None or got is None else f"{said}; logprobs {expected!r}, {got!r}"
