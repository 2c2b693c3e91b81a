"""What a session asked and was answered, in the shape in which AReaL's trainer takes it.

A *turn* is one answered request: as messages, and as token ids with their logprobs where the client asked its engine
for both. The shape is that of AReaL's own proxy: a tensor is its bytes in base64 with shape and type, so nothing of
torch is needed here. It is made of records of the ledger that hold bodies.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.core.sse import payloads

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes whose answers are turns."""

Message = dict[str, Any]


class Unkept(Exception):
    """A body is not in the ledger, or not whole."""


class Unreadable(Exception):
    """A turn cannot be given as it was. The text names it and says why."""


class Tokens(NamedTuple):
    """The token ids of a turn."""

    prompt: list[int]
    drawn: list[int]
    logprobs: list[float]
    """Of the drawn ones."""
    version: int
    """Of the weights that drew them; 0: they had no name."""


class Turn(NamedTuple):
    """One answered request."""

    request_id: str
    answer_id: str | None
    messages: list[Any]
    answer: list[Message]
    reward: float | None
    tokens: Tokens | None
    """None: the answer does not tell them all, or weights have a name that is no number."""


def read(request: Mapping[str, Any]) -> Turn | None:
    """The turn that a request of an export was; None: it was none. Raises `Unkept`, `Unreadable`."""
    route = request.get("route")
    if request.get("outcome") != "delivered" or route not in ROUTES or (request.get("status") or 0) >= 400:
        return None
    try:
        turn = _turn(request, route)
        if turn is not None:
            orjson.dumps((turn.messages, turn.answer))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Unreadable(f"{request.get('request_id')}: its bodies cannot be given as JSON ({error})") from error
    return turn


def _turn(request: Mapping[str, Any], route: str) -> Turn | None:
    asked, told = _json(_kept(request, "request")), _told(_kept(request, "answer"))
    if not isinstance(asked, dict) or not isinstance(told, dict):
        return None
    messages: Any
    answer: Any
    tokens = None
    match route:
        case "/v1/chat/completions":
            choices = told.get("choices") or [{}]
            messages = asked.get("messages")
            answer = [choices[0].get("message") or {}]
            tokens = _tokens(told, choices[0], request.get("weight_version"))
        case "/v1/responses":
            messages, answer = asked.get("input"), told["output"]
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
        case _:
            messages = asked.get("messages")
            answer = [{"role": "assistant", "content": told.get("content")}]
    names = request["request_id"], request.get("answer_id")
    return Turn(*names, messages or [], answer or [], request.get("reward"), tokens)


def discounted(rewards: Sequence[float | None], discount: float, *, tensors: bool = False) -> list[float]:
    """The rewards of turns, each with what follows it: its own and `discount` times that of the next.

    Raises `Unreadable` where one is too large: for a number, or, if it is to be one of `tensors`, for their 32 bits.
    """
    found, following = [], 0.0
    for reward in reversed(rewards):
        following = following * discount + (reward or 0.0)
        found.append(following)
    most = FLOAT32 if tensors else sys.float_info.max
    if not all(abs(reward) <= most for reward in found):
        raise Unreadable(f"a reward is beyond {most}")
    return found[::-1]


def strings(turn: Turn, reward: float, name: str) -> dict[str, Any]:
    """A turn as messages."""
    said = {"messages": turn.messages, "output_message_list": turn.answer}
    return {**said, "reward": reward, "interaction_id": name}


def tensors(turn: Turn, reward: float, name: str) -> dict[str, Any]:
    """A turn as tensors of one sequence: the prompt, of which nothing is learnt, and what was drawn."""
    assert turn.tokens is not None
    prompt, drawn, logprobs, version = turn.tokens
    before = len(prompt)
    told = {
        "input_ids": _tensor("int64", prompt + drawn),
        "loss_mask": _tensor("int64", [0] * before + [1] * len(drawn)),
        "logprobs": _tensor("float32", [0.0] * before + logprobs),
        "versions": _tensor("int64", [-1] * before + [version] * len(drawn)),
        "attention_mask": _tensor("bool", [True] * (before + len(drawn))),
        "rewards": _tensor("float32", [reward], flat=True),
    }
    return {"tensor_dict": told, "reward": reward, "interaction_id": name}


FLOAT32 = (2 - 2**-23) * 2.0**127
"""The largest number of 32 bits."""

_CODES = {"int64": "q", "float32": "f", "bool": "?"}


def _tensor(kind: str, values: Sequence[Any], *, flat: bool = False) -> dict[str, Any]:
    data = struct.pack(f"<{len(values)}{_CODES[kind]}", *values)
    shape = [len(values)] if flat else [1, len(values)]
    return {"type": "tensor", "data": base64.b64encode(data).decode(), "shape": shape, "dtype": f"torch.{kind}"}


