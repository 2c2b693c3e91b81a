"""The gateway before real vLLM servers, asked by the real SDKs: `make test-vllm`, not `make test`."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from gateway.core import seeds
from tests import matrix
from tests.engines import contrast, gates, servers, structured, trainer
from tests.engines.asking import (
    CHAT,
    COMPLETIONS,
    Endpoint,
    ask,
    chat,
    complete,
    metric,
    open_request,
    text,
    told,
    wait_metric,
)
from tests.engines.contrast import Answer
from tests.engines.gates import Gate
from tests.engines.servers import Server, Spec

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CLASSIFY = "/classify"
RUNNING = "vllm:num_requests_running"
ENDED = "vllm:request_success_total"
ENGINE_KEY = "the-engines-own"

# Its answers depend on what else is in the batch.
MID = Spec(
    "vllm",
    "mid-llm",
    (
        *servers.VLLM.options,
        *("--no-enable-prefix-caching", "--api-key", ENGINE_KEY),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ),
    environment={"DTYPE": "bfloat16"},
)
MID_REWARD = Spec("vllm", "mid-rm", servers.VLLM_REWARD.options)
ONE_EACH = {"scope": "replica", "limit": 1}


def urls(started: Sequence[Server]) -> list[str]:
    return [server.url for server in started]


@pytest.fixture(scope="module")
def gate(vllm_pair: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The default profile; the pool claims a model that the replicas do not have."""
    pool = gates.pool("policy", "vllm", urls(vllm_pair), deterministic="declared", models=["tiny-llm", "ghost"])
    with gates.gateway(tmp_path_factory.mktemp("gate"), pool) as started:
        yield started


@pytest.fixture
def engine(vllm_pair: list[Server]) -> Server:
    """A replica, to ask past the gateway."""
    return vllm_pair[0]


def sdk(gate: Gate, session: str, **options: Any) -> OpenAI:
    """The SDK for one session, without retries of its own."""
    return OpenAI(base_url=f"{gate.url}/sessions/{session}/v1", api_key="unused", max_retries=0, **options)


def seed_of(answer: Any) -> int:
    """The seed that the gateway gave a request."""
    return int(answer.headers["x-detgate-seed"])


def in_flight(gate: Gate) -> int:
    return sum(replica["in_flight"] for replica in gate.replicas("/readyz").values())


