"""The two digests of a request: of its bytes, to know a repeat, and of its content, which enters seeds.

The *canonical form* of a body is fixed for good, here and in no library: a digest that changes would make
every run in `content` order unrepeatable. It is the following text, in UTF-8, with no space between its
tokens.

- An object is `{"key":value,…}`, its keys sorted by code point; of equal keys the last one counts.
- A list is `[value,…]` in its own order.
- `true`, `false`, `null`, `NaN`, `Infinity` and `-Infinity` are themselves.
- A number is written by its exact decimal value, so 1, 1.0 and 10e-1 are one number, and -0 is 0. An
  integer of at most 30 digits is its digits: `-120`. Any other number is `{c}e{x}` with the value c · 10^x,
  c being an integer that does not end in 0: 0.70 is `7e-1`, 10^30 is `1e30`, 10^30 + 1 is its 31 digits and
  `e0`.
- A string is `"…"` with `\\"`, `\\\\`, `\\b`, `\\t`, `\\n`, `\\f`, `\\r`, other characters below U+0020 as
  `\\u` and four lower-case hex digits, lone surrogates likewise, and every other character as it is. (The
  same as JSON.stringify of ECMAScript writes.)

Before that, what does not sample is left out: the members of the body whose keys are in `UNSAMPLED`. And
every id that an engine or a client library invented is replaced by `#` and the ordinal of its first
appearance, 0, 1, …, so that a tool loop repeats. These are the strings at the following places, visited in
this order:

1. element by element in the list `messages` (a list in it is a conversation of such elements), then in the
   list `input`: `id` of each of `tool_calls`; `tool_call_id`; of each part of the list `content`, `id`
   where its `type` ends in `tool_use`, then `tool_use_id`; and in `input` also `call_id`, then `id`;
2. `previous_response_id`.

The *content digest* is the first 32 hex digits of the SHA-256 of `detgate-content-v1`, the route and the
canonical form, the first two each behind its length in 8 bytes, big-endian.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from hashlib import sha256
from typing import Any

import orjson
import xxhash

from gateway.core.document import Document
from gateway.core.seeds import framed

UNSAMPLED = frozenset(
    {
        "stream",
        "stream_options",
        "rid",
        "request_id",
        "priority",
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "cache_salt",
    }
)

_CLIENTS_OWN = UNSAMPLED - {"stream", "stream_options"}

_TAG = framed(b"detgate-content-v1")
_PLAIN_DIGITS = 30
_DEEPEST = 32
"""Levels of objects down to which a float's literal is looked up in the bytes."""
_MOST = 64
"""Floats of a body that are: reading all bytes again costs less than looking up many."""

_TOKEN = re.compile(r'[\s,:]*([\[\]{}"]|[^\s,:"\[\]{}]+)')
_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?)0*([0-9]+))?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMES = {"true": True, "false": False, "null": None}
_LOOKED_INTO = frozenset({float, dict, list})
_HOLDERS = frozenset({dict, list})
_ID_HOLDERS = frozenset({"tool_calls", "tool_call_id"})
_STRINGS = json.JSONDecoder()


def raw(route: str, body: bytes) -> bytes:
    """The bytes digest, 16 bytes: XXH3-128 of the framed route and the body. It enters no seed."""
    digest = xxhash.xxh3_128(_framed(route))
    digest.update(body)
    return digest.digest()


def content(document: Document, route: str) -> str:
    """The content digest of a request, 32 hex digits: equal for requests that ask the same of an engine."""
    digest = sha256(_tagged(route))
    digest.update(form(document))
    return digest.hexdigest()[:32]


def varies(document: Document) -> bool:
    """Whether the bytes may hold what is invented anew in each run, so that only the content tells two runs alike."""
    if not _CLIENTS_OWN.isdisjoint(document.value):
        return True
    if all(map(_simple, document.value, document.value.values())):
        return False
    raw = document.raw
    return b'call_id"' in raw or b'"tool_calls"' in raw or b'tool_use"' in raw or b'"previous_response_id"' in raw


def form(document: Document) -> bytes:
    """The canonical form of a body.

    Made from the parsed value where that is exact. Else the bytes are read again, number by number, and where they
    are nested deeply not by recursion, so that nothing depends on how deep the caller's stack is.
    """
    try:
        plain = _plain(document)
        return _written(_without_ids(_exact(document)) if plain is None else plain)
    except _Unfit:
        body = _without_ids(_sampled(_read(document.raw.decode("utf-8-sig"))))
    try:
        return _written(body)
    except _Unfit:
        return _spelled(body)


