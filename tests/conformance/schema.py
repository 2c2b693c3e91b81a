"""schemathesis on the control plane: what the API's description allows, and what it does not, is answered as it says.

One of its checks is left out: that everything is taken which the description allows. Ids are bounded in bytes, which a
schema cannot say.
"""

from __future__ import annotations

import re

from tests.conformance import sources
from tests.conformance.outcome import Outcome
from tests.conformance.processes import output
from tests.harness import FakeWorker, gateway, pool

CONTROL = r"^/(sessions|groups|admin|runs|rl|livez|readyz|metrics|determinism)"


async def run() -> Outcome:
    """All of its checks. Raises `sources.Missing`."""
    commands = sources.installed("schemathesis")
    _, version = await output(commands / "schemathesis", "--version")
    outcome = Outcome(version.strip())
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        command = (
            "run",
            f"{gate.url}/openapi.json",
            "--include-path-regex",
            CONTROL,
            "--seed",
            "1",
            "--no-color",
            "--exclude-checks",
            "positive_data_acceptance",
            "--max-examples",
            "60",
        )
        status, text = await output(commands / "schemathesis", *command, folder=sources.CACHE)
    counts = re.search(r"(\d+) generated(?:, (\d+) passed)?", text)
    assert counts is not None, text[-2000:]
    found = re.findall(r"^- (ST\d+ .*)", text, re.M)
    outcome.passed = int(counts[2] or counts[1]) if not found else int(counts[1]) - len(found)
    outcome.failed = found
    outcome.notes = re.findall(r"^\s+(?:Selected|Tested): .*", text, re.M)
    if status:
        outcome.notes.append(text)
    return outcome
