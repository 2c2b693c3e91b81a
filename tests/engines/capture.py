"""Record answers of the real engines into `tests/captures`.

    python -m tests.engines.capture vllm sglang

Each engine is asked everything in its table below, one request after the other. A body is kept as it came,
but for the folder of engines and models, which becomes `/engines`. Of long texts meant for machines (metrics,
the server's own description) only the fields that the gateway reads are kept.
"""

import argparse
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import captures
from tests.engines import install, servers
from tests.engines.servers import Spec

KEPT_HEADERS = ("content-type", "x-request-id", "server", "retry-after", "allow")
MAX_BYTES = 20_000

Body = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request to make: a JSON body, or text that is sent as it is.

    `keep` shortens the answer's body. After `abort_after` seconds the request's `rid` is aborted (SGLang).
    """

    name: str
    path: str
    body: Body | str | None = None
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    keep: Callable[[bytes], bytes] = bytes
    abort_after: float | None = None


def metric_lines(*prefixes: str) -> Callable[[bytes], bytes]:
    """Keeps the metrics with these names, with their HELP and TYPE lines."""

    def keep(body: bytes) -> bytes:
        wanted = []
        for line in body.decode().splitlines():
            words = line.split(" ")
            name = words[2] if line.startswith("#") else line.split("{")[0].split(" ")[0]
            if name in prefixes:
                wanted.append(line)
        return ("\n".join(wanted) + "\n").encode()

    return keep


def json_fields(*fields: str) -> Callable[[bytes], bytes]:
    """Keeps these fields of the JSON object, in its order, at whatever depth they stand under an object."""

    def thin(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, inner in value.items():
            if key in fields:
                kept[key] = inner
            elif isinstance(inner, dict) and (below := thin(inner)):
                kept[key] = below
        return kept

    return lambda body: json.dumps(thin(json.loads(body)), indent=1).encode()


HI = [{"role": "user", "content": "Say hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        # Else vLLM lets the arguments be any JSON value.
        "strict": True,
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                "metric": {"type": "boolean"},
            },
            "required": ["city", "metric"],
            "additionalProperties": False,
        },
    },
}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chat(**more: Any) -> Body:
    """A small chat request with a seed."""
    return {"model": "tiny-llm", "messages": HI, "max_tokens": 6, "temperature": 1, "seed": 11} | more


def complete(prompt: Any, **more: Any) -> Body:
    """A small completion request with a seed."""
    return {"model": "tiny-llm", "prompt": prompt, "max_tokens": 5, "temperature": 1, "seed": 11} | more


def respond(**more: Any) -> Body:
    """A small request to the responses route."""
    return {
        "model": "tiny-llm",
        "input": "Say hi",
        "max_output_tokens": 6,
        "temperature": 1,
        "store": False,
    } | more


def message(**more: Any) -> Body:
    """A small request to the messages route."""
    return {"model": "tiny-llm", "messages": HI, "max_tokens": 6, "temperature": 1} | more


def native(text: Any, **sampling: Any) -> Body:
    """A small request to SGLang's own generate route."""
    return {"text": text, "sampling_params": {"max_new_tokens": 5, "temperature": 1} | sampling}


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
ABORT = "/abort_request"
TWO = ["The sky is", "Water is"]
TALK = [*HI, {"role": "assistant", "content": "hi"}]


def blank_tokens() -> list[str]:
    """The ids of the tiny models' tokens that are white space alone, as keys of `logit_bias`."""
    tokenizer = json.loads((servers.models() / "tiny-llm" / "tokenizer.json").read_text())
    # How a byte-level tokenizer writes space, tab, newline and carriage return.
    blank = set("\u0120\u0109\u010a\u010d")
    return [str(number) for token, number in tokenizer["model"]["vocab"].items() if set(token) <= blank]


