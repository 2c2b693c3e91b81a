"""The gateway before real SGLang servers, asked by the real SDKs: `make test-sglang`, not `make test`."""

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    chunks,
    complete,
    open_request,
    text,
    told,
    wait_metric,
)
from tests.engines.gates import Gate
from tests.engines.servers import Server, Spec

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
CLASSIFY = "/classify"
ABORT = "/abort_request"
RUNNING = "sglang:num_running_reqs"
PROMPT = "The colour is"
# On a CPU its attention backend is none that its deterministic mode covers.
DOUBTED = "balanced; engine-doubted"

LOOSE = Spec("sglang")
CACHING_REWARD = Spec("sglang", "tiny-rm", ("--is-embedding",))


@pytest.fixture(scope="module")
def gate(sglang: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The default profile before one replica in deterministic mode."""
    with gates.gateway(tmp_path_factory.mktemp("gate"), gates.pool("policy", "sglang", [sglang.url])) as started:
        yield started


def native(text: Any = PROMPT, **sampling: Any) -> dict[str, Any]:
    """A request of 12 tokens to SGLang's own generate route, at temperature 1."""
    return {"text": text, "sampling_params": {"max_new_tokens": 12, "temperature": 1} | sampling}


def generated(server: Server, seed: int, prompt: str = PROMPT) -> str:
    """What the engine itself generates with this seed."""
    said: str = told(ask(server, GENERATE, native(prompt, sampling_seed=seed)))["text"]
    return said


def sdk(gate: Gate, session: str) -> OpenAI:
    """The SDK for one session, without retries of its own."""
    return OpenAI(base_url=f"{gate.url}/sessions/{session}/v1", api_key="unused", max_retries=0)


def seed_of(answer: Any) -> int:
    """The seed that the gateway gave a request."""
    return int(answer.headers["x-detgate-seed"])


@pytest.mark.smoke
class TestSeeds:
    """Without a seed SGLang runs everything at 42, and all samples of one call at one seed."""

    def eight_times(self, gate: Gate) -> set[tuple[int, str]]:
        """Seed and answer of one prompt sent eight times at once."""
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(gate, CHAT, chat()), range(8)))
        return {(seed_of(answer), told(answer)["choices"][0]["message"]["content"]) for answer in answers}

    def test_one_prompt_eight_times(self, sglang: Server, tmp_path: Path) -> None:
        pool = gates.pool("policy", "sglang", [sglang.url])
        runs = []
        for run in (1, 2):
            with gates.gateway(tmp_path / str(run), pool, hash_seed=run) as gate:
                runs.append(self.eight_times(gate))
        assert runs[0] == runs[1]
        assert len({seed for seed, _ in runs[0]}) == 8
        assert len({said for _, said in runs[0]}) == 8

    @pytest.mark.parametrize("stream", [False, True])
    def test_n_of_eight(self, gate: Gate, sglang: Server, stream: bool) -> None:
        with sdk(gate, f"eight-{stream}") as client:
            raw = client.chat.completions.with_raw_response.create(
                model="tiny-llm",
                messages=[{"role": "user", "content": "Name a colour"}],
                max_tokens=12,
                temperature=1,
                n=8,
                stream=stream,
            )
            parsed: Any = raw.parse()
            said = [""] * 8
            for part in parsed if stream else [parsed]:
                for choice in part.choices:
                    said[choice.index] += (choice.delta if stream else choice.message).content or ""
        assert said == [text(sglang, CHAT, chat(seed=seed)) for seed in seeds.samples(seed_of(raw), 8)]
        assert len(set(said)) == 8
        assert raw.headers["x-detgate-guarantee"] == DOUBTED

    def test_a_list_of_equal_prompts(self, gate: Gate, sglang: Server) -> None:
        answer = ask(gate, "/sessions/list" + COMPLETIONS, complete([PROMPT] * 2, n=2))
        said = [choice["text"] for choice in told(answer)["choices"]]
        alone = [text(sglang, COMPLETIONS, complete(seed=seed)) for seed in seeds.samples(seed_of(answer), 4)]
        assert said == alone
        assert len(set(said)) == 4

    def test_a_seed_of_the_client_goes_where_it_is_read(self, gate: Gate, sglang: Server) -> None:
        misplaced = ask(gate, "/sessions/misplaced" + GENERATE, native() | {"seed": 7})
        assert told(misplaced)["text"] == generated(sglang, 7)
        assert misplaced.headers["x-detgate-seed-source"] == "client"

    @pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
    def test_routes_without_a_seed_say_so(self, gate: Gate, path: str) -> None:
        body = {"model": "tiny-llm", "input": "a", "max_output_tokens": 4} if path == RESPONSES else chat()
        assert ask(gate, path, body).headers["x-detgate-guarantee"] == "none; no-seed; engine-doubted"

    @pytest.mark.parametrize("seed", [-1, 2**63, "12", True, 1.5])
    @pytest.mark.parametrize("path", [CHAT, GENERATE])
    def test_malformed_ones_reach_no_engine(self, gate: Gate, path: str, seed: Any) -> None:
        body = chat(seed=seed) if path == CHAT else native(sampling_seed=seed)
        answer = ask(gate, path, body)
        assert answer.status_code == 400
        assert "x-detgate-replica" not in answer.headers


