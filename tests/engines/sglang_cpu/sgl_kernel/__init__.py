"""Stands in for SGLang's kernel library, which has no CPU build: plain torch, what a CPU without AMX calls.

Two operations are real: the table of token slots, and the hash of SGLang's seeded sampler, which is
MurmurHash3 (x86, 32 bit) over the 64-bit seed, the position and the vocabulary column. Every other name fails
when it is called, not at import.
"""

# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__version__ = "0.0.0+cpu.standin"
WORD = 0xFFFFFFFF
# SGLang asks for these with `hasattr` and has a way of its own without them.
ABSENT = {"convert_weight_packed"}

library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the table, from its start to its end offset."""
    taken = 0
    starts, ends = start_offset.tolist(), end_offset.tolist()
    for row, start, end in zip(req_pool_indices.tolist(), starts, ends, strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """32-bit hashes, one row for each (seed, position), one column for each vocabulary column."""
    seeds = (seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)).view(-1, 1)
    words = (
        seeds & WORD,
        (seeds >> 32) & WORD,
        positions.to(torch.int64).view(-1, 1) & WORD,
        columns.to(torch.int64).view(1, -1) & WORD,
    )
    state = torch.zeros_like(seeds)
    for word in words:
        state = mix(state, word)
    return finish(state, length=4 * len(words)).to(torch.uint32)


def mix(state: Tensor, word: Tensor) -> Tensor:
    """One round of MurmurHash3: takes a 32-bit word in."""
    word = (word * 0xCC9E2D51) & WORD
    word = ((word << 15) | (word >> 17)) & WORD
    state = state ^ ((word * 0x1B873593) & WORD)
    state = ((state << 13) | (state >> 19)) & WORD
    return (state * 5 + 0xE6546B64) & WORD


def finish(state: Tensor, length: int) -> Tensor:
    """MurmurHash3's last step, over the number of bytes taken in."""
    state = state ^ length
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & WORD
    return state ^ (state >> 16)


library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


@torch.library.register_fake("sgl_kernel::murmur_hash32_cpu")
def murmur_hash32_shape(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """What the hash gives, by shape and type, for torch's tracing."""
    return torch.empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__") or name in ABSENT:
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the CPU stand-in for sgl_kernel has no {name}")

    return missing
