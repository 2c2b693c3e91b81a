"""vLLM (read and tried at 0.32.0).

Seeds are taken as int64, -1 meaning none. Choice i of n is what seed + i gives alone, so n stays in one
call; a list of prompts shares one seed, so it does not. An abort is a closed connection."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.core import exposition
from gateway.core.document import Document, Edit
from gateway.core.told import at, count, flag, named, numbers, owner, root, text
from gateway.core.types import Facts, Handling, Headers, Path

NAME = "vllm"
PROBE = "/health"
ABORT = None

_STRAYS: tuple[Path, ...] = (
    ("sampling_seed",),
    ("sampling_params", "seed"),
    ("sampling_params", "sampling_seed"),
)
_SALT = "cache_salt"
_CHAT = Handling(
    "sample",
    "openai",
    "generate",
    seed=("seed",),
    strays=_STRAYS,
    n=("n",),
    beams=("use_beam_search",),
    merge="choices",
    salt=_SALT,
    priority=True,
)
_RERANK = Handling("score", "native", "reward", inputs=("documents",), merge="rerank", salt=_SALT)
_PAIRS = ("text_2", "documents", "items", "data_2")

ROUTES = MappingProxyType(
    {
        "/v1/chat/completions": _CHAT,
        "/v1/chat/completions/batch": Handling(
            "sample",
            "openai",
            "generate",
            seed=("seed",),
            strays=_STRAYS,
            inputs=("messages",),
            merge="conversations",
            salt=_SALT,
            priority=True,
        ),
        "/v1/completions": Handling(
            "sample",
            "openai",
            "generate",
            seed=("seed",),
            strays=_STRAYS,
            n=("n",),
            inputs=("prompt", "prompt_embeds"),
            beams=("use_beam_search",),
            merge="choices",
            salt=_SALT,
            priority=True,
        ),
        "/v1/responses": Handling(
            "sample", "responses", "generate", seed=("seed",), strays=_STRAYS, salt=_SALT, priority=True
        ),
        "/v1/messages": Handling("sample", "anthropic", "generate", salt=_SALT),
        "/v1/messages/count_tokens": Handling("plain", "anthropic", "generate"),
        "/inference/v1/generate": Handling(
            "sample",
            "native",
            "generate",
            seed=("sampling_params", "seed"),
            strays=(("sampling_params", "sampling_seed"), ("seed",), ("sampling_seed",)),
            n=("sampling_params", "n"),
            salt=_SALT,
            priority=True,
        ),
        "/v1/models": Handling("models", "openai", "any", methods=("GET",)),
        "/tokenize": Handling("plain", "native", "any"),
        "/detokenize": Handling("plain", "native", "any"),
        "/classify": Handling("score", "native", "reward", inputs=("input",), merge="data", salt=_SALT),
        "/pooling": Handling("score", "native", "reward", inputs=("input",), merge="data", salt=_SALT),
        "/v1/embeddings": Handling("score", "openai", "reward", inputs=("input",), merge="data", salt=_SALT),
        "/score": Handling("score", "native", "reward", inputs=_PAIRS, merge="pairs", salt=_SALT),
        "/v1/score": Handling("score", "openai", "reward", inputs=_PAIRS, merge="pairs", salt=_SALT),
        "/rerank": _RERANK,
        "/v1/rerank": Handling("score", "openai", "reward", inputs=("documents",), merge="rerank", salt=_SALT),
        "/v2/rerank": _RERANK,
    }
)


def check(path: str, document: Document, facts: Facts, n: int) -> None:
    """Nothing: the seeds that vLLM misreads are refused for every engine, and the rest it refuses itself."""


def extra(path: str, document: Document, facts: Facts) -> tuple[Edit, ...]:
    return ()


def id_headers(engine_id: str) -> Headers:
    return [(b"x-request-id", engine_id.encode("ascii"))]


_SETTINGS = "/server_info?config_format=json"

_PROCESSES = "/detgate/processes"

_GENERATING = "/v1/chat/completions"

ASKS = ("/version", "/metrics", "/weight_info", _SETTINGS, _PROCESSES, _GENERATING)
"""The third and fourth are served in its development mode alone. They tell settings, not what kernels do. The fifth is
the route of `gateway.vllm_plugin`, where that is installed. The last takes no GET, which only who has it says."""

PREEMPTIONS = ("/metrics", "vllm:num_preemptions_total")
"""A request that was preempted is computed anew in one pass, as no step computed it before."""

POSITIONAL = False
"""Its noise is a stream for each request, which begins anew with the same seed."""

HIGHER_FIRST = False
LOAD = "/metrics"
"""Written after each step: what came since is not counted yet. It enters the engine behind the abort of a request whose
connection was closed before, so it shares no step with it."""

PREFIX_CACHE = ("vllm:cache_config_info", "enable_prefix_caching")

EXACT = True

_RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Of requests to score they hardly ever tell: each is gone at the end of its step, when these are written."""

