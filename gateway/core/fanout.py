"""Parting one request into calls that an engine cannot answer with clones.

An engine that gives every sample of a request one seed gets each sample alone. A child's body is the
client's with only the shared lists taken apart: its prompt stands in it in the client's own bytes.

The rules are named as `Handling.merge` names them, and `gateway.core.merge` has the same names:

| rule | a request that may be parted | a child |
|---|---|---|
| choices | `n`, list `prompt` | one prompt, n = 1 |
| conversations | several conversations in `messages` | a list of one conversation |
| generate | `n`, list `text`, `input_ids` or `input_embeds` with its companions | one prompt, n = 1 |
| embedding | list `text` or `input_ids` | one input |
| data | list `input` | one input |
| pairs | 1 × N or N × N texts | one pair |
| scores | list `items` | a list of one item |
| rerank, ranking | `documents` | a list of one document, no `top_n` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.document import Document, Edit, Remove, Set
from gateway.core.errors import CallerFault, TooLarge
from gateway.core.types import Call, Handling, Path

LIMIT = 4096
"""Calls that one request may become unless told otherwise."""

LARGEST = 268_435_456
"""Bytes of all their bodies together: a long prompt goes to the engine once for each sample."""

_WRAPPED = frozenset({"conversations", "scores", "rerank", "ranking"})
"""Rules whose children hold a list of one."""

_RANKED = frozenset({"rerank", "ranking"})

_COMPANIONS = {
    "generate": (
        "audio_data",
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "cache_salt",
        "custom_logit_processor",
        "decode_tp_size",
        "extra_key",
        "image_data",
        "kv_hints",
        "logprob_start_len",
        "lora_id",
        "lora_path",
        "mm_content_hashes",
        "mm_hashes",
        "return_hidden_states",
        "return_logprob",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "sampling_params",
        "token_ids_logprob",
        "top_logprobs_num",
        "video_data",
        "watermark",
    ),
    "embedding": ("audio_data", "image_data", "lora_id", "lora_path", "video_data"),
    "data": ("embed_overrides", "lora_path"),
    "scores": ("item_embed_overrides", "label_token_ids"),
}
"""Fields that may hold a list with one value a prompt. A value that is no list goes to every child."""

_NESTED = frozenset({"label_token_ids", "token_ids_logprob"})
"""Companions whose plain list is one value: only a list of lists belongs to the prompts one by one."""

_REWRAPPED = frozenset({"embed_overrides", "item_embed_overrides", "label_token_ids"})
"""Companions that a child has as a list of one, as it has its input."""

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


@dataclass(frozen=True, slots=True)
class _Lists:
    """The lists of a request that its children share out."""

    prompts: int
    """How many prompts or inputs there are; a list of one counts as one."""
    fields: tuple[str, ...] = ()
    """The fields that hold them as a list."""


def samples(handling: Handling, document: Document, *, limit: int = LIMIT) -> int:
    """How many samples a request draws: prompts × n. A list that only carries scores counts as one.

    Raises `CallerFault` where n is no integer, or there are more samples than `limit`.
    """
    if handling.kind != "sample" or _plain(handling, document):
        return 1
    count = _lists(handling, document).prompts * _n(handling, document)
    _bound(count, limit)
    return count


def calls(
    handling: Handling,
    document: Document,
    seeds: Sequence[int],
    *,
    split_inputs: bool = False,
    limit: int = LIMIT,
) -> list[Call]:
    """The calls that a request becomes, in sample order. One call is the request as it is.

    `seeds` holds one for each of `samples`, or nothing where the route reads none. `split_inputs`: each input
    of a scoring request gets a call of its own.

    Raises `CallerFault` where the lists of a request cannot be shared out, or there would be more calls than
    `limit`, or more bytes than `LARGEST`.
    """
    unparted = handling.kind == "score" and (not split_inputs or _misranked(handling, document))
    if unparted or _plain(handling, document):
        return [_whole(document, seeds)]
    lists, n = _lists(handling, document), _n(handling, document)
    if _beams(handling, document) or (lists.prompts == 1 and (n == 1 or not handling.clones)):
        if not _listed_params(handling, document):
            return [_whole(document, seeds)]
        lists, n = _Lists(1), 1
    _bound(lists.prompts * n, limit)
    return _children(handling, document, lists, n, seeds)


def shares_out(handling: Handling, field: str) -> bool:
    """Whether a field may be a list with one value a prompt."""
    return field in _COMPANIONS.get(handling.merge or "", ())


def listed_params(handling: Handling, document: Document) -> list[Document]:
    """The sampling params that hold the seed, where they come as a list, one for each prompt; else [].

    Raises `CallerFault` where one of them is no object.
    """
    if not _listed_params(handling, document):
        return []
    return [_object(literal, "sampling_params") for literal in document.elements(("sampling_params",)) or ()]


def _whole(document: Document, seeds: Sequence[int]) -> Call:
    return Call(sample=0, prompt=0, seed=seeds[0] if seeds else None, document=document, edits=())


def _plain(handling: Handling, document: Document) -> bool:
    """Whether nothing in the request can ask for a second sample: most requests, told fast."""
    value = document.value
    if handling.n is not None:
        holder = value if len(handling.n) == 1 else value.get(handling.n[0], {})
        if type(holder) is not dict or handling.n[-1] in holder:
            return False
    if not handling.inputs:
        return True
    first, *others = handling.inputs
    return type(value.get(first)) is str and not any(field in value for field in others)


def _misranked(handling: Handling, document: Document) -> bool:
    """Whether a rerank asks for a number of results that only the engine can refuse."""
    top = document.value.get("top_n")
    return handling.merge in _RANKED and top is not None and (type(top) is not int or top < 0)


def _bound(count: int, limit: int) -> None:
    if count > limit:
        raise CallerFault(
            f"The request asks for {count} samples; one request gets at most {limit}. Send several requests.",
            code="too_many_samples",
        )


def _bound_bytes(size: int) -> None:
    if size > LARGEST:
        raise TooLarge(
            f"Taken apart the request is {size} bytes, since each part holds what they share; one request gets at "
            f"most {LARGEST}. Ask for less at once, and send several requests."
        )


def _beams(handling: Handling, document: Document) -> bool:
    if handling.beams is None:
        return False
    width = _at(_single(document.value, handling.beams[0]), handling.beams)
    return width is True or (isinstance(width, int) and width > 1)


def _listed_params(handling: Handling, document: Document) -> bool:
    """Whether the sampling params that hold the seed are a list, one for each prompt."""
    if handling.seed is None or handling.seed[0] != "sampling_params":
        return False
    return isinstance(document.value.get("sampling_params"), list)


def _n(handling: Handling, document: Document) -> int:
    if handling.n is None:
        return 1
    holders = document.value.get(handling.n[0])
    if len(handling.n) == 2 and isinstance(holders, list):
        found = [_at(holder, handling.n[1:]) for holder in holders] or [None]
        if any(value != found[0] for value in found):
            raise CallerFault(f"All of {handling.n[0]} must have the same n.", param=".".join(handling.n))
        value = found[0]
    else:
        value = _at(document.value, handling.n)
    if value is None:
        return 1
    if type(value) is not int:
        raise CallerFault(f"n must be an integer, not {value!r}.", param=".".join(handling.n))
    return max(value, 1)


def _lists(handling: Handling, document: Document) -> _Lists:
    if handling.merge == "pairs":
        return _paired(document)
    value = document.value
    present = [field for field in handling.inputs if value.get(field) not in (None, "", [])]
    listed = tuple(field for field in present if _several(field, value[field], handling.merge))
    counts = [len(value[field]) if field in listed else 1 for field in present]
    # Prompts and prompt embeddings of one request are prompts of it, one after the other.
    prompts = sum(counts) if handling.merge == "choices" else max(counts, default=1)
    if prompts > 1 and len(present) > 1:
        raise CallerFault(
            f"A request with both {' and '.join(present)} cannot be shared out. Send one prompt a request.",
            code="cannot_split",
            param=present[0],
        )
    return _Lists(max(prompts, 1), listed)


def _several(field: str, value: Any, rule: str | None) -> bool:
    """Whether a value is a list of prompts: a list of numbers is one prompt."""
    if not isinstance(value, list):
        return False
    first = value[0]
    if rule == "conversations":
        return isinstance(first, list)
    if field == "input_embeds":
        first = first[0] if isinstance(first, list) and first else None
    return not isinstance(first, int | float | None)


def _paired(document: Document) -> _Lists:
    value = document.value
    for first, second in _PAIRS:
        if first not in value or second not in value:
            continue
        sizes = [len(value[field]) if isinstance(value[field], list) else 1 for field in (first, second)]
        # The engine answers for what is neither 1 × N nor N × N.
        if sizes[0] not in (1, sizes[1]) or sizes[1] == 0:
            return _Lists(1)
        return _Lists(sizes[1], tuple(field for field in (first, second) if isinstance(value[field], list)))
    return _Lists(1)


def _children(handling: Handling, document: Document, lists: _Lists, n: int, seeds: Sequence[int]) -> list[Call]:
    shares = _shares(handling, document, lists)
    base = _stripped(document, shares)
    _bound_bytes(n * (lists.prompts * len(base.raw) + sum(len(part) for parts in shares.values() for part in parts)))
    params = shares.pop("sampling_params", None)
    found = []
    for prompt in range(lists.prompts):
        # Seed and n go into the params, and two edits may not touch one field.
        child = base if params is None else Document(base.edited([Set(("sampling_params",), params[prompt])]))
        own = [Set((field,), parts[prompt]) for field, parts in shares.items()]
        edits = (*own, *_one(handling, child))
        for i in range(n):
            sample = prompt * n + i
            found.append(Call(sample, prompt, seeds[sample] if seeds else None, child, edits))
    return found


def _one(handling: Handling, document: Document) -> tuple[Edit, ...]:
    if handling.n is None or _at(document.value, handling.n) in (None, 1):
        return ()
    return (Set(handling.n, b"1"),)


def _shares(handling: Handling, document: Document, lists: _Lists) -> dict[str, list[bytes]]:
    """For every field that the children share out: the literal for each prompt."""
    rule = handling.merge or ""
    shares: dict[str, list[bytes]] = {}
    for field in lists.fields:
        parts = [_wrapped(part, rule) for part in document.elements((field,)) or ()]
        shares[field] = parts * lists.prompts if len(parts) == 1 else parts
    for field in _COMPANIONS.get(rule, ()):
        if lists.fields or field == "sampling_params":
            parts = _companion(document, field, lists.prompts)
            if parts:
                shares[field] = parts
    _check_shared(document, lists.prompts)
    return shares


def _check_shared(document: Document, prompts: int) -> None:
    """Refuse values that hold for several prompts and for none of them alone."""
    value = document.value
    if prompts > 1 and isinstance(value.get("bootstrap_room"), int):
        raise CallerFault(
            "One bootstrap_room for several prompts cannot be shared out. Send single prompts.",
            code="cannot_split",
            param="bootstrap_room",
        )
    if prompts > 1 and value.get("encoding_format") in ("bytes", "bytes_only"):
        raise CallerFault(
            "Answers in bytes cannot be joined. Send single inputs, or encoding_format float or base64.",
            code="cannot_split",
            param="encoding_format",
        )


def _companion(document: Document, field: str, prompts: int) -> list[bytes]:
    """What each prompt has of a companion; [] where all have the same."""
    value = document.value.get(field)
    if not isinstance(value, list) or (field in _NESTED and not (value and isinstance(value[0], list))):
        return []
    parts = document.elements((field,)) or []
    if len(parts) != prompts:
        raise CallerFault(
            f"{field} has {len(parts)} values for {prompts} prompts. Send one for each, or single prompts.",
            code="cannot_split",
            param=field,
        )
    return [b"[" + part + b"]" for part in parts] if field in _REWRAPPED else parts


def _wrapped(element: bytes, rule: str) -> bytes:
    """An element as a child has it: a list of one where the route takes nothing else, or would misread it
    alone."""
    wraps = (
        rule in _WRAPPED
        or (rule == "data" and element.startswith(b"{"))
        or (rule == "embedding" and element.startswith(b"[") and element[1:].lstrip().startswith(b'"'))
    )
    return b"[" + element + b"]" if wraps else element


def _stripped(document: Document, shares: dict[str, list[bytes]]) -> Document:
    """The body without what belongs to single prompts, so that a child's body costs its own length alone."""
    edits: list[Edit] = [Set((field,), b"null") for field in shares]
    if isinstance(document.value.get("rid"), list):
        edits.append(Remove(("rid",)))
    if "documents" in shares and "top_n" in document.value:
        edits.append(Remove(("top_n",)))
    return Document(document.edited(edits)) if edits else document


def _object(literal: bytes, field: str) -> Document:
    try:
        return Document(literal)
    except ValueError:
        raise CallerFault(f"{field} must hold objects.", param=field) from None


def _single(value: dict[str, Any], field: str) -> dict[str, Any]:
    """The value with the first of a field's list in the list's place."""
    found = value.get(field)
    return {**value, field: found[0]} if isinstance(found, list) and found else value


def _at(value: Any, path: Path) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
