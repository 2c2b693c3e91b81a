"""Turns of a session in the shape that AReaL's trainer takes, from answers as the engines give them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gateway.core.trajectory import FLOAT32, Turn, Unkept, Unreadable, discounted, read, strings, tensors

CAPTURES = Path(__file__).parents[1] / "captures"
CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "Name a colour"}]


def request(answer: str | dict[str, Any], route: str = CHAT, asked: Any = None, **fields: Any) -> dict[str, Any]:
    """A delivered request, as an export has it with bodies."""
    body = json.dumps(asked or {"messages": TALK})
    told = answer if isinstance(answer, str) else json.dumps(answer)
    names = {"route": route, "outcome": "delivered", "status": 200, "request_id": "17:3:0", "answer_id": "a-0"}
    return names | {"request_body": body, "answer_body": told, "reward": 1.0, "weight_version": None} | fields


def turn(*given: Any, **fields: Any) -> Turn:
    found = read(request(*given, **fields))
    assert found is not None
    return found


def capture(engine: str, name: str) -> str:
    return (CAPTURES / engine / f"{name}.body").read_text()


def values(tensor: dict[str, Any]) -> list[Any]:
    """A tensor's values, as its receiver reads them."""
    code = {"torch.int64": "q", "torch.float32": "f", "torch.bool": "?"}[tensor["dtype"]]
    data = base64.b64decode(tensor["data"])
    found = struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data)
    assert tensor["type"] == "tensor"
    assert tensor["shape"] in ([1, len(found)], [len(found)])
    return list(found)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_whole_and_a_streamed_chat_of_each_engine_are_messages(engine: str) -> None:
    whole = json.loads(capture(engine, "chat"))["choices"][0]["message"]
    told = strings(turn(capture(engine, "chat")), 0.5, "a-0")
    assert told == {"messages": TALK, "output_message_list": [whole], "reward": 0.5, "interaction_id": "a-0"}
    body = capture(engine, "chat-stream")
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    [message] = turn(body).answer
    assert (message["role"], message["content"]) == ("assistant", said)
    assert said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tools_that_are_called_in_a_stream_are_put_together(engine: str) -> None:
    [whole] = turn(capture(engine, "chat-tools")).answer
    [streamed] = turn(capture(engine, "chat-tools-stream")).answer
    called = [[each["function"] for each in message["tool_calls"]] for message in (whole, streamed)]
    assert [each["name"] for each in called[0]] == [each["name"] for each in called[1]]
    assert [set(each) for each in streamed["tool_calls"]] == [{"id", "type", "function"}]
    assert all(json.loads(each["arguments"]) is not None for each in called[0] + called[1])


LOGPROBS = {"content": [{"logprob": -0.5}, {"logprob": -1.25}]}


@pytest.mark.parametrize(
    "answer",
    [
        {"prompt_token_ids": [7, 8, 9], "choices": [{"message": {}, "token_ids": [1, 2], "logprobs": LOGPROBS}]},
        {"choices": [{"prompt_token_ids": [7, 8, 9], "response_token_ids": [1, 2], "logprobs": LOGPROBS}]},
    ],
    ids=["vllm", "sglang"],
)
@pytest.mark.parametrize(("weights", "version"), [(None, 0), ("default", 0), ("12", 12)])
def test_token_ids_and_logprobs_are_tensors(answer: dict[str, Any], weights: str | None, version: int) -> None:
    told = tensors(turn(answer, weight_version=weights), 0.5, "a-0")
    assert {name: values(each) for name, each in told["tensor_dict"].items()} == {
        "input_ids": [7, 8, 9, 1, 2],
        "loss_mask": [0, 0, 0, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -1.25],
        "versions": [-1, -1, -1, version, version],
        "attention_mask": [True] * 5,
        "rewards": [0.5],
    }
    assert told["tensor_dict"]["rewards"]["shape"] == [1]
    assert (told["reward"], told["interaction_id"]) == (0.5, "a-0")


def test_those_of_a_stream_are_gathered() -> None:
    whole, body = (json.loads(capture("vllm", "chat-token-ids")), capture("vllm", "chat-token-ids-stream"))
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    drawn = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]
    for event in events:
        for choice in event["choices"]:
            choice["logprobs"] = {"content": [{"logprob": -1.0} for _ in choice.get("token_ids") or ()]}
    found = turn("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n").tokens
    assert found is not None
    assert (found.prompt, found.drawn) == (whole["prompt_token_ids"], drawn)
    assert len(found.logprobs) == len(drawn) > 1


@pytest.mark.parametrize(
    ("answer", "weights"),
    [
        ({"choices": [{"message": {"content": "a"}}]}, None),
        ({"prompt_token_ids": [7], "choices": [{"token_ids": [1, 2, 3], "logprobs": LOGPROBS}]}, None),
        ({"prompt_token_ids": [7], "choices": [{"token_ids": [1, 2], "logprobs": LOGPROBS}]}, "step-12"),
    ],
    ids=["not asked for", "not all", "weights that are no number"],
)
def test_without_all_of_them_there_are_none(answer: dict[str, Any], weights: str | None) -> None:
    assert turn(answer, weight_version=weights).tokens is None


