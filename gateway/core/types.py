"""The values that travel along the request path. Frozen where a decision is recorded, so that it can be
recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from gateway.core.document import Document, Edit

Headers = list[tuple[bytes, bytes]]
"""Header fields in the order of the message; names in lower case."""

Path = tuple[str, ...]
"""Where a field stands in a JSON body: `("sampling_params", "sampling_seed")`."""

Api = Literal["openai", "anthropic", "responses", "native"]
"""Whose shape errors have on a route."""

Kind = Literal["sample", "score", "plain", "abort", "models"]
"""sample: draws tokens, takes an index and a seed. score: draws nothing, takes an index in `content` order.
plain: neither (tokenize …), takes no index. abort: reaches the replica that runs the named request. models:
merged."""


@dataclass(slots=True)
class Request:
    """One HTTP request as a carrier read it: the head parsed, the body whole."""

    method: str
    path: str
    query: str
    headers: Headers
    fields: dict[bytes, bytes]
    """The same headers by name; of a repeated one the last."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Handling:
    """What one engine does with one route. Engines list these; the pipeline knows no engine by name."""

    kind: Kind
    api: Api
    role: Literal["generate", "reward", "any"]
    seed: Path | None = None
    """Where this engine reads the seed on this route; None where the API has none."""
    strays: tuple[Path, ...] = ()
    """Seed fields that the engine ignores here: a client's seed in one of them is moved to `seed`."""
    n: Path | None = None
    """Where the number of samples a prompt stands."""
    clones: bool = False
    """True: with n > 1 every sample of this engine has the same seed, so the gateway fans out."""
    inputs: tuple[str, ...] = ()
    """Fields, of which at most one is present, that may hold several prompts or inputs."""
    engine_id: Path | None = None
    """Body field for the id that the engine knows the request by; None: the header X-Request-Id (or no
    id)."""
    beams: Path | None = None
    """Field that turns beam search on (true, or a width above 1). It draws nothing, and `n` then counts
    beams."""
    merge: str | None = None
    """Name of the rule by which `gateway.core.fanout` parts a request and `gateway.core.merge` joins the
    answers; None: never fanned out."""
    methods: tuple[str, ...] = ("POST",)
    salt: str | None = None
    """Body field whose text parts the engine's prefix cache; None where it reads none here."""
    priority: bool = False
    """The engine reads `priority` in the body here, where its scheduler goes by it."""
    computes: bool = field(init=False)
    """It is one for the engine itself, not for what stands before it: it takes an index."""
    asks: frozenset[str] = field(init=False)
    """Fields of the body that must be looked into: one without them is one call that brings no seed, if its first
    input is a text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "computes", self.kind in ("sample", "score"))
        paths = (self.seed, *self.strays, self.n)
        object.__setattr__(self, "asks", frozenset([path[0] for path in paths if path]).union(self.inputs[1:]))

    def plain(self, body: Mapping[str, Any]) -> bool:
        """Whether a body asks for one sample and brings no seed, which shows without looking into it."""
        return self.asks.isdisjoint(body) and (not self.inputs or type(body.get(self.inputs[0])) is str)


class Call(NamedTuple):
    """One call to the engine: a whole request, or one child of a fan-out."""

    sample: int
    """Sample number: prompt · n + i."""
    prompt: int
    """Number of the prompt or input: the prompt's tokens are counted once in a merged usage."""
    seed: int | None
    document: Document
    """What the edits change: the client's own body, or that body without what belongs to the siblings."""
    edits: tuple[Edit, ...]
    """What makes the document the child's body: n, the one prompt. Seed and id are added later."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica tells of itself. Unknown is None."""

    deterministic: bool | None = None
    is_generation: bool | None = None
    default_min_p: float | None = None
    """min_p > 0 that the model's own generation config or preferred sampling parameters bring."""
    priority_scheduling: bool | None = None
    prefix_cache: bool | None = None
    engine: str | None = None
    """Which engine it says that it is."""
    version: str | None = None
    accelerator: str | None = None
    libraries: str | None = None
    """The builds that it computes with, such as "torch 2.13.0, cuda 13.0, nccl 2.31.1"."""
    model: str | None = None
    """What it loaded, by path or name."""
    revision: str | None = None
    weight_version: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    """"none" where it says that there is none."""
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    sampling_backend: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: int | None = None
    dp_attention: bool | None = None
    sequence_parallel: bool | None = None
    mixture_of_experts: bool | None = None
    speculative: str | None = None
    """How it drafts tokens; "none" where it says that it does not."""
    overlapped: bool | None = None
    """The next batch is put together before this step's tokens are known."""
    scheduling_policy: str | None = None
    max_running: int | None = None
    """Most requests in one batch."""
    sampling_defaults: str | None = None
    """Where sampling parameters come from that a request leaves out: the "model" (its generation_config.json) or the
    "engine"."""
    defaults: tuple[tuple[str, float], ...] = ()
    """Such parameters, as far as it tells them."""

    def known(self) -> dict[str, Any]:
        """Those that were told, by name."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if value not in (None, ())} | (
            {"defaults": dict(self.defaults)} if self.defaults else {}
        )


Value = Mapping[str, Any]
Check = Callable[[str, Value, Facts], None]
