"""/v1/completions, whole and streamed."""

from collections.abc import AsyncIterator

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, answer_usage, begin, wants_usage
from gateway.sim.fields import Fields
from gateway.sim.jobs import Piece
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Run, read_prompts

_KIND = "text_completion"
_BUDGET = 16
_MOST_LOGPROBS = 20


async def completions(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One or several prompts, n samples of each; choice i is sample i % n of prompt i // n."""
    fields = ask.fields
    prompts = read_prompts(fields.get("prompt"), ask.settings.max_model_len)
    top = fields.integer("logprobs", 0, 0, _MOST_LOGPROBS) or 0
    id, run = begin(ask, dialect, "cmpl", prompts, top_logprobs=top, default_budget=_BUDGET)
    if fields.flag("stream"):
        return Stream(_events(ask, dialect, id, run, prompts), dialect.broken(ask.path))
    answers = await run.answers()
    choices = [
        {
            "index": place,
            "text": _echo(fields, found.prompt) + found.text,
            "logprobs": _logprobs(fields, dialect, found.pieces, found.prompt),
            "finish_reason": found.finish.reason,
            **dialect.text_ending(ask, found),
        }
        for place, found in enumerate(answers)
    ]
    tail = dialect.tail(ask, answer_usage(dialect, prompts, answers), answers, chat=False)
    return answer({**dialect.head(ask, id, _KIND), "choices": choices, **tail})


async def _events(ask: Ask, dialect: Dialect, id: str, run: Run, prompts: list[list[int]]) -> AsyncIterator[Event]:
    ids = dialect.chunk_ids(id, [job.id for job in run.generations])
    completion = ended = 0
    begun: set[int] = set()
    async for place, piece in run.pieces():
        completion += piece.token is not None
        ended += piece.finish is not None
        prompt = None if place in begun else run.generations[place].tokens
        begun.add(place)
        last = ended == len(ids)
        choice = {
            "index": place,
            "text": _echo(ask.fields, prompt or []) + piece.text,
            "logprobs": _logprobs(ask.fields, dialect, [piece], prompt or []),
            "finish_reason": piece.finish.reason if piece.finish else None,
            **dialect.text_chunk_ending(ask, piece, prompt),
        }
        tail = dialect.chunk_tail(ask, chat=False, last=last and not wants_usage(ask))
        chunk = {**dialect.head(ask, ids[place], _KIND), "choices": [choice], **tail}
        yield data(chunk, tokens=1, tail=last)
    if wants_usage(ask):
        usage = {"usage": dialect.stream_usage(sum(map(len, prompts)), completion, chat=False)}
        tail = dialect.chunk_tail(ask, chat=False, last=True) | usage
        yield data({**dialect.head(ask, ids[0], _KIND), "choices": [], **usage, **tail}, tail=True)
    yield Event(DONE, tail=True)


def _echo(fields: Fields, prompt: list[int]) -> str:
    return model.decode(prompt) if fields.flag("echo") else ""


def _logprobs(fields: Fields, dialect: Dialect, pieces: list[Piece], prompt: list[int]) -> Object | None:
    if fields.get("logprobs") is None:
        return None
    count = fields.integer("logprobs", 0) or 0
    told = [piece for piece in pieces if piece.token is not None]
    if fields.flag("echo"):
        told = [*_prompt_pieces(prompt, count), *told]
    offsets = []
    length = 0
    for piece in told:
        offsets.append(dialect.text_offset(length))
        length += len(_name(piece))
    first = bool(prompt) and fields.flag("echo")
    return {
        "text_offset": offsets,
        "token_logprobs": [None if first and not place else piece.logprob for place, piece in enumerate(told)],
        "tokens": [_name(piece) for piece in told],
        "top_logprobs": [
            None
            if first and not place
            else {model.decode([token]): logprob for token, logprob in dialect.chosen_logprobs(piece)}
            for place, piece in enumerate(told)
        ],
    }


def _prompt_pieces(prompt: list[int], count: int) -> list[Piece]:
    return [
        Piece(token, "", logprob, top[:count])
        for token, (logprob, top) in zip(prompt, model.prompt_logprobs(prompt), strict=True)
    ]


def _name(piece: Piece) -> str:
    return "" if piece.token is None else model.decode([piece.token])
