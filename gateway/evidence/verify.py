"""`detgate verify`: canaries straight to the replicas, a verdict, and what it cannot tell.

A pass is written down beside the ledger for the engine's fingerprint, and lifts `unverified` from its answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx

from gateway.evidence import canaries, doctor, endpoints, files, verify_text
from gateway.evidence.canaries import LATE, NOT_HERE, References, Result
from gateway.evidence.commands import admin_key, progress
from gateway.evidence.endpoints import Sampling, Scoring
from gateway.evidence.output import output
from gateway.findings import Case, Told, alone, replicas
from gateway.passes import Passes
from gateway.settings import Pool, Settings
from gateway.settings import Replica as ReplicaSettings
from gateway.upstream import trust

PASSED, FAILED, NOT_TOLD = 0, 1, 2
"""Exit statuses; what was not tried is not passed. `NOT_TOLD`: a file or a gateway that should have the report took
not all of it, or cannot."""

TELL_SECONDS = 30.0
"""How long the gateway may take to take the report."""

LEAST_SECONDS = 10.0
"""What a request may take at least, however little of the budget is left."""

NEVER_ASKED = ("engine-other", "role-mismatch")
"""Findings with which a canary could end the server."""


@dataclass
class Verdict:
    """What came of all canaries on one replica."""

    pool: str
    replica: str
    fingerprint: str = ""
    results: list[Result] = field(default_factory=list)
    references: dict[str, References] = field(default_factory=dict)
    """What it answered alone, by route."""

    @property
    def tried(self) -> list[Result]:
        """Without those on routes that it does not serve."""
        return [result for result in self.results if not result.detail.startswith(NOT_HERE)]

    @property
    def passed(self) -> bool:
        return bool(self.tried) and all(result.outcome == "passed" for result in self.tried)

    @property
    def failed(self) -> bool:
        """Something was seen that must not be; else it may just not have been tried."""
        return any(result.outcome == "failed" for result in self.results)


@dataclass
class Verification:
    """All of it."""

    apart: dict[str, bool]
    """By pool: whether company was sent one at a time, as its lane would."""
    verdicts: list[Verdict] = field(default_factory=list)
    across: dict[str, list[Result]] = field(default_factory=dict)
    """By pool: its replicas' answers against each other."""

    @property
    def passed(self) -> bool:
        agreed = all(result.outcome == "passed" for results in self.across.values() for result in results)
        return agreed and bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)


def verify(
    settings: Settings,
    *,
    budget: float,
    lanes: bool = True,
    as_json: Path | None = None,
    junit: Path | None = None,
    tell: str | None = None,
) -> int:
    """Send the canaries and say what came of them. `budget`: seconds after which none is begun. The exit status.

    `tell`: URL of a running gateway that shall have the report too. Raises `InvalidSettings` where it needs a key of
    which the configuration has the hash alone.
    """
    if tell is not None:
        admin_key(settings)
    named = [file for file in (as_json, junit) if file is not None and str(file) != "-"]
    if (why := files.unwritable(named)) is not None:
        print(f"detgate: {why}", file=sys.stderr)
        return NOT_TOLD
    steps = sum(_steps(pool) * len(pool.replicas) for pool in settings.pools)
    with progress() as shown:
        bar = shown.add_task("canaries", total=steps)
        verification = asyncio.run(examine(settings, budget, lanes, lambda: shown.advance(bar)))
    _note(settings, verification)
    told = report(verification)
    kept = True
    text = json.dumps(told, ensure_ascii=False, indent=2)
    if as_json is not None and str(as_json) != "-":
        kept &= files.write(as_json, f"{text}\n".encode())
    if junit is not None:
        kept &= files.write(junit, as_junit(verification))
    if as_json is not None and str(as_json) == "-":
        print(text)
    else:
        with output() as console:
            verify_text.show(told, console)
    if tell is not None:
        kept &= hand(settings, tell, told)
    if not kept:
        return NOT_TOLD
    return PASSED if verification.passed else FAILED