class TestGenerate:
    def test_a_list_of_prompts_and_samples(self, gate: Gate, sglang: Server) -> None:
        answer = ask(gate, "/sessions/lists" + GENERATE, native([PROMPT, "Water is"], n=2))
        said = [row["text"] for row in told(answer)]
        own = seeds.samples(seed_of(answer), 4)
        prompts = [PROMPT, PROMPT, "Water is", "Water is"]
        assert said == [generated(sglang, seed, prompt) for seed, prompt in zip(own, prompts, strict=True)]

    def test_a_list_of_parameters(self, gate: Gate, sglang: Server) -> None:
        params = [native()["sampling_params"], native(max_new_tokens=3)["sampling_params"]]
        answer = ask(gate, "/sessions/params" + GENERATE, {"text": [PROMPT] * 2, "sampling_params": params})
        rows = told(answer)
        first, second = seeds.samples(seed_of(answer), 2)
        assert rows[0]["text"] == generated(sglang, first)
        assert generated(sglang, second).startswith(rows[1]["text"])
        assert rows[1]["meta_info"]["completion_tokens"] == 3

    def test_a_list_of_one_is_answered_by_a_list(self, gate: Gate, sglang: Server) -> None:
        answer = ask(gate, "/sessions/list-of-one" + GENERATE, native([PROMPT]))
        [row] = told(answer)
        assert row["text"] == generated(sglang, seed_of(answer))

    def test_a_list_streamed(self, gate: Gate, sglang: Server) -> None:
        answer = ask(gate, "/sessions/stream" + GENERATE, native([PROMPT, "Water is"]) | {"stream": True})
        so_far = {part["index"]: part["text"] for part in chunks(answer.text)}
        first, second = seeds.samples(seed_of(answer), 2)
        assert so_far == {0: generated(sglang, first), 1: generated(sglang, second, "Water is")}