def openai_asks(tool_seed: int) -> Iterator[Ask]:
    """What both engines are asked on the routes that they share.

    `tool_seed` is one with which the engine's noise ends a tool call within 80 tokens.
    """
    yield Ask("chat", CHAT, chat(), headers=(("x-request-id", "abc"),))
    yield Ask("chat-stream", CHAT, chat(stream=True), headers=(("x-request-id", "abc"),))
    yield Ask("chat-stream-usage", CHAT, chat(**USAGE))
    yield Ask("chat-n2", CHAT, chat(n=2))
    yield Ask("chat-n2-stream", CHAT, chat(n=2, **USAGE))
    yield Ask("chat-logprobs", CHAT, chat(logprobs=True, top_logprobs=2))
    yield Ask("chat-logprobs-stream", CHAT, chat(logprobs=True, top_logprobs=2, **USAGE))
    # Between the parts of a call JSON allows white space without end, and noise would go on with it.
    no_space = dict.fromkeys(blank_tokens(), -100)
    tools = chat(max_tokens=80, seed=tool_seed, tools=[WEATHER], tool_choice="required", logit_bias=no_space)
    yield Ask("chat-tools", CHAT, tools)
    yield Ask("chat-tools-stream", CHAT, tools | USAGE)
    yield Ask("chat-stop", CHAT, chat(max_tokens=200, stop=["e"]))
    yield Ask("completions", COMPLETIONS, complete("The sky is"))
    yield Ask("completions-stream", COMPLETIONS, complete("The sky is", **USAGE))
    yield Ask("completions-n2", COMPLETIONS, complete("The sky is", n=2))
    yield Ask("completions-list", COMPLETIONS, complete(TWO))
    yield Ask("completions-list-stream", COMPLETIONS, complete(TWO, **USAGE))
    yield Ask("completions-list-n2", COMPLETIONS, complete(TWO, n=2))
    yield Ask("completions-list-n2-stream", COMPLETIONS, complete(TWO, n=2, **USAGE))
    yield Ask("completions-tokens", COMPLETIONS, complete([40, 41, 42]))
    yield Ask("completions-tokens-list", COMPLETIONS, complete([[40, 41, 42], [50, 51]]))
    yield Ask("completions-logprobs", COMPLETIONS, complete("The sky is", logprobs=1, echo=True))
    yield Ask("completions-logprobs-stream", COMPLETIONS, complete("The sky is", logprobs=1, stream=True))
    yield Ask("responses", RESPONSES, respond())
    yield Ask("responses-stream", RESPONSES, respond(stream=True))
    yield Ask("messages", MESSAGES, message())
    yield Ask("messages-stream", MESSAGES, message(stream=True))
    yield Ask("tokenize", "/tokenize", {"model": "tiny-llm", "prompt": "The sky is"})
    yield Ask("detokenize", "/detokenize", {"model": "tiny-llm", "tokens": [40, 41, 42]})
    yield Ask("models", "/v1/models", method="GET")
    yield Ask("health", "/health", method="GET")
    yield from openai_errors()


def openai_errors() -> Iterator[Ask]:
    """Requests that an engine refuses, on the routes that both share."""
    yield Ask("error-seed-range", CHAT, chat(seed=2**63))
    yield Ask("error-seed-word", CHAT, chat(seed="seven"))
    yield Ask("error-seed-fraction", CHAT, chat(seed=1.5))
    yield Ask("error-model", CHAT, chat(model="nobody"))
    yield Ask("error-model-completions", COMPLETIONS, complete("a", model="nobody"))
    yield Ask("error-json", CHAT, '{"model": "tiny-llm", "messages": [')
    yield Ask("error-field-missing", CHAT, {"model": "tiny-llm"})
    yield Ask("error-too-long", COMPLETIONS, complete([40] * 3000))
    yield Ask("error-n-greedy", CHAT, chat(n=2, temperature=0))
    yield Ask("error-stream", CHAT, chat(seed=2**63, stream=True))
    yield Ask("error-temperature-stream", CHAT, chat(temperature=-1, stream=True))
    yield Ask("error-responses", RESPONSES, respond(model="nobody"))
    yield Ask("error-responses-field", RESPONSES, respond(temperature=-1))
    yield Ask("error-messages", MESSAGES, message(model="nobody"))
    yield Ask("error-messages-field", MESSAGES, message(messages=1))
    yield Ask("error-route", "/v1/nothing", {})
    yield Ask("error-method", CHAT, method="GET")