class TestTwoRuns:
    """A rollout of 256 calls, 32 in flight, by two gateway processes with different PYTHONHASHSEED."""

    def runs(
        self, vllm_pair: list[Server], folder: Path, path: str, profile: str = "strict", order: str = "arrival"
    ) -> list[list[Answer]]:
        pool = gates.pool("policy", "vllm", urls(vllm_pair), deterministic="declared")
        answers = []
        for run in (1, 2):
            with gates.gateway(
                folder / str(run), pool, hash_seed=run, seed=7, profile=profile, index_order=order
            ) as gate:
                answers.append(asyncio.run(contrast.rollout([gate.url + path], "tiny-llm")))
        return answers

    def per_prompt(self, run: list[Answer]) -> Counter[tuple[Any, ...]]:
        """What was decided and answered for each prompt, whichever of its callers got it."""
        return Counter((answer.prompt, answer.text, *sorted(answer.decisions.items())) for answer in run)

    @pytest.mark.smoke
    def test_a_session_each(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        runs = self.runs(vllm_pair, tmp_path, "/sessions/{prompt}:{sample}/v1")
        figures = contrast.compare(*runs)
        assert figures["different_texts"] == 0
        assert figures["different_decisions"] == dict.fromkeys(contrast.DECISIONS, 0)
        assert figures["distinct_samples"] == {4: 64}
        assert {answer.decisions["x-detgate-replica"] for answer in runs[0]} == {"policy-0", "policy-1"}

    def test_balanced_decides_all_but_the_replica(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        path = "/sessions/{prompt}:{sample}/v1"
        figures = contrast.compare(*self.runs(vllm_pair, tmp_path, path, profile="balanced"))
        different = figures["different_decisions"]
        assert different.pop("x-detgate-replica") > 0
        assert set(different.values()) == {0}
        assert figures["different_texts"] == 0

    def test_without_a_session_equal_calls_share_out_the_same_seeds(
        self, vllm_pair: list[Server], tmp_path: Path
    ) -> None:
        first, second = self.runs(vllm_pair, tmp_path, "/v1")
        assert self.per_prompt(first) == self.per_prompt(second)
        assert contrast.compare(first, second)["distinct_samples"] == {4: 64}

    def test_siblings_of_one_session_in_content_order(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        first, second = self.runs(vllm_pair, tmp_path, "/sessions/all/v1", order="content")
        assert self.per_prompt(first) == self.per_prompt(second)
        assert contrast.compare(first, second)["distinct_samples"] == {4: 64}
        assert len({answer.decisions["x-detgate-seed"] for answer in first}) == 256


@pytest.mark.smoke
class TestOneAnswer:
    """What a call through the gateway gives is what the engine gives for the seed that the answer names."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_chat(self, gate: Gate, engine: Server, stream: bool) -> None:
        with sdk(gate, f"chat-{stream}") as client:
            raw = client.chat.completions.with_raw_response.create(
                model="tiny-llm", messages=[{"role": "user", "content": "Name a colour"}],
                max_tokens=12, temperature=1, stream=stream,
            )  # fmt: skip
            parsed: Any = raw.parse()
            if stream:
                said = "".join(part.choices[0].delta.content or "" for part in parsed)
            else:
                said = parsed.choices[0].message.content
                assert parsed.id == f"chatcmpl-chat-{stream}:0.0!"
        assert said == text(engine, CHAT, chat(seed=seed_of(raw)))
        assert raw.headers["x-detgate-guarantee"] == "balanced"

    @pytest.mark.parametrize("stream", [False, True])
    def test_completions(self, gate: Gate, engine: Server, stream: bool) -> None:
        with sdk(gate, f"completions-{stream}") as client:
            raw = client.completions.with_raw_response.create(
                model="tiny-llm", prompt="The colour is", max_tokens=12, temperature=1, stream=stream
            )
            parsed: Any = raw.parse()
            said = "".join(part.choices[0].text for part in (parsed if stream else [parsed]))
        assert said == text(engine, COMPLETIONS, complete(seed=seed_of(raw)))

    @pytest.mark.parametrize("stream", [False, True])
    def test_responses(self, gate: Gate, engine: Server, stream: bool) -> None:
        body = {"model": "tiny-llm", "input": "Name a colour", "max_output_tokens": 12, "temperature": 1}
        with sdk(gate, f"responses-{stream}") as client:
            raw = client.responses.with_raw_response.create(**body, stream=stream)  # type: ignore[call-overload]
            parsed: Any = raw.parse()
            if stream:
                *_, last = parsed
                assert last.type == "response.completed"
                parsed = last.response
            said = parsed.output_text
        direct = told(ask(engine, RESPONSES, body | {"seed": seed_of(raw)}))
        assert said == direct["output"][0]["content"][0]["text"]

    def test_a_seed_of_the_client_is_kept(self, gate: Gate, engine: Server) -> None:
        answer = ask(gate, "/sessions/own-seed" + CHAT, chat(seed=7))
        assert told(answer)["choices"][0]["message"]["content"] == text(engine, CHAT, chat(seed=7))
        assert (answer.headers["x-detgate-seed"], answer.headers["x-detgate-seed-source"]) == ("7", "client")

    def test_null_is_no_seed(self, gate: Gate, engine: Server) -> None:
        answer = ask(gate, "/sessions/null-seed" + CHAT, chat(seed=None))
        said = told(answer)["choices"][0]["message"]["content"]
        assert said == text(engine, CHAT, chat(seed=seed_of(answer)))

    @pytest.mark.parametrize("seed", [-1, 2**63, "7", 1.5, True])
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
    def test_a_malformed_seed_reaches_no_engine(
        self, gate: Gate, vllm_pair: list[Server], path: str, seed: Any
    ) -> None:
        before = [metric(server, ENDED) for server in vllm_pair]
        body = {CHAT: chat(), COMPLETIONS: complete(), RESPONSES: {"model": "tiny-llm", "input": "a"}}[path]
        answer = ask(gate, "/sessions/malformed" + path, body | {"seed": seed})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_seed"
        assert [metric(server, ENDED) for server in vllm_pair] == before


@pytest.mark.smoke
class TestSeveralSamples:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat(n=4)), (COMPLETIONS, complete(n=4))])
    def test_n_of_four(self, gate: Gate, engine: Server, path: str, body: dict[str, Any]) -> None:
        answer = ask(gate, f"/sessions/four{path}", body)
        said = choices(told(answer))
        alone = [text(engine, path, body | {"n": 1, "seed": seed_of(answer) + i}) for i in range(4)]
        assert said == alone
        assert len(set(said)) == 4

    def test_a_list_of_equal_prompts_has_no_clones(self, gate: Gate, engine: Server) -> None:
        body = complete(["The colour is"] * 2, n=2, ignore_eos=True)
        answer = ask(gate, "/sessions/list" + COMPLETIONS, body)
        merged = told(answer)
        single = [
            text(engine, COMPLETIONS, complete(ignore_eos=True, seed=seed))
            for seed in seeds.samples(seed_of(answer), 4)
        ]
        assert choices(merged) == single
        assert len(set(single)) == 4
        assert merged["usage"] == told(ask(engine, COMPLETIONS, body | {"seed": 1}))["usage"]

    def test_a_list_streamed(self, gate: Gate, engine: Server) -> None:
        with sdk(gate, "list-stream") as client:
            raw = client.completions.with_raw_response.create(
                model="tiny-llm", prompt=["The colour is", "Water is"], max_tokens=12, temperature=1,
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            parts = list(raw.parse())
        said = ["".join(c.text for part in parts for c in part.choices if c.index == i) for i in (0, 1)]
        first, second = seeds.samples(seed_of(raw), 2)
        assert said[0] == text(engine, COMPLETIONS, complete(seed=first))
        assert said[1] == text(engine, COMPLETIONS, complete("Water is", seed=second))
        assert len({part.id for part in parts}) == 1
        assert [part.usage is not None for part in parts].count(True) == 1

    def test_the_batch_route(self, gate: Gate, engine: Server) -> None:
        talks = [chat()["messages"]] * 2
        answer = ask(gate, "/sessions/batch" + CHAT + "/batch", chat(messages=talks))
        said = choices(told(answer))
        assert said == [text(engine, CHAT, chat(seed=seed)) for seed in seeds.samples(seed_of(answer), 2)]
        assert len(set(said)) == 2

    def test_several_greedy_samples_are_the_engines_refusal(self, gate: Gate) -> None:
        with sdk(gate, "greedy") as client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="tiny-llm", messages=[{"role": "user", "content": "a"}], n=2, temperature=0
            )
        assert "n must be 1" in refused.value.message


def choices(answer: dict[str, Any]) -> list[str]:
    """The texts of an answer's choices, which stand in the order of their indices."""
    rows = answer["choices"]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["message"]["content"] if "message" in row else row["text"] for row in rows]


class TestMessages:
    def client(self, gate: Gate, session: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=f"{gate.url}/sessions/{session}", api_key="unused", max_retries=0)

    def test_anthropics_sdk_is_told_that_there_is_no_seed(self, gate: Gate) -> None:
        with self.client(gate, "claude") as client:
            raw = client.messages.with_raw_response.create(
                model="tiny-llm", max_tokens=12, messages=[{"role": "user", "content": "Name a colour"}]
            )
            assert raw.parse().usage.output_tokens > 0
        assert raw.headers["x-detgate-guarantee"] == "none; no-seed"
        assert raw.headers["x-detgate-seed-source"] == "none"
        assert "x-detgate-seed" not in raw.headers

    def test_it_streams(self, gate: Gate) -> None:
        with self.client(gate, "claude-streams") as client:
            with client.messages.stream(
                model="tiny-llm", max_tokens=12, messages=[{"role": "user", "content": "Name a colour"}]
            ) as stream:
                said = "".join(stream.text_stream)
                whole = stream.get_final_message()
        assert whole.stop_reason in ("max_tokens", "end_turn")
        assert [said] == [part.text for part in whole.content if part.type == "text"]

    def test_it_counts_tokens(self, gate: Gate, engine: Server) -> None:
        body = {"model": "tiny-llm", "messages": [{"role": "user", "content": "Name a colour"}]}
        direct = told(ask(engine, MESSAGES + "/count_tokens", body))
        assert told(ask(gate, "/sessions/claude-counts" + MESSAGES + "/count_tokens", body)) == direct

    def test_strict_refuses_it_in_anthropics_shape(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        pool = gates.pool("policy", "vllm", urls(vllm_pair), deterministic="declared")
        with gates.gateway(tmp_path, pool, profile="strict") as strict:
            with self.client(strict, "claude") as client, pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.create(model="tiny-llm", max_tokens=12, messages=[{"role": "user", "content": "a"}])
        body: Any = refused.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"


class TestStructuredAnswers:
    """Of the shape that the SDK asked for, and still what the engine gives for the seed that the answer names."""

    def test_parse_and_stream_are_good_and_repeat(self, gate: Gate, engine: Server) -> None:
        with sdk(gate, "shape:0") as client:
            text, seed = structured.parsed(client)
        assert text == structured.straight(engine, seed)
        with sdk(gate, "shape:1") as client:
            whole, _ = structured.parsed(client)
        with sdk(gate, "shape:2", default_headers={"x-detgate-identity": "shape:1"}) as client:
            assert structured.streamed(client) == whole

    def test_samples_of_one_call(self, gate: Gate) -> None:
        said = []
        for session in ("shapes:0", "shapes:1"):
            with sdk(gate, session, default_headers={"x-detgate-identity": "shapes"}) as client:
                said.append(structured.several(client, 8))
        assert said[0] == said[1]
        assert len(set(said[0])) > 1


class TestOtherRoutes:
    def test_tokens_there_and_back(self, gate: Gate, engine: Server) -> None:
        body = {"model": "tiny-llm", "prompt": "The sky is blue"}
        tokens = told(ask(gate, "/tokenize", body))
        assert tokens == told(ask(engine, "/tokenize", body))
        back = {"model": "tiny-llm", "tokens": tokens["tokens"]}
        assert told(ask(gate, "/detokenize", back))["prompt"] == "The sky is blue"

    def test_models_of_two_replicas_are_listed_once(self, gate: Gate) -> None:
        with sdk(gate, "any") as client:
            listed = [model.id for model in client.models.list()]
        assert sorted(listed) == ["ghost", "tiny-llm"]

    def test_a_pool_that_declares_nothing_is_unverified(self, vllm_pair: list[Server], tmp_path: Path) -> None:
        pool = gates.pool("policy", "vllm", urls(vllm_pair))
        with gates.gateway(tmp_path, pool) as plain:
            assert ask(plain, CHAT, chat()).headers["x-detgate-guarantee"] == "balanced; unverified"


class TestErrors:
    def test_the_engines_404(self, gate: Gate) -> None:
        with sdk(gate, "ghost") as client, pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="ghost", messages=[{"role": "user", "content": "a"}])
        self.is_openai(refused.value)
        assert refused.value.response.headers["x-detgate-replica"].startswith("policy-")

    def test_a_model_that_no_pool_has(self, gate: Gate) -> None:
        with sdk(gate, "nobody") as client, pytest.raises(openai.NotFoundError) as refused:
            client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "a"}])
        self.is_openai(refused.value)
        assert refused.value.code == "model_not_found"

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_engines_400(self, gate: Gate, stream: bool) -> None:
        with sdk(gate, f"too-long-{stream}") as client, pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny-llm", prompt=[40] * 3000, max_tokens=1, stream=stream)
        self.is_openai(refused.value)
        assert "2048" in refused.value.message

    @pytest.mark.parametrize(("path", "body"), [("/v1/nothing", {}), ("/invocations", chat())])
    def test_routes_that_are_not_forwarded(self, gate: Gate, path: str, body: dict[str, Any]) -> None:
        answer = ask(gate, path, body)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def is_openai(self, error: openai.APIStatusError) -> None:
        assert set(error.response.json()) == {"error"}
        assert set(error.response.json()["error"]) >= {"message", "type", "param", "code"}


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    def test_it_is_cancelled_in_the_engine(self, gate: Gate, vllm_pair: list[Server], stream: bool) -> None:
        # So many samples that they outlast a look at metrics, which a busy server may answer seconds late.
        endless = chat(n=128, max_tokens=2000, ignore_eos=True, stream=stream)
        with open_request(gate, CHAT, endless):
            deadline = time.monotonic() + 20
            while not any(metric(server, RUNNING) for server in vllm_pair):
                assert time.monotonic() < deadline
            assert in_flight(gate) == 1
        assert all(wait_metric(server, RUNNING, 0, seconds=1) for server in vllm_pair)
        assert in_flight(gate) == 0