@lru_cache(maxsize=256)
def _framed(route: str) -> bytes:
    return framed(route.encode())


@lru_cache(maxsize=256)
def _tagged(route: str) -> bytes:
    return _TAG + _framed(route)


class _Verbatim:
    """A piece of the canonical form that is written as it is."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _Unfit(Exception):
    """The fast way does not lead to the canonical form of this body."""


def _sampled(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in UNSAMPLED}


def _plain(document: Document) -> dict[str, Any] | None:
    """What is sampled of a body that holds texts, numbers and turns of one text each; None: it holds more."""
    body = {}
    for name, value in document.value.items():
        if name in UNSAMPLED:
            continue
        kind = type(value)
        if kind is float:
            if len(document.value) > _MOST:
                raise _Unfit
            literal = document.literal((name,))
            assert literal is not None
            value = _number(literal.decode())
        elif not _simple(name, value):
            return None
        body[name] = value
    return body


def _simple(name: str, value: Any) -> bool:
    """Whether a field of a body is a text, a number or turns of one text each, and so holds no invented id."""
    kind = type(value)
    if kind is list and name == "messages":
        for turn in value:
            if type(turn) is not dict or len(turn) != 2 or type(turn.get("content")) is not str:
                return False
            if type(turn.get("role")) is not str:
                return False
        return True
    return kind is not list and kind is not dict and name != "previous_response_id"


def _exact(document: Document) -> dict[str, Any]:
    return _Exact(document).object((), _sampled(document.value))


class _Exact:
    """The values of a body with exact numbers in place of floats."""

    __slots__ = ("_document", "_left")

    def __init__(self, document: Document) -> None:
        self._document = document
        self._left = _MOST

    def object(self, path: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
        """An object; the same one where it has no floats."""
        if _LOOKED_INTO.isdisjoint(map(type, value.values())):
            return value
        if len(path) > _DEEPEST:
            raise _Unfit
        exact: dict[str, Any] = {}
        for name, inner in value.items():
            kind = type(inner)
            if kind is float:
                exact[name] = self._number((*path, name))
            elif kind is dict:
                exact[name] = self.object((*path, name), inner)
            elif kind is list:
                _refuse_floats(inner)
        return value | exact

    def _number(self, path: tuple[str, ...]) -> int | _Verbatim:
        if not self._left:
            raise _Unfit
        self._left -= 1
        literal = self._document.literal(path)
        assert literal is not None
        return _number(literal.decode())


def _refuse_floats(values: list[Any]) -> None:
    pending: list[list[Any] | dict[str, Any]] = [values]
    while pending:
        holder = pending.pop()
        inner = holder if isinstance(holder, list) else holder.values()
        if _LOOKED_INTO.isdisjoint(map(type, inner)):
            continue
        for value in inner:
            kind = type(value)
            if kind is dict or kind is list:
                pending.append(value)
            elif kind is float:
                raise _Unfit


def _number(text: str) -> int | _Verbatim:
    """A number, NaN or an infinity by its exact value."""
    return _remembered(text) if len(text) <= 32 else _evaluated(text)


def _evaluated(text: str) -> int | _Verbatim:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return _Verbatim(text)
    sign, whole, fraction, exponent_sign, exponent = match.groups(default="")
    digits = (whole + fraction).lstrip("0")
    coefficient = digits.rstrip("0")
    if not coefficient:
        return 0
    shift = len(digits) - len(coefficient) - len(fraction)
    power = _sum(exponent_sign + (exponent or "0"), shift)
    if power.isdigit() and len(power) < 3 and len(coefficient) + int(power) <= _PLAIN_DIGITS:
        return int(sign + coefficient + "0" * int(power))
    return _Verbatim(f"{sign}{coefficient}e{power}")


_remembered = lru_cache(maxsize=1024)(_evaluated)


def _sum(integer: str, shift: int) -> str:
    """The sum in decimal; Python's own integers refuse to be read or written above 4,300 digits."""
    if len(integer) < 4000:
        return str(int(integer) + shift)
    exact = Context(prec=len(integer) + 20, Emin=MIN_EMIN, Emax=MAX_EMAX)
    return format(exact.add(Decimal(integer), Decimal(shift)), "f")


_EXACT = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=_number)


def _read(text: str) -> Any:
    """The value of a text that is known to be JSON, its numbers exact."""
    try:
        return _EXACT.decode(text)
    except RecursionError:
        return _walked(text)


