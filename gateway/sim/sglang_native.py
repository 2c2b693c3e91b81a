"""SGLang's own /generate: single and lists, whole and as cumulative streams."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, defaults, fresh
from gateway.sim.fields import INT64, Fields, Refused, is_integer
from gateway.sim.jobs import Generation
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Answer, Run, read_count, read_prompts, read_sampling
from gateway.sim.sglang import Sglang, free_id, meta_info

_BUDGET = 128


@dataclass(frozen=True)
class _Sample:
    id: str
    prompt: list[int]
    parameters: Fields
    n: int


async def generate(ask: Ask, dialect: Sglang) -> Reply | Stream:
    """One text or a list, each with its own sampling parameters where these are a list too."""
    try:
        run, listed = _begin(ask, dialect)
    except Refused as refused:
        if ask.fields.get("stream") is not True:
            raise
        return Stream(_refusal(refused), b"")
    if ask.fields.flag("stream"):
        return Stream(_events(ask, run, listed), dialect.broken(ask.path))
    answers = await run.answers()
    results = [_result(ask, job, found) for job, found in zip(run.generations, answers, strict=True)]
    return answer(results if listed else results[0])


def _begin(ask: Ask, dialect: Sglang) -> tuple[Run, bool]:
    samples, listed = _samples(ask)
    run = Run(ask)
    used = []
    seeds = []
    for sample in samples:
        sampling = read_sampling(
            sample.parameters,
            defaults(ask),
            budget="max_new_tokens",
            top_logprobs=ask.fields.integer("top_logprobs_num", 0, 0) or 0,
            default_budget=_BUDGET,
        )
        dialect.check(ask, sampling, sample.n)
        seed = _seed(sample.parameters)
        seeds.append(seed)
        for choice in range(sample.n):
            noise, effective = dialect.noise(ask, seed, choice)
            used.append(effective)
            id = sample.id if sample.n == 1 else fresh()
            salt = ask.fields.text("extra_key")
            priority = ask.fields.integer("priority", 0) or 0
            run.add(id, sample.prompt, sampling, noise, salt=salt, priority=priority)
    ask.note(samples[0].id, seeds[0], tuple(used))
    return run, listed or len(used) > 1


def _samples(ask: Ask) -> tuple[list[_Sample], bool]:
    fields = ask.fields
    name = "input_ids" if fields.get("text") is None else "text"
    value = fields.get(name)
    prompts = read_prompts(value, ask.settings.max_model_len, name)
    listed = isinstance(value, list) and not isinstance(value[0], int)
    parameters = fields.get("sampling_params")
    if isinstance(parameters, list):
        if not listed or len(parameters) != len(prompts):
            raise Refused(400, "sampling_params must be as many as the texts", "sampling_params")
        own = [Fields(item) for item in parameters if isinstance(item, Mapping)]
        if len(own) != len(prompts):
            raise Refused(400, "sampling_params must hold objects", "sampling_params")
    else:
        own = [fields.inner("sampling_params")] * len(prompts)
    ids = _ids(ask, len(prompts), listed)
    parts = zip(ids, prompts, own, strict=True)
    return [_Sample(id, prompt, item, read_count(item)) for id, prompt, item in parts], listed


def _ids(ask: Ask, count: int, listed: bool) -> list[str]:
    rid = ask.fields.get("rid")
    if rid is None:
        return [fresh() for _ in range(count)]
    given = (
        rid
        if isinstance(rid, list)
        else [rid]
        if not listed
        else [f"{rid}_{place}" for place in range(count)]
    )
    if len(given) != count:
        raise Refused(400, "rid must be as many as the texts", "rid")
    return [free_id(ask, one) for one in given]


def _seed(parameters: Fields) -> int | None:
    seed = parameters.get("sampling_seed")
    if seed is None:
        return None
    if not is_integer(seed) or not -INT64 <= seed < INT64:
        raise Refused(400, f"sampling_seed must be a 64-bit integer, got {seed!r}", "sampling_seed")
    return int(seed)


def _result(ask: Ask, job: Generation, found: Answer) -> Object:
    meta = meta_info(ask, job.id, found)
    if ask.fields.flag("return_logprob"):
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [piece.logprob, piece.token, None] for piece in found.pieces if piece.token is not None
        ]
        if ask.fields.integer("top_logprobs_num", 0):
            meta["output_top_logprobs"] = [
                [[logprob, token, None] for token, logprob in piece.top]
                for piece in found.pieces
                if piece.token is not None
            ]
    return {"text": found.text, "output_ids": found.tokens, "meta_info": meta}


async def _events(ask: Ask, run: Run, listed: bool) -> AsyncIterator[Event]:
    found = [Answer(job.tokens, job.cached_tokens) for job in run.generations]
    open_choices = len(found)
    async for place, piece in run.pieces():
        job, sample = run.generations[place], found[place]
        sample.pieces.append(piece)
        sample.cached_tokens = job.cached_tokens
        open_choices -= piece.finish is not None
        result = _result(ask, job, sample)
        yield data({**result, "index": place} if listed else result, tokens=1, tail=open_choices == 0)
    yield Event(DONE, tail=True)


async def _refusal(refused: Refused) -> AsyncIterator[Event]:
    yield data({"error": {"message": refused.message}}, tail=True)
    yield Event(DONE, tail=True)


async def abort_request(ask: Ask, dialect: Sglang) -> Reply:
    """Ends the live requests whose id begins with `rid`, or all."""
    rid = ask.fields.text("rid")
    if ask.fields.flag("abort_all"):
        ask.engine.abort("")
    elif rid:
        ask.engine.abort(rid)
    return Reply(200)


async def detokenize(ask: Ask, dialect: Sglang) -> Reply:
    """Text from tokens, or a list of texts from a list of lists."""
    listed = read_prompts(ask.fields.get("tokens"), ask.settings.max_model_len, "tokens")
    texts = [model.decode(tokens) for tokens in listed]
    single = isinstance(ask.fields.get("tokens")[0], int)
    return answer({"text": texts[0] if single else texts})


async def tokenize(ask: Ask, dialect: Sglang) -> Reply:
    """Tokens of a prompt, or of each of a list."""
    prompt: Any = ask.fields.get("prompt")
    listed = read_prompts(prompt, ask.settings.max_model_len)
    counts = [len(tokens) for tokens in listed]
    single = isinstance(prompt, str)
    tokens, count = (listed[0], counts[0]) if single else (listed, counts)
    return answer({"tokens": tokens, "count": count, "max_model_len": ask.settings.max_model_len})
