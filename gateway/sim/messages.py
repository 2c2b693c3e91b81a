"""Anthropic's /v1/messages on both engines, which drop any seed: vLLM answers at random, SGLang at 42."""

from collections.abc import AsyncIterator
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, begin, fresh
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Finish
from gateway.sim.replies import Event, Reply, Stream, answer, named
from gateway.sim.runs import Answer, Run
from gateway.sim.templates import Tool, chat_prompt, forced_tool


async def messages(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One message."""
    fields = _as_chat(ask.fields)
    if fields.get("max_tokens") is None:
        raise Refused(400, "Field required", "max_tokens", schema=True)
    prompt = chat_prompt(fields, ask.settings.max_model_len)
    tool = forced_tool(fields)
    id, run = begin(ask, dialect, "chatcmpl", [prompt], fields=fields, seeded=False)
    id = id if ask.settings.engine == "vllm" else f"msg_{fresh()}"
    if fields.flag("stream"):
        return Stream(_events(ask, id, run, tool), dialect.broken(ask.path))
    [found] = await run.answers()
    reason, sequence = _stop(found.finish, tool)
    usage = {"input_tokens": len(prompt), "output_tokens": len(found.tokens)}
    body: Object = {"id": id, "type": "message", "role": "assistant", "content": [_block(found, tool)]}
    body |= {"model": _model(ask), "stop_reason": reason}
    if sequence is not None:
        body["stop_sequence"] = sequence
    return answer({**body, "usage": usage})


async def count_tokens(ask: Ask, dialect: Dialect) -> Reply:
    """How long the prompt is."""
    count = len(chat_prompt(_as_chat(ask.fields), ask.settings.max_model_len))
    return answer({"input_tokens": count, "context_management": {"original_input_tokens": count}})


async def _events(ask: Ask, id: str, run: Run, tool: Tool | None) -> AsyncIterator[Event]:
    vllm = ask.settings.engine == "vllm"
    prompt = len(run.generations[0].tokens)
    usage: Object = {"input_tokens": prompt, "output_tokens": 0}
    start: Object = {"id": id, "type": "message", "role": "assistant", "content": [], "model": _model(ask)}
    start |= {"stop_reason": None, "stop_sequence": None} if vllm else {}
    yield _event("message_start", message={**start, "usage": usage})
    block: Object = {"type": "text", "text": ""}
    if tool is not None:
        block = {"type": "tool_use", "id": _tool_id(), "name": tool.name, "input": {}}
    yield _event("content_block_start", index=0, content_block=block)
    finish = Finish("abort")
    opening = tool.opening if tool else ""
    async for _, piece in run.pieces():
        finish = piece.finish or finish
        if piece.text or opening:
            text = opening + tool.inside(piece.text) if tool else piece.text
            opening = ""
            kind, name = ("input_json_delta", "partial_json") if tool else ("text_delta", "text")
            yield _event("content_block_delta", index=0, delta={"type": kind, name: text}, tokens=1)
    if tool is not None and finish.reason == "stop":
        delta = {"type": "input_json_delta", "partial_json": tool.closing}
        yield _event("content_block_delta", index=0, delta=delta)
    yield _event("content_block_stop", index=0, tail=True)
    reason, sequence = _stop(finish, tool)
    ending: Object = {"stop_reason": reason}
    if vllm or sequence is not None:
        ending["stop_sequence"] = sequence
    counted = {"input_tokens": prompt} if vllm else {}
    counted["output_tokens"] = run.generations[0].drawn
    yield _event("message_delta", delta=ending, usage=counted, tail=True)
    yield _event("message_stop", tail=True)


def _event(kind: str, *, tokens: int = 0, tail: bool = False, **members: Any) -> Event:
    return named(kind, {"type": kind, **members}, tokens=tokens, tail=tail)


def _as_chat(fields: Fields) -> Fields:
    """The body with the names of the chat route."""
    members = dict(fields.members)
    system, listed = members.get("system"), members.get("messages")
    if system is not None and isinstance(listed, list):
        members["messages"] = [{"role": "system", "content": system}, *listed]
    members["stop"] = members.get("stop_sequences")
    choice = members.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "none"):
        members["tool_choice"] = {"any": "required"}.get(choice["type"], "auto")
    return Fields(members)


def _block(found: Answer, tool: Tool | None) -> Object:
    if tool is None or found.finish.reason != "stop":
        return {"type": "text", "text": found.text}
    return {"type": "tool_use", "id": _tool_id(), "name": tool.name, "input": {tool.argument: found.text}}


def _tool_id() -> str:
    return f"toolu_{fresh(24)}"


def _stop(finish: Finish, tool: Tool | None) -> tuple[str | None, str | None]:
    """Anthropic's (stop_reason, stop_sequence); an abort has no name there."""
    if finish.reason == "length":
        return "max_tokens", None
    if finish.reason != "stop":
        return None, None
    if tool is not None:
        return "tool_use", None
    return ("stop_sequence", finish.matched) if isinstance(finish.matched, str) else ("end_turn", None)


def _model(ask: Ask) -> str:
    return ask.fields.text("model", ask.settings.model)
