"""`python -m tests.bench`: the table, or the check that CI runs.

    python -m tests.bench                                     detgate beside nginx and a direct call
    python -m tests.bench --url http://127.0.0.1:8000 --pid 4711 --name other
                                                              another gateway beside them, whose replicas are the fake
                                                              engine's: http://127.0.0.1:17821 and :17822, fake-model
    python -m tests.bench check                               the ratios to nginx against those that were recorded
    python -m tests.bench check --planted                     and that a gateway which costs twice as much is noticed

All on 127.0.0.1: the gateway on the first core, engine and load on the others. CPU time is the operating system's, user
and system, of a process and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.bench import machine, parts
from tests.bench.cases import CASES, CHECKED, Figures, rounds
from tests.bench.parts import Bench, Target

RECORDED = parts.HERE / "ratios.json"
"""What detgate costs in units of nginx, where it was last measured at leisure."""
ALLOWED = 1.6
"""How far above what is recorded a ratio may be: machines and neighbours differ, and a doubling is not let through."""


def table(every: Sequence[Figures], names: Sequence[str], against: str | None) -> str:
    """The medians as Markdown."""
    lines = ["| | " + " | ".join(figures.case.title for figures in every) + " |", "|---" * (len(every) + 1) + "|"]
    for name in names:
        cells = ["" if name == "direct" and not f.case.latency else f"{f.median(name):.4g}" for f in every]
        lines.append(f"| {name}{' (p50 itself)' * (name == 'direct')} | " + " | ".join(cells) + " |")
    for name in names:
        if against and name not in ("direct", against):
            lines.append(f"| {name} ÷ {against} | " + " | ".join(f"{f.ratio(name, against):.1f}" for f in every) + " |")
    return "\n".join(lines)


def compare(bench: Bench, given: argparse.Namespace) -> None:
    """Print the table."""
    with ExitStack() as stack:
        targets = [Target("direct", bench.engines[0], None)]
        if not given.no_nginx:
            targets.append(stack.enter_context(parts.nginx(bench)))
        for url, pid, name in zip(given.url, given.pid, given.name, strict=True):
            targets.append(Target(name, urlsplit(url).port or 80, pid))
            parts.serves(bench, targets[-1])
        if not given.no_detgate:
            targets.append(stack.enter_context(parts.gateway(bench)))
        every = []
        since, busy = time.monotonic(), machine.busy_seconds()
        own = sum(parts.spent(target) for target in targets) + sum(os.times()[:4])
        for case in CASES:
            if not given.cases or case.name in given.cases:
                every.append(rounds(bench, case, targets, given.rounds, given.seconds))
                print(
                    f"{case.name}: " + json.dumps({k: [round(x, 1) for x in v] for k, v in every[-1].of.items()}),
                    file=sys.stderr,
                )
        own = sum(parts.spent(target) for target in targets) + sum(os.times()[:4]) - own
        busy = (machine.busy_seconds() - busy) / ((time.monotonic() - since) * len(parts.CORES))
        print(table(every, [target.name for target in targets], "nginx" if not given.no_nginx else None))
        print(f"\n{given.rounds} rounds, load {os.getloadavg()[0]:.1f}; the machine's cores were {busy:.0%} busy.")


def compared(bench: Bench, given: argparse.Namespace, plant: str | None = None) -> dict[str, Figures]:
    """detgate beside nginx, by case. `plant`: what more it costs, as in `tests.bench.planted`."""
    with ExitStack() as stack:
        plain = stack.enter_context(parts.nginx(bench))
        ours = stack.enter_context(parts.gateway(bench, plant=plant))
        every = {case.name: rounds(bench, case, [plain, ours], given.rounds, given.seconds) for case in CHECKED}
    for figures in every.values():
        print(f"{figures.case.title}: " + ", ".join(f"{name} {figures.median(name):.1f}" for name in figures.of))
    return every


def doubled(every: dict[str, Figures]) -> str:
    """What to plant so that everything costs twice as much."""
    request, large, chunk = (figures.median("detgate") for figures in every.values())
    return f"{request},{(large - request) / (64 << 10)},{chunk}"


def above(every: dict[str, Figures], recorded: dict[str, float]) -> list[str]:
    """Print what was found beside what is allowed; the cases that cost too much."""
    found = {name: figures.ratio("detgate", "nginx") for name, figures in every.items()}
    for name, ratio in found.items():
        most = ALLOWED * recorded[name]
        verdict = "TOO MUCH" if ratio > most else "well"
        print(f"{name}: {ratio:.2f} × nginx, {recorded[name]} recorded, at most {most:.1f}: {verdict}")
    return [name for name, ratio in found.items() if ratio > ALLOWED * recorded[name]]


def check(bench: Bench, given: argparse.Namespace) -> int:
    """The exit status: 1 where something costs too much, or a doubling would not be noticed."""
    every = compared(bench, given)
    if given.record:
        found = {name: round(figures.ratio("detgate", "nginx"), 2) for name, figures in every.items()}
        RECORDED.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    recorded: dict[str, float] = json.loads(RECORDED.read_text())
    if above(every, recorded):
        return 1
    if given.planted:
        print("\ntwice as much:")
        missed = set(every).difference(above(compared(bench, given, doubled(every)), recorded))
        print(f"not noticed in {', '.join(missed)}" if missed else "noticed in each")
        return 1 if missed else 0
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("table", "check"), default="table")
    parser.add_argument("--url", action="append", default=[], help="a gateway that runs already")
    parser.add_argument("--pid", action="append", default=[], type=int, help="its process")
    parser.add_argument("--name", action="append", default=[], help="what to call it")
    parser.add_argument("--no-nginx", action="store_true")
    parser.add_argument("--no-detgate", action="store_true")
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--planted", action="store_true", help="see that a gateway that costs twice as much is noticed")
    parser.add_argument("--record", action="store_true", help="write down what is found as what is allowed")
    given = parser.parse_args()
    with parts.bench(parts.ENGINES if given.url else ()) as bench:
        if given.what == "check":
            return check(bench, given)
        compare(bench, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
