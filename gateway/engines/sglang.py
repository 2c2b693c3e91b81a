"""SGLang (read and tried at 0.5.23).

In deterministic mode a request without a seed runs at 42, all samples of one request share its seed, and
one request with min_p > 0 ends the whole server. A server started with --is-embedding dies of a request to
generate. An abort names the id; closing the connection works too, up to two seconds later."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from gateway.core.document import Document, Edit, Set
from gateway.core.errors import CallerFault
from gateway.core.told import at, count, flag, named, numbers, owner, text
from gateway.core.types import Facts, Handling, Headers, Path

NAME = "sglang"
PROBE = "/ready"


def _abort_body(engine_id: str) -> bytes:
    return orjson.dumps({"rid": engine_id})


ABORT = ("/abort_request", _abort_body)

_RID: Path = ("rid",)
_SALT = "extra_key"
_PUT = ("POST", "PUT")
_STRAYS: tuple[Path, ...] = (
    ("sampling_seed",),
    ("sampling_params", "sampling_seed"),
    ("sampling_params", "seed"),
)
_POOLED = Handling(
    "score",
    "native",
    "reward",
    inputs=("text", "input_ids"),
    engine_id=_RID,
    merge="embedding",
    methods=_PUT,
)
_TOKENS = Handling("plain", "openai", "any")
_NATIVE_TOKENS = Handling("plain", "native", "any")

ROUTES = MappingProxyType(
    {
        "/v1/chat/completions": Handling(
            "sample",
            "openai",
            "generate",
            seed=("seed",),
            strays=_STRAYS,
            n=("n",),
            clones=True,
            engine_id=_RID,
            merge="choices",
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
            clones=True,
            inputs=("prompt",),
            engine_id=_RID,
            merge="choices",
            salt=_SALT,
            priority=True,
        ),
        # A request_id would become the answer's id, and a previous_response_id must begin with resp_.
        "/v1/responses": Handling("sample", "responses", "generate", salt=_SALT, priority=True),
        "/v1/messages": Handling("sample", "anthropic", "generate"),
        "/v1/messages/count_tokens": Handling("plain", "anthropic", "generate"),
        "/generate": Handling(
            "sample",
            "native",
            "generate",
            seed=("sampling_params", "sampling_seed"),
            strays=(("sampling_params", "seed"), ("sampling_seed",), ("seed",)),
            n=("sampling_params", "n"),
            clones=True,
            inputs=("text", "input_ids", "input_embeds"),
            engine_id=_RID,
            beams=("sampling_params", "beam_width"),
            merge="generate",
            methods=_PUT,
            salt=_SALT,
            priority=True,
        ),
        "/abort_request": Handling("abort", "native", "any", engine_id=_RID),
        "/v1/models": Handling("models", "openai", "any", methods=("GET",)),
        "/tokenize": _NATIVE_TOKENS,
        "/detokenize": _NATIVE_TOKENS,
        "/v1/tokenize": _TOKENS,
        "/v1/detokenize": _TOKENS,
        "/classify": _POOLED,
        "/encode": _POOLED,
        "/v1/classify": Handling("score", "openai", "reward", inputs=("input",), engine_id=_RID, merge="data"),
        "/v1/embeddings": Handling("score", "openai", "reward", inputs=("input",), engine_id=_RID, merge="data"),
        "/v1/score": Handling("score", "openai", "reward", inputs=("items",), merge="scores"),
        "/v1/rerank": Handling("score", "openai", "reward", inputs=("documents",), merge="ranking", methods=_PUT),
    }
)

_MIN_P: dict[str, Path] = {
    "/v1/chat/completions": ("min_p",),
    "/v1/responses": ("min_p",),
    "/generate": ("sampling_params", "min_p"),
}
"""Where the model's own min_p can be overruled. Completions send 0 of themselves."""


def check(path: str, document: Document, facts: Facts, n: int) -> None:
    """Refuse what ends the server: min_p in deterministic mode, and generating on an embedding server."""
    if ROUTES[path].kind != "sample":
        return
    if facts.is_generation is False:
        raise CallerFault(
            f"This replica was started with --is-embedding, and a request to {path} would end it. "
            "Send it to a pool of role generate.",
            code="not_a_generation_model",
        )
    if facts.deterministic is not False:
        _check_min_p(path, document.value, facts)