def test_responses_and_messages_are_turns_too() -> None:
    output = [{"type": "message", "role": "assistant", "content": []}]
    found = turn({"output": output}, "/v1/responses", {"input": "hello"})
    assert (found.messages, found.answer) == ([{"role": "user", "content": "hello"}], output)
    done = (
        f"event: response.completed\ndata: {json.dumps({'type': 'response.completed', 'response': {'output': output}})}"
    )
    assert turn(f"{done}\n\n", "/v1/responses", {"input": TALK})[2:4] == (TALK, output)
    blocks = [{"type": "text", "text": "hi"}]
    assert turn({"content": blocks}, "/v1/messages").answer == [{"role": "assistant", "content": blocks}]
    events: list[dict[str, Any]] = [
        {"type": "message_start"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "h"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ": 1}"}},
    ]
    streamed = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    [message] = turn(streamed, "/v1/messages").answer
    assert message["content"] == [*blocks, {"type": "tool_use", "id": "t", "input": {"a": 1}}]


def streamed(*events: dict[str, Any]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


@pytest.mark.parametrize(("pieces", "given"), [([], {}), ([""], {}), (['{"a": "b'], '{"a": "b'), (["1", "2"], 12)])
def test_the_arguments_of_a_tool_are_what_came_of_them(pieces: list[str], given: Any) -> None:
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    body = streamed(
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "index": 0, "content_block": tool},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "message_stop"},
    )
    [message] = turn(body, "/v1/messages").answer
    assert message["content"] == [tool | {"input": given}]


def test_a_stream_that_ended_as_incomplete_has_an_answer() -> None:
    output = [{"type": "message", "role": "assistant", "content": []}]
    body = streamed(
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.incomplete", "response": {"output": output}},
    )
    assert turn(body, "/v1/responses", {"input": "hello"}).answer == output


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e999", r'"\ud800"'])
def test_what_json_has_not_hinders_only_where_it_would_be_given(odd: str) -> None:
    beside = request({"choices": []}, request_body=f'{{"messages": [], "top_p": {odd}}}')
    found = read(beside)
    assert found is not None
    assert found.messages == []
    for within in (
        {"request_body": f'{{"messages": [{{"role": "user", "content": {odd}}}]}}'},
        {"answer_body": f'{{"choices": [{{"message": {{"content": {odd}}}}}]}}'},
    ):
        with pytest.raises(Unreadable, match="17:3:0"):
            read(request({"choices": []}) | within)


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        (CHAT, "no JSON"),
        (CHAT, '{"choices": 5}'),
        (CHAT, '{"choices": ["x"]}'),
        (CHAT, '{"choices": [{"message": %s}]}' % ("[" * 300 + "]" * 300)),
        (CHAT, "[" * 100_000),
        (
            "/v1/messages",
            streamed({"type": "message_start"}, {"type": "content_block_delta", "index": 0, "delta": {"text": "a"}}),
        ),
        ("/v1/messages", streamed({"type": "message_start"}, {"type": "content_block_start", "index": 0})),
        ("/v1/responses", streamed({"type": "response.created", "response": {}})),
    ],
)
def test_answers_of_no_known_shape_are_said_to_be_so(route: str, answer: str) -> None:
    with pytest.raises(Unreadable, match="17:3:0"):
        read(request(answer, route))


@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": [1, "2"]},
        {"token_ids": [1, 2**63]},
        {"logprobs": {"content": [{"logprob": -1.0}, {"logprob": 1e39}]}},
    ],
    ids=["words", "too large", "beyond 32 bits"],
)
def test_tokens_that_no_tensor_takes_are_said_to_be_so(odd: dict[str, Any]) -> None:
    choice = {"message": {}, "token_ids": [1, 2], "logprobs": LOGPROBS} | odd
    with pytest.raises(Unreadable, match="17:3:0"):
        read(request({"prompt_token_ids": [7], "choices": [choice]}))


def test_rewards_that_no_number_is_large_enough_for_are_said_to_be_so() -> None:
    assert discounted([FLOAT32], 1.0, tensors=True) == [FLOAT32]
    assert discounted([1e39], 1.0) == [1e39]
    for rewards, discount, of_tensors in (
        ([1e39], 1.0, True),
        ([1.7e308] * 2, 1.0, False),
        ([0.0, 10.0], 1e308, False),
    ):
        with pytest.raises(Unreadable):
            discounted(rewards, discount, tensors=of_tensors)


@pytest.mark.parametrize(
    "fields", [{"outcome": "failed"}, {"status": 400}, {"route": "/classify"}, {"outcome": None}], ids=str
)
def test_what_was_no_answered_turn_is_none(fields: dict[str, Any]) -> None:
    assert read(request({"choices": []}) | fields) is None


@pytest.mark.parametrize(
    "fields", [{"request_body": None}, {"answer_cut": True}, {"answer_bytes": 1}, {"answer_body": None}], ids=str
)
def test_without_whole_bodies_it_is_said(fields: dict[str, Any]) -> None:
    with pytest.raises(Unkept, match="17:3:0"):
        read(request({"choices": []}) | fields)


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        ([None, None, 1.0], 1.0, [1.0, 1.0, 1.0]),
        ([None, 2.0, 1.0], 0.5, [1.25, 2.5, 1.0]),
        ([1.0, None], 0.9, [1.0, 0.0]),
        ([], 0.9, []),
    ],
)
def test_a_turn_is_worth_what_follows_it(rewards: list[float | None], discount: float, expected: list[float]) -> None:
    assert discounted(rewards, discount) == expected
