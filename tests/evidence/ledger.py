"""Ledgers written by hand, for what no run shows on demand: records as the gateway writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

Records = list[dict[str, Any]]


def request(session: str, index: int, *, answer: str = "", **changes: Any) -> Records:
    """A request that was delivered: its claim and its end."""
    names = {
        "run": changes.pop("run", "r"),
        "session": session,
        "identity": changes.pop("identity", session),
        "index": index,
    }
    prompt = changes.pop("prompt", f"{session} {index}")
    opened = {
        "event": "opened",
        **names,
        "ordinal": 0,
        "order": "arrival",
        "digest": prompt,
        "content": None,
        "seed": 1000 + index,
        "seed_source": "derived",
        "scheme": "v1",
        "request_id": f"{session}:{index}",
        "route": "/v1/chat/completions",
        "pool": "policy",
        "group": None,
        "flags": [],
    }
    closed = {
        "event": "closed",
        **names,
        "outcome": "delivered",
        "status": 200,
        "error": None,
        "racing": False,
        "attempts": [{"replica": "policy-0", "outcome": "answered"}],
        "engine": "vllm-1",
        "weight_version": None,
        "finish_reasons": ["stop"],
        "usage": {"completion_tokens": 9},
        "answer": answer or f"answer to {prompt}",
        "flags": ["unverified"],
    }
    for name, value in changes.items():
        (closed if name in closed else opened)[name] = value
    return [opened, closed]


def write(folder: Path, *records: Iterable[dict[str, Any]], **deciding: Any) -> Path:
    """A run's folder with these records in one segment."""
    folder.mkdir(parents=True)
    lines = [orjson.dumps(record) for each in records for record in each]
    (folder / "1-1.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    (folder / "run.json").write_bytes(orjson.dumps({"run": folder.name, "deciding": {"seed": 42} | deciding}))
    return folder
