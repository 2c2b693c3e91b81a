"""The gateway's process, before a scripted worker in an engine's place."""

import asyncio
from pathlib import Path

import pytest

from tests.engines import gates
from tests.engines.asking import CHAT, ask, told
from tests.harness import MODEL, FakeWorker, chat, completion


async def test_it_serves_keeps_records_and_ends(tmp_path: Path) -> None:
    def use(url: str) -> None:
        pool = gates.pool("policy", "vllm", [url], models=[MODEL])
        with gates.gateway(tmp_path, pool, hash_seed=5, seed=7) as gate:
            environment = Path(f"/proc/{gate.process.pid}/environ").read_bytes().split(b"\0")
            assert b"PYTHONHASHSEED=5" in environment
            assert gate.replicas()["policy-0"]["state"] == "up"
            assert told(ask(gate, "/sessions/17:3" + CHAT, chat())) == completion()
        assert gate.process.returncode == 0
        assert [record["request_id"] for record in gate.records("opened")] == ["17:3:0"]
        assert [record["outcome"] for record in gate.records("closed")] == ["delivered"]

    async with FakeWorker() as worker:
        await asyncio.to_thread(use, worker.url)


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(gates.NotReady, match=r"ended with 2:\ndetgate: pools\[0\].engine"):
        with gates.gateway(tmp_path, gates.pool("policy", "vlm", ["http://127.0.0.1:1"])):
            raise AssertionError("it serves")


def test_what_finds_no_replica_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "READY_SECONDS", 3.0)
    with pytest.raises(gates.NotReady, match="not ready in 3 s"):
        with gates.gateway(tmp_path, gates.pool("policy", "vllm", ["http://127.0.0.1:1"])):
            raise AssertionError("it serves")