async def examine(settings: Settings, budget: float, lanes: bool, step: Callable[[], None]) -> Verification:
    """Try all replicas of all pools side by side. `step` is called after each canary."""
    verification = Verification({pool.name: lanes and alone(pool) for pool in settings.pools})
    deadline = asyncio.get_running_loop().time() + budget
    turns = {replica.url: asyncio.Lock() for pool in settings.pools for replica in pool.replicas}

    async def one(pool: Pool, replica: ReplicaSettings) -> Verdict:
        # Ranks of one server, or pools that share it, would be each other's company.
        async with turns[replica.url]:
            return await _replica(pool, replica, verification.apart[pool.name], deadline, step)

    asking = [one(pool, replica) for pool in settings.pools for replica in pool.replicas]
    verification.verdicts = list(await asyncio.gather(*asking))
    for pool in settings.pools:
        verification.across[pool.name] = list(_across([v for v in verification.verdicts if v.pool == pool.name]))
    return verification


async def _replica(
    pool: Pool, settings: ReplicaSettings, apart: bool, deadline: float, step: Callable[[], None]
) -> Verdict:
    verdict = Verdict(pool.name, settings.name)
    left = max(LEAST_SECONDS, deadline - asyncio.get_running_loop().time())
    headers = doctor.key(pool)
    if settings.dp_rank is not None:
        headers["x-data-parallel-rank"] = str(settings.dp_rank)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=settings.url, headers=headers, timeout=left, limits=limits, verify=trust(pool.tls)
    ) as http:
        said, unreachable = await doctor.meet(http, pool, settings)
        verdict.fingerprint = said.fingerprint
        against = unreachable or _dangerous(pool, Told(said.facts))
        names = [str(model["id"]) for model in said.models or ()] or list(pool.models)
        if against or not names:
            verdict.results.append(Result("asked", "broken", detail=against or "it names no model"))
            return verdict
        asked = canaries.Replica(http, names[0], apart, deadline)
        async for route, result, references in _canaries(pool, asked):
            verdict.results.append(replace(result, endpoint=route))
            if references:
                verdict.references[route] = references
            step()
        again, _ = await doctor.meet(http, pool, settings)
    if again.fingerprint != said.fingerprint:
        verdict.results.append(Result("same-engine", "broken", detail="it became another engine under way"))
    return verdict


async def _canaries(pool: Pool, replica: canaries.Replica) -> AsyncIterator[tuple[str, Result, References | None]]:
    for endpoint in _endpoints(pool):
        if isinstance(endpoint, Sampling):
            async for result, references in canaries.of_sampling(replica, endpoint):
                yield endpoint.path, result, references
        else:
            async for result, references in canaries.of_scoring(replica, endpoint):
                yield endpoint.path, result, references


def _endpoints(pool: Pool) -> tuple[Sampling | Scoring, ...]:
    known = endpoints.load(pool.engine)
    return known.SAMPLING if pool.role == "generate" else known.SCORING


def _steps(pool: Pool) -> int:
    each = canaries.SAMPLING_CANARIES if pool.role == "generate" else canaries.SCORING_CANARIES
    return each * len(_endpoints(pool))


def _dangerous(pool: Pool, told: Told) -> str:
    """Why a replica must not be asked at all."""
    found = replicas.findings(Case(pool, told))
    return next((f"it {finding.says}: not asked" for finding in found if finding.id in NEVER_ASKED), "")


def _across(verdicts: list[Verdict]) -> Iterator[Result]:
    """The replicas' answers against each other, by route."""
    for route in dict.fromkeys(route for verdict in verdicts for route in verdict.references):
        given = [verdict.references[route] for verdict in verdicts if route in verdict.references]
        if len(given) > 1:
            by_prompt = [list(answers) for answers in zip(*given, strict=True)]
            yield replace(canaries.judge("across-replicas", by_prompt), endpoint=route)


def _note(settings: Settings, verification: Verification) -> None:
    """Write down who passed, and who no longer does."""
    passes = Passes(settings.ledger.path)
    pools = {pool.name: pool for pool in settings.pools}
    try:
        for verdict in verification.verdicts:
            if verdict.fingerprint and (verdict.passed or verdict.failed):
                passes.note(
                    pools[verdict.pool],
                    verdict.replica,
                    verdict.fingerprint,
                    apart=verification.apart[verdict.pool],
                    passed=verdict.passed,
                    at=time.time(),
                )
    except OSError as error:
        where, why = settings.ledger.path, files.because(error)
        print(f"detgate: the verdict could not be kept in {where}: {why}", file=sys.stderr)


