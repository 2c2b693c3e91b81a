"""`detgate doctor`: what every replica is, and what of it breaks determinism."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx

from gateway import engines, findings
from gateway.evidence import doctor_text
from gateway.evidence.output import output
from gateway.findings import Told
from gateway.introductions import Introduction, introduce
from gateway.passes import Passes
from gateway.questions import Answered
from gateway.settings import Pool, Replica, Settings
from gateway.upstream import Broken, trust

PROMISED, REFUSED, UNKNOWN = 0, 1, 2
"""Exit statuses: `strict` would serve, it would refuse, it is not known because somebody did not answer."""

_STATUS = {True: PROMISED, False: REFUSED, None: UNKNOWN}


def doctor(settings: Settings, *, url: str | None = None, as_json: bool = False) -> int:
    """Ask the replicas of the settings, or the gateway at `url` what it knows, and say so. The exit status."""
    try:
        told = asyncio.run(_of_gateway(url, settings) if url is not None else examine(settings))
    except (httpx.HTTPError, ValueError) as error:
        print(f"detgate: {url} does not tell: {str(error) or type(error).__name__}", file=sys.stderr)
        return UNKNOWN
    if as_json:
        print(json.dumps(told, ensure_ascii=False, indent=2))
    else:
        with output() as console:
            doctor_text.show(told, console)
    return _STATUS[told["strict"]]


async def examine(settings: Settings) -> dict[str, Any]:
    """What `/determinism` of a gateway with these settings would say once it had probed its replicas."""
    passes = Passes(settings.ledger.path)
    pools = await asyncio.gather(*(_examine(settings, pool, passes) for pool in settings.pools))
    strict = findings.strict_serves(
        fatal=any(finding["severity"] == "fatal" for pool in pools for finding in pool["findings"]),
        states=(replica["state"] for pool in pools for replica in pool["replicas"].values()),
    )
    named = dict(zip((pool.name for pool in settings.pools), pools, strict=True))
    return {"profile": settings.profile, "run": None, "strict": strict, "pools": named}


async def _examine(settings: Settings, pool: Pool, passes: Passes) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=settings.health.timeout, verify=trust(pool.tls)) as http:
        met = await asyncio.gather(*(meet(http, pool, replica) for replica in pool.replicas))
    told = {
        replica.name: Told(
            said.facts,
            said.fingerprint,
            pinned=replica.dp_rank is not None,
            verified=passes.verdict(pool, replica.name, said.fingerprint),
        )
        for replica, (said, _) in zip(pool.replicas, met, strict=True)
    }
    report = findings.report(pool, told, findings.judge(pool, told))
    for replica, (_, reason) in zip(pool.replicas, met, strict=True):
        report["replicas"][replica.name] |= {"state": "down" if reason else "up", "reason": reason or "answers"}
    return report


async def meet(http: httpx.AsyncClient, pool: Pool, replica: Replica) -> tuple[Introduction, str]:
    """What a replica says of itself, and why it could not be asked: "" where it could."""
    engine = engines.load(pool.engine)

    async def ask(path: str) -> Answered:
        try:
            answer = await http.get(replica.url + path, headers=key(pool))
        except httpx.HTTPError as error:
            raise Broken(str(error) or type(error).__name__, "send") from None
        return Answered(answer.status_code, answer.content)

    said = await introduce(ask, engine)
    if said.refusal:
        return said, said.refusal
    try:
        alive = await ask(engine.PROBE)
    except Broken as error:
        return said, f"{engine.PROBE} did not answer: {error.reason}"
    return said, "" if alive.good else f"{engine.PROBE} answers {alive.status}"


async def _of_gateway(url: str, settings: Settings) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=settings.health.timeout, verify=trust()) as http:
        answer = await http.get(url.rstrip("/") + "/determinism")
    answer.raise_for_status()
    told = answer.json()
    if not isinstance(told, dict) or not {"strict", "pools"} <= told.keys():
        raise ValueError("it is no gateway")
    return told


def key(pool: Pool) -> dict[str, str]:
    """The header that the pool's replicas want."""
    return {} if pool.api_key is None else {"authorization": f"Bearer {pool.api_key.get_secret_value()}"}
