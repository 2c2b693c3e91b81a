"""The object of /v1/responses, as each engine writes it."""

from dataclasses import dataclass

from gateway.sim.asks import Ask
from gateway.sim.dialect import Object
from gateway.sim.jobs import Finish, Generation

_CUT = {"length": "max_output_tokens", "abort": "abort"}


@dataclass(frozen=True)
class State:
    """Where a response stands; no finish: it still runs."""

    id: str
    status: str
    output: list[Object]
    finish: Finish | None


def vllm_response(ask: Ask, job: Generation, state: State) -> Object:
    """vLLM's object."""
    fields = ask.fields
    tools = fields.get("tools") or []
    body: Object = {"id": state.id, "created_at": ask.created, "incomplete_details": _incomplete(state)}
    body |= {"instructions": fields.get("instructions"), "metadata": fields.get("metadata")}
    body |= {"model": ask.settings.model, "object": "response", "output": state.output}
    body |= {"parallel_tool_calls": True, "temperature": job.sampling.temperature}
    body |= {"tool_choice": fields.get("tool_choice") or ("auto" if tools else "none"), "tools": tools}
    body |= {"top_p": job.sampling.top_p, "background": False, "max_output_tokens": job.budget}
    body |= {"max_tool_calls": None, "previous_response_id": fields.get("previous_response_id")}
    body |= {"prompt": None, "reasoning": None, "service_tier": "auto", "status": state.status}
    body |= {"text": None, "top_logprobs": None, "truncation": "disabled"}
    body["usage"] = None if state.finish is None else _vllm_usage(job)
    body |= {"user": fields.get("user"), "presence_penalty": 0.0, "frequency_penalty": 0.0}
    body |= {"kv_transfer_params": None, "ec_transfer_params": None}
    return {**body, "input_messages": None, "output_messages": None}


def sglang_response(ask: Ask, job: Generation, state: State) -> Object:
    """SGLang's object."""
    fields = ask.fields
    body: Object = {"id": state.id, "object": "response", "created_at": ask.created}
    body |= {"model": fields.get("model") or ask.settings.model, "output": state.output, "status": state.status}
    body["usage"] = None if state.finish is None else _usage(job, {}, {})
    body |= {"parallel_tool_calls": True, "tool_choice": fields.get("tool_choice") or "auto"}
    body |= {"tools": fields.get("tools") or [], "error": None, "incomplete_details": _incomplete(state)}
    body |= {"instructions": fields.get("instructions"), "max_output_tokens": job.budget}
    body |= {"previous_response_id": fields.get("previous_response_id")}
    body |= {"reasoning": {"effort": None, "summary": None}, "store": fields.flag("store", True)}
    body["temperature"] = job.sampling.temperature
    body["text"] = None if state.finish is None else {"format": {"type": "text"}}
    body |= {"top_p": fields.get("top_p"), "truncation": "disabled", "user": fields.get("user")}
    return {**body, "metadata": fields.get("metadata") or {}}


def _incomplete(state: State) -> Object | None:
    if state.finish is None or state.finish.reason == "stop":
        return None
    return {"reason": _CUT[state.finish.reason]}


def _vllm_usage(job: Generation) -> Object:
    read: Object = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    written: Object = {"tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return _usage(job, read, written)


def _usage(job: Generation, read: Object, written: Object) -> Object:
    prompt, completion = len(job.tokens), job.drawn
    details = {"cached_tokens": job.cached_tokens, "cache_write_tokens": 0, **read}
    usage: Object = {"input_tokens": prompt, "input_tokens_details": details, "output_tokens": completion}
    usage["output_tokens_details"] = {"reasoning_tokens": 0, **written}
    return {**usage, "total_tokens": prompt + completion}
