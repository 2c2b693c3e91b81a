"""Doctor before simulated engines: what it reads, what it says, and its exit status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from gateway.cli import main
from gateway.evidence import doctor
from gateway.passes import Passes
from gateway.settings import Settings
from gateway.sim import SimServer, SimSettings
from tests.harness import FakeWorker, Reply, Seen, gateway, pool

GOOD_VLLM = {"engine": "vllm", "dev_mode": True}
UNTOLD = {"engine": "vllm"}


@asynccontextmanager
async def engines(*settings: dict[str, Any]) -> AsyncIterator[list[str]]:
    """Simulated engines, and their URLs."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(SimSettings(**each))) for each in settings]
        yield [server.url for server in servers]


def configured(folder: Path, *pools: dict[str, Any]) -> Path:
    file = folder / "gateway.yaml"
    file.write_text(json.dumps({"pools": [{**each, "models": []} for each in pools], "ledger": {"path": str(folder)}}))
    return file


async def said(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status and what was printed."""
    capsys.readouterr()
    status = await asyncio.to_thread(main, ["doctor", "--config", str(file), *arguments])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("simulated", "settings", "status", "fatal"),
    [
        (GOOD_VLLM, {}, 0, set()),
        (UNTOLD, {}, 0, set()),
        (GOOD_VLLM | {"deterministic": False}, {}, 1, {"not-deterministic"}),
        (GOOD_VLLM | {"deterministic": False}, {"lane": {"scope": "replica", "limit": 1}}, 1, {"prefix-cache"}),
        (
            GOOD_VLLM | {"deterministic": False, "prefix_cache": False},
            {"lane": {"scope": "replica", "limit": 1}},
            0,
            set(),
        ),
        (GOOD_VLLM, {"engine": "sglang"}, 1, {"engine-other"}),
        (GOOD_VLLM | {"role": "reward", "prefix_cache": False}, {}, 1, {"role-mismatch"}),
        (UNTOLD | {"role": "reward", "prefix_cache": False}, {}, 1, {"role-mismatch"}),
        (UNTOLD, {"role": "reward"}, 1, {"role-mismatch", "prefix-cache"}),
        (GOOD_VLLM | {"role": "reward", "prefix_cache": False}, {"role": "reward"}, 0, set()),
        (GOOD_VLLM | {"told": {"vllm_config": {"parallel_config": {"data_parallel_size": 2}}}}, {}, 1, {"dp-unpinned"}),
        ({"engine": "sglang"}, {"engine": "sglang"}, 0, set()),
        ({"engine": "sglang", "deterministic": False}, {"engine": "sglang"}, 1, {"not-deterministic"}),
        ({"engine": "sglang", "version": "0.5.2"}, {"engine": "sglang"}, 1, {"too-old"}),
        ({"engine": "sglang", "role": "reward"}, {"engine": "sglang", "role": "reward"}, 1, {"prefix-cache"}),
        ({"engine": "vllm"}, {"engine": "openai"}, 1, {"unverified"}),
    ],
)
async def test_the_exit_status_says_whether_strict_would_serve(
    simulated: dict[str, Any],
    settings: dict[str, Any],
    status: int,
    fatal: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with engines(simulated) as urls:
        got, out = await said(configured(tmp_path, pool("policy", *urls, **settings)), capsys, "--json")
    told = json.loads(out)
    found = {finding["id"] for finding in told["pools"]["policy"]["findings"] if finding["severity"] == "fatal"}
    assert (got, found, told["strict"]) == (status, fatal, not fatal)


async def test_a_rank_that_is_named_and_what_canaries_have_shown_count(tmp_path: Path) -> None:
    ranked = GOOD_VLLM | {"told": {"vllm_config": {"parallel_config": {"data_parallel_size": 2}}}}
    async with engines(ranked, UNTOLD) as (ranked_url, untold_url):
        ranks = [{"name": f"rank-{rank}", "url": ranked_url, "dp_rank": rank} for rank in range(2)]
        listed = [pool("ranked") | {"replicas": ranks}, pool("untold", untold_url)]
        settings = Settings.load(None, {}, {"pools": listed, "ledger": {"path": str(tmp_path)}})
        before = await doctor.examine(settings)
        fingerprint = before["pools"]["untold"]["replicas"]["untold-0"]["fingerprint"]
        passes = Passes(tmp_path)
        passes.note(settings.pools[1], "untold-0", fingerprint, apart=False, passed=True, at=1.0)
        passed = await doctor.examine(settings)
        passes.note(settings.pools[1], "untold-0", fingerprint, apart=False, passed=False, at=2.0)
        failed = await doctor.examine(settings)
    found = [
        {finding["id"] for pool in report["pools"].values() for finding in pool["findings"]}
        for report in (before, passed, failed)
    ]
    assert found == [{"unverified"}, set(), {"canaries-failed"}]
    assert (before["strict"], passed["strict"], failed["strict"]) == (True, True, False)


async def test_everything_that_vllm_tells_is_read(tmp_path: Path) -> None:
    told = {
        "vllm_config": {
            "model_config": {
                "dtype": "torch.bfloat16",
                "quantization": "fp8",
                "revision": "main",
                "generation_config": "auto",
                "override_generation_config": {"min_p": 0.1},
            },
            "cache_config": {"cache_dtype": "fp8_e4m3"},
            "parallel_config": {
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 2,
                "data_parallel_size": 2,
                "enable_expert_parallel": True,
                "is_moe_model": True,
            },
            "scheduler_config": {"async_scheduling": True, "policy": "priority", "max_num_seqs": 512},
            "attention_config": {"backend": "FLASH_ATTN"},
            "speculative_config": {"method": "eagle"},
            "compilation_config": {"pass_config": {"enable_sp": True}},
        },
        "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA H100 80GB HBM3"},
    }
    async with engines(GOOD_VLLM | {"told": told, "weight_version": "step-7"}) as urls:
        settings = Settings.load(None, {}, {"pools": [pool("policy", *urls)], "ledger": {"path": str(tmp_path)}})
        report = await doctor.examine(settings)
    assert report["pools"]["policy"]["replicas"]["policy-0"]["facts"] == {
        "deterministic": True,
        "is_generation": True,
        "default_min_p": 0.1,
        "priority_scheduling": True,
        "prefix_cache": True,
        "engine": "vllm",
        "version": "0.32.0",
        "accelerator": "GPU 0: NVIDIA H100 80GB HBM3",
        "model": "sim-model",
        "revision": "main",
        "weight_version": "step-7",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "attention_backend": "FLASH_ATTN",
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
        "data_parallel": 2,
        "expert_parallel": 8,
        "sequence_parallel": True,
        "mixture_of_experts": True,
        "speculative": "eagle",
        "overlapped": True,
        "scheduling_policy": "priority",
        "max_running": 512,
        "sampling_defaults": "model",
        "defaults": {"min_p": 0.1},
    }


async def test_everything_that_sglang_tells_is_read(tmp_path: Path) -> None:
    told = {
        "device": "cuda",
        "revision": "main",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "speculative_algorithm": "EAGLE",
        "disable_overlap_schedule": False,
        "schedule_policy": "lpm",
        "sampling_defaults": "openai",
        "enable_dp_attention": True,
        "ep_size": 4,
    }
    async with engines({"engine": "sglang", "told": told, "preferred_sampling_params": {"min_p": 0.2}}) as urls:
        listed = pool("policy", *urls, engine="sglang")
        settings = Settings.load(None, {}, {"pools": [listed], "ledger": {"path": str(tmp_path)}})
        report = await doctor.examine(settings)
    assert report["pools"]["policy"]["replicas"]["policy-0"]["facts"] == {
        "deterministic": True,
        "is_generation": True,
        "default_min_p": 0.2,
        "priority_scheduling": False,
        "prefix_cache": True,
        "engine": "sglang",
        "version": "0.5.23",
        "accelerator": "cuda",
        "model": "sim-model",
        "revision": "main",
        "weight_version": "default",
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_dtype": "auto",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "expert_parallel": 4,
        "dp_attention": True,
        "mixture_of_experts": True,
        "speculative": "EAGLE",
        "overlapped": True,
        "scheduling_policy": "lpm",
        "max_running": 64,
        "sampling_defaults": "engine",
        "defaults": {"min_p": 0.2},
    }


async def test_people_read_what_breaks_how_sure_it_is_and_what_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engines(*[{"engine": "sglang", "deterministic": False}] * 2) as urls:
        status, out = await said(configured(tmp_path, pool("policy", *urls, engine="sglang")), capsys)
    assert status == 1
    assert (
        "fatal policy-0, policy-1 says that it is not in deterministic mode, so it ignores seeds and draws each answer"
        " anew (told by the replica) --enable-deterministic-inference (since 0.5.3)"
        " https://docs.sglang.io/advanced_features/deterministic_inference.html" in " ".join(out.split())
    )
    assert "attention backend" in out
    assert out.rstrip().endswith("strict would refuse: each finding marked fatal has to be mended")


async def test_who_does_not_answer_is_named_and_nothing_is_sure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engines(GOOD_VLLM) as urls:
        file = configured(tmp_path, pool("policy", *urls, "http://127.0.0.1:9"))
        status, out = await said(file, capsys)
    assert status == 2
    assert "policy-1 is down: /health did not answer" in out


async def test_of_a_server_that_nobody_reached_nothing_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configured(tmp_path, pool("policy", "http://127.0.0.1:9"))
    status, out = await said(file, capsys)
    assert status == 2
    assert [line.split() for line in out.splitlines() if "fingerprint" in line] == [["fingerprint", "–"]]
    assert out.rstrip().endswith("whether strict would serve is not known while a replica is down: policy-0")
    status, out = await said(file, capsys, "--json")
    told = json.loads(out)
    assert (status, told["strict"]) == (2, None)
    assert told["pools"]["policy"]["replicas"]["policy-0"]["fingerprint"] is None


async def test_what_is_fatal_is_refused_whoever_else_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engines(GOOD_VLLM | {"deterministic": False}) as urls:
        file = configured(tmp_path, pool("policy", *urls, "http://127.0.0.1:9"))
        status, out = await said(file, capsys)
        status_of_json, told = await said(file, capsys, "--json")
    assert status == status_of_json == 1
    assert out.rstrip().endswith("strict would refuse: each finding marked fatal has to be mended")
    assert json.loads(told)["strict"] is False


async def test_a_running_gateway_does_not_vouch_for_a_replica_that_is_down_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with engines(GOOD_VLLM) as urls:
        async with gateway(pool("policy", *urls, "http://127.0.0.1:9", models=[])) as gate:
            down = gate.gateway.fleet.pools["policy"].replicas["policy-1"]
            await gate.until(lambda: down.state == "down")
            capsys.readouterr()
            status = await asyncio.to_thread(main, ["doctor", "--url", gate.url, "--json"])
            told = json.loads(capsys.readouterr().out)
            assert (status, told["strict"]) == (2, None)
            assert "not known while a replica is not up" in (await gate.http.get("/ui/")).text


def test_no_pools_is_a_wrong_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("detgate: pools: none")


async def test_nothing_that_doctor_asks_generates(tmp_path: Path) -> None:
    asked: list[str] = []

    async def note(seen: Seen, reply: Reply) -> None:
        asked.append(f"{seen.method} {seen.target}")
        reply.json({})

    async with FakeWorker(probes=note) as worker:
        for engine in ("vllm", "sglang", "openai"):
            listed = pool("policy", worker.url, engine=engine)
            settings = Settings.load(None, {}, {"pools": [listed], "ledger": {"path": str(tmp_path)}})
            await doctor.examine(settings)
        assert worker.seen == []
    assert set(asked) == {
        f"GET {route}"
        for route in (
            *("/health", "/ready", "/v1/models", "/version", "/metrics", "/weight_info"),
            *("/server_info?config_format=json", "/detgate/processes", "/server_info", "/model_info"),
            "/v1/chat/completions",
        )
    }


async def test_a_running_gateway_tells_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with engines({"engine": "sglang", "deterministic": False}, GOOD_VLLM) as urls:
        pools = pool("policy", urls[0], engine="sglang", models=[]), pool("other", urls[1], models=[])
        status, asked = await said(configured(tmp_path, *pools), capsys, "--json")
        async with gateway(*pools) as gate:
            capsys.readouterr()
            status_of_gateway = await asyncio.to_thread(main, ["doctor", "--url", gate.url, "--json"])
            told = json.loads(capsys.readouterr().out)
    assert status == status_of_gateway == 1
    direct = json.loads(asked)
    assert told["run"] is not None
    for name in ("policy", "other"):
        for replica in told["pools"][name]["replicas"].values():
            del replica["reason"]
        for replica in direct["pools"][name]["replicas"].values():
            del replica["reason"]
        assert told["pools"][name] == direct["pools"][name]


@pytest.mark.parametrize("path", ["", "/nowhere"])
async def test_what_is_no_gateway_is_said(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeWorker() as worker:
        assert await asyncio.to_thread(main, ["doctor", "--url", worker.url + path]) == 2
    assert "does not tell: it is no gateway" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("x")]
)
async def test_a_replica_that_cannot_be_asked_is_down_and_the_rest_is_told(error: httpx.HTTPError) -> None:
    settings = Settings.load(None, {}, {"pools": [pool("policy", "http://replica:1", "http://replica:2")]})
    with respx.mock(assert_all_called=False) as replicas:
        replicas.route(port=1).mock(side_effect=error)
        replicas.get(port=2, path="/health").respond(200)
        replicas.get(port=2, path="/version").respond(200, json={"version": "0.32.0"})
        replicas.route(port=2).respond(404)
        told = (await doctor.examine(settings))["pools"]["policy"]["replicas"]
    assert (told["policy-0"]["state"], told["policy-1"]["state"]) == ("down", "up")
    assert told["policy-0"]["reason"] == f"/health did not answer: {str(error) or type(error).__name__}"
    assert told["policy-1"]["facts"]["version"] == "0.32.0"
