"""OpenAI's /v1/responses on both engines: vLLM honours `seed`, SGLang drops it and answers at 42."""

from collections.abc import AsyncIterator
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, begin, fresh
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Finish
from gateway.sim.replies import Event, Reply, Stream, answer, named
from gateway.sim.response_shapes import State, sglang_response, vllm_response
from gateway.sim.runs import Run
from gateway.sim.templates import Tool, chat_prompt, forced_tool


async def responses(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One response, after the stored one that `previous_response_id` names."""
    _check(ask)
    listed = _conversation(ask)
    fields = Fields({**ask.fields.members, "messages": listed, "max_tokens": ask.fields.get("max_output_tokens")})
    prompt = chat_prompt(fields, ask.settings.max_model_len)
    tool = forced_tool(fields)
    seeded = ask.settings.engine == "vllm"
    _, run = begin(ask, dialect, "resp", [prompt], fields=fields, seeded=seeded)
    response = _Response(ask, listed, run, tool)
    if fields.flag("stream"):
        return Stream(response.events(), dialect.broken(ask.path))
    [found] = await run.answers()
    return answer(response.ended(found.text, found.finish))


def _check(ask: Ask) -> None:
    model = ask.fields.get("model")
    if ask.settings.engine == "sglang" and model not in (None, ask.settings.model):
        raise Refused(404, f"The model '{model}' does not exist", "model")


def _conversation(ask: Ask) -> list[Any]:
    fields = ask.fields
    previous = fields.get("previous_response_id")
    listed: list[Any] = []
    if previous is not None:
        if previous not in ask.engine.responses:
            raise Refused(404, f"Response with id '{previous}' not found.", "previous_response_id")
        listed = list(ask.engine.responses[previous])
    if fields.text("instructions"):
        listed = [{"role": "system", "content": fields.text("instructions")}, *listed]
    given = fields.get("input")
    if isinstance(given, str):
        return [*listed, {"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Refused(400, "Input should be a valid string or list", "input", schema=True)
    return listed + [_as_message(item) for item in given]


def _as_message(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    if isinstance(item, dict) and item.get("type") == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [{"function": item}]}
    return item


class _Response:
    """One response as it grows."""

    def __init__(self, ask: Ask, listed: list[Any], run: Run, tool: Tool | None) -> None:
        self._ask = ask
        self._listed = listed
        self._run = run
        self._tool = tool
        self._vllm = ask.settings.engine == "vllm"
        digits = 16 if self._vllm else 32
        self._item = f"fc_{fresh(digits)}" if tool else f"msg_{fresh(digits)}"
        self._call = f"call_{fresh(digits)}"
        self._id = f"resp_{fresh(digits)}"
        self._number = -1

    async def events(self) -> AsyncIterator[Event]:
        """The named events, numbered; there is no [DONE]."""
        yield self._event("response.created", response=self._object("in_progress", [], None))
        yield self._event("response.in_progress", response=self._object("in_progress", [], None))
        yield self._event("response.output_item.added", item=self._output("", "in_progress"), output_index=0)
        place: Object = {"item_id": self._item, "output_index": 0}
        if self._tool is None:
            place["content_index"] = 0
            part = {**_part(""), "logprobs": [] if self._vllm else None}
            yield self._event("response.content_part.added", part=part, **place)
        text = ""
        finish = Finish("abort")
        opening = self._tool.opening if self._tool else ""
        async for _, piece in self._run.pieces():
            finish = piece.finish or finish
            text += piece.text
            if piece.text or opening:
                yield self._delta(opening, piece.text, place)
                opening = ""
        for event in self._endings(text, finish, place):
            yield event

    def ended(self, text: str, finish: Finish) -> Object:
        """The whole response, kept for the next one unless `store` is false."""
        cut = finish.reason != "stop"
        output = self._output(text, "completed")
        if self._ask.fields.flag("store", True):
            self._ask.engine.keep_response(self._id, [*self._listed, _as_message(output)])
        return self._object("incomplete" if cut else "completed", [output], finish)

    def _delta(self, opening: str, text: str, place: Object) -> Event:
        if self._tool is None:
            return self._event("response.output_text.delta", tokens=1, delta=text, logprobs=[], **place)
        delta = opening + self._tool.inside(text)
        return self._event("response.function_call_arguments.delta", tokens=1, delta=delta, **place)

    def _endings(self, text: str, finish: Finish, place: Object) -> list[Event]:
        output = self._output(text, "completed")
        if self._tool is None:
            events = [
                self._event("response.output_text.done", tail=True, logprobs=[], text=text, **place),
                self._event("response.content_part.done", tail=True, part=_part(text), **place),
            ]
        else:
            arguments = output["arguments"]
            kind = "response.function_call_arguments.done"
            events = [self._event(kind, tail=True, arguments=arguments, name=self._tool.name, **place)]
        events.append(self._event("response.output_item.done", tail=True, item=output, output_index=0))
        response = self.ended(text, finish)
        ending = "completed" if self._vllm else response["status"]
        return [*events, self._event(f"response.{ending}", tail=True, response=response)]

    def _event(self, kind: str, *, tokens: int = 0, tail: bool = False, **members: Any) -> Event:
        self._number += 1
        body = {**members, "sequence_number": self._number, "type": kind}
        return named(kind, body, tokens=tokens, tail=tail)

    def _output(self, text: str, status: str) -> Object:
        if self._tool is not None:
            arguments = self._tool.arguments(text) if status == "completed" else ""
            call: Object = {"id": self._item, "call_id": self._call, "name": self._tool.name}
            return {**call, "arguments": arguments, "type": "function_call", "status": status}
        content = [_part(text)] if status == "completed" else []
        item: Object = {"id": self._item, "content": content, "role": "assistant", "status": status}
        return {**item, "type": "message", "phase": None if self._vllm else "final_answer"}

    def _object(self, status: str, output: list[Object], finish: Finish | None) -> Object:
        state = State(self._id, status, output, finish)
        shape = vllm_response if self._vllm else sglang_response
        return shape(self._ask, self._run.generations[0], state)


def _part(text: str) -> Object:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