@pytest.fixture(scope="class")
def mid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A replica whose answers depend on what else is in its batch."""
    with servers.running([MID], tmp_path_factory.mktemp("vllm-mid")) as [started]:
        yield started


class TestAnEngineThatIsNotBatchInvariant:
    PROMPTS = 12
    CLIENTS = (1, 2, 4, 12)

    def pool(self, mid: Server, **settings: Any) -> dict[str, Any]:
        return gates.pool("policy", "vllm", [mid.url], deterministic="declared", api_key=ENGINE_KEY, **settings)

    def distinct(self, gate: Gate) -> list[int]:
        """How many answers each prompt has, asked with one seed, by more and more clients at once."""
        answers: list[set[str]] = [set() for _ in range(self.PROMPTS)]

        async def one(client: openai.AsyncOpenAI, places: asyncio.Semaphore, prompt: int) -> None:
            async with places:
                answer = await client.chat.completions.create(
                    model="mid-llm", messages=[{"role": "user", "content": contrast.prompt_text(prompt)}],
                    max_tokens=48, temperature=1, seed=contrast.own_seed(prompt, 0),
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
            answers[prompt].add(str(answer.choices[0].message.content))

        async def all_rounds() -> None:
            async with openai.AsyncOpenAI(base_url=gate.url + "/v1", api_key="unused", timeout=300) as client:
                for clients in self.CLIENTS:
                    places = asyncio.Semaphore(clients)
                    await asyncio.gather(*(one(client, places, prompt) for prompt in range(self.PROMPTS)))

        asyncio.run(all_rounds())
        return [len(said) for said in answers]

    def test_without_a_lane_prompts_have_several_answers(self, mid: Server, tmp_path: Path) -> None:
        with gates.gateway(tmp_path, self.pool(mid)) as gate:
            several = sum(answers > 1 for answers in self.distinct(gate))
        print(f"without a lane {several} of {self.PROMPTS} prompts have several answers")
        assert several > 2

    def test_with_a_lane_of_one_they_have_one(self, mid: Server, tmp_path: Path) -> None:
        with gates.gateway(tmp_path, self.pool(mid, lane=ONE_EACH)) as gate:
            assert self.distinct(gate) == [1] * self.PROMPTS

    def test_who_leaves_shares_no_batch_with_who_follows(self, mid: Server, tmp_path: Path) -> None:
        body = chat(model="mid-llm", max_tokens=8, seed=7, logprobs=True, top_logprobs=5, ignore_eos=True)
        endless = chat(model="mid-llm", max_tokens=1500, ignore_eos=True)
        rng = random.Random(0)
        with gates.gateway(tmp_path, self.pool(mid, lane=ONE_EACH)) as gate:
            alone = told(ask(gate, CHAT, body))["choices"]
            waits = []
            for attempt in range(24):
                leaving = open_request(gate, CHAT, endless | {"stream": attempt % 2 == 0})
                # Before, in and after its prefill.
                time.sleep(rng.choice([0.0, 0.005, 0.02, 0.05, 0.2]))
                leaving.close()
                left = time.monotonic()
                after = ask(gate, CHAT, body)
                waits.append(time.monotonic() - left)
                assert told(after)["choices"] == alone
                assert after.headers["x-detgate-guarantee"] == "balanced"
        print(f"answered {sorted(waits)[len(waits) // 2]:.2f} s after another left, {max(waits):.2f} s at most")
        assert max(waits) < 5

    def test_its_key_is_the_gateways_business(self, mid: Server, tmp_path: Path) -> None:
        with gates.gateway(tmp_path, self.pool(mid)) as gate:
            assert ask(gate, CHAT, chat(model="mid-llm"), {"authorization": "Bearer wrong"}).status_code == 200

    def test_without_its_key_it_is_down_and_the_gateway_says_why(self, mid: Server, tmp_path: Path) -> None:
        keyless = gates.pool("keyless", "vllm", [mid.url], models=["mid-llm"])
        with gates.gateway(tmp_path, self.pool(mid), keyless, up=["policy-0"]) as gate:
            refused = ask(gate, CHAT, chat(model="mid-llm"), {"x-detgate-pool": "keyless"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_replica")
            assert "/v1/models answers 401: it wants a key" in refused.json()["error"]["message"]
            assert ask(gate, CHAT, chat(model="mid-llm"), {"x-detgate-pool": "policy"}).status_code == 200

    def test_tool_calls_stream(self, mid: Server, tmp_path: Path) -> None:
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        asked: dict[str, Any] = {
            "model": "mid-llm",
            "messages": [{"role": "user", "content": "Weather?"}],
            "tools": [tool],
            "tool_choice": "required",
            "max_tokens": 200,
            "temperature": 1,
        }
        with gates.gateway(tmp_path, self.pool(mid, lane=ONE_EACH)) as gate:
            with sdk(gate, "whole") as client:
                whole = client.chat.completions.create(**asked, seed=3).choices[0].message.tool_calls
            with sdk(gate, "streamed") as client, client.chat.completions.stream(**asked, seed=3) as stream:
                streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert whole
        assert streamed
        # The engine holds its model to a call and to JSON, not to the tool's own schema.
        assert {call.function.name for call in streamed} == {"weather"}
        assert [json.loads(call.function.arguments) for call in streamed] == [
            json.loads(call.function.arguments) for call in whole
        ]


@pytest.fixture(scope="class")
def mid_reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A reward model whose scores depend on what else is in its batch."""
    with servers.running([MID_REWARD], tmp_path_factory.mktemp("vllm-mid-rm")) as [started]:
        yield started


