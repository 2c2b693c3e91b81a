"""`detgate demo`: simulated replicas and the gateway in front of them, in one process, to try it without an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from gateway import addresses
from gateway.assembly import Gateway
from gateway.logs import configure
from gateway.serve import Server, serve
from gateway.settings import InvalidSettings, Settings
from gateway.settings.sources import merged
from gateway.sim import SimServer, SimSettings
from gateway.tasks import start

POLICY, REWARD = "sim-model", "sim-reward"

_POLICY = SimSettings(engine="vllm", model=POLICY)
_REWARD = SimSettings(engine="vllm", role="reward", model=REWARD, prefix_cache=False)

WELCOME = """
detgate runs on {url}, run {run}, in front of three simulated replicas: nothing here is a real model.
Paste this; then end the demo, start it again, and paste it again: the same index, seed, request id and text.

  curl -s -D- {url}/sessions/demo/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{policy}", "max_tokens": 16, "messages": [{{"role": "user", "content": "Tell me a story."}}]}}'

A reward:

  curl -s {url}/classify -H 'Content-Type: application/json' -d '{{"model": "{reward}", "input": "a good answer"}}'

What it knows of its replicas: curl -s {url}/readyz    CTRL-C ends it.
"""


def run(flags: Mapping[str, Any], *, resume: bool = False, new_run: bool = False) -> None:
    """Serve until CTRL-C. `flags` win over the demo's own settings."""
    with asyncio.Runner() as runner:
        runner.run(_serve(flags, resume, new_run))


async def _serve(flags: Mapping[str, Any], resume: bool, new_run: bool) -> None:
    async with AsyncExitStack() as stack:
        urls = []
        for replica in (_POLICY, _POLICY, _REWARD):
            urls.append((await stack.enter_async_context(SimServer(replica))).url)
        settings = Settings.load(None, os.environ, merged(_pools(urls), dict(flags)))
        if settings.workers > 1:
            raise InvalidSettings([f"workers: the demo is one process, not {settings.workers}; use detgate serve"])
        configure(settings.log)
        addresses.check(settings)
        gateway = Gateway(settings, resume=resume, new_run=new_run)
        server = Server(gateway)

        async def welcome() -> None:
            await gateway.health.probed.wait()
            url = f"http://{settings.host}:{server.port}"
            print(WELCOME.format(url=url, run=gateway.run, policy=POLICY, reward=REWARD), flush=True)

        await serve(gateway, server, lambda _: start(welcome(), "welcome"))


def _pools(urls: list[str]) -> dict[str, Any]:
    policy = [{"name": f"policy-{number}", "url": url} for number, url in enumerate(urls[:2])]
    return {
        "pools": [
            {"name": "policy", "engine": "vllm", "models": [POLICY], "replicas": policy},
            {
                "name": "reward",
                "engine": "vllm",
                "role": "reward",
                "models": [REWARD],
                "replicas": [{"name": "reward-0", "url": urls[2]}],
            },
        ]
    }
