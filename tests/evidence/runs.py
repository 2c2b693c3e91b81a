"""Recorded runs of a real gateway before simulated engines, to be compared."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli import main
from gateway.sim import SimServer, SimSettings
from tests.harness import MODEL, Gate, chat, gateway, pool


@asynccontextmanager
async def recorded(
    folder: Path,
    run: str,
    *,
    replicas: int = 2,
    engine: str = "vllm",
    sim: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Gate, list[SimServer]]]:
    """A gateway that records a run of this name, before simulated engines."""
    told: Any = {"engine": engine, "model": MODEL, "token_seconds": 0.0, **(sim or {})}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(SimSettings(**told))) for _ in range(replicas)]
        policy = pool("policy", *(server.url for server in servers), engine=engine)
        ledger = {"path": str(folder), "bodies": True} | settings.pop("ledger", {})
        yield await stack.enter_async_context(gateway(policy, run=run, ledger=ledger, **settings)), servers


async def ask(
    gate: Gate, session: str, text: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    """One chat request of a session."""
    body = chat(text, max_tokens=12, **fields)
    return await gate.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session, **(headers or {})})


async def converse(gate: Gate, session: str, said: list[str], **fields: Any) -> None:
    """A conversation: each turn holds all that was said before, as an agent's loop does."""
    messages: list[Any] = []
    for text in said:
        messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": messages, "max_tokens": 12, **fields}
        answer = await gate.http.post(f"/sessions/{session}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])


def diff(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `detgate diff a b`."""
    capsys.readouterr()
    status = main(["diff", "a", "b", "--ledger", str(folder), "--json", *more])
    return status, json.loads(capsys.readouterr().out)
