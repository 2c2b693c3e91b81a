"""SGLang's own routes: /generate, tokens and aborts."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, defaults, fresh
from gateway.sim.fields import Fields, Refused, is_integer
from gateway.sim.jobs import Generation, Piece
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Answer, Run, read_count, read_prompts, read_sampling
from gateway.sim.sglang import Sglang, checked_seed, job_ids, meta_info

_BUDGET = 128


@dataclass(frozen=True)
class _Sample:
    id: str
    prompt: list[int]
    parameters: Fields
    n: int


async def generate(ask: Ask, dialect: Sglang) -> Reply | Stream:
    """One text or a list, each with its own sampling parameters where these are a list too."""
    streamed = ask.fields.flag("stream")
    try:
        run, listed = _begin(ask, dialect)
    except Refused as refused:
        if not streamed or refused.schema:
            raise
        return Stream(_refusal(refused), b"")
    if streamed:
        return Stream(_events(ask, run, listed), dialect.broken(ask.path))
    answers = await run.answers()
    results = [_result(ask, job, found) for job, found in zip(run.generations, answers, strict=True)]
    return answer(results if listed else results[0])


def _begin(ask: Ask, dialect: Sglang) -> tuple[Run, bool]:
    samples, listed = _samples(ask)
    run = Run(ask)
    used = []
    seeds = []
    top = ask.fields.integer("top_logprobs_num", 0, 0) or 0
    salt = ask.fields.text("extra_key")
    priority = ask.fields.integer("priority", 0) or 0
    for sample in samples:
        sampling = read_sampling(
            sample.parameters,
            defaults(ask),
            budget="max_new_tokens",
            top_logprobs=top,
            default_budget=_BUDGET,
        )
        dialect.check(ask, sampling, sample.n)
        seeds.append(_seed(sample.parameters))
        for choice in range(sample.n):
            noise, effective = dialect.noise(ask, seeds[-1], choice)
            used.append(effective)
            id = sample.id if sample.n == 1 else fresh()
            run.add(id, sample.prompt, sampling, noise, salt=salt, priority=priority)
    ask.note(samples[0].id, seeds[0], tuple(used))
    return run, listed or len(used) > 1


def _samples(ask: Ask) -> tuple[list[_Sample], bool]:
    fields = ask.fields
    name = "input_ids" if fields.get("text") is None else "text"
    value = fields.get(name)
    if value is None:
        raise Refused(400, "Either text, input_ids or input_embeds should be provided.")
    prompts = read_prompts(value, ask.settings.max_model_len, name)
    listed = isinstance(value, list) and not isinstance(value[0], int)
    parameters = fields.get("sampling_params")
    if isinstance(parameters, list):
        own = [Fields(item) for item in parameters if isinstance(item, Mapping)]
        if not listed or len(own) != len(prompts):
            raise Refused(400, "sampling_params must be objects, as many as the texts")
    else:
        own = [fields.inner("sampling_params")] * len(prompts)
    ids = job_ids(ask, len(prompts), listed)
    parts = zip(ids, prompts, own, strict=True)
    return [_Sample(id, prompt, item, read_count(item)) for id, prompt, item in parts], listed


def _seed(parameters: Fields) -> int | None:
    seed = parameters.get("sampling_seed")
    if seed is not None and not is_integer(seed):
        raise Refused(400, f"invalid type: {seed!r}, expected i64", "sampling_seed", schema=True)
    return checked_seed(seed)


def _result(ask: Ask, job: Generation, found: Answer) -> Object:
    meta = meta_info(ask, job, found, _logprobs(ask.fields, found.pieces))
    return {"text": found.text, "output_ids": found.tokens, "meta_info": meta}


def _logprobs(fields: Fields, pieces: list[Piece]) -> Object:
    if not fields.flag("return_logprob"):
        return {}
    known = [piece for piece in pieces if piece.token is not None]
    told: Object = {"input_token_logprobs": []}
    told["output_token_logprobs"] = [[piece.logprob, piece.token, None] for piece in known]
    if fields.integer("top_logprobs_num", 0):
        told["output_top_logprobs"] = [[[logprob, token, None] for token, logprob in piece.top] for piece in known]
    told["output_token_logprobs_length"] = len(known)
    return told


async def _events(ask: Ask, run: Run, listed: bool) -> AsyncIterator[Event]:
    found = [Answer(job.tokens, []) for job in run.generations]
    open_choices = len(found)
    async for place, piece in run.pieces():
        found[place].pieces.append(piece)
        open_choices -= piece.finish is not None
        result = _result(ask, run.generations[place], found[place])
        yield data({**result, "index": place} if listed else result, tokens=1, tail=open_choices == 0)
    yield Event(DONE, tail=True)


async def _refusal(refused: Refused) -> AsyncIterator[Event]:
    error = {"message": refused.message, "type": "invalid_request_error", "code": 400, "retryable": False}
    yield data({"error": error}, tail=True)
    yield Event(DONE, tail=True)


async def abort_request(ask: Ask, dialect: Sglang) -> Reply:
    """Ends the live requests whose id begins with `rid`, or all."""
    rid = ask.fields.text("rid")
    if rid or ask.fields.flag("abort_all"):
        ask.engine.abort("" if ask.fields.flag("abort_all") else rid)
    return Reply(200)


async def tokenize(ask: Ask, dialect: Sglang) -> Reply:
    """The tokens of a prompt, or of each of a list."""
    prompt = ask.fields.get("prompt")
    listed = read_prompts(prompt, ask.settings.max_model_len)
    counts = [len(tokens) for tokens in listed]
    one = isinstance(prompt, str)
    tokens, count = (listed[0], counts[0]) if one else (listed, counts)
    return answer({"tokens": tokens, "count": count, "max_model_len": ask.settings.max_model_len})


async def detokenize(ask: Ask, dialect: Sglang) -> Reply:
    """The text of tokens, or of each list of a list."""
    tokens = ask.fields.get("tokens")
    texts = [model.decode(one) for one in read_prompts(tokens, ask.settings.max_model_len, "tokens")]
    return answer({"text": texts[0] if isinstance(tokens[0], int) else texts})
