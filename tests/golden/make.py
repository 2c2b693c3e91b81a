"""Makes the golden ledgers of this version: real runs before simulated engines, which together use all that decides.

    python -m tests.golden.make

writes `tests/golden/{version}/`. What is there is never made anew: a release keeps the ledgers it came with.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gateway import __version__
from gateway.sim import SimServer, SimSettings
from tests.harness import MODEL, Gate, chat, gateway, pool

FOLDER = Path(__file__).parent
TOKENS = {"max_tokens": 4}
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def _run(folder: Path, name: str, engine: str, **settings: Any) -> AsyncIterator[tuple[Gate, list[SimServer]]]:
    """A recorded run: three replicas that generate, two that score."""
    async with AsyncExitStack() as stack:
        servers = [await _server(stack, engine=engine) for _ in range(3)]
        rewards = [await _server(stack, engine=engine, role="reward", model="rm", prefix_cache=False) for _ in range(2)]
        pools = (
            pool("policy", *(server.url for server in servers), engine=engine),
            pool("reward", *(server.url for server in rewards), engine=engine, role="reward", models=["rm"]),
        )
        ledger = {"path": str(folder), "bodies": True, "body_bytes": 4096}
        gate = await stack.enter_async_context(gateway(*pools, run=name, ledger=ledger, **settings))
        yield gate, servers


async def _server(stack: AsyncExitStack, **settings: Any) -> SimServer:
    told: Any = {"model": MODEL, "token_seconds": 0.001, **settings}
    return await stack.enter_async_context(SimServer(SimSettings(**told)))


async def _post(gate: Gate, path: str, body: Any, **headers: str) -> Any:
    answer = await gate.http.post(path, json=body, headers=_headers(headers))
    assert answer.status_code == 200, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


def _headers(given: dict[str, str]) -> dict[bytes, bytes]:
    return {name.replace("_", "-").encode(): value.encode() for name, value in given.items()}


async def _orders(gate: Gate) -> None:
    """Every index order, alone and beside others."""
    for turn in range(3):
        await _post(gate, f"/sessions/17:3{CHAT}", chat(f"turn {turn}", **TOKENS))
    raced = [_post(gate, CHAT, chat(f"racing {n}", **TOKENS), X_Session_ID="17:10") for n in range(4)]
    await asyncio.gather(*raced)
    same = [_post(gate, CHAT, chat(f"branch {n // 2}", **TOKENS), X_Session_ID="2:0", X_Index_Order="content")
            for n in range(6)]  # fmt: skip
    await asyncio.gather(*same)
    for number in (5, 0, 7):
        await _post(gate, CHAT, chat(f"number {number}", **TOKENS), X_Session_ID="numbers", X_Request_Index=f"{number}")
    await asyncio.gather(*[_post(gate, CHAT, chat(f"of no session {n % 3}", **TOKENS)) for n in range(6)])
    for text in ("keyed", "keyed", "another"):
        await _post(gate, CHAT, chat(text, **TOKENS), X_Session_ID="keys", Idempotency_Key=f"key of {text}")


async def _names(gate: Gate) -> None:
    """Identities that are no plain words, sessions and groups that were created."""
    for identity in ("Köln/~1", "a b%c", "x" * 180):
        await _post(gate, CHAT, chat("hi", **TOKENS), X_Session_ID="s", X_Detgate_Identity=identity)
    wishes: list[dict[str, Any]] = [
        {"identity": "eval", "seed": 7},
        {"identity": "eval"},
        {"identity": "tree", "index_order": "content"},
        {"identity": "task", "group_size": 3},
    ]
    for wanted in wishes:
        created = (await gate.http.post("/sessions", json=wanted)).json()
        for session in created.get("sessions", [created]):
            bearer = f"Bearer {session['api_key']}"
            for text in ("first", "second"):
                await _post(gate, CHAT, chat(text, **TOKENS), Authorization=bearer)


async def _bodies(gate: Gate) -> None:
    """Bodies that seeds and calls follow from."""
    await _post(gate, CHAT, chat("three", n=3, **TOKENS), X_Session_ID="samples")
    prompts = {"model": MODEL, "prompt": ["one", "two"], "n": 2, **TOKENS}
    await _post(gate, "/v1/completions", prompts, X_Session_ID="samples")
    await _post(gate, CHAT, chat("own seed", seed=123, **TOKENS), X_Session_ID="samples")
    await _post(gate, CHAT, chat("null seed", seed=None, stream=True, **TOKENS), X_Session_ID="samples")
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    loop = [{"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": "1.50"}]  # fmt: skip
    body = {"model": MODEL, "messages": [{"role": "user", "content": "tools"}, *loop], "temperature": 0.70, **TOKENS}
    await _post(gate, CHAT, body | {"user": "somebody"}, X_Session_ID="tools")
    await _post(gate, CHAT, body, X_Session_ID="tools", X_Index_Order="content")


async def _scores(gate: Gate, route: str) -> None:
    """Scores, several inputs a call."""
    texts = [f"answer {n}" for n in range(3)]
    for body in ({"model": "rm", "input": texts}, {"model": "rm", "input": "alone"}):
        await _post(gate, route, body, X_Session_ID="17:3")


async def _broken(gate: Gate, servers: list[SimServer]) -> None:
    """Failover, a client that leaves, a repeat."""
    for server in servers:
        server.engine.faults.add(route=CHAT, times=2, reset_before_head=True)
    for number in range(3):
        body = chat(f"failover {number}", **TOKENS)
        for _ in range(3):
            answer = await gate.http.post(f"/sessions/broken{CHAT}", json=body)
            if answer.status_code == 200:
                break
    for server in servers:
        server.engine.faults.clear()
        server.engine.faults.add(route=CHAT, times=1, delay_head=30.0)
    leaving = asyncio.create_task(_post(gate, f"/sessions/left{CHAT}", chat("left", **TOKENS)))
    await gate.until(lambda: any(replica.load for replica in gate.gateway.fleet.replicas))
    leaving.cancel()
    await gate.until(lambda: not any(replica.load for replica in gate.gateway.fleet.replicas))
    for server in servers:
        server.engine.faults.clear()
    await _post(gate, f"/sessions/left{CHAT}", chat("left", **TOKENS), X_Stainless_Retry_Count="1")


async def main(folder: Path) -> None:
    """Record the runs."""
    async with _run(folder, "balanced", "vllm") as (gate, servers):
        await _orders(gate)
        await _names(gate)
        await _bodies(gate)
        await _scores(gate, "/classify")
        await _broken(gate, servers)
    async with _run(folder, "strict", "sglang", profile="strict", sessions={"allow_random": True}) as (gate, servers):
        await _post(gate, f"/sessions/17:3{CHAT}", chat("hi", **TOKENS))
        await _bodies(gate)
        native = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "n": 2}}
        await _post(gate, "/generate", native, X_Session_ID="native", X_Detgate_Pool="policy")
        await _broken(gate, servers)
    async with _run(folder, "areal", "vllm", scheme="areal", seed=0, routing={"key": "session", "slack": 2}) as (
        gate,
        _,
    ):
        await _orders(gate)
        await _names(gate)
    async with _run(folder, "offset", "vllm", scheme="offset", seed=2**62, client_seed="mix") as (gate, _):
        await _names(gate)
        await _bodies(gate)
    async with _run(folder, "content", "sglang", index_order="content", routing={"slack": "inf"}) as (gate, _):
        await _bodies(gate)
        for turn in range(3):
            await _post(gate, f"/sessions/17:3{CHAT}", chat(f"turn {turn}", **TOKENS))


def keep(made: Path, wanted: Path) -> None:
    """Put the ledgers where they belong; of each run the records and what it began with."""
    for run in sorted(path for path in made.iterdir() if path.is_dir()):
        kept = wanted / run.name
        kept.mkdir(parents=True)
        for number, file in enumerate(sorted(run.glob("*.jsonl"))):
            shutil.copyfile(file, kept / f"{number}.jsonl")
        about = json.loads((run / "run.json").read_text())
        (kept / "run.json").write_text(json.dumps({"run": run.name, "deciding": about["deciding"]}, indent=2) + "\n")


if __name__ == "__main__":
    target = FOLDER / __version__
    if target.exists():
        sys.exit(f"{target} is there already, and stays as it is")
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
        keep(Path(temporary), target)
    print(f"made {target}")
