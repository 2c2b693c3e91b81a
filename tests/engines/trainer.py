"""An episode as AReaL's trainer runs it, through the gateway before a real engine, and what it gets of it."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx

from tests.engines.asking import CHAT, ask, chat, told
from tests.engines.gates import Gate

CODES = {"torch.int64": "q", "torch.float32": "f", "torch.bool": "?"}


def episode(gate: Gate, *, stream: bool) -> tuple[list[Any], list[dict[str, list[Any]]]]:
    """Two turns, of which clients ask the token ids and logprobs: their answers, and the tensors that are exported."""
    begun = told(ask(gate, "/rl/start_session", {"task_id": f"episode-{stream}"}))
    key = {"authorization": f"Bearer {begun['api_key']}"}
    answers = []
    for text in ("Name a colour", "Name another"):
        body = chat(messages=[{"role": "user", "content": text}], return_token_ids=True, logprobs=True, stream=stream)
        answer = ask(gate, CHAT, body, key)
        assert answer.status_code == 200, answer.text
        answers.append(answer)
    told(ask(gate, "/rl/set_reward", {"reward": 1.0}, key))
    told(ask(gate, "/rl/end_session", {}, key))
    exported = told(ask(gate, "/export_trajectories", {"session_id": begun["session_id"], "discount": 0.5}))
    tensors = [each["tensor_dict"] for each in exported["interactions"].values()]
    return answers, [{name: values(each) for name, each in tensor.items()} for tensor in tensors]


def values(tensor: dict[str, Any]) -> list[Any]:
    """A tensor's values."""
    code, data = CODES[tensor["dtype"]], base64.b64decode(tensor["data"])
    return list(struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data))


def check(prompts: list[list[int]], drawn: list[list[int]], tensors: list[dict[str, list[Any]]]) -> None:
    """What is exported are the tokens that the engine told, and the rewards of what followed."""
    assert [each["input_ids"] for each in tensors] == [p + d for p, d in zip(prompts, drawn, strict=True)]
    assert [each["loss_mask"] for each in tensors] == [
        [0] * len(p) + [1] * len(d) for p, d in zip(prompts, drawn, strict=True)
    ]
    for each, prompt in zip(tensors, prompts, strict=True):
        assert all(logprob < 0 for logprob in each["logprobs"][len(prompt) :])
    assert [each["rewards"] for each in tensors] == [[0.5], [1.0]]


def whole(answers: list[httpx.Response]) -> list[Any]:
    """The answers' JSON."""
    return [answer.json() for answer in answers]
