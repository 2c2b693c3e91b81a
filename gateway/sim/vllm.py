"""vLLM's ways: 0.32, as seen from outside."""

from collections.abc import Sequence
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, fresh
from gateway.sim.fields import INT64, Fields, Refused
from gateway.sim.jobs import Generation, Piece
from gateway.sim.replies import DONE, Reply, answer, as_json
from gateway.sim.runs import Answer
from gateway.sim.sampling import Noise, Sampling, random_noise, stream_noise

VERSION = "0.32.0"
_FINGERPRINT = f"vllm-{VERSION}-5f1a0c3e"
_GUARDED = ("/v1", "/v2", "/inference")
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class Vllm(Dialect):
    """A generator stream for each request, ids from X-Request-Id, errors nested in `error`."""

    @property
    def finish_apart(self) -> bool:
        return False

    def refusal(self, path: str, refused: Refused) -> Reply:
        return answer(error_body(path, refused), refused.status)

    def broken(self, path: str) -> bytes:
        failure = Refused(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        if path == "/v1/messages":
            body = {"type": "error", "error": {"type": "internal_error", "message": failure.message}}
            return b"event: error\ndata: " + as_json(body) + b"\n\n"
        return b"data: " + as_json(error_body(path, failure)) + b"\n\n" + DONE

    def guarded(self, path: str) -> bool:
        return path.startswith(_GUARDED)

    def request_id(self, ask: Ask, kind: str) -> str:
        return f"{kind}-{ask.header('x-request-id') or fresh(16)}"

    def job_ids(self, id: str, count: int) -> list[str]:
        return [id] if count == 1 else [f"{place}_{id}" for place in range(count)]

    def chunk_ids(self, id: str, jobs: list[str]) -> list[str]:
        return [id] * len(jobs)

    def check(self, ask: Ask, sampling: Sampling, count: int) -> None:
        check_model(ask)
        if count > 1 and sampling.temperature == 0:
            raise Refused(400, f"n must be 1 when using greedy sampling, got {count}.")

    def noise(self, ask: Ask, seed: int | None, choice: int) -> tuple[Noise, int | None]:
        if seed is None and ask.fault.unseeded_42:
            seed = 42
        return (random_noise(), None) if seed is None else (stream_noise(seed + choice), seed + choice)

    def seed(self, fields: Fields) -> int | None:
        try:
            seed = fields.integer("seed", None, -INT64, INT64 - 1)
        except Refused as refused:
            raise Refused(400, refused.message, "seed", schema=True) from refused
        return None if seed == -1 else seed

    def head(self, ask: Ask, id: str, kind: str) -> Object:
        return {"id": id, "object": kind, "created": ask.created, "model": ask.settings.model}

    def tail(self, ask: Ask, usage: Object, answers: Sequence[Answer], *, chat: bool) -> Object:
        tail: Object = {"service_tier": None, "system_fingerprint": _FINGERPRINT, "usage": usage}
        if chat:
            tail["prompt_logprobs"] = None
            tail["prompt_token_ids"] = _wanted_ids(ask, answers[0].prompt)
            tail["prompt_text"] = None
        return {**tail, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    def usage(self, prompt: int, completion: int) -> Object:
        usage = self.stream_usage(prompt, completion, chat=True)
        return {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}

    def stream_usage(self, prompt: int, completion: int, *, chat: bool) -> Object:
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def message(self, content: str | None, calls: list[Object]) -> Object:
        message: Object = {"role": "assistant", "content": content or "", "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None}
        if calls:
            message["tool_calls"] = calls
        return {**message, "reasoning": None}

    def delta(self, **members: Any) -> Object:
        return members

    def tool_delta(self, arguments: str, *, id: str | None = None, name: str | None = None) -> Object:
        call: Object = {"index": 0, "function": {"arguments": arguments}}
        if id is not None:
            call = {"id": id, "type": "function", "index": 0, "function": {"name": name}}
        return {"content": None, "tool_calls": [call]}

    def chat_ending(self, ask: Ask, job: Generation, answer: Answer, *, called: bool) -> Object:
        ids = _wanted_ids(ask, answer.tokens)
        return {"stop_reason": answer.finish.matched, "token_ids": ids, "routed_experts": None}

    def text_ending(self, ask: Ask, answer: Answer) -> Object:
        return {
            "stop_reason": answer.finish.matched,
            "token_ids": _wanted_ids(ask, answer.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": _wanted_ids(ask, answer.prompt),
            "routed_experts": None,
        }

    def chat_chunk_ending(self, ask: Ask, piece: Piece | None) -> Object:
        if piece is None:
            return {}
        ending: Object = {} if piece.finish is None else {"stop_reason": piece.finish.matched}
        return {**ending, "token_ids": _wanted_ids(ask, _token(piece))}

    def text_chunk_ending(self, ask: Ask, piece: Piece, prompt: list[int] | None) -> Object:
        return {
            "stop_reason": piece.finish.matched if piece.finish else None,
            "prompt_token_ids": None if prompt is None else _wanted_ids(ask, prompt),
            "token_ids": _wanted_ids(ask, _token(piece)),
        }

    def chunk_tail(self, ask: Ask, *, chat: bool, prompt: list[int] | None = None, last: bool = False) -> Object:
        tail: Object = {}
        if prompt is not None:
            tail = {"prompt_token_ids": _wanted_ids(ask, prompt), "prompt_text": None}
        return {**tail, "system_fingerprint": _FINGERPRINT} if last else tail

    def chosen_logprobs(self, piece: Piece) -> list[tuple[int, float]]:
        assert piece.token is not None
        chosen = (piece.token, piece.logprob)
        return [chosen, *(pair for pair in piece.top if pair[0] != piece.token)]

    def text_offset(self, length: int) -> int:
        return length

    def call_id(self) -> str:
        return f"chatcmpl-tool-{fresh(16)}"

    def tool_finish(self, named: bool) -> str:
        return "stop" if named else "tool_calls"


def check_model(ask: Ask) -> None:
    """Refused (404): the body names another model than the one served; none at all is fine."""
    model, served = ask.fields.get("model"), ask.settings.model
    if model is None or model == served:
        return
    if ask.settings.role == "reward":
        raise Refused(404, f"The model `{model}` does not exist.")
    raise Refused(404, f"The model `{model}` does not exist. Valid aliases: {served}.", "model")


def error_body(path: str, refused: Refused) -> Object:
    """vLLM's error object; Anthropic's on /v1/messages, except for a body of the wrong form."""
    if refused.schema:
        where = f"body.{refused.param}" if refused.param else "body"
        message = f"1 validation error:\n  {{'loc': '{where}', 'msg': '{refused.message}'}}"
        return {"error": {"message": message, "type": "Bad Request", "param": where, "code": refused.status}}
    kind = _TYPES.get(refused.status, "BadRequestError" if refused.status < 500 else "InternalServerError")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": refused.message}}
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.status}}


def _wanted_ids(ask: Ask, tokens: list[int]) -> list[int] | None:
    return tokens if ask.fields.flag("return_token_ids") else None


def _token(piece: Piece) -> list[int]:
    return [] if piece.token is None else [piece.token]