class TestReward:
    INPUTS = tuple(f"{contrast.prompt_text(n)} It is {n}. " + "Sure. " * (n % 13) for n in range(200))

    def scores(self, place: Endpoint, clients: int, order: int = 0) -> list[float]:
        """The scores of all inputs, by so many clients that send one after the other, shuffled by `order`."""
        turns = list(range(len(self.INPUTS)))
        random.Random(order).shuffle(turns)
        scores: dict[int, float] = {}

        async def client(http: httpx.AsyncClient) -> None:
            while turns:
                number = turns.pop()
                answer = await http.post(CLASSIFY, json={"model": "mid-rm", "input": self.INPUTS[number]})
                [row] = told(answer)["data"]
                [scores[number]] = row["probs"]

        async def everyone() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=place.url, timeout=300, limits=limits) as http:
                await asyncio.gather(*(client(http) for _ in range(clients)))

        asyncio.run(everyone())
        return [scores[number] for number in range(len(self.INPUTS))]

    def test_three_runs_are_equal_to_the_last_bit(self, mid_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "vllm", [mid_reward.url], role="reward")
        health = {"interval": 0.1}
        with gates.gateway(tmp_path, pool, health=health, profile="strict") as gate:
            runs = [self.scores(gate, clients=20, order=order) for order in range(3)]
            assert runs[0] == runs[1] == runs[2]
            listed = ask(gate, CLASSIFY, {"model": "mid-rm", "input": self.INPUTS})
            rows = told(listed)["data"]
            assert [row["index"] for row in rows] == list(range(200))
            assert [row["probs"][0] for row in rows] == runs[0]
            assert listed.headers["x-detgate-guarantee"] == "strict"
            assert "foreign" not in gate.log()
        assert {record["outcome"] for record in gate.records("closed")} == {"delivered"}
        crowded = self.scores(mid_reward, clients=200)
        equal = sum(ours == theirs for ours, theirs in zip(runs[0], crowded, strict=True))
        print(f"without the gateway, 200 at once: {equal} of 200 scores are the same")

    def test_who_leaves_is_not_taken_for_a_stranger(self, mid_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "vllm", [mid_reward.url], role="reward")
        with gates.gateway(tmp_path, pool, health={"interval": 0.05}) as gate:
            rng = random.Random(0)
            for _ in range(30):
                with open_request(gate, CLASSIFY, {"model": "mid-rm", "input": "word " * 300}):
                    time.sleep(rng.uniform(0, 0.05))
                time.sleep(rng.choice([0.01, 0.2]))
            assert ask(gate, CLASSIFY, {"model": "mid-rm", "input": "a"}).headers["x-detgate-guarantee"] == "balanced"
            assert "foreign" not in gate.log()

    def test_one_request_past_the_gateway_is_found(self, mid_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "vllm", [mid_reward.url], role="reward")
        body = {"model": "mid-rm", "input": "a"}
        with gates.gateway(tmp_path, pool, health={"interval": 1.0}) as gate:
            assert ask(gate, CLASSIFY, body).headers["x-detgate-guarantee"] == "balanced"
            told(ask(mid_reward, CLASSIFY, body))
            gate.wait_logged("foreign traffic")
            assert ask(gate, CLASSIFY, body).headers["x-detgate-guarantee"] == "none; foreign-traffic"