class TestWhatWouldKillIt:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, chat(min_p=0.1)),
            (COMPLETIONS, complete(min_p=0.1)),
            (GENERATE, native(min_p=0.1)),
            (GENERATE, native([PROMPT] * 2) | {"sampling_params": [{"min_p": 0}, {"min_p": 0.1}]}),
        ],
    )
    def test_min_p(self, gate: Gate, sglang: Server, path: str, body: dict[str, Any]) -> None:
        answer = ask(gate, path, body)
        assert answer.status_code == 400
        assert "min_p" in answer.text
        assert sglang.process.poll() is None
        assert ask(gate, CHAT, chat(min_p=0)).status_code == 200

    def test_generating_on_a_reward_model(self, sglang_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("policy", "sglang", [sglang_reward.url], models=["tiny-rm"])
        with gates.gateway(tmp_path, pool) as gate:
            answer = ask(gate, CHAT, chat(model="tiny-rm"))
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "not_a_generation_model"
        assert sglang_reward.process.poll() is None


class TestAborts:
    def endless(self, rid: str, tokens: int) -> dict[str, Any]:
        return native(max_new_tokens=tokens, ignore_eos=True) | {"rid": rid}

    def test_the_clients_rid_reaches_that_one_alone(self, gate: Gate, sglang: Server) -> None:
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(ask, gate, GENERATE, self.endless("s1", 1500))
            twelve = pool.submit(ask, gate, GENERATE, self.endless("s12", 400))
            assert wait_metric(sglang, RUNNING, 2, seconds=20)
            assert ask(gate, ABORT, {"rid": "s1"}).status_code == 200
            aborted, other = one.result(), twelve.result()
        assert told(other)["meta_info"]["finish_reason"]["type"] == "length"
        assert told(other)["meta_info"]["completion_tokens"] == 400
        assert aborted.status_code != 200 or told(aborted)["meta_info"]["finish_reason"]["type"] == "abort"

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_leaves_is_cancelled_in_the_engine(self, gate: Gate, sglang: Server, stream: bool) -> None:
        with open_request(gate, CHAT, chat(max_tokens=1500, ignore_eos=True, stream=stream)):
            assert wait_metric(sglang, RUNNING, 1, seconds=20)
        assert wait_metric(sglang, RUNNING, 0, seconds=4)
        assert [row["in_flight"] for row in gate.replicas("/readyz").values()] == [0]


class TestLanes:
    def test_who_leaves_is_out_of_the_engine_before_the_next_begins(self, sglang: Server, tmp_path: Path) -> None:
        """Although the engine sees a closed connection only after two seconds."""
        rng = random.Random(0)
        most, watching = 0, True

        def watch() -> None:
            nonlocal most
            while watching:
                loads = httpx.get(sglang.url + "/v1/loads", timeout=5).json()["loads"]
                most = max(most, sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads))

        pool = gates.pool("policy", "sglang", [sglang.url], lane={"scope": "replica", "limit": 1})
        waits = []
        with gates.gateway(tmp_path, pool) as gate, ThreadPoolExecutor(1) as watcher:
            done = watcher.submit(watch)
            try:
                for attempt in range(12):
                    endless = native(max_new_tokens=1500, ignore_eos=True) | {"stream": attempt % 2 == 0}
                    leaving = open_request(gate, GENERATE, endless)
                    time.sleep(rng.choice([0.005, 0.02, 0.05, 0.2]))
                    leaving.close()
                    left = time.monotonic()
                    after = ask(gate, GENERATE, native(max_new_tokens=30, ignore_eos=True))
                    waits.append(time.monotonic() - left)
                    assert told(after)["meta_info"]["completion_tokens"] == 30
                    assert after.headers["x-detgate-guarantee"] == DOUBTED
            finally:
                watching = False
            done.result()
        print(f"answered {sorted(waits)[len(waits) // 2]:.2f} s after another left, {max(waits):.2f} s at most")
        assert most == 1
        assert max(waits) < 2


class TestShapes:
    def test_usage_of_several_samples_counts_the_prompt_once(self, gate: Gate, sglang: Server) -> None:
        several = chat(n=2, ignore_eos=True)
        usage = told(ask(gate, "/sessions/usage" + CHAT, several))["usage"]
        direct = told(ask(sglang, CHAT, several))["usage"]
        counted = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [usage[name] for name in counted] == [direct[name] for name in counted]

    def test_anthropics_sdk(self, gate: Gate) -> None:
        base_url = f"{gate.url}/sessions/claude"
        with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0) as client:
            with client.messages.stream(
                model="tiny-llm", max_tokens=8, messages=[{"role": "user", "content": "a"}]
            ) as stream:
                said = "".join(stream.text_stream)
                whole = stream.get_final_message()
        assert [said] == [part.text for part in whole.content if part.type == "text"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_engines_400_has_openais_shape(self, gate: Gate, stream: bool) -> None:
        with sdk(gate, f"bad-{stream}") as client, pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="tiny-llm", messages=[{"role": "user", "content": "a"}], temperature=-1, stream=stream
            )
        assert set(refused.value.response.json()["error"]) == {"message", "type", "param", "code"}
        assert "temperature" in refused.value.message

    def test_tokens_and_models(self, gate: Gate, sglang: Server) -> None:
        body = {"model": "tiny-llm", "prompt": PROMPT}
        assert told(ask(gate, "/tokenize", body)) == told(ask(sglang, "/tokenize", body))
        with sdk(gate, "any") as client:
            assert [model.id for model in client.models.list()] == ["tiny-llm"]


class TestTwoRuns:
    """A rollout of 256 calls, 32 in flight, by two strict gateway processes with different PYTHONHASHSEED."""

    def test_decisions_repeat_and_no_samples_are_clones(self, sglang: Server, tmp_path: Path) -> None:
        pool = gates.pool("policy", "sglang", [sglang.url])
        runs = []
        for run in (1, 2):
            with gates.gateway(tmp_path / str(run), pool, hash_seed=run, profile="strict") as gate:
                path = "/sessions/{prompt}:{sample}/v1"
                runs.append(asyncio.run(contrast.rollout([gate.url + path], "tiny-llm")))
        figures = contrast.compare(*runs)
        print(figures)
        assert figures["different_decisions"] == dict.fromkeys(contrast.DECISIONS, 0)
        assert figures["different_texts"] == 0
        assert figures["distinct_samples"] == {4: 64}