def vllm_asks() -> Iterator[Ask]:
    """What a generating vLLM in its development mode is asked; it has a tool parser and the native route."""
    yield from openai_asks(tool_seed=20)
    yield Ask("chat-seed-minus-one", CHAT, chat(seed=-1))
    yield Ask("chat-token-ids", CHAT, chat(return_token_ids=True))
    yield Ask("chat-token-ids-stream", CHAT, chat(return_token_ids=True, stream=True))
    batch = {"model": "tiny-llm", "messages": [HI, TALK], "max_tokens": 5, "seed": 11}
    yield Ask("chat-batch", CHAT + "/batch", batch)
    yield Ask("messages-count", MESSAGES + "/count_tokens", {"model": "tiny-llm", "messages": HI})
    ids: Body = {"model": "tiny-llm", "token_ids": [40, 41], "sampling_params": {"max_tokens": 4, "seed": 11}}
    yield Ask("native", "/inference/v1/generate", ids)
    yield Ask("native-stream", "/inference/v1/generate", ids | {"stream": True})
    yield Ask("error-native", "/inference/v1/generate", ids | {"sampling_params": {"seed": "x"}})
    yield Ask("version", "/version", method="GET")
    yield Ask("weight-info", "/weight_info", method="GET")
    info = json_fields(
        *(
            "model",
            "dtype",
            "seed",
            "scheduling_policy",
            "policy",
            "tensor_parallel_size",
            "enable_prefix_caching",
        ),
        *(
            "VLLM_BATCH_INVARIANT",
            "max_num_seqs",
            "pipeline_parallel_size",
            "data_parallel_size",
            "runner_type",
        ),
        *("enable_chunked_prefill", "quantization", "system_env_python"),
    )
    yield Ask("server-info", "/server_info?config_format=json", method="GET", keep=info)
    running = metric_lines("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:cache_config_info")
    yield Ask("metrics", "/metrics", method="GET", keep=running)


def vllm_reward_asks() -> Iterator[Ask]:
    """What a vLLM reward model (one label) is asked."""
    one = {"model": "tiny-rm", "input": "The sky is blue"}
    yield Ask("classify", "/classify", one, headers=(("x-request-id", "abc"),))
    yield Ask("classify-list", "/classify", one | {"input": ["The sky is blue", "Water", "1 + 1 = 2"]})
    yield Ask("classify-raw", "/classify", one | {"use_activation": False})
    yield Ask("classify-messages", "/classify", {"model": "tiny-rm", "messages": TALK})
    yield Ask("classify-tokens", "/classify", one | {"input": [40, 41, 42]})
    yield Ask("classify-tokens-list", "/classify", one | {"input": [[40, 41, 42], [50, 51]]})
    yield Ask("pooling", "/pooling", one)
    yield Ask("pooling-list", "/pooling", one | {"input": TWO})
    score: Body = {"model": "tiny-rm", "text_1": "What is blue?", "text_2": TWO}
    yield Ask("score", "/v1/score", score)
    yield Ask("score-pairs", "/score", score | {"text_1": TWO})
    yield Ask("score-queries", "/score", {"model": "tiny-rm", "queries": "What is blue?", "documents": TWO})
    rank: Body = {"model": "tiny-rm", "query": "What is blue?", "documents": TWO}
    yield Ask("rerank", "/v1/rerank", rank)
    yield Ask("rerank-top", "/v2/rerank", rank | {"top_n": 1})
    yield Ask("reward-models", "/v1/models", method="GET")
    yield Ask("reward-route-missing", "/v1/chat/completions", chat())
    yield Ask("reward-no-v1-classify", "/v1/classify", one)
    yield Ask("error-classify-model", "/classify", one | {"model": "nobody"})
    yield Ask("error-classify-field", "/classify", {"model": "tiny-rm", "text": "a"})
    yield Ask("error-classify-json", "/classify", '{"input": ')
    running = metric_lines("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:cache_config_info")
    yield Ask("reward-metrics", "/metrics", method="GET", keep=running)


def vllm_labels_asks() -> Iterator[Ask]:
    """What a vLLM classifier of three labels is asked."""
    yield Ask("classify-labels", "/classify", {"model": "tiny-cls", "input": TWO})


def embed(text: Any, **more: Any) -> Body:
    """A request for embeddings, short ones."""
    return {"model": "tiny-llm", "input": text} | more


def embedding_asks() -> Iterator[Ask]:
    """What an embedding model is asked on either engine."""
    yield Ask("embeddings", "/v1/embeddings", embed("The sky is blue"))
    yield Ask("embeddings-list", "/v1/embeddings", embed(TWO))
    yield Ask("embeddings-base64", "/v1/embeddings", embed(TWO, encoding_format="base64"))
    yield Ask("embeddings-tokens", "/v1/embeddings", embed([[40, 41, 42], [50, 51]]))


