"""What a simulated engine is told at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SimSettings:
    """One simulated engine; the defaults are a healthy engine in deterministic mode.

    engine                     whose routes, shapes, noise and failings it has
    role                       "generate", or "reward" (vLLM `--runner pooling`, SGLang `--is-embedding`)
    model                      the one model it serves
    api_key                    wanted as a bearer token on the routes that the engine guards; None: no key
    guard_probes               wants the key on /health and /ready too
    deterministic              SGLang: honours seeds (else ignores them); vLLM: what /server_info tells of
                               batch invariance, nothing more, as at the real one
    batch_dependent            company in the batch and a warm prefix cache change results a little
    prefix_cache               keeps prompts in blocks of 16 tokens and says so in its metrics
    token_seconds              one step of the batch, seconds
    score_seconds              least time of one score, seconds; None: one step
    max_num_seqs               most requests in one batch; the rest wait
    max_model_len              tokens of prompt and answer together
    generation_config          sampling defaults that came with the model, for the /v1 routes
    preferred_sampling_params  SGLang: the same by start flag, for all routes; told by /model_info
    priority_scheduling        honours `priority` (vLLM: lower first, SGLang: higher first)
    dev_mode                   vLLM: serves /server_info and /reset_prefix_cache
    scale_out                  vLLM: serves /inference/v1/generate
    request_id_headers         vLLM: answers carry X-Request-Id, the request's or a new one
    health_seconds             SGLang: least time of /health, which generates a token
    keep_alive_seconds         idle connections are closed after this
    weight_version             told where the engine tells it
    version                    told where the engine tells it; None: the one that it is faithful to
    told                       laid over what /server_info tells, nested as there; nothing else hangs on it
    """

    engine: Literal["vllm", "sglang"]
    role: Literal["generate", "reward"] = "generate"
    model: str = "sim-model"
    api_key: str | None = None
    guard_probes: bool = False
    deterministic: bool = True
    batch_dependent: bool = False
    prefix_cache: bool = True
    token_seconds: float = 0.002
    score_seconds: float | None = None
    max_num_seqs: int = 64
    max_model_len: int = 32768
    generation_config: Mapping[str, float] = field(default_factory=dict)
    preferred_sampling_params: Mapping[str, float] = field(default_factory=dict)
    priority_scheduling: bool = False
    dev_mode: bool = False
    scale_out: bool = False
    request_id_headers: bool = False
    health_seconds: float = 1.0
    keep_alive_seconds: int = 5
    weight_version: str = "default"
    version: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
