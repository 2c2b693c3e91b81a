"""vLLM (read and tried at 0.32.0).

Seeds are taken as int64, -1 meaning none. Choice i of n is what seed + i gives alone, so n stays in one
call; a list of prompts shares one seed, so it does not. An abort is a closed connection."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.core import exposition
from gateway.core.document import Document, Edit
from gateway.core.types import Facts, Handling, Headers, Path

NAME = "vllm"
PROBE = "/health"
ABORT = None

_STRAYS: tuple[Path, ...] = (
    ("sampling_seed",),
    ("sampling_params", "seed"),
    ("sampling_params", "sampling_seed"),
)
_CHAT = Handling(
    "sample",
    "openai",
    "generate",
    seed=("seed",),
    strays=_STRAYS,
    n=("n",),
    beams=("use_beam_search",),
    merge="choices",
)
_RERANK = Handling("score", "native", "reward", inputs=("documents",), merge="rerank")
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
        ),
        "/v1/responses": Handling("sample", "responses", "generate", seed=("seed",), strays=_STRAYS),
        "/v1/messages": Handling("sample", "anthropic", "generate"),
        "/v1/messages/count_tokens": Handling("plain", "anthropic", "generate"),
        "/inference/v1/generate": Handling(
            "sample",
            "native",
            "generate",
            seed=("sampling_params", "seed"),
            strays=(("sampling_params", "sampling_seed"), ("seed",), ("sampling_seed",)),
            n=("sampling_params", "n"),
        ),
        "/v1/models": Handling("models", "openai", "any", methods=("GET",)),
        "/tokenize": Handling("plain", "native", "any"),
        "/detokenize": Handling("plain", "native", "any"),
        "/classify": Handling("score", "native", "reward", inputs=("input",), merge="data"),
        "/pooling": Handling("score", "native", "reward", inputs=("input",), merge="data"),
        "/v1/embeddings": Handling("score", "openai", "reward", inputs=("input",), merge="data"),
        "/score": Handling("score", "native", "reward", inputs=_PAIRS, merge="pairs"),
        "/v1/score": Handling("score", "openai", "reward", inputs=_PAIRS, merge="pairs"),
        "/rerank": _RERANK,
        "/v1/rerank": Handling("score", "openai", "reward", inputs=("documents",), merge="rerank"),
        "/v2/rerank": _RERANK,
    }
)


def check(path: str, document: Document, facts: Facts, n: int) -> None:
    """Nothing: the seeds that vLLM misreads are refused for every engine, and the rest it refuses itself."""


def extra(path: str, document: Document, facts: Facts) -> tuple[Edit, ...]:
    return ()


def id_headers(engine_id: str) -> Headers:
    return [(b"x-request-id", engine_id.encode("ascii"))]


ASKS = ()
"""Nothing that this engine serves by default tells whether its kernels are batch-invariant."""

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
    """Unknown, all of it."""
    return Facts()