class TestARolloutThatGoesOn:
    def test_its_segment_has_the_seed_that_is_said_and_another_run_has_the_same(
        self, vllm_pair: list[Server], engine: Server, tmp_path: Path
    ) -> None:
        pool = gates.pool("policy", "vllm", urls(vllm_pair), deterministic="declared")
        runs = []
        for run in (1, 2):
            with gates.gateway(tmp_path / str(run), pool, hash_seed=run) as gate:
                path = "/sessions/17:3" + COMPLETIONS
                whole = ask(gate, path, complete(max_tokens=6))
                so_far = "The colour is" + told(whole)["choices"][0]["text"]
                name = whole.headers["x-detgate-request-id"]
                part = ask(gate, path, complete(so_far), {"x-detgate-resume": name})
                seed = seed_of(part)
                assert seed == seeds.segment(seed_of(whole), 0, 1, positional=False)
                said = told(part)["choices"][0]["text"]
                assert said == text(engine, COMPLETIONS, complete(so_far, seed=seed))
                runs.append((so_far, said, seed))
        assert runs[0] == runs[1]


class TestSalts:
    def test_warm_scores_are_cold_ones_where_each_request_has_a_salt(self, tmp_path: Path) -> None:
        inputs = ["The same beginning of every text, long enough for a block. " * 24 + f"{n}" for n in range(60)]
        with servers.running(
            [Spec("vllm", "mid-rm", ("--runner", "pooling", "--enable-prefix-caching"))], tmp_path
        ) as [rm]:
            told_of = {}
            for isolate in ("request", "off"):
                pool = gates.pool("reward", "vllm", [rm.url], role="reward", isolate_cache=isolate)
                with gates.gateway(tmp_path / isolate, pool) as gate:
                    runs = []
                    for order in (inputs, inputs[::-1]):
                        scores = {
                            each: told(ask(gate, CLASSIFY, {"model": "mid-rm", "input": each}))["data"][0]["probs"][0]
                            for each in order
                        }
                        runs.append([scores[each] for each in inputs])
                    equal = sum(a == b for a, b in zip(*runs, strict=True))
                    told_of[isolate] = equal
                    hits = metric(rm, "vllm:prefix_cache_hits_total")
                    if isolate == "request":
                        assert equal == len(inputs)
                        assert hits == 0
                    else:
                        assert hits > 0
            print(f"equal scores of {len(inputs)} in two orders: {told_of}")


