"""vLLM's own routes: tokens, and generation from tokens to tokens."""

from collections.abc import AsyncIterator

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, fresh
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Run, read_count, read_prompts, read_sampling, tokens_of
from gateway.sim.templates import chat_prompt
from gateway.sim.vllm import Vllm


async def tokenize(ask: Ask, dialect: Vllm) -> Reply:
    """The tokens of a prompt, or of messages."""
    longest = ask.settings.max_model_len
    if ask.fields.get("messages") is None:
        tokens = tokens_of(ask.fields.text("prompt"), longest)
    else:
        tokens = chat_prompt(ask.fields, longest)
    names = [model.decode([token]) for token in tokens] if ask.fields.flag("return_token_strs") else None
    return answer({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": names})


async def detokenize(ask: Ask, dialect: Vllm) -> Reply:
    [tokens] = read_prompts(ask.fields.get("tokens"), ask.settings.max_model_len, "tokens")
    return answer({"prompt": model.decode(tokens)})


async def generate(ask: Ask, dialect: Vllm) -> Reply | Stream:
    """/inference/v1/generate: tokens in, tokens out; the seed stands in sampling_params."""
    fields = ask.fields
    parameters = fields.inner("sampling_params")
    [prompt] = read_prompts(fields.get("token_ids"), ask.settings.max_model_len, "token_ids")
    count = read_count(parameters)
    sampling = read_sampling(parameters, {}, budget="max_tokens", default_budget=16)
    dialect.check(ask, sampling, count)
    seed = dialect.seed(parameters)
    id = fields.text("request_id") or f"generate-tokens-{ask.header('x-request-id') or fresh()}"
    run = Run(ask)
    used = []
    for choice, job_id in enumerate(dialect.job_ids(id, count)):
        noise, effective = dialect.noise(ask, seed, choice)
        used.append(effective)
        salt = fields.text("cache_salt")
        run.add(job_id, prompt, sampling, noise, salt=salt, priority=fields.integer("priority", 0) or 0)
    ask.note(id, seed, tuple(used))
    if fields.flag("stream"):
        return Stream(_events(ask, id, run), dialect.broken(ask.path))
    answers = await run.answers()
    choices = [_choice(place, found.tokens, found.finish.reason) for place, found in enumerate(answers)]
    return answer({"request_id": id, "choices": choices, **_tail(ask)})


async def _events(ask: Ask, id: str, run: Run) -> AsyncIterator[Event]:
    open_choices = len(run.generations)
    async for place, piece in run.pieces():
        open_choices -= piece.finish is not None
        tokens = [] if piece.token is None else [piece.token]
        choice = _choice(place, tokens, piece.finish.reason if piece.finish else None)
        yield data({"request_id": id, "choices": [choice]}, tokens=1, tail=open_choices == 0)
    yield Event(DONE, tail=True)


def _choice(place: int, tokens: list[int], reason: str | None) -> Object:
    return {"index": place, "logprobs": None, "finish_reason": reason, "token_ids": tokens}


def _tail(ask: Ask) -> Object:
    return {
        "prompt_logprobs": None,
        "weight_versions": [ask.settings.weight_version],
        "kv_transfer_params": None,
    }
