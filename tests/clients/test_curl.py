"""curl, as the documents write it: a whole answer, a stream, and what its headers say."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tests.harness import gateway, pool
from tests.sim.serving import serving

BODY = {"model": "sim-model", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hi"}]}


async def curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", "--max-time", "20", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("http", ["--http1.1", "--http1.0", "--http2"])
async def test_whole_and_streamed(http: str) -> None:
    async with (
        serving("vllm") as (server, _),
        gateway(pool("policy", server.url, models=["sim-model"])) as gate,
    ):
        url = f"{gate.url}/sessions/17:3/v1/chat/completions"
        said = await curl(http, "--include", "--json", json.dumps(BODY), url)
        head, body = said.split("\r\n\r\n", 1)
        assert " 200" in head.splitlines()[0]
        assert "x-detgate-index: 0" in head
        assert json.loads(body)["choices"][0]["message"]["content"]
        streamed = await curl(http, "--no-buffer", "--json", json.dumps(BODY | {"stream": True}), url)
        assert streamed.rstrip().endswith("data: [DONE]")
        refused = await curl(http, "--json", "{", url)
        assert json.loads(refused)["error"]["code"] == "invalid_json"
