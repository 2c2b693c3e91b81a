"""Any other server with the OpenAI API, of which the gateway knows the field `seed` and nothing else.

Whether it clones samples is unknown, so n and lists are taken apart: only then do no two samples share a
seed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.core.document import Document, Edit
from gateway.core.told import owner
from gateway.core.types import Facts, Handling, Headers

NAME = "openai"
PROBE = "/v1/models"
ABORT = None

_STRAYS = (("sampling_seed",), ("sampling_params", "seed"), ("sampling_params", "sampling_seed"))

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
            merge="choices",
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
            merge="choices",
        ),
        # The Responses API has no seed, and OpenAI's own server refuses fields that it does not know.
        "/v1/responses": Handling("sample", "responses", "generate"),
        "/v1/embeddings": Handling("score", "openai", "any", inputs=("input",), merge="data"),
        "/v1/models": Handling("models", "openai", "any", methods=("GET",)),
    }
)


def check(path: str, document: Document, facts: Facts, n: int) -> None:
    """Nothing is known to kill it."""


def extra(path: str, document: Document, facts: Facts) -> tuple[Edit, ...]:
    return ()


def id_headers(engine_id: str) -> Headers:
    return [(b"x-request-id", engine_id.encode("ascii"))]


ASKS = ()
"""Nothing that this engine serves by default tells whether its kernels are batch-invariant."""

PREEMPTIONS = None
POSITIONAL = False
HIGHER_FIRST = False
LOAD = None
PREFIX_CACHE = None
EXACT = False


def running(told: str) -> float | None:
    return None


def done(told: str) -> float | None:
    return None


def facts(told: Mapping[str, Any]) -> Facts:
    """Unknown, all but which engine it says that it is."""
    return Facts(engine=owner(told))