_ANSWERED = "http_requests_total"
_SCORING = frozenset(path for path, handling in ROUTES.items() if handling.kind == "score")


def running(told: str) -> float | None:
    return exposition.total(told, _RUNNING)


def done(told: str) -> float | None:
    by_route = exposition.by_label(told, _ANSWERED, "handler")
    return sum(count for route, count in by_route.items() if route in _SCORING) if by_route else None


def facts(told: Mapping[str, Any]) -> Facts:
    """Outside its development mode little more than its version, its model and the prefix cache."""
    info = at(told, _SETTINGS)
    model, parallel = at(info, "vllm_config", "model_config"), at(info, "vllm_config", "parallel_config")
    scheduler, cache = at(info, "vllm_config", "scheduler_config"), at(info, "vllm_config", "cache_config")
    runner, passes = text(scheduler.get("runner_type")), at(info, "vllm_config", "compilation_config", "pass_config")
    defaults = numbers(model.get("override_generation_config"))
    source = text(model.get("generation_config"))
    return Facts(
        deterministic=_invariant(info, told),
        is_generation={405: True, 404: False}.get(_status(told)) if runner is None else runner == "generate",
        default_min_p=dict(defaults).get("min_p"),
        priority_scheduling=_is(scheduler.get("policy"), "priority"),
        prefix_cache=_caches(told.get("/metrics"), cache),
        engine=owner(told),
        version=text(at(told, "/version").get("version")),
        accelerator=text(at(info, "system_env").get("nvidia_gpu_models")),
        libraries=_libraries(told),
        model=root(told),
        revision=text(model.get("revision")),
        weight_version=text(at(told, "/weight_info").get("weight_version")),
        dtype=_plain(model.get("dtype")),
        quantization=named(model, "quantization"),
        kv_cache_dtype=text(cache.get("cache_dtype")) or _label(told.get("/metrics"), "cache_dtype"),
        attention_backend=text(at(info, "vllm_config", "attention_config").get("backend")),
        tensor_parallel=count(parallel.get("tensor_parallel_size")),
        pipeline_parallel=count(parallel.get("pipeline_parallel_size")),
        data_parallel=count(parallel.get("data_parallel_size")),
        expert_parallel=_experts(parallel),
        sequence_parallel=flag(passes.get("enable_sp", passes.get("enable_sequence_parallelism"))),
        mixture_of_experts=flag(parallel.get("is_moe_model")),
        speculative=_drafts(info),
        overlapped=flag(scheduler.get("async_scheduling")),
        scheduling_policy=text(scheduler.get("policy")),
        max_running=count(scheduler.get("max_num_seqs")),
        sampling_defaults=None if source is None else "engine" if source == "vllm" else "model",
        defaults=defaults,
    )


def _invariant(info: Any, told: Mapping[str, Any]) -> bool | None:
    """Whether it is in its batch-invariant mode, as its development mode tells, or else each of its processes."""
    processes = at(told, _PROCESSES).get("processes")
    if "vllm_env" in info or not isinstance(processes, list) or not processes:
        return flag(at(info, "vllm_env").get("VLLM_BATCH_INVARIANT"))
    return all(at(each, "environment").get("VLLM_BATCH_INVARIANT") == "1" for each in processes)


def _status(told: Mapping[str, Any]) -> int:
    """With what a question of a wrong method is refused; 0 where it is not."""
    status = told.get(_GENERATING)
    return status if isinstance(status, int) else 0


def _libraries(told: Mapping[str, Any]) -> str | None:
    """What its processes compute with; where they differ, each way that there is."""
    processes = at(told, _PROCESSES).get("processes")
    ways = {
        ", ".join(f"{name} {each[name]}" for name in ("torch", "cuda", "hip", "cudnn", "nccl") if each.get(name))
        for each in (processes if isinstance(processes, list) else ())
        if isinstance(each, Mapping)
    }
    return " | ".join(sorted(filter(None, ways))) or None


def _label(metrics: Any, name: str) -> str | None:
    return exposition.label(metrics, PREFIX_CACHE[0], name) if isinstance(metrics, str) else None


def _caches(metrics: Any, cache: Mapping[str, Any]) -> bool | None:
    label = _label(metrics, PREFIX_CACHE[1])
    return flag(cache.get("enable_prefix_caching")) if label is None else label.lower() in ("true", "1")


def _is(value: Any, wanted: str) -> bool | None:
    return value == wanted if isinstance(value, str) else None


def _plain(dtype: Any) -> str | None:
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else None


def _experts(parallel: Mapping[str, Any]) -> int | None:
    if not flag(parallel.get("enable_expert_parallel")):
        return None
    return (count(parallel.get("tensor_parallel_size")) or 1) * (count(parallel.get("data_parallel_size")) or 1)


def _drafts(info: Any) -> str | None:
    config = at(info, "vllm_config")
    if "speculative_config" not in config:
        return None
    drafts = at(config, "speculative_config")
    return text(drafts.get("method")) or ("some" if drafts else "none")
