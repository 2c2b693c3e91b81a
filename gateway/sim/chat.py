"""/v1/chat/completions, whole and streamed, and vLLM's batch of conversations."""

from collections.abc import AsyncIterator
from typing import Any

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, answer_usage, begin, wants_usage
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Piece
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Answer, Run
from gateway.sim.templates import Tool, chat_prompt, forced_tool

_KIND = "chat.completion"
_MOST_LOGPROBS = 20


async def chat(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One conversation, n samples."""
    prompts = [chat_prompt(ask.fields, ask.settings.max_model_len)]
    tool = forced_tool(ask.fields)
    id, run = _begin(ask, dialect, prompts)
    if ask.fields.flag("stream"):
        return Stream(_Chunks(ask, dialect, id, run, tool).events(), dialect.broken(ask.path))
    return await _whole(ask, dialect, id, run, tool, prompts)


async def batch(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """Several conversations in one request; choice i answers the i-th, all with the same seed."""
    listed = ask.fields.get("messages")
    if not isinstance(listed, list) or not listed:
        raise Refused(400, "Input should be a valid list", "messages", schema=True)
    if ask.fields.flag("stream") or ask.fields.integer("n", 1) != 1:
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


async def _whole(ask: Ask, dialect: Dialect, id: str, run: Run, tool: Tool | None, prompts: list[list[int]]) -> Reply:
    answers = await run.answers()
    choices = [
        {
            "index": job.place,
            "message": message(dialect, found, tool),
            "logprobs": _logprobs(ask.fields, dialect, found.pieces),
            "finish_reason": finish(ask.fields, dialect, found.pieces[-1], tool),
            **dialect.chat_ending(ask, job, found, called=tool is not None),
        }
        for job, found in zip(run.generations, answers, strict=True)
    ]
    tail = dialect.tail(ask, answer_usage(dialect, prompts, answers), answers, chat=True)
    return answer({**dialect.head(ask, id, _KIND), "choices": choices, **tail})


def message(dialect: Dialect, found: Answer, tool: Tool | None) -> Object:
    """A sample as a message; a call that was cut short is none."""
    if tool is None or found.finish.reason != "stop":
        return dialect.message(found.text, [])
    function = {"name": tool.name, "arguments": tool.arguments(found.text)}
    return dialect.message(None, [{"id": dialect.call_id(), "type": "function", "function": function}])


def finish(fields: Fields, dialect: Dialect, piece: Piece, tool: Tool | None) -> str | None:
    """A choice's finish_reason; None: not yet."""
    if piece.finish is None:
        return None
    if tool is not None and piece.finish.reason == "stop":
        return dialect.tool_finish(isinstance(fields.get("tool_choice"), dict))
    return piece.finish.reason


class _Chunks:
    """The chunks of one stream."""

    def __init__(self, ask: Ask, dialect: Dialect, id: str, run: Run, tool: Tool | None) -> None:
        self._ask = ask
        self._dialect = dialect
        self._run = run
        self._ids = dialect.chunk_ids(id, [job.id for job in run.generations])
        self._tool = tool
        self._called: set[int] = set()
        self._ended: dict[int, Piece] = {}

    async def events(self) -> AsyncIterator[Event]:
        """Openings, text as it comes, ends, usage, [DONE]."""
        for job in self._run.generations:
            yield data(self._opening(job.place, job.tokens))
        completion = 0
        async for place, piece in self._run.pieces():
            completion += piece.token is not None
            if piece.finish is not None:
                self._ended[place] = piece
            for event in self._text(place, piece):
                yield event
        if self._dialect.finish_apart:
            for place, piece in sorted(self._ended.items()):
                yield data(self._finish(place, piece), tail=True)
        if wants_usage(self._ask):
            yield data(self._usage(completion), tail=True)
        yield Event(DONE, tail=True)

    def _opening(self, place: int, prompt: list[int]) -> Object:
        delta = self._dialect.delta(role="assistant", content="")
        tail = self._dialect.chunk_tail(self._ask, chat=True, prompt=prompt)
        return self._chunk(place, delta, None, tail)

    def _text(self, place: int, piece: Piece) -> list[Event]:
        apart = self._dialect.finish_apart
        if apart and not piece.text and self._tool is None and not self._ask.fields.flag("logprobs"):
            return []
        shown = Piece(piece.token, piece.text, piece.logprob, piece.top) if apart else piece
        last = not apart and len(self._ended) == len(self._run.generations)
        closing = last and not wants_usage(self._ask)
        tail = self._dialect.chunk_tail(self._ask, chat=self._tool is None, last=closing)
        if self._tool is None:
            told = {} if apart and not piece.text else {"content": piece.text}
            delta = self._dialect.delta(**told)
            return [data(self._chunk(place, delta, shown, tail), tokens=1, tail=last)]
        opening = [] if place in self._called else [self._call(place, self._tool)]
        delta = self._dialect.tool_delta(self._arguments(place, piece, self._tool))
        if apart or piece.finish is None or piece.finish.reason != "stop":
            return [*opening, data(self._chunk(place, delta, shown, tail), tokens=1, tail=last)]
        unended = Piece(piece.token, piece.text, piece.logprob, piece.top)
        ending = self._chunk(place, {}, Piece(None, "", finish=piece.finish), tail)
        return [*opening, data(self._chunk(place, delta, unended, {}), tokens=1), data(ending, tail=last)]

    def _call(self, place: int, tool: Tool) -> Event:
        delta = self._dialect.tool_delta("", id=self._dialect.call_id(), name=tool.name)
        return data(self._chunk(place, delta, Piece(None, ""), self._dialect.chunk_tail(self._ask, chat=False)))

    def _arguments(self, place: int, piece: Piece, tool: Tool) -> str:
        opening = "" if place in self._called else tool.opening
        self._called.add(place)
        ended = piece.finish is not None and piece.finish.reason == "stop"
        return opening + tool.inside(piece.text) + (tool.closing if ended else "")

    def _finish(self, place: int, piece: Piece) -> Object:
        return self._chunk(place, self._dialect.delta(), Piece(None, "", finish=piece.finish), {})

    def _usage(self, completion: int) -> Object:
        usage = self._dialect.stream_usage(len(self._run.generations[0].tokens), completion, chat=True)
        head = self._dialect.head(self._ask, self._ids[-1], f"{_KIND}.chunk")
        tail = self._dialect.chunk_tail(self._ask, chat=True, last=True)
        return {**head, "choices": [], "usage": usage, **tail}

    def _chunk(self, place: int, delta: Object, piece: Piece | None, tail: Object) -> Object:
        fields = self._ask.fields
        known = piece is not None and piece.token is not None
        choice = {
            "index": place,
            "delta": delta,
            "logprobs": _logprobs(fields, self._dialect, [piece]) if piece and known else None,
            "finish_reason": finish(fields, self._dialect, piece, self._tool) if piece else None,
            **self._dialect.chat_chunk_ending(self._ask, piece),
        }
        return {
            **self._dialect.head(self._ask, self._ids[place], f"{_KIND}.chunk"),
            "choices": [choice],
            **tail,
        }


def _logprobs(fields: Fields, dialect: Dialect, pieces: list[Piece]) -> Object | None:
    if not fields.flag("logprobs"):
        return None
    return {"content": [_entry(dialect, piece) for piece in pieces if piece.token is not None]}


def _entry(dialect: Dialect, piece: Piece) -> Object:
    assert piece.token is not None
    top = [_named(token, logprob) for token, logprob in dialect.chosen_logprobs(piece)]
    return {**_named(piece.token, piece.logprob), "top_logprobs": top}


def _named(token: int, logprob: float) -> dict[str, Any]:
    raw = model.piece(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