def _walked(text: str) -> Any:
    """The same without recursion."""
    found: list[Any] = []
    holder: Any = found
    outer: list[Any] = []
    key: str | None = None
    position = 0
    while (match := _TOKEN.match(text, position)) is not None:
        token = match[1]
        position = match.end()
        value: Any
        if token == "]" or token == "}":
            holder = outer.pop()
            continue
        if token == '"':
            value, position = _STRINGS.raw_decode(text, position - 1)
            if key is None and type(holder) is dict:
                key = value
                continue
        elif token == "{":
            value = {}
        elif token == "[":
            value = []
        else:
            value = _NAMES[token] if token in _NAMES else _number(token)
        if type(holder) is dict:
            holder[key] = value
            key = None
        else:
            holder.append(value)
        if token == "{" or token == "[":
            outer.append(holder)
            holder = value
    return found[0]


def _without_ids(body: dict[str, Any]) -> dict[str, Any]:
    ids: dict[str, _Verbatim] = {}
    changed: dict[str, Any] = {}
    for field, names in (("messages", ()), ("input", ("call_id", "id"))):
        turns = body.get(field)
        if type(turns) is list and not _HOLDERS.isdisjoint(map(type, turns)):
            changed[field] = [
                [_turn(part, names, ids) for part in turn]
                if type(turn) is list and field == "messages"
                else _turn(turn, names, ids)
                for turn in turns
            ]
    if "previous_response_id" in body:
        changed |= _ordinals(body, ("previous_response_id",), ids)
    return body | changed if changed else body


def _turn(turn: Any, names: tuple[str, ...], ids: dict[str, _Verbatim]) -> Any:
    if type(turn) is not dict:
        return turn
    if not names and type(turn.get("content")) is str and _ID_HOLDERS.isdisjoint(turn):
        return turn
    changed: dict[str, Any] = {}
    if type(calls := turn.get("tool_calls")) is list:
        changed["tool_calls"] = [_with(call, ("id",), ids) for call in calls]
    changed |= _ordinals(turn, ("tool_call_id",), ids)
    if type(content := turn.get("content")) is list:
        changed["content"] = [_block(block, ids) for block in content]
    changed |= _ordinals(turn, names, ids)
    return turn | changed if changed else turn


def _block(block: Any, ids: dict[str, _Verbatim]) -> Any:
    kind = block.get("type") if type(block) is dict else None
    use = isinstance(kind, str) and kind.endswith("tool_use")
    return _with(block, ("id", "tool_use_id") if use else ("tool_use_id",), ids)


def _with(holder: Any, names: Iterable[str], ids: dict[str, _Verbatim]) -> Any:
    return holder | _ordinals(holder, names, ids) if type(holder) is dict else holder


def _ordinals(holder: dict[str, Any], names: Iterable[str], ids: dict[str, _Verbatim]) -> dict[str, Any]:
    """The ordinals that take the place of the ids under these names."""
    found = {}
    for name in names:
        if type(value := holder.get(name)) is str:
            found[name] = ids.setdefault(value, _Verbatim(f"#{len(ids)}"))
    return found


def _written(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body, default=_fragment, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # nested deeply, integers above 64 bits, lone surrogates
        raise _Unfit from None


def _fragment(piece: _Verbatim) -> orjson.Fragment:
    return orjson.Fragment(piece.text)


def _spelled(body: dict[str, Any]) -> bytes:
    pieces: list[str] = []
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is _Verbatim:
            pieces.append(value.text)
        elif kind is dict:
            pending += reversed(_object_pieces(value))
        elif kind is list:
            pending += reversed(_list_pieces(value))
        else:
            pieces.append(json.dumps(value, ensure_ascii=False))
    text = "".join(pieces)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()


def _object_pieces(value: dict[str, Any]) -> list[Any]:
    pieces: list[Any] = []
    for name in sorted(value):
        start = "," if pieces else "{"
        pieces += (_Verbatim(f"{start}{json.dumps(name, ensure_ascii=False)}:"), value[name])
    return [*pieces, _Verbatim("}")] if pieces else [_Verbatim("{}")]


def _list_pieces(values: list[Any]) -> list[Any]:
    pieces: list[Any] = []
    for value in values:
        pieces += (_Verbatim("," if pieces else "["), value)
    return [*pieces, _Verbatim("]")] if pieces else [_Verbatim("[]")]
