"""/v1/chat/completions, whole and streamed, and vLLM's batch of conversations."""

from collections.abc import AsyncIterator
from typing import Any

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, begin, used_tokens
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Piece
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Answer, Run
from gateway.sim.templates import Tool, chat_prompt, forced_tool

_MOST_LOGPROBS = 20


async def chat(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One conversation, n samples."""
    prompts = [chat_prompt(ask.fields, ask.settings.max_model_len)]
    id, run = _begin(ask, dialect, prompts)
    tool = forced_tool(ask.fields)
    if ask.fields.flag("stream"):
        return Stream(_events(ask, dialect, id, run, tool), dialect.broken(ask.path))
    return await _whole(ask, dialect, id, run, tool, prompts)


async def batch(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """Several conversations in one request; choice i answers the i-th, all with the same seed."""
    listed = ask.fields.get("messages")
    if not isinstance(listed, list) or not listed:
        raise Refused(400, "messages must be a list of conversations", "messages")
    if ask.fields.flag("stream") or (ask.fields.integer("n", 1) or 1) != 1:
        raise Refused(400, "stream and n are not supported for batched conversations")
    longest = ask.settings.max_model_len
    prompts = [chat_prompt(ask.fields, longest, messages) for messages in listed]
    id, run = _begin(ask, dialect, prompts)
    return await _whole(ask, dialect, id, run, None, prompts)


def _begin(ask: Ask, dialect: Dialect, prompts: list[list[int]]) -> tuple[str, Run]:
    fields = ask.fields
    top = fields.integer("top_logprobs", 0, 0, _MOST_LOGPROBS) or 0
    budget = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return begin(ask, dialect, "chatcmpl", prompts, budget=budget, top_logprobs=top)


async def _whole(
    ask: Ask, dialect: Dialect, id: str, run: Run, tool: Tool | None, prompts: list[list[int]]
) -> Reply:
    answers = await run.answers()
    choices = [_choice(ask, dialect, id, place, found, tool) for place, found in enumerate(answers)]
    usage = used_tokens(dialect, prompts, answers)
    head = dialect.head(ask, id, "chat.completion")
    return answer({**head, "choices": choices, "usage": usage, **dialect.tail(ask, answers)})


def _choice(ask: Ask, dialect: Dialect, id: str, place: int, found: Answer, tool: Tool | None) -> Object:
    calls = []
    if tool is not None:
        arguments = tool.arguments(found.text)
        function = {"name": tool.name, "arguments": arguments}
        calls = [{"id": dialect.call_id(), "type": "function", "function": function}]
    return {
        "index": place,
        "message": dialect.message(None if tool else found.text, calls),
        "logprobs": _logprobs(ask.fields, found.pieces),
        "finish_reason": _reason(ask, dialect, found.pieces[-1], tool),
        **dialect.ending(found, ask, id),
    }


def _reason(ask: Ask, dialect: Dialect, piece: Piece, tool: Tool | None) -> str | None:
    if piece.finish is None:
        return None
    if tool is not None and piece.finish.reason == "stop":
        return dialect.tool_finish(isinstance(ask.fields.get("tool_choice"), dict))
    return piece.finish.reason


async def _events(ask: Ask, dialect: Dialect, id: str, run: Run, tool: Tool | None) -> AsyncIterator[Event]:
    chunks = _Chunks(ask, dialect, id, run, tool)
    for place in range(len(run.generations)):
        yield data(chunks.opening(place))
    completion = 0
    ended: dict[int, Piece] = {}
    async for place, piece in run.pieces():
        completion += piece.token is not None
        last = piece.finish is not None
        if last:
            ended[place] = piece
        if not dialect.finish_apart:
            yield data(chunks.text(place, piece), tokens=1, tail=last and len(ended) == len(run.generations))
        elif piece.text or tool is not None:
            yield data(chunks.text(place, piece), tokens=1)
    for place, piece in sorted(ended.items()):
        if dialect.finish_apart:
            yield data(chunks.finish(place, piece), tail=True)
    if ask.fields.inner("stream_options").flag("include_usage"):
        yield data(chunks.usage(completion), tail=True)
    yield Event(DONE, tail=True)


class _Chunks:
    """The chunks of one stream."""

    def __init__(self, ask: Ask, dialect: Dialect, id: str, run: Run, tool: Tool | None) -> None:
        self._ask = ask
        self._dialect = dialect
        self._jobs = run.generations
        self._ids = dialect.chunk_ids(id, [job.id for job in run.generations])
        self._tool = tool
        self._called: set[int] = set()

    def opening(self, place: int) -> Object:
        return self._chunk(place, {"role": "assistant", "content": ""}, None, None, first=True)

    def text(self, place: int, piece: Piece) -> Object:
        logprobs = _logprobs(self._ask.fields, [piece])
        reason = None if self._dialect.finish_apart else _reason(self._ask, self._dialect, piece, self._tool)
        return self._chunk(place, self._delta(place, piece), piece, logprobs, reason)

    def finish(self, place: int, piece: Piece) -> Object:
        reason = _reason(self._ask, self._dialect, piece, self._tool)
        return self._chunk(place, {"role": None, "content": None}, piece, None, reason)

    def usage(self, completion: int) -> Object:
        usage = self._dialect.usage(len(self._jobs[0].tokens), completion, self._jobs[0].cached_tokens)
        head = self._dialect.head(self._ask, self._ids[0], "chat.completion.chunk")
        return {**head, "choices": [], "usage": usage}

    def _chunk(
        self,
        place: int,
        delta: Object,
        piece: Piece | None,
        logprobs: Any,
        reason: str | None = None,
        first: bool = False,
    ) -> Object:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is None and piece is not None:
            piece = Piece(piece.token, piece.text)
        choice |= self._dialect.chunk_ending(piece, self._ask)
        head = self._dialect.head(self._ask, self._ids[place], "chat.completion.chunk")
        tail = self._dialect.chunk_tail(self._ask, place, self._jobs[place].tokens, first)
        return {**head, "choices": [choice], **tail}

    def _delta(self, place: int, piece: Piece) -> Object:
        if self._tool is None:
            return {"content": piece.text}
        function: Object = {"arguments": self._tool.inside(piece.text)}
        call: Object = {"index": 0, "function": function}
        if place not in self._called:
            self._called.add(place)
            call = {"id": self._dialect.call_id(), "type": "function", **call}
            function["name"] = self._tool.name
            function["arguments"] = self._tool.opening + function["arguments"]
        if piece.finish is not None and piece.finish.reason == "stop":
            function["arguments"] += self._tool.closing
        return {"tool_calls": [call]}


def _logprobs(fields: Fields, pieces: list[Piece]) -> Object | None:
    if not fields.flag("logprobs"):
        return None
    return {"content": [_entry(piece) for piece in pieces if piece.token is not None]}


def _entry(piece: Piece) -> Object:
    assert piece.token is not None
    top = [_named(token, logprob) for token, logprob in piece.top]
    return {**_named(piece.token, piece.logprob), "top_logprobs": top}


def _named(token: int, logprob: float) -> Object:
    raw = model.piece(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
