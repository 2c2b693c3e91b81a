"""Which routes an engine has: method and path → handler."""

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.sim import (
    chat,
    completions,
    messages,
    probes,
    responses,
    sglang_native,
    sglang_scores,
    vllm_native,
    vllm_pooling,
)
from gateway.sim.replies import Reply, Stream
from gateway.sim.settings import SimSettings

Handler = Callable[[Any, Any], Awaitable[Reply | Stream]]
Routes = dict[tuple[str, str], Handler]


def routes(settings: SimSettings) -> Routes:
    """The routes of that engine in that role."""
    return _vllm(settings) if settings.engine == "vllm" else _sglang()


def _vllm(settings: SimSettings) -> Routes:
    found: Routes = {
        ("GET", "/health"): probes.quick,
        ("GET", "/ping"): probes.quick,
        ("GET", "/version"): probes.version,
        ("GET", "/metrics"): probes.metrics,
        ("GET", "/v1/models"): probes.models,
        ("POST", "/tokenize"): vllm_native.tokenize,
        ("POST", "/detokenize"): vllm_native.detokenize,
    }
    if settings.dev_mode:
        found["GET", "/server_info"] = probes.vllm_server_info
        found["GET", "/weight_info"] = probes.weight_info
        found["POST", "/reset_prefix_cache"] = probes.clear_cache
    if settings.role == "reward":
        return found | _vllm_reward()
    found["POST", "/v1/chat/completions"] = chat.chat
    found["POST", "/v1/chat/completions/batch"] = chat.batch
    found["POST", "/v1/completions"] = completions.completions
    found["POST", "/v1/responses"] = responses.responses
    found["POST", "/v1/messages"] = messages.messages
    found["POST", "/v1/messages/count_tokens"] = messages.count_tokens
    if settings.scale_out:
        found["POST", "/inference/v1/generate"] = vllm_native.generate
    return found


def _vllm_reward() -> Routes:
    return {
        ("POST", "/classify"): vllm_pooling.classify,
        ("POST", "/pooling"): vllm_pooling.pooling,
        ("POST", "/v1/embeddings"): vllm_pooling.embeddings,
        ("POST", "/score"): vllm_pooling.scores,
        ("POST", "/v1/score"): vllm_pooling.scores,
        ("POST", "/rerank"): vllm_pooling.rerank,
        ("POST", "/v1/rerank"): vllm_pooling.rerank,
        ("POST", "/v2/rerank"): vllm_pooling.rerank,
    }


def _sglang() -> Routes:
    return {
        ("GET", "/health"): probes.slow,
        ("GET", "/health_generate"): probes.slow,
        ("GET", "/ready"): probes.quick,
        ("GET", "/metrics"): probes.metrics,
        ("GET", "/v1/loads"): probes.loads,
        ("GET", "/v1/models"): probes.models,
        ("GET", "/server_info"): probes.sglang_server_info,
        ("GET", "/get_server_info"): probes.sglang_server_info,
        ("GET", "/model_info"): probes.model_info,
        ("GET", "/get_model_info"): probes.model_info,
        ("GET", "/flush_cache"): probes.clear_cache,
        ("POST", "/flush_cache"): probes.clear_cache,
        ("POST", "/abort_request"): sglang_native.abort_request,
        ("POST", "/tokenize"): sglang_native.tokenize,
        ("POST", "/v1/tokenize"): sglang_native.tokenize,
        ("POST", "/detokenize"): sglang_native.detokenize,
        ("POST", "/v1/detokenize"): sglang_native.detokenize,
        ("POST", "/v1/chat/completions"): chat.chat,
        ("POST", "/v1/completions"): completions.completions,
        ("POST", "/v1/responses"): responses.responses,
        ("POST", "/v1/messages"): messages.messages,
        ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
        ("POST", "/generate"): sglang_native.generate,
        ("POST", "/classify"): sglang_scores.classify,
        ("POST", "/encode"): sglang_scores.classify,
        ("POST", "/v1/classify"): sglang_scores.classify_v1,
        ("POST", "/v1/embeddings"): sglang_scores.embeddings,
        ("POST", "/v1/score"): sglang_scores.scores,
        ("POST", "/v1/rerank"): sglang_scores.rerank,
    }