class TestPriority:
    def test_an_engine_that_goes_by_it_is_told_and_serves_all(self, tmp_path: Path) -> None:
        spec = Spec(
            "vllm",
            options=("--scheduling-policy", "priority", "--max-num-seqs", "4"),
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
        with servers.running([spec], tmp_path) as [server]:
            pool = gates.pool("policy", "vllm", [server.url], priority="header", deterministic="declared")
            with gates.gateway(tmp_path / "gate", pool) as gate:
                assert "priority-unused" not in httpx.get(gate.url + "/determinism").text
                alone = {n: told(ask(gate, f"/sessions/{n}" + CHAT, chat(seed=n + 1))) for n in range(12)}

                def one(number: int) -> httpx.Response:
                    headers = {"x-detgate-priority": str(number)}
                    return ask(gate, f"/sessions/p{number}" + CHAT, chat(seed=number + 1), headers)

                with ThreadPoolExecutor(12) as pool_:
                    crowded = list(pool_.map(one, range(12)))
                assert [told(each)["choices"] == alone[n]["choices"] for n, each in enumerate(crowded)] == [True] * 12


class TestATrainer:
    def test_what_it_gets_of_an_episode_are_the_engines_own_tokens(
        self, vllm_pair: list[Server], tmp_path: Path
    ) -> None:
        pool = gates.pool("policy", "vllm", urls(vllm_pair), deterministic="declared")
        ledger = {"path": str(tmp_path / "ledger"), "bodies": True}
        with gates.gateway(tmp_path, pool, ledger=ledger) as gate:
            answers, tensors = trainer.episode(gate, stream=False)
            bodies = trainer.whole(answers)
            trainer.check(
                [each["prompt_token_ids"] for each in bodies],
                [each["choices"][0]["token_ids"] for each in bodies],
                tensors,
            )
            _, streamed = trainer.episode(gate, stream=True)
            assert [len(each["input_ids"]) for each in streamed] == [len(each["logprobs"]) for each in streamed]
            assert [each["rewards"] for each in streamed] == [[0.5], [1.0]]


class TestTheMatrix:
    """docs/engines.md says by route what holds, as found before the simulated engine: the real one agrees."""

    # Routes that the usual servers do not have, and a server with the option that brings each.
    APART: ClassVar = {
        "/inference/v1/generate": ("generate", Spec("vllm", options=("--enable-scale-out",))),
        "/v1/embeddings": ("reward", Spec("vllm", options=("--runner", "pooling", "--no-enable-prefix-caching"))),
    }

    def test_real_and_simulated_agree(self, vllm_pair: list[Server], vllm_reward: Server, tmp_path: Path) -> None:
        urls = {"generate": vllm_pair[0].url, "reward": vllm_reward.url}
        found = gates.matrix_of(tmp_path / "usual", "vllm", urls, {"generate": "tiny-llm", "reward": "tiny-rm"})
        expected = asyncio.run(matrix.simulated("vllm"))
        different = {path: said for (path, _), said in found.items() if said != expected[path, False]}
        print(different)
        assert set(different) == set(self.APART)
        with servers.running([spec for _, spec in self.APART.values()], tmp_path) as started:
            for (path, (role, _)), server in zip(self.APART.items(), started, strict=True):
                folder = tmp_path / path.replace("/", "-")
                found |= gates.matrix_of(folder, "vllm", {role: server.url}, {role: "tiny-llm"}, only=[path])
        assert found == expected