def extra(path: str, document: Document, facts: Facts) -> tuple[Edit, ...]:
    """min_p 0 where the model brings another and the client sent none."""
    if not facts.default_min_p or facts.deterministic is False:
        return ()
    where = _MIN_P.get(path)
    if where is None or _at(document.value, where) is not None:
        return ()
    return (Set(where, b"0"),)


def id_headers(engine_id: str) -> Headers:
    return []


def _check_min_p(path: str, value: dict[str, Any], facts: Facts) -> None:
    params = value.get("sampling_params")
    for fields in (value, *(params if isinstance(params, list) else [params])):
        # Anything that is no zero counts: the engine takes "0.1" and true as numbers too.
        if isinstance(fields, dict) and fields.get("min_p") not in (None, 0):
            raise CallerFault(
                "min_p above 0 ends an SGLang server in deterministic mode. Leave it out or send 0; "
                "top_p and top_k work.",
                code="min_p_unsupported",
                param="min_p",
            )
    if path == "/v1/messages" and facts.default_min_p:
        raise CallerFault(
            f"The model brings min_p {facts.default_min_p}, which ends SGLang in deterministic mode, and "
            "/v1/messages cannot overrule it. Use /v1/chat/completions.",
            code="min_p_unsupported",
            param="min_p",
        )


def _at(value: Any, path: Path) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


ASKS = ("/server_info", "/model_info")
"""Routes that say what a server is."""

PREEMPTIONS = None
"""Its noise is a hash of seed and position, so who is put back continues with the same."""

POSITIONAL = True
"""Its noise is a hash of seed and position."""

HIGHER_FIRST = True
LOAD = "/v1/loads"
"""The scheduler's own count. Its /metrics tell of a request only after 40 tokens, and only with --enable-metrics."""

PREFIX_CACHE = None
EXACT = False


def running(told: str) -> float | None:
    try:
        counts = [rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in orjson.loads(told)["loads"]]
        return float(sum(counts)) if counts else None
    except (ValueError, TypeError, KeyError):
        return None


def done(told: str) -> float | None:
    """Tokens: it counts no requests unless asked to by --enable-metrics."""
    try:
        counts = [rank["total_prefill_uncached_tokens"] for rank in orjson.loads(told)["loads"]]
        return float(sum(counts)) if counts else None
    except (ValueError, TypeError, KeyError):
        return None


def facts(told: Mapping[str, Any]) -> Facts:
    """What the answers say, by route; an answer that did not come is absent."""
    server, model = at(told, "/server_info"), at(told, "/model_info")
    preferred = numbers(model.get("preferred_sampling_params"))
    off = flag(server.get("disable_radix_cache"))
    overlap_off = flag(server.get("disable_overlap_schedule"))
    experts = count(server.get("ep_size"))
    return Facts(
        deterministic=flag(server.get("enable_deterministic_inference")),
        is_generation=flag(model.get("is_generation")),
        default_min_p=dict(preferred).get("min_p"),
        priority_scheduling=flag(server.get("enable_priority_scheduling")),
        prefix_cache=None if off is None else not off,
        engine=owner(told),
        version=text(server.get("version")),
        accelerator=text(server.get("device")),
        model=text(model.get("model_path")) or text(server.get("model_path")),
        revision=text(server.get("revision")),
        weight_version=text(model.get("weight_version")) or text(server.get("weight_version")),
        dtype=text(server.get("dtype")),
        quantization=named(server, "quantization"),
        kv_cache_dtype=text(server.get("kv_cache_dtype")),
        attention_backend=text(server.get("attention_backend")),
        sampling_backend=text(server.get("sampling_backend")),
        tensor_parallel=count(server.get("tp_size")),
        pipeline_parallel=count(server.get("pp_size")),
        data_parallel=count(server.get("dp_size")),
        expert_parallel=experts,
        dp_attention=flag(server.get("enable_dp_attention")),
        mixture_of_experts=_mixes(model.get("architectures"), experts),
        speculative=named(server, "speculative_algorithm"),
        overlapped=None if overlap_off is None else not overlap_off,
        scheduling_policy=text(server.get("schedule_policy")),
        max_running=count(server.get("max_running_requests")),
        sampling_defaults=_source(server.get("sampling_defaults")),
        defaults=preferred,
    )


def _mixes(architectures: Any, experts: int | None) -> bool | None:
    if experts is not None and experts > 1:
        return True
    return any("moe" in str(name).lower() for name in architectures) if isinstance(architectures, list) else None


def _source(told: Any) -> str | None:
    return {"model": "model", "openai": "engine"}.get(told) if isinstance(told, str) else None
