"""vLLM's ways: 0.32, as seen from outside."""

from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, fresh
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Piece
from gateway.sim.replies import DONE, Reply, answer, as_json
from gateway.sim.runs import Answer
from gateway.sim.sampling import Noise, Sampling, random_noise, stream_noise

VERSION = "0.32.0"
_FINGERPRINT = f"vllm-{VERSION}-5f1a0c3e"
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class Vllm(Dialect):
    """A generator stream for each request, ids from X-Request-Id, errors nested in `error`."""

    finish_apart = False

    def error(self, path: str, status: int, message: str, param: str | None = None) -> Reply:
        return answer(error_body(path, status, message, param), status)

    def broken(self, path: str) -> bytes:
        body = error_body(path, 500, "EngineCore encountered an issue.", None)
        if path in ("/v1/messages", "/v1/responses"):
            return b"event: error\ndata: " + as_json(body) + b"\n\n"
        return b"data: " + as_json(body) + b"\n\n" + DONE

    def guarded(self, path: str) -> bool:
        return path.startswith("/v1")

    def request_id(self, ask: Ask, kind: str) -> str:
        return f"{kind}-{ask.header('x-request-id') or fresh()}"

    def job_ids(self, id: str, count: int) -> list[str]:
        return [id] if count == 1 else [f"{place}_{id}" for place in range(count)]

    def chunk_ids(self, id: str, jobs: list[str]) -> list[str]:
        return [id] * len(jobs)

    def check(self, ask: Ask, sampling: Sampling, count: int) -> None:
        model = ask.fields.get("model")
        if model is not None and model != ask.settings.model:
            raise Refused(404, f"The model `{model}` does not exist.", "model")
        if count > 1 and sampling.temperature == 0:
            raise Refused(400, f"n must be 1 when using greedy sampling, got {count}.", "n")

    def noise(self, ask: Ask, seed: int | None, choice: int) -> tuple[Noise, int | None]:
        if seed is None and ask.fault.unseeded_42:
            seed = 42
        return (random_noise(), None) if seed is None else (stream_noise(seed + choice), seed + choice)

    def seed(self, fields: Fields) -> int | None:
        seed = fields.integer("seed")
        return None if seed == -1 else seed

    def head(self, ask: Ask, id: str, kind: str) -> Object:
        return {"id": id, "object": kind, "created": ask.created, "model": ask.settings.model}

    def tail(self, ask: Ask, answers: list[Answer]) -> Object:
        wanted = ask.fields.flag("return_token_ids")
        return {
            "service_tier": None,
            "system_fingerprint": _FINGERPRINT,
            "prompt_logprobs": None,
            "prompt_token_ids": answers[0].prompt if wanted else None,
            "kv_transfer_params": None,
        }

    def usage(self, prompt: int, completion: int, cached: int) -> Object:
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
        }

    def message(self, content: str | None, calls: list[Object]) -> Object:
        return {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": calls,
            "reasoning": None,
        }

    def ending(self, answer: Answer, ask: Ask, id: str) -> Object:
        wanted = ask.fields.flag("return_token_ids")
        return {"stop_reason": answer.finish.matched, "token_ids": answer.tokens if wanted else None}

    def chunk_ending(self, piece: Piece | None, ask: Ask) -> Object:
        ending: Object = {}
        if piece is not None and piece.finish is not None:
            ending["stop_reason"] = piece.finish.matched
        if piece is not None and ask.fields.flag("return_token_ids"):
            ending["token_ids"] = [] if piece.token is None else [piece.token]
        else:
            ending["token_ids"] = None
        return ending

    def chunk_tail(self, ask: Ask, place: int, prompt: list[int], first: bool) -> Object:
        tail: Object = {"system_fingerprint": _FINGERPRINT}
        if first:
            tail["prompt_token_ids"] = prompt if ask.fields.flag("return_token_ids") else None
        return tail

    def call_id(self) -> str:
        return f"chatcmpl-tool-{fresh()}"

    def tool_finish(self, named: bool) -> str:
        return "stop" if named else "tool_calls"


def error_body(path: str, status: int, message: str, param: str | None) -> dict[str, Any]:
    """vLLM's error object; Anthropic's on /v1/messages."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
