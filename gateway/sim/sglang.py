"""SGLang's ways: 0.5.23, as seen from outside."""

from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, fresh
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Finish, Piece
from gateway.sim.replies import DONE, EngineDied, Reply, answer, as_json
from gateway.sim.runs import Answer
from gateway.sim.sampling import Noise, Sampling, hashed_noise, random_noise

VERSION = "0.5.23"
UNSEEDED = 42
_OPEN = ("/health", "/health_generate", "/metrics", "/ready")


class Sglang(Dialect):
    """Noise hashed from seed and position, ids from `rid`, flat errors on /v1."""

    finish_apart = True

    def error(self, path: str, status: int, message: str, param: str | None = None) -> Reply:
        return answer(error_body(path, status, message, param), status)

    def broken(self, path: str) -> bytes:
        body = error_body(path, 500, "Scheduler hit an exception", None)
        if path in ("/v1/messages", "/v1/responses"):
            return b"event: error\ndata: " + as_json(body) + b"\n\n"
        body = body if "error" in body else {"error": body}
        return b"data: " + as_json(body) + b"\n\n" + DONE

    def guarded(self, path: str) -> bool:
        return path not in _OPEN

    def request_id(self, ask: Ask, kind: str) -> str:
        rid = ask.fields.get("rid")
        rid = rid[0] if isinstance(rid, list) and rid else rid
        if rid is None:
            return fresh()
        return free_id(ask, rid)

    def job_ids(self, id: str, count: int) -> list[str]:
        return [id] if count == 1 else [fresh() for _ in range(count)]

    def chunk_ids(self, id: str, jobs: list[str]) -> list[str]:
        return jobs

    def check(self, ask: Ask, sampling: Sampling, count: int) -> None:
        if ask.settings.role == "reward":
            raise EngineDied("generation on a server without a sampler")
        if ask.settings.deterministic and sampling.min_p > 0:
            raise EngineDied("min_p in deterministic mode")

    def noise(self, ask: Ask, seed: int | None, choice: int) -> tuple[Noise, int | None]:
        if not ask.settings.deterministic:
            return random_noise(), None
        effective = UNSEEDED if seed is None else seed
        return hashed_noise(effective), effective

    def seed(self, fields: Fields) -> int | None:
        return fields.integer("seed")

    def head(self, ask: Ask, id: str, kind: str) -> Object:
        model = ask.fields.get("model")
        return {
            "id": id,
            "object": kind,
            "created": ask.created,
            "model": model if isinstance(model, str) else "default",
        }

    def tail(self, ask: Ask, answers: list[Answer]) -> Object:
        version = ask.settings.weight_version
        longest = max(len(answer.tokens) for answer in answers)
        return {"metadata": {"weight_version": version, "weight_versions": [[version, 0, longest]]}}

    def usage(self, prompt: int, completion: int, cached: int) -> Object:
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def message(self, content: str | None, calls: list[Object]) -> Object:
        return {
            "role": "assistant",
            "content": content,
            "reasoning_content": None,
            "tool_calls": calls or None,
        }

    def ending(self, answer: Answer, ask: Ask, id: str) -> Object:
        ending: Object = {"matched_stop": matched(answer.finish)}
        if ask.fields.flag("return_token_ids"):
            ending |= {"prompt_token_ids": answer.prompt, "token_ids": answer.tokens}
        if ask.fields.flag("return_meta_info"):
            ending["meta_info"] = meta_info(ask, id, answer)
        return ending

    def chunk_ending(self, piece: Piece | None, ask: Ask) -> Object:
        ending: Object = {"matched_stop": matched(piece.finish) if piece and piece.finish else None}
        if piece is not None and piece.token is not None and ask.fields.flag("return_token_ids"):
            ending["token_ids"] = [piece.token]
        return ending

    def chunk_tail(self, ask: Ask, place: int, prompt: list[int], first: bool) -> Object:
        return {"usage": None}

    def call_id(self) -> str:
        return f"call_{fresh()[:24]}"

    def tool_finish(self, named: bool) -> str:
        return "tool_calls"


def free_id(ask: Ask, rid: object) -> str:
    """A request's own id. Refused: it is no string, or in use."""
    if not isinstance(rid, str):
        raise Refused(400, "rid must be a string or a list of strings", "rid")
    if rid in ask.engine.ids():
        raise Refused(400, f"Duplicate request ID detected: {rid}", "rid")
    return rid


def matched(finish: Finish) -> int | str | None:
    """The stop string or token of an end by "stop"; the end token counts."""
    if finish.reason != "stop":
        return None
    return 256 if finish.matched is None else finish.matched


def meta_info(ask: Ask, id: str, answer: Answer) -> dict[str, Any]:
    """What /generate tells of a sample."""
    return {
        "id": id,
        "finish_reason": finish_reason(answer.pieces[-1].finish, len(answer.tokens)),
        "prompt_tokens": len(answer.prompt),
        "weight_version": ask.settings.weight_version,
        "total_retractions": 0,
        "completion_tokens": len(answer.tokens),
        "cached_tokens": answer.cached_tokens,
    }


def finish_reason(finish: Finish | None, length: int) -> dict[str, Any] | None:
    """An end in the shape of /generate; None: not ended."""
    if finish is None:
        return None
    match finish.reason:
        case "stop":
            return {"type": "stop", "matched": matched(finish)}
        case "length":
            return {"type": "length", "length": length}
    return {"type": "abort", "message": finish.matched or "Unknown error"}


def error_body(path: str, status: int, message: str, param: str | None) -> dict[str, Any]:
    """SGLang's error shapes: flat on /v1, nested on /v1/responses and native routes."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path == "/v1/responses":
        return {"error": {"message": message, "type": kind, "param": param, "code": status}}
    if path.startswith("/v1"):
        return {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    return {"error": {"message": message}}