class TestStructuredAnswers:
    """Of the shape that the SDK asked for, and still what the engine gives for the seed that the answer names."""

    # Its answers tell versions of the weights as a list in `metadata`, which the SDK's types do not know.
    @pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
    def test_parse_and_streams_and_samples_are_good_and_repeat(self, tmp_path: Path) -> None:
        spec = Spec("sglang", options=("--grammar-backend", "xgrammar"), deterministic=True)
        with servers.running([spec], tmp_path) as [server]:
            said = []
            for run in (1, 2):
                pool = gates.pool("policy", "sglang", [server.url])
                with gates.gateway(tmp_path / str(run), pool, hash_seed=run) as gate:
                    with sdk(gate, "shape:0") as client:
                        text, seed = structured.parsed(client)
                    assert text == structured.straight(server, seed)
                    with sdk(gate, "shape:1") as client:
                        streamed = structured.streamed(client)
                    with sdk(gate, "shape:2") as client:
                        several = structured.several(client, 4)
                    assert len(set(several)) > 1
                    said.append([text, streamed, *several])
            assert said[0] == said[1]


class TestOutOfDeterministicMode:
    def test_it_is_said_and_refused_in_strict(self, tmp_path: Path) -> None:
        with servers.running([LOOSE], tmp_path) as [loose]:
            pool = gates.pool("policy", "sglang", [loose.url])
            with gates.gateway(tmp_path / "balanced", pool) as gate:
                answer = ask(gate, CHAT, chat())
                assert answer.headers["x-detgate-guarantee"] == "none; engine-not-deterministic"
                assert told(answer)["choices"]
                assert ask(gate, CHAT, chat(min_p=0.1)).status_code == 200
            with gates.gateway(tmp_path / "strict", pool, profile="strict") as gate:
                refused = ask(gate, CHAT, chat())
                assert refused.status_code == 503
                assert "deterministic mode" in refused.json()["error"]["message"]
                assert httpx.get(gate.url + "/readyz").status_code == 503


class TestReward:
    INPUTS = tuple(f"{contrast.prompt_text(n)} It is {n}. " + "Sure. " * (n % 13) for n in range(100))

    def scores(self, place: Endpoint, order: int) -> list[float]:
        """The scores of all inputs by ten clients, shuffled by `order`."""
        turns = list(range(len(self.INPUTS)))
        random.Random(order).shuffle(turns)
        scores: dict[int, float] = {}

        async def client(http: httpx.AsyncClient) -> None:
            while turns:
                number = turns.pop()
                answer = told(await http.post(CLASSIFY, json={"text": self.INPUTS[number]}))
                [scores[number]] = answer["embedding"]

        async def everyone() -> None:
            async with httpx.AsyncClient(base_url=place.url, timeout=300) as http:
                await asyncio.gather(*(client(http) for _ in range(10)))

        asyncio.run(everyone())
        return [scores[number] for number in range(len(self.INPUTS))]

    def test_runs_are_equal_to_the_last_bit(self, sglang_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "sglang", [sglang_reward.url], role="reward")
        with gates.gateway(tmp_path, pool, profile="strict", health={"interval": 0.1}) as gate:
            first, second = (self.scores(gate, order) for order in range(2))
            assert first == second
            listed = ask(gate, CLASSIFY, {"text": list(self.INPUTS)})
            assert [row["embedding"][0] for row in told(listed)] == first
            assert listed.headers["x-detgate-guarantee"] == "strict"
            assert "foreign" not in gate.log()

    def test_who_asks_past_the_gateway_is_found(self, sglang_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "sglang", [sglang_reward.url], role="reward")
        with gates.gateway(tmp_path, pool, health={"interval": 1.0}) as gate:
            assert ask(gate, CLASSIFY, {"text": "a"}).headers["x-detgate-guarantee"] == "balanced"
            deadline = time.monotonic() + 20
            while "foreign traffic" not in gate.log():
                assert time.monotonic() < deadline
                told(ask(sglang_reward, CLASSIFY, {"text": "a"}))
                time.sleep(0.1)
            assert ask(gate, CLASSIFY, {"text": "a"}).headers["x-detgate-guarantee"] == "none; foreign-traffic"

    def test_who_leaves_is_not_taken_for_a_stranger(self, sglang_reward: Server, tmp_path: Path) -> None:
        pool = gates.pool("reward", "sglang", [sglang_reward.url], role="reward")
        rng = random.Random(0)
        with gates.gateway(tmp_path, pool, health={"interval": 0.05}) as gate:
            for _ in range(30):
                with open_request(gate, CLASSIFY, {"text": "word " * 300}):
                    time.sleep(rng.uniform(0, 0.05))
                time.sleep(rng.choice([0.01, 0.2]))
            assert ask(gate, CLASSIFY, {"text": "a"}).headers["x-detgate-guarantee"] == "balanced"
            assert "foreign" not in gate.log()

    def test_a_radix_cache_is_found_out(self, tmp_path: Path) -> None:
        with servers.running([CACHING_REWARD], tmp_path) as [caching]:
            pool = gates.pool("reward", "sglang", [caching.url], role="reward")
            with gates.gateway(tmp_path / "balanced", pool) as gate:
                answer = ask(gate, CLASSIFY, {"text": "Water"})
                assert answer.headers["x-detgate-guarantee"] == "none; reward-batched"
            with gates.gateway(tmp_path / "strict", pool, profile="strict") as gate:
                assert ask(gate, CLASSIFY, {"text": "Water"}).status_code == 503