def _kept(request: Mapping[str, Any], name: str) -> bytes:
    text = request.get(f"{name}_body")
    if not isinstance(text, str) or request.get(f"{name}_cut"):
        raise Unkept(request.get("request_id"))
    body = text.encode()
    if len(body) != request.get(f"{name}_bytes", len(body)):
        raise Unkept(request.get("request_id"))
    return body


def _tokens(told: Mapping[str, Any], choice: Mapping[str, Any], weights: Any) -> Tokens | None:
    """vLLM tells the prompt's ids beside its choices and the drawn ones as `token_ids`; SGLang both in the choice.

    Raises `ValueError` where they are no numbers that a tensor takes.
    """
    prompt = told.get("prompt_token_ids") or choice.get("prompt_token_ids")
    drawn = choice.get("token_ids") or choice.get("response_token_ids")
    logprobs = [each.get("logprob") for each in (choice.get("logprobs") or {}).get("content") or ()]
    if not prompt or not drawn or len(logprobs) != len(drawn) or None in logprobs:
        return None
    if not all(type(token) is int and abs(token) < 2**63 for token in (*prompt, *drawn)):
        raise ValueError("token ids that are no integers of 64 bits")
    if not all(type(each) in (int, float) and abs(each) <= FLOAT32 for each in logprobs):
        raise ValueError("logprobs that are no numbers of 32 bits")
    if weights is None or weights == "default":
        return Tokens(prompt, drawn, logprobs, 0)
    return Tokens(prompt, drawn, logprobs, int(weights)) if re.fullmatch(r"[0-9]{1,18}", weights) else None


class _NaN:
    """Stands for what Python's reader takes for a number and JSON has not."""


def _json(body: bytes) -> Any:
    """What a body says. Python's own reader takes what the gateway takes in requests too: NaN, halves of characters."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body, parse_float=_number, parse_constant=lambda _: _NaN())


def _number(text: str) -> Any:
    number = float(text)
    return number if math.isfinite(number) else _NaN()


# --- streams

_WHOLE = ("response.completed", "response.incomplete")
"""Events that bring a whole answer of `/v1/responses`."""


def _told(body: bytes) -> Any:
    """A whole answer; a stream's is put together."""
    carried = payloads(body)
    if carried is None:
        return _json(body)
    told = [_json(data) for data in carried if data.startswith(b"{")]
    if any(event.get("type") == "message_start" for event in told):
        return {"content": _blocks(told)}
    whole = [event["response"] for event in told if event.get("type") in _WHOLE]
    return whole[0] if whole else _joined(told)


def _joined(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A streamed chat, as it would have been whole: its first choice."""
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    choice: dict[str, Any] = {"message": message}
    told: dict[str, Any] = {"choices": [choice]}
    logprobs: list[Any] = []
    for event in events:
        if event.get("prompt_token_ids"):
            told["prompt_token_ids"] = event["prompt_token_ids"]
        for part in event.get("choices") or ():
            if part.get("index"):
                continue
            if part.get("prompt_token_ids"):
                choice["prompt_token_ids"] = part["prompt_token_ids"]
            for ids in ("token_ids", "response_token_ids"):
                if part.get(ids):
                    choice.setdefault(ids, []).extend(part[ids])
            logprobs += (part.get("logprobs") or {}).get("content") or ()
            _add(message, calls, part.get("delta") or {})
    if calls:
        message["tool_calls"] = [calls[place] for place in sorted(calls)]
    choice["logprobs"] = {"content": logprobs}
    return told


def _add(message: Message, calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    for field, value in delta.items():
        if field == "tool_calls":
            for call in value or ():
                kept = calls.setdefault(call.get("index", 0), {"type": "function", "function": {"arguments": ""}})
                function = call.get("function") or {}
                kept["id"] = call.get("id") or kept.get("id")
                kept["function"]["name"] = function.get("name") or kept["function"].get("name")
                kept["function"]["arguments"] += function.get("arguments") or ""
        elif field != "role" and isinstance(value, str):
            message[field] = (message.get(field) or "") + value


def _blocks(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What an answer in Anthropic's shape consists of."""
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    for event in events:
        place = event.get("index", 0)
        match event.get("type"):
            case "content_block_start":
                blocks[place] = dict(event["content_block"])
            case "content_block_delta":
                for field, piece in _pieces(event["delta"]):
                    if field == "partial_json":
                        inputs[place] = inputs.get(place, "") + piece
                    else:
                        blocks[place][field] = blocks[place].get(field, "") + piece
    for place, text in inputs.items():
        blocks[place]["input"] = _input(text) if text else blocks[place].get("input", {})
    return [blocks[place] for place in sorted(blocks)]


def _input(text: str) -> Any:
    """The arguments of a tool; as they stand where the answer ended within them."""
    try:
        return _json(text.encode())
    except ValueError:
        return text


def _pieces(delta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((field, value) for field, value in delta.items() if field != "type" and isinstance(value, str))
