"""vLLM's own routes: tokens, and generation from tokens to tokens."""

from collections.abc import AsyncIterator

from gateway.sim import model
from gateway.sim.asks import Ask
from gateway.sim.dialect import Object, begin
from gateway.sim.fields import Fields, Refused
from gateway.sim.replies import DONE, Event, Reply, Stream, answer, data
from gateway.sim.runs import Run, read_prompts, tokens_of
from gateway.sim.templates import chat_prompt
from gateway.sim.vllm import Vllm

_BUDGET = 16


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
    """The text of tokens."""
    [tokens] = read_prompts(ask.fields.get("tokens"), ask.settings.max_model_len, "tokens")
    return answer({"prompt": model.decode(tokens)})


async def generate(ask: Ask, dialect: Vllm) -> Reply | Stream:
    """/inference/v1/generate: tokens in, tokens out; the seed stands in sampling_params."""
    fields = ask.fields
    parameters = Fields({"model": fields.get("model"), **fields.inner("sampling_params").members})
    prompts = read_prompts([fields.integers("token_ids")], ask.settings.max_model_len, "token_ids")
    try:
        id, run = begin(ask, dialect, "generate-tokens", prompts, fields=parameters, default_budget=_BUDGET)
    except Refused as refused:
        param = "sampling_params" if refused.schema else refused.param
        raise Refused(refused.status, refused.message, param, schema=refused.schema) from refused
    id = fields.text("request_id") or id
    if fields.flag("stream"):
        return Stream(_events(ask, id, run), dialect.broken(ask.path))
    answers = await run.answers()
    choices = [
        _choice(ask, place, found.tokens, found.finish.reason, found.finish.matched, len(found.tokens))
        for place, found in enumerate(answers)
    ]
    usage = dialect.usage(len(prompts[0]), sum(len(found.tokens) for found in answers))
    head: Object = {"request_id": id, "model": ask.settings.model, "created": ask.created, "usage": usage}
    head |= dict.fromkeys(("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids"))
    head |= dict.fromkeys(("mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"))
    return answer({**head, "output_mode": "tokens", "choices": choices})


async def _events(ask: Ask, id: str, run: Run) -> AsyncIterator[Event]:
    open_choices = len(run.generations)
    async for place, piece in run.pieces():
        open_choices -= piece.finish is not None
        tokens = [] if piece.token is None else [piece.token]
        drawn = run.generations[place].drawn
        reason, stop = (piece.finish.reason, piece.finish.matched) if piece.finish else (None, None)
        choice = _choice(ask, place, tokens, reason, stop, drawn)
        chunk = {"request_id": id, "usage": None, "output_mode": "tokens", "choices": [choice]}
        yield data(chunk, tokens=1, tail=open_choices == 0)
    yield Event(DONE, tail=True)


def _choice(ask: Ask, place: int, tokens: list[int], reason: str | None, stop: int | str | None, drawn: int) -> Object:
    version = {"version": ask.settings.weight_version, "start": 0, "end": drawn}
    choice: Object = {"index": place, "finish_reason": reason, "stop_reason": stop, "token_ids": tokens}
    choice |= {"routed_experts": None, "sampling_mask": None}
    return {**choice, "weight_versions": [version] if reason else None, "logprobs": None}
