"""SGLang's ways: 0.5.23, as seen from outside."""

import time
from collections.abc import Sequence
from typing import Any

from gateway.sim.asks import Ask
from gateway.sim.dialect import Dialect, Object, fresh
from gateway.sim.fields import INT64, Fields, Refused
from gateway.sim.jobs import Finish, Generation, Job, Piece
from gateway.sim.model import END
from gateway.sim.replies import DONE, EngineDied, Reply, answer, as_json
from gateway.sim.runs import Answer
from gateway.sim.sampling import Noise, Sampling, hashed_noise, random_noise

VERSION = "0.5.23"
UNSEEDED = 42
_OPEN = ("/health", "/ready", "/metrics")


class Sglang(Dialect):
    """Noise hashed from seed and position, ids from `rid`, flat errors on /v1."""

    @property
    def finish_apart(self) -> bool:
        return True

    def refusal(self, path: str, refused: Refused) -> Reply:
        return answer(error_body(path, refused), refused.status)

    def broken(self, path: str) -> bytes:
        body = error_body(path, Refused(500, "Scheduler hit an exception"))
        if path in ("/v1/messages", "/v1/responses"):
            return b"event: error\ndata: " + as_json({"type": "error", **body}) + b"\n\n"
        wrapped = body if "error" in body else {"error": body}
        return b"data: " + as_json(wrapped) + b"\n\n" + DONE

    def guarded(self, path: str) -> bool:
        return not path.startswith(_OPEN)

    def request_id(self, ask: Ask, kind: str) -> str:
        rid = ask.fields.get("rid")
        if rid is None:
            return fresh()
        return free_id(ask, rid[0] if isinstance(rid, list) and rid else rid)

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
        return checked_seed(fields.integer("seed", None, -(2**70), 2**70))

    def head(self, ask: Ask, id: str, kind: str) -> Object:
        model = ask.fields.get("model")
        name = model if isinstance(model, str) else ask.settings.model
        return {"id": id, "object": kind, "created": ask.created, "model": name}

    def tail(self, ask: Ask, usage: Object, answers: Sequence[Answer], *, chat: bool) -> Object:
        versions = weight_versions(ask, max(len(answer.tokens) for answer in answers))
        metadata = {"weight_version": ask.settings.weight_version, "weight_versions": versions}
        return {"usage": usage, "metadata": metadata}

    def usage(self, prompt: int, completion: int) -> Object:
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }

    def stream_usage(self, prompt: int, completion: int, *, chat: bool) -> Object:
        usage = self.usage(prompt, completion)
        return usage if chat else {name: count for name, count in usage.items() if count is not None}

    def message(self, content: str | None, calls: list[Object]) -> Object:
        message: Object = {"role": "assistant", "content": content or "", "reasoning_content": None}
        return {**message, "tool_calls": [{"index": 0, **call} for call in calls]} if calls else message

    def delta(self, **members: Any) -> Object:
        return {"reasoning_content": None, **members}

    def tool_delta(self, arguments: str, *, id: str | None = None, name: str | None = None) -> Object:
        function = {"name": name, "arguments": arguments}
        call = {"id": id, "index": 0, "type": "function", "function": function}
        return {"role": None, "content": None, "reasoning_content": None, "tool_calls": [call]}

    def chat_ending(self, ask: Ask, job: Generation, answer: Answer, *, called: bool) -> Object:
        ending: Object = {"matched_stop": None if called else matched(answer.finish)}
        if ask.fields.flag("return_token_ids"):
            ending |= {"prompt_token_ids": answer.prompt, "response_token_ids": answer.tokens}
        if ask.fields.flag("return_meta_info"):
            ending["meta_info"] = meta_info(ask, job, answer)
        return ending

    def text_ending(self, ask: Ask, answer: Answer) -> Object:
        return {"matched_stop": matched(answer.finish)}

    def chat_chunk_ending(self, ask: Ask, piece: Piece | None) -> Object:
        return {"matched_stop": matched(piece.finish) if piece and piece.finish else None}

    def text_chunk_ending(self, ask: Ask, piece: Piece, prompt: list[int] | None) -> Object:
        return self.chat_chunk_ending(ask, piece)

    def chunk_tail(self, ask: Ask, *, chat: bool, prompt: list[int] | None = None, last: bool = False) -> Object:
        return {} if chat else {"usage": None}

    def chosen_logprobs(self, piece: Piece) -> list[tuple[int, float]]:
        return list(piece.top)

    def text_offset(self, length: int) -> int:
        return -1

    def call_id(self) -> str:
        return f"call_{fresh(24)}"

    def tool_finish(self, named: bool) -> str:
        return "tool_calls"


