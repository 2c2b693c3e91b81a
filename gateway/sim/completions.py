"""/v1/completions, whole and streamed."""

from collections.abc import AsyncIterator

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, begin, used_tokens
from gateway.sim.fields import Fields
from gateway.sim.jobs import Piece
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Run, read_prompts

_BUDGET = 16
_MOST_LOGPROBS = 20


async def completions(ask: Ask, dialect: Dialect) -> Reply | Stream:
    """One or several prompts, n samples of each; choice i is sample i % n of prompt i // n."""
    fields = ask.fields
    prompts = read_prompts(fields.get("prompt"), ask.settings.max_model_len)
    top = fields.integer("logprobs", 0, 0, _MOST_LOGPROBS) or 0
    id, run = begin(
        ask, dialect, "cmpl", prompts, budget="max_tokens", top_logprobs=top, default_budget=_BUDGET
    )
    if fields.flag("stream"):
        return Stream(_events(ask, dialect, id, run, prompts), dialect.broken(ask.path))
    answers = await run.answers()
    choices = [
        {
            "index": place,
            "text": _echo(fields, found.prompt) + found.text,
            "logprobs": _logprobs(fields, found.pieces),
            "finish_reason": found.finish.reason,
            **dialect.ending(found, ask, id),
        }
        for place, found in enumerate(answers)
    ]
    usage = used_tokens(dialect, prompts, answers)
    head = dialect.head(ask, id, "text_completion")
    return answer({**head, "choices": choices, "usage": usage, **dialect.tail(ask, answers)})


async def _events(
    ask: Ask, dialect: Dialect, id: str, run: Run, prompts: list[list[int]]
) -> AsyncIterator[Event]:
    ids = dialect.chunk_ids(id, [job.id for job in run.generations])
    completion = 0
    ended: dict[int, Piece] = {}
    begun: set[int] = set()
    async for place, piece in run.pieces():
        completion += piece.token is not None
        prompt = run.generations[place].tokens
        text = piece.text if place in begun else _echo(ask.fields, prompt) + piece.text
        first, last = place not in begun, piece.finish is not None
        begun.add(place)
        if last:
            ended[place] = piece
        whole = not dialect.finish_apart
        if whole or text:
            chunk = _chunk(
                ask, dialect, ids[place], place, piece if whole else _open(piece), text, prompt, first
            )
            yield data(chunk, tokens=1, tail=whole and last and len(ended) == len(ids))
    for place, piece in sorted(ended.items()):
        if dialect.finish_apart:
            yield data(_chunk(ask, dialect, ids[place], place, piece, "", [], False), tail=True)
    if ask.fields.inner("stream_options").flag("include_usage"):
        cached = sum(job.cached_tokens for job in run.generations)
        usage = dialect.usage(sum(map(len, prompts)), completion, cached)
        yield data({**dialect.head(ask, ids[0], "text_completion"), "choices": [], "usage": usage}, tail=True)
    yield Event(DONE, tail=True)


def _open(piece: Piece) -> Piece:
    return Piece(piece.token, piece.text, piece.logprob, piece.top)


def _chunk(
    ask: Ask, dialect: Dialect, id: str, place: int, piece: Piece, text: str, prompt: list[int], first: bool
) -> Object:
    choice = {
        "index": place,
        "text": text,
        "logprobs": _logprobs(ask.fields, [piece]),
        "finish_reason": piece.finish.reason if piece.finish else None,
        **dialect.chunk_ending(piece, ask),
    }
    head = dialect.head(ask, id, "text_completion")
    return {**head, "choices": [choice], **dialect.chunk_tail(ask, place, prompt, first)}


def _echo(fields: Fields, prompt: list[int]) -> str:
    return model.decode(prompt) if fields.flag("echo") else ""


def _logprobs(fields: Fields, pieces: list[Piece]) -> Object | None:
    if fields.get("logprobs") is None:
        return None
    offsets = []
    length = 0
    known = [(piece.token, piece) for piece in pieces if piece.token is not None]
    for token, _ in known:
        offsets.append(length)
        length += len(model.decode([token]))
    return {
        "text_offset": offsets,
        "token_logprobs": [piece.logprob for _, piece in known],
        "tokens": [model.decode([token]) for token, _ in known],
        "top_logprobs": [
            {model.decode([token]): logprob for token, logprob in piece.top} for _, piece in known
        ],
    }
