"""What an engine tells of itself: health, models, settings, metrics."""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.sim import sglang, vllm
from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, fresh
from gateway.sim.engine import BLOCKS
from gateway.sim.model import END
from gateway.sim.replies import Reply, answer
from gateway.sim.runs import Run
from gateway.sim.sampling import Sampling, random_noise


async def quick(ask: Ask, dialect: Dialect) -> Reply:
    """vLLM's /health, SGLang's /ready: an empty 200 at once."""
    return Reply(200)


async def slow(ask: Ask, dialect: Dialect) -> Reply:
    """SGLang's /health and /health_generate: a token through the batch, and a second at least."""
    run = Run(ask)
    run.add("HEALTH_CHECK", [END], Sampling(max_tokens=1), random_noise())
    await asyncio.gather(run.answers(), asyncio.sleep(ask.settings.health_seconds))
    return Reply(200)


async def models(ask: Ask, dialect: Dialect) -> Reply:
    """The one model."""
    settings = ask.settings
    card: Object = {
        "id": settings.model,
        "object": "model",
        "created": ask.created,
        "owned_by": settings.engine,
        "root": settings.model,
        "parent": None,
        "max_model_len": settings.max_model_len,
    }
    if settings.engine == "vllm":
        card["permission"] = [_permission(ask)]
    return answer({"object": "list", "data": [card]})


async def version(ask: Ask, dialect: Dialect) -> Reply:
    return answer({"version": ask.settings.version or vllm.VERSION})


async def vllm_server_info(ask: Ask, dialect: Dialect) -> Reply:
    """The settings, not what kernels do; dev mode only."""
    settings = ask.settings
    runner = "pooling" if settings.role == "reward" else "generate"
    policy = "priority" if settings.priority_scheduling else "fcfs"
    config = {
        "model_config": {"model": settings.model, "dtype": "torch.float32", "seed": 0, "quantization": None},
        "cache_config": {"enable_prefix_caching": settings.prefix_cache},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "eplb_config": {"policy": "default"},
        },
        "scheduler_config": {
            "runner_type": runner,
            "max_num_seqs": settings.max_num_seqs,
            "enable_chunked_prefill": False,
            "policy": policy,
        },
    }
    env = {"VLLM_BATCH_INVARIANT": settings.deterministic}
    return answer(_laid_over({"vllm_config": config, "vllm_env": env}, settings.told))


async def weight_info(ask: Ask, dialect: Dialect) -> Reply:
    return answer({"weight_version": ask.settings.weight_version})


async def sglang_server_info(ask: Ask, dialect: Dialect) -> Reply:
    """The start arguments that matter here, of the several hundred."""
    settings = ask.settings
    told = {
        "model_path": settings.model,
        "tokenizer_path": settings.model,
        "served_model_name": settings.model,
        "enable_deterministic_inference": settings.deterministic,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_radix_cache": not settings.prefix_cache,
        "is_embedding": settings.role == "reward",
        "enable_priority_scheduling": settings.priority_scheduling,
        "preferred_sampling_params": _preferred(ask),
        "max_running_requests": settings.max_num_seqs,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "enable_dp_attention": False,
        "dtype": "float32",
        "random_seed": 42,
        "weight_version": settings.weight_version,
        "version": settings.version or sglang.VERSION,
    }
    return answer(_laid_over(told, settings.told))


async def model_info(ask: Ask, dialect: Dialect) -> Reply:
    settings = ask.settings
    return answer(
        {
            "model_path": settings.model,
            "served_model_name": settings.model,
            "tokenizer_path": settings.model,
            "is_generation": settings.role == "generate",
            "preferred_sampling_params": _preferred(ask),
            "weight_version": settings.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def metrics(ask: Ask, dialect: Dialect) -> Reply:
    """The gauges that say what runs, in Prometheus' text format."""
    settings, engine = ask.settings, ask.engine
    running, waiting = len(engine.running), len(engine.waiting)
    if settings.engine == "sglang":
        labels = f'engine_type="unified",model_name="{settings.model}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        text = _gauge("sglang:num_running_reqs", "The number of running requests.", labels, running)
        text += _gauge("sglang:num_queue_reqs", "The number of requests in the waiting queue.", labels, waiting)
    else:
        labels = f'engine="0",model_name="{settings.model}"'
        text = _gauge("vllm:num_requests_running", "Number of requests in model execution batches.", labels, running)
        text += _gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, waiting)
        total = engine.counters.preemptions
        text += _gauge("vllm:num_preemptions_total", "Cumulative number of preemption.", labels, total)
        config = f'block_size="{BLOCKS["vllm"]}",enable_prefix_caching="{settings.prefix_cache}",engine="0"'
        text += _gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", config, 1)
    return Reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


async def loads(ask: Ask, dialect: Dialect) -> Reply:
    """SGLang's count of what is in its scheduler, as of now."""
    engine, now = ask.engine, time.time()
    rank = {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": len(engine.running),
        "num_waiting_reqs": len(engine.waiting),
        "max_running_requests": ask.settings.max_num_seqs,
    }
    stamp = datetime.fromtimestamp(now, UTC).isoformat()
    return answer({"timestamp": stamp, "version": sglang.VERSION, "loads": [rank]})


async def clear_cache(ask: Ask, dialect: Dialect) -> Reply:
    """SGLang's /flush_cache, vLLM's /reset_prefix_cache."""
    ask.engine.cache.clear()
    return Reply(200)


def _permission(ask: Ask) -> Object:
    allowed = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    denied = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False)
    head = {"id": f"modelperm-{fresh(16)}", "object": "model_permission", "created": ask.created}
    return {**head, **allowed, **denied, "organization": "*", "group": None, "is_blocking": False}


def _gauge(name: str, about: str, labels: str, value: int) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} gauge\n{name}{{{labels}}} {float(value)}\n"


def _preferred(ask: Ask) -> Object | None:
    return dict(ask.settings.preferred_sampling_params) or None


def _laid_over(below: Object, above: Mapping[str, Any]) -> Object:
    """`above` over `below`, member by member."""
    return below | {
        name: _laid_over(below[name], value) if isinstance(value, Mapping) and name in below else value
        for name, value in above.items()
    }
