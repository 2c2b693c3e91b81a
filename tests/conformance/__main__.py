"""Runs public suites on the gateway and tells their figures: `make conformance`, or one of them by its name.

A suite that cannot be had here is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

from tests.conformance import corpus, h1spec, schema, slow, smuggler
from tests.conformance.outcome import Outcome
from tests.conformance.sources import URLS, Missing

SUITES: dict[str, Callable[[], Awaitable[Outcome]]] = {
    "h1spec": h1spec.run,
    "gunicorn": corpus.run,
    "smuggler": smuggler.run,
    "slowhttptest": slow.run,
    "schemathesis": schema.run,
}


async def _one(name: str) -> bool:
    try:
        outcome = await SUITES[name]()
    except Missing as missing:
        hint = f" Name a git URL or a folder: {name.upper()}=…" if name in URLS else ""
        print(f"{name}: MISSING: {missing}.{hint}", flush=True)
        return False
    print(outcome.text(), flush=True)
    return not outcome.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="all of them, where none is named")
    passed = [asyncio.run(_one(name)) for name in parser.parse_args().suites or SUITES]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