def free_id(ask: Ask, rid: object) -> str:
    """A request's own id. Refused: it is no string, or in use."""
    if not isinstance(rid, str):
        raise Refused(400, "rid must be a string or a list of strings", "rid", schema=True)
    if rid in ask.engine.ids():
        raise Refused(400, f"Duplicate request ID detected: {rid}")
    return rid


def job_ids(ask: Ask, count: int, listed: bool) -> list[str]:
    """The ids of a native request's parts: its `rid`, or one made from it. Refused: too few, or in use."""
    rid = ask.fields.get("rid")
    if rid is None:
        return [fresh() for _ in range(count)]
    given = rid if isinstance(rid, list) else [f"{rid}_{place}" for place in range(count)] if listed else [rid]
    if len(given) != count:
        raise Refused(400, "The rids provided must be as many as the inputs")
    return [free_id(ask, one) for one in given]


def checked_seed(seed: int | None) -> int | None:
    """The seed. Refused: it is out of int64."""
    if seed is not None and not -INT64 <= seed < INT64:
        raise Refused(400, f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
    return seed


def matched(finish: Finish) -> int | str | None:
    """The stop string or token of an end by "stop"; the end token counts."""
    if finish.reason != "stop":
        return None
    return END if finish.matched is None else finish.matched


def weight_versions(ask: Ask, tokens: int) -> list[Object]:
    """Which weights made which tokens."""
    return [{"version": ask.settings.weight_version, "start": 0, "end": tokens}]


def meta_info(ask: Ask, job: Generation, answer: Answer, logprobs: Object | None = None) -> Object:
    """What /generate tells of a sample, as far as it has come."""
    finish = answer.pieces[-1].finish
    length = len(answer.tokens)
    meta: Object = {"id": job.id, "finish_reason": finish_reason(finish, length)}
    meta |= {"prompt_tokens": len(answer.prompt), "weight_version": ask.settings.weight_version}
    meta |= {"num_retractions": 0, "storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0}
    meta |= {"forward_entry_time": job.arrived, "prefill_finished_time": job.arrived, "queue_time": 0.0}
    meta |= logprobs or {}
    meta |= {"reasoning_tokens": 0, "completion_tokens": length, "cached_tokens": job.cached_tokens}
    if finish is not None:
        meta["weight_versions"] = weight_versions(ask, length)
    meta |= {"cached_tokens_details": {"device": job.cached_tokens, "host": 0}, "dp_rank": None}
    if finish is not None:
        return meta | _times(job, length)
    return {**meta, "response_sent_to_client_ts": time.time()} if length == 1 else meta


def pooled_meta(ask: Ask, job: Job) -> Object:
    """What the reward routes tell of a text."""
    meta: Object = {"id": job.id, "finish_reason": {"type": "length", "length": 0}}
    meta |= {"prompt_tokens": len(job.tokens), "weight_version": ask.settings.weight_version}
    now = time.time()
    return {**meta, "num_retractions": 0, "e2e_latency": now - job.arrived, "response_sent_to_client_ts": now}


def _times(job: Job, length: int) -> Object:
    now = time.time()
    taken = max(now - job.arrived, 1e-6)
    return {
        "e2e_latency": taken,
        "request_received_ts": job.arrived,
        "first_token_latency": taken / max(length, 1),
        "api_server_dispatch_finish_ts": job.arrived,
        "request_finished_ts": now,
        "decode_throughput": length / taken,
        "response_sent_to_client_ts": now,
    }


def finish_reason(finish: Finish | None, length: int) -> Object | None:
    """An end in the shape of /generate; None: not ended."""
    if finish is None:
        return None
    match finish.reason:
        case "stop":
            return {"type": "stop", "matched": matched(finish)}
        case "length":
            return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def error_body(path: str, refused: Refused) -> Object:
    """SGLang's error shapes: flat on /v1 and for a body of the wrong form, else nested."""
    message, param, status = refused.message, refused.param, refused.status
    if path.startswith("/v1/messages"):
        said = f"{param}: {message}" if refused.schema and param else message
        kind = "invalid_request_error" if status < 500 else "api_error"
        return {"type": "error", "error": {"type": kind, "message": said}}
    if path == "/generate" and param == "sampling_seed":
        return {"error": message}
    if refused.schema:
        where = ("body", param) if param else ("body",)
        said = f"1 validation error:\n  {{'loc': {where}, 'msg': '{message}'}}"
        return {"object": "error", "message": said, "type": "Bad Request", "param": None, "code": status}
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    if path == "/v1/responses":
        kind = "invalid_request_error" if status < 500 else "server_error"
        blamed = param if status == 404 else None
        return {"error": {"message": message, "type": kind, "param": blamed, "code": status}}
    if path.startswith("/v1"):
        return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return {"error": {"message": message}}