def sglang_asks() -> Iterator[Ask]:
    """What a generating SGLang in deterministic mode is asked."""
    yield from openai_asks(tool_seed=1)
    yield Ask("chat-rid", CHAT, chat(rid="abc"))
    yield Ask("chat-token-ids", CHAT, chat(return_token_ids=True))
    yield Ask("chat-meta-info", CHAT, chat(return_meta_info=True))
    yield from sglang_native()
    endless = chat(max_tokens=1500, ignore_eos=True)
    yield Ask("abort", CHAT, endless | {"rid": "abort-1"}, abort_after=0.15)
    yield Ask("abort-stream", CHAT, endless | {"rid": "abort-2", "stream": True}, abort_after=0.15)
    silent = native("The sky is", sampling_seed=11, max_new_tokens=1500, ignore_eos=True)
    yield Ask("abort-native", GENERATE, silent | {"rid": "abort-3"}, abort_after=0.15)
    # Each part holds the whole text so far: few parts keep this one short.
    silent["sampling_params"]["stream_interval"] = 40
    yield Ask("abort-native-stream", GENERATE, silent | {"rid": "abort-4", "stream": True}, abort_after=0.5)
    yield Ask("tokenize-v1", "/v1/tokenize", {"model": "tiny-llm", "prompt": "The sky is"})
    yield Ask("abort-unknown", ABORT, {"rid": "nobody"})
    yield Ask("ready", "/ready", method="GET")
    yield Ask("model-info", "/model_info", method="GET")
    info = json_fields(
        *("model_path", "served_model_name", "is_embedding", "enable_deterministic_inference"),
        *("attention_backend", "sampling_backend", "disable_radix_cache", "tp_size", "dp_size", "pp_size"),
        *("dtype", "version", "random_seed", "schedule_policy", "max_running_requests", "weight_version"),
        *("enable_dp_attention", "disable_overlap_schedule", "chunked_prefill_size"),
        *("rl_on_policy_target", "preferred_sampling_params"),
    )
    yield Ask("server-info", "/server_info", method="GET", keep=info)
    running = metric_lines("sglang:num_running_reqs", "sglang:num_queue_reqs")
    yield Ask("metrics", "/metrics", method="GET", keep=running)
    loads = json_fields("timestamp", "version", "loads")
    yield Ask("loads", "/v1/loads", method="GET", keep=loads)


def sglang_native() -> Iterator[Ask]:
    """What SGLang's own generate route is asked, errors too."""
    seeded = native("The sky is", sampling_seed=11)
    yield Ask("native", GENERATE, seeded | {"rid": "abc-native"})
    yield Ask("native-stream", GENERATE, seeded | {"stream": True})
    two = native("The sky is", sampling_seed=11, n=2)
    yield Ask("native-n2", GENERATE, two)
    yield Ask("native-n2-stream", GENERATE, two | {"stream": True})
    batch = native(TWO, sampling_seed=11)
    yield Ask("native-list", GENERATE, batch)
    yield Ask("native-list-stream", GENERATE, batch | {"stream": True})
    params = [native("", sampling_seed=seed)["sampling_params"] for seed in (11, 12)]
    yield Ask("native-list-seeds", GENERATE, {"text": TWO, "sampling_params": params})
    yield Ask("native-list-one", GENERATE, native(["The sky is"], sampling_seed=11))
    yield Ask("native-list-n2", GENERATE, native(TWO, sampling_seed=11, n=2))
    ids = {"input_ids": [40, 41, 42], "sampling_params": {"max_new_tokens": 4, "sampling_seed": 11}}
    yield Ask("native-ids", GENERATE, ids)
    yield Ask("native-logprobs", GENERATE, seeded | {"return_logprob": True})
    yield Ask("error-native-seed", GENERATE, native("a", sampling_seed="12"))
    yield Ask("error-native-seed-range", GENERATE, native("a", sampling_seed=2**63))
    yield Ask("error-native-field", GENERATE, {"sampling_params": {}})
    yield Ask("error-native-sampling", GENERATE, native("a", temperature=-1))
    yield Ask("error-native-stream", GENERATE, native("a", temperature=-1) | {"stream": True})
    yield Ask("error-native-json", GENERATE, '{"text": ')