class TestARolloutThatGoesOn:
    """Broken off after 5 tokens and again after 9: the tokens are those of the whole one."""

    def test_it_continues_exactly(self, gate: Gate) -> None:
        prompt = [11, 12, 13, 14]
        path = "/sessions/goes-on" + GENERATE

        def sampled(tokens: list[int], length: int, resumes: str | None = None) -> httpx.Response:
            body = {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": length, "temperature": 1, "ignore_eos": True},
            }
            return ask(gate, path, body, {"x-detgate-resume": resumes} if resumes else None)

        whole = sampled(prompt, 16)
        drawn = told(whole)["output_ids"]
        said = drawn[:5]
        for length in (4, 7):
            part = sampled(prompt + said, length, whole.headers["x-detgate-request-id"])
            said = said + told(part)["output_ids"]
            assert part.headers["x-detgate-seed"] == whole.headers["x-detgate-seed"]
        assert said == drawn
        assert part.headers["x-detgate-segment"] == "2"


class TestSalts:
    def test_no_prompt_is_found_in_the_cache(self, sglang: Server, tmp_path: Path) -> None:
        for isolate, warm in (("off", True), ("request", False)):
            pool = gates.pool("policy", "sglang", [sglang.url], isolate_cache=isolate)
            with gates.gateway(tmp_path / isolate, pool) as gate:
                metas = [told(ask(gate, GENERATE, native("word " * 50)))["meta_info"] for _ in range(2)]
                assert (metas[1]["cached_tokens"] > 10) is warm, (isolate, metas)


class TestPriority:
    def test_an_engine_that_goes_by_it_is_told_and_serves_all(self, tmp_path: Path) -> None:
        options = ("--enable-priority-scheduling", "--max-running-requests", "2")
        with servers.running([Spec("sglang", options=options, deterministic=True)], tmp_path) as [server]:
            pool = gates.pool("policy", "sglang", [server.url], priority="index")
            with gates.gateway(tmp_path / "gate", pool) as gate:
                assert "priority-unused" not in httpx.get(gate.url + "/determinism").text
                with ThreadPoolExecutor(8) as clients:
                    answers = list(
                        clients.map(lambda n: ask(gate, f"/sessions/{n}" + GENERATE, native(sampling_seed=n)), range(8))
                    )
                assert [told(each)["text"] for each in answers] == [generated(server, n) for n in range(8)]


class TestATrainer:
    def test_what_it_gets_of_an_episode_are_the_engines_own_tokens(self, sglang: Server, tmp_path: Path) -> None:
        ledger = {"path": str(tmp_path / "ledger"), "bodies": True}
        with gates.gateway(tmp_path, gates.pool("policy", "sglang", [sglang.url]), ledger=ledger) as gate:
            answers, tensors = trainer.episode(gate, stream=False)
            choices = [each["choices"][0] for each in trainer.whole(answers)]
            trainer.check(
                [each["prompt_token_ids"] for each in choices],
                [each["response_token_ids"] for each in choices],
                tensors,
            )


class TestTheMatrix:
    """docs/engines.md says by route what holds, as found before the simulated engine: the real one agrees."""

    def test_real_and_simulated_agree(self, sglang: Server, sglang_reward: Server, tmp_path: Path) -> None:
        urls = {"generate": sglang.url, "reward": sglang_reward.url}
        found = gates.matrix_of(tmp_path, "sglang", urls, {"generate": "tiny-llm", "reward": "tiny-rm"})
        assert found == asyncio.run(matrix.simulated("sglang"))
