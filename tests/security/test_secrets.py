"""Keys and passwords are nowhere that they do not belong: everything is tried at debug, and everything is searched."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.keys import entry
from tests.harness import FakeWorker, Reply, Seen, chat, completion, delta, pool
from tests.processes import serving

CHAT = "/v1/chat/completions"
SECRETS = {
    "api": "hidden-api-key-1",
    "hashed": "hidden-hashed-key-2",
    "admin": "hidden-admin-key-3",
    "pool": "hidden-pool-key-4",
    "wrong": "hidden-wrong-key-5",
    "cookie": "hidden-cookie-6",
    "prompt": "hidden-prompt-7",
    "answer": "hidden-answer-8",
}


async def uneven(seen: Seen, reply: Reply) -> None:
    """Answers, refuses, breaks off and dies, as the prompt says."""
    if b"refuse" in seen.body:
        reply.json({"object": "error", "message": "no"}, 400)
    elif b"die" in seen.body:
        reply.reset()
    elif b"half" in seen.body:
        reply.sse()
        reply.chunk(delta("h"))
        reply.reset()
    else:
        reply.json(completion(SECRETS["answer"]))


async def test_no_secret_is_in_logs_ledger_answers_or_with_replicas(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    sessions: list[str] = []

    async with FakeWorker(uneven) as worker:
        given = {
            "auth": {"api_keys": [SECRETS["api"], entry(SECRETS["hashed"], "bob")], "admin_key": SECRETS["admin"]},
            "log": {"level": "debug", "format": "json"},
            "ledger": {"path": str(tmp_path / "ledger"), "bodies": False},
            "health": {"interval": 0.1, "failures": 1},
            "pools": [
                pool("policy", worker.url, api_key=SECRETS["pool"]),
                pool("gone", "http://127.0.0.1:9", models=["gone"], api_key=SECRETS["pool"]),
            ],
        }
        async with serving(tmp_path, yaml.safe_dump(given)) as gate:

            async def ask(method: str, path: str, key: str, **more: Any) -> httpx.Response | None:
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    headers |= {"cookie": f"detgate_ui={SECRETS['cookie']}", "x-request-id": "r"}
                    try:
                        answers.append(await gate.http.request(method, path, headers=headers, **more))
                    except httpx.TransportError:
                        return None
                return answers[-1]

            for key in (SECRETS["api"], SECRETS["hashed"], SECRETS["wrong"], SECRETS["admin"]):
                for text in ("", "refuse", "die", "half"):
                    await ask("POST", CHAT, key, json=chat(f"{text} {SECRETS['prompt']}"))
                await ask("POST", CHAT, key, json=chat() | {"model": "gone"})
                await ask("POST", CHAT, key, content=SECRETS["prompt"].encode())
                made = await gate.http.post("/sessions", json={"identity": "a"}, headers={"x-api-key": key})
                if made.status_code == 201:
                    sessions.append(made.json()["api_key"])
                    name = made.json()["session_id"]
                    await ask("POST", f"/sessions/{name}{CHAT}", sessions[-1], json=chat())
                    await ask("GET", f"/sessions/{name}", sessions[-1])
                    await ask("POST", f"/sessions/{name}{CHAT}", SECRETS["wrong"], json=chat())
                    await ask("DELETE", f"/sessions/{name}", sessions[-1])
                    await ask("POST", f"/sessions/{name}{CHAT}", sessions[-1], json=chat())
                for path in ("/admin/replicas", "/determinism", "/metrics", "/readyz", "/openapi.json", "/ui/"):
                    await ask("GET", path, key)
                await ask("POST", "/ui/login", key, data={"key": key})
                await ask("POST", "/admin/pools/policy/replicas", key, json={"name": "x", "url": f"http://u:{key}@h"})
            gate.signal(signal.SIGTERM)
            await gate.ended()
            logged = "".join(gate.lines)
    assert len(sessions) >= 2
    assert any(seen.header("authorization") == f"Bearer {SECRETS['pool']}" for seen in worker.seen)
    lines = [json.loads(line) for line in gate.lines]
    requests = [line for line in lines if line["event"] == "request"]
    assert {"bob", None} <= {line.get("user") for line in requests}
    assert all("request_id" in line or line.get("client_request_id") == "r" for line in requests)

    ledger = b"".join(file.read_bytes() for file in (tmp_path / "ledger").rglob("*") if file.is_file())
    assert b'"user":"bob"' in ledger
    told = "".join(str(answer.status_code) + str(answer.headers) + answer.text for answer in answers)
    sent = "".join(str(seen.headers) + seen.target for seen in worker.seen)
    for name, secret in [*SECRETS.items(), *((f"session {n}", key) for n, key in enumerate(sessions))]:
        assert secret not in logged, name
        assert secret.encode() not in ledger, name
        assert (secret in told) is (name == "answer"), name
        assert (secret in sent) is (name == "pool"), name
    assert entry(SECRETS["hashed"])[7:] not in logged + ledger.decode(errors="replace") + told + sent