def sglang_reward_asks() -> Iterator[Ask]:
    """What an SGLang reward model (one label) is asked."""
    yield Ask("classify", "/classify", {"text": "The sky is blue", "rid": "abc"})
    yield Ask("classify-list", "/classify", {"text": ["The sky is blue", "Water", "1 + 1 = 2"]})
    yield Ask("classify-ids", "/classify", {"input_ids": [40, 41, 42]})
    yield Ask("classify-ids-list", "/classify", {"input_ids": [[40, 41, 42], [50, 51]]})
    yield Ask("classify-list-one", "/classify", {"text": ["The sky is blue"]})
    yield Ask("classify-v1", "/v1/classify", {"model": "tiny-rm", "input": TWO})
    yield Ask("encode", "/encode", {"text": "The sky is blue"})
    yield Ask("encode-list", "/encode", {"text": TWO})
    yield Ask("rm-embeddings-list", "/v1/embeddings", {"model": "tiny-rm", "input": TWO})
    yield Ask("rerank", "/v1/rerank", {"model": "tiny-rm", "query": "What is blue?", "documents": TWO})
    score = {"model": "tiny-rm", "query": "What is blue?", "items": TWO, "label_token_ids": [40, 41]}
    yield Ask("score", "/v1/score", score)
    yield Ask("reward-models", "/v1/models", method="GET")
    yield Ask("reward-ready", "/ready", method="GET")
    yield Ask("reward-model-info", "/model_info", method="GET")
    yield Ask("error-classify-field", "/classify", {"input": "The sky is blue"})
    yield Ask("error-classify-json", "/classify", '{"text": ')


SGLANG_OPTIONS = (
    *servers.SGLANG.options,
    # A tool parser that constrains by plain JSON schema: the tiny tokenizer has no special tokens for tools.
    *("--tool-call-parser", "mimo", "--grammar-backend", "llguidance"),
    "--constrained-json-disable-any-whitespace",
)
SERVERS: dict[str, dict[str, tuple[Spec, Callable[[], Iterator[Ask]]]]] = {
    "vllm": {
        "generate": (
            Spec(
                "vllm",
                options=(
                    *servers.VLLM.options,
                    *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
                ),
                environment={"VLLM_SERVER_DEV_MODE": "1"},
            ),
            vllm_asks,
        ),
        "reward": (servers.VLLM_REWARD, vllm_reward_asks),
        "labels": (Spec("vllm", "tiny-cls", servers.VLLM_REWARD.options), vllm_labels_asks),
        "embed": (Spec("vllm", "tiny-llm", ("--runner", "pooling", "--convert", "embed")), embedding_asks),
    },
    "sglang": {
        "generate": (Spec("sglang", options=SGLANG_OPTIONS, deterministic=True), sglang_asks),
        "reward": (servers.SGLANG_REWARD, sglang_reward_asks),
        "embed": (Spec("sglang", "tiny-llm", servers.SGLANG_REWARD.options), embedding_asks),
    },
}


def record(engine: str, server: str, url: str, ask: Ask) -> captures.Capture:
    """Send one request and keep its answer. Raises `ValueError` where the answer is too long to keep."""
    content = ask.body if isinstance(ask.body, str) else json.dumps(ask.body).encode()
    if ask.abort_after is not None and isinstance(ask.body, dict):
        threading.Timer(ask.abort_after, httpx.post, (url + ABORT,), {"json": {"rid": ask.body["rid"]}}).start()
    answer = httpx.request(
        ask.method,
        url + ask.path,
        content=None if ask.body is None else content,
        headers={"content-type": "application/json", **dict(ask.headers)},
        timeout=120,
    )
    body = ask.keep(answer.content).replace(bytes(install.cache()), b"/engines")
    if len(body) > MAX_BYTES:
        raise ValueError(f"{engine} {ask.name}: {len(body)} bytes")
    headers = {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
    return captures.Capture(engine, server, ask.name, ask.method, ask.path, ask.body, answer.status_code, headers, body)


def main() -> None:
    """Record the engines named on the command line."""
    parser = argparse.ArgumentParser(description="Record answers of real engines.")
    parser.add_argument("engines", nargs="+", choices=SERVERS)
    parser.add_argument("--server", help="only this one of the engine's servers: generate, reward …")
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="capture-"))
    for engine in args.engines:
        for name, (spec, asks) in SERVERS[engine].items():
            if args.server not in (None, name):
                continue
            with servers.running([spec], logs) as [server]:
                for ask in asks():
                    capture = record(engine, name, server.url, ask)
                    captures.save(capture)
                    print(engine, name, capture.name, capture.status, len(capture.body), flush=True)


if __name__ == "__main__":
    main()