def hand(settings: Settings, url: str, told: dict[str, Any]) -> bool:
    """Give the report to a running gateway. Says what it did not take."""
    key = admin_key(settings)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(f"{url.rstrip('/')}/admin/verdicts", json=told, headers=headers, timeout=TELL_SECONDS)
        if not answer.is_success:
            raise ValueError(f"{answer.status_code}: {answer.text[:500]}")
        outcome = answer.json()
        taken = sum(map(len, outcome["taken"].values()))
        refused = list(_flat(outcome["refused"]))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, AttributeError, TypeError) as error:
        print(f"detgate: {url} did not take the report: {str(error) or type(error).__name__}", file=sys.stderr)
        return False
    print(f"detgate: {url} took the verdicts on {taken} replicas", file=sys.stderr)
    for (pool, replica), why in refused:
        print(f"detgate: {url} did not take that on {pool}, {replica}: {why}", file=sys.stderr)
    return not refused


def _flat(by_pool: dict[str, dict[str, str]]) -> Iterator[tuple[tuple[str, str], str]]:
    return (((pool, name), why) for pool, names in by_pool.items() for name, why in names.items())


# --- reports


def report(verification: Verification) -> dict[str, Any]:
    """All of it, as JSON."""
    return {
        "passed": verification.passed,
        "pools": {
            name: {
                "one_at_a_time": apart,
                "replicas": {
                    verdict.replica: {
                        "passed": verdict.passed,
                        "fingerprint": verdict.fingerprint or None,
                        "canaries": [_told(result) for result in verdict.results],
                    }
                    for verdict in verification.verdicts
                    if verdict.pool == name
                },
                "across": [_told(result) for result in verification.across[name]],
            }
            for name, apart in verification.apart.items()
        },
        "cannot_tell": list(_cannot_tell(verification)),
    }


def _told(result: Result) -> dict[str, Any]:
    return asdict(result) | {"first": None if result.first is None else result.first._asdict()}


def _cannot_tell(verification: Verification) -> Iterator[str]:
    """What the canaries cannot show, or cannot tell apart."""
    results = [result for verdict in verification.verdicts for result in verdict.results]
    yield (
        "Other clients' requests, preemptions and a cache that was emptied meanwhile look like the company that was"
        " sent: verify while nobody else uses the replicas."
    )
    yield (
        f"Not tried: more than {canaries.CROWDS[-1]} requests at once, answers above {canaries.TOKENS} tokens, contexts"
        f" above some {len(canaries.LONG) // 1000},000 characters, other sampling parameters, routes other than these."
    )
    if any(result.canary == "cold-warm" and result.outcome == "passed" for result in results):
        yield "A prefix cache that is off and one that changes nothing look the same."
    if any(verification.apart.values()):
        yield "What the engine does in company: requests were kept apart, as the lane does. --no-lane tries it."
    if any(result.first is None and result.endpoint == "/v1/responses" for result in results):
        yield "On /v1/responses no logprobs are told: what differs in the last bits alone is not seen there."
    if any(result.canary == "seed-repeats" and result.outcome == "failed" for result in results):
        yield "Where answers differ even alone: whether seeds are ignored, or kernels give other bits each time."
    if any(result.detail == LATE for result in results):
        yield "Nothing of what was skipped for the budget."


def as_junit(verification: Verification) -> bytes:
    """A JUnit report: a suite a replica, and one for the pool's replicas against each other."""
    root = ElementTree.Element("testsuites", name="detgate verify")
    for verdict in verification.verdicts:
        _suite(root, f"{verdict.pool}.{verdict.replica}", verdict.results)
    for pool, results in verification.across.items():
        if results:
            _suite(root, pool, results)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _suite(root: ElementTree.Element, name: str, results: list[Result]) -> None:
    counts = Counter(result.outcome for result in results)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(len(results)),
        failures=str(counts["failed"]),
        errors=str(counts["broken"]),
        skipped=str(counts["skipped"]),
    )
    for result in results:
        title = f"{result.endpoint} {result.canary}".strip()
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=title)
        if result.outcome != "passed":
            kind = {"failed": "failure", "broken": "error", "skipped": "skipped"}[result.outcome]
            ElementTree.SubElement(case, kind, message=verify_text.sentence(_told(result)))
