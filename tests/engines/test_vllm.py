"""What the gateway leans on in vLLM, asked of real servers: `make test-vllm`, not `make test`."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.engines import contrast
from tests.engines.asking import (
    CHAT,
    COMPLETIONS,
    ask,
    at_once,
    chat,
    chunks,
    complete,
    data_lines,
    metric,
    open_request,
    text,
    texts,
    told,
    wait_metric,
)
from tests.engines.servers import Server

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
RUNNING = "vllm:num_requests_running"


@pytest.fixture
def vllm(vllm_pair: list[Server]) -> Server:
    """One of the two replicas."""
    return vllm_pair[0]


def respond(**more: Any) -> dict[str, Any]:
    """A request to the responses route."""
    return {"model": "tiny-llm", "input": "Name a colour", "max_output_tokens": 12, "temperature": 1} | more


def response_text(server: Server, **more: Any) -> str:
    """The text that the responses route gives."""
    said: str = told(ask(server, RESPONSES, respond(**more)))["output"][0]["content"][0]["text"]
    return said


class TestSeeds:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, complete())])
    def test_a_seed_gives_one_answer_on_every_replica(
        self, vllm_pair: list[Server], path: str, body: dict[str, Any]
    ) -> None:
        one, other = vllm_pair
        assert text(one, path, body | {"seed": 7}) == text(other, path, body | {"seed": 7})
        assert text(one, path, body | {"seed": 7}) != text(one, path, body | {"seed": 8})

    def test_responses_take_a_seed(self, vllm_pair: list[Server]) -> None:
        one, other = vllm_pair
        assert response_text(one, seed=7) == response_text(other, seed=7)
        assert response_text(one, seed=7) != response_text(one, seed=8)

    def test_messages_ignore_a_seed(self, vllm: Server) -> None:
        body = chat(seed=7)
        answers = [told(ask(vllm, MESSAGES, body))["content"][0]["text"] for _ in range(2)]
        assert answers[0] != answers[1]

    @pytest.mark.parametrize("more", [{}, {"seed": None}, {"seed": -1}, {"sampling_seed": 7}])
    def test_without_a_seed_each_answer_is_new(self, vllm: Server, more: dict[str, Any]) -> None:
        assert text(vllm, CHAT, chat(**more)) != text(vllm, CHAT, chat(**more))

    @pytest.mark.parametrize(("seed", "same"), [("7", 7), (7.0, 7), (True, 1), (5 + 2**32, 5), (2**63 - 1, 2**32 - 1)])
    def test_seeds_that_are_taken_for_another(self, vllm: Server, seed: Any, same: int) -> None:
        assert text(vllm, CHAT, chat(seed=seed)) == text(vllm, CHAT, chat(seed=same))

    @pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, "seven", [7]])
    def test_seeds_that_are_refused(self, vllm: Server, seed: Any) -> None:
        answer = ask(vllm, CHAT, chat(seed=seed))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "body.seed"

    def test_the_last_of_two_seeds_wins(self, vllm: Server) -> None:
        twice = json.dumps(chat(seed=7))[:-1] + ', "seed": 8}'
        said = told(ask(vllm, CHAT, twice))["choices"][0]["message"]["content"]
        assert said == text(vllm, CHAT, chat(seed=8))

    def test_a_stream_says_the_same(self, vllm: Server) -> None:
        body = chat(seed=7, stream=True)
        parts = chunks(ask(vllm, CHAT, body).text)
        streamed = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        assert streamed == text(vllm, CHAT, chat(seed=7))

    def test_temperature_zero_needs_no_seed(self, vllm_pair: list[Server]) -> None:
        one, other = vllm_pair
        assert text(one, CHAT, chat(temperature=0)) == text(other, CHAT, chat(temperature=0, seed=7))


class TestSamples:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, complete())])
    def test_choice_i_is_what_seed_plus_i_gives(self, vllm: Server, path: str, body: dict[str, Any]) -> None:
        together = texts(vllm, path, body | {"n": 4, "seed": 100})
        assert together == [text(vllm, path, body | {"seed": 100 + i}) for i in range(4)]
        assert len(set(together)) == 4

    def test_equal_prompts_of_a_list_are_clones(self, vllm: Server) -> None:
        first, second = texts(vllm, COMPLETIONS, complete(["The colour is"] * 2, seed=7))
        assert first == second == text(vllm, COMPLETIONS, complete(seed=7))

    def test_a_list_with_n_repeats_its_seeds_for_each_prompt(self, vllm: Server) -> None:
        samples = texts(vllm, COMPLETIONS, complete(["The colour is"] * 2, seed=7, n=2))
        assert samples[:2] == samples[2:]
        assert samples[0] != samples[1]

    def test_the_batch_route_clones_too(self, vllm: Server) -> None:
        talks = [chat()["messages"]] * 2
        first, second = texts(vllm, CHAT + "/batch", chat(messages=talks, seed=7))
        assert first == second == text(vllm, CHAT, chat(seed=7))

    def test_several_greedy_samples_are_refused(self, vllm: Server) -> None:
        assert ask(vllm, CHAT, chat(n=2, temperature=0)).status_code == 400

    def test_n_of_one_is_no_other_request(self, vllm: Server) -> None:
        assert text(vllm, CHAT, chat(n=1, seed=7)) == text(vllm, CHAT, chat(seed=7))


class TestIds:
    @pytest.mark.parametrize(
        ("path", "body", "prefix"), [(CHAT, chat(), "chatcmpl-"), (COMPLETIONS, complete(), "cmpl-")]
    )
    def test_the_header_names_the_answer(self, vllm: Server, path: str, body: dict[str, Any], prefix: str) -> None:
        answer = ask(vllm, path, body, {"x-request-id": "17:3:0.0!"})
        assert told(answer)["id"] == prefix + "17:3:0.0!"
        assert answer.headers["x-request-id"] == "17:3:0.0!"

    def test_responses_have_ids_of_their_own(self, vllm: Server) -> None:
        answer = ask(vllm, RESPONSES, respond(), {"x-request-id": "abc"})
        assert "abc" not in told(answer)["id"]

    def test_an_id_may_be_in_use(self, vllm: Server) -> None:
        bodies = [chat(seed=seed, request_id="twice", max_tokens=64) for seed in (1, 2)]
        assert [answer.status_code for answer in at_once(vllm, CHAT, bodies)] == [200, 200]


class TestStreams:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, complete())])
    def test_usage_comes_last_and_without_choices(self, vllm: Server, path: str, body: dict[str, Any]) -> None:
        asked = body | {"n": 2, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
        parts = chunks(ask(vllm, path, asked).text)
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["completion_tokens"] == 24
        assert {choice["index"] for part in parts for choice in part["choices"]} == {0, 1}
        assert len({part["id"] for part in parts}) == 1

    @pytest.mark.parametrize(
        ("path", "body", "last"),
        [(RESPONSES, respond(), "response.completed"), (MESSAGES, chat(), "message_stop")],
    )
    def test_named_events_end_without_done(self, vllm: Server, path: str, body: dict[str, Any], last: str) -> None:
        lines = data_lines(ask(vllm, path, body | {"stream": True}).text)
        assert json.loads(lines[-1])["type"] == last

    def test_closing_the_connection_cancels(self, vllm: Server) -> None:
        # So many samples that they outlast a look at metrics, which a busy server may answer seconds late.
        endless = chat(n=32, max_tokens=2000, ignore_eos=True, seed=1)
        with open_request(vllm, CHAT, endless):
            assert wait_metric(vllm, RUNNING, 32, seconds=20)
        assert wait_metric(vllm, RUNNING, 0, seconds=1)

    def test_an_idle_connection_is_closed_after_five_seconds(self, vllm: Server) -> None:
        with open_request(vllm, CHAT, chat(max_tokens=1)) as connection:
            connection.recv(65536)
            answered = time.monotonic()
            while connection.recv(65536):
                pass
            assert 4.5 < time.monotonic() - answered < 6.5


class TestErrors:
    def test_openai_shape(self, vllm: Server) -> None:
        answer = ask(vllm, CHAT, chat(model="nobody"))
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["code"] == 404

    def test_messages_have_two_shapes(self, vllm: Server) -> None:
        unknown = ask(vllm, MESSAGES, chat(model="nobody"))
        assert unknown.status_code == 404
        assert unknown.json()["type"] == "error"
        malformed = ask(vllm, MESSAGES, chat(messages=1))
        assert malformed.status_code == 400
        assert "type" not in malformed.json()

    def test_routes_and_methods_answer_in_the_frameworks_shape(self, vllm: Server) -> None:
        assert ask(vllm, "/v1/nothing", {}).json() == {"detail": "Not Found"}
        assert httpx.get(vllm.url + CHAT).json() == {"detail": "Method Not Allowed"}

    def test_a_bad_stream_is_an_error_with_a_status(self, vllm: Server) -> None:
        answer = ask(vllm, CHAT, chat(seed=2**63, stream=True))
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"

    def test_a_model_may_be_missing_and_fields_unknown(self, vllm: Server) -> None:
        body = chat(seed=7, what={"a": None})
        del body["model"]
        assert text(vllm, CHAT, body) == text(vllm, CHAT, chat(seed=7))

    def test_invocations_generate(self, vllm: Server) -> None:
        assert text(vllm, "/invocations", chat(seed=7)) == text(vllm, CHAT, chat(seed=7))


class TestWhatItIs:
    def test_health_is_quick_and_runs_nothing(self, vllm: Server) -> None:
        before = metric(vllm, "vllm:generation_tokens_total")
        assert httpx.get(vllm.url + "/health").status_code == 200
        assert metric(vllm, "vllm:generation_tokens_total") == before

    def test_version(self, vllm: Server) -> None:
        assert httpx.get(vllm.url + "/version").json() == {"version": "0.32.0"}

    def test_models(self, vllm: Server) -> None:
        [model] = httpx.get(vllm.url + "/v1/models").json()["data"]
        assert (model["id"], model["owned_by"]) == ("tiny-llm", "vllm")

    def test_equal_replicas_have_one_fingerprint(self, vllm_pair: list[Server]) -> None:
        prints = {told(ask(server, CHAT, chat()))["system_fingerprint"] for server in vllm_pair}
        assert len(prints) == 1
        assert prints.pop().startswith("vllm-0.32.0-")

    def test_metrics_tell_of_the_prefix_cache(self, vllm: Server) -> None:
        lines = httpx.get(vllm.url + "/metrics").text.splitlines()
        [info] = [line for line in lines if line.startswith("vllm:cache_config_info{")]
        assert 'enable_prefix_caching="True"' in info

    def test_server_info_needs_the_development_mode(self, vllm: Server) -> None:
        assert httpx.get(vllm.url + "/server_info?config_format=json").status_code == 404


class TestReward:
    def classify(self, server: Server, **more: Any) -> list[float]:
        answer = told(ask(server, "/classify", {"model": "tiny-rm"} | more))
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        return [row["probs"][0] for row in rows]

    def test_a_list_is_answered_in_its_order(self, vllm_reward: Server) -> None:
        inputs = ["The sky is blue", "Water", "1 + 1 = 2"]
        alone = [self.classify(vllm_reward, input=text)[0] for text in inputs]
        assert self.classify(vllm_reward, input=inputs) == pytest.approx(alone)
        assert len(set(alone)) == 3

    def test_one_at_a_time_is_equal_to_the_last_bit(self, vllm_reward: Server) -> None:
        inputs = [f"{contrast.prompt_text(n)} It is {n}." for n in range(50)]
        rounds = [[self.classify(vllm_reward, input=one) for one in order] for order in (inputs, inputs[::-1])]
        assert rounds[0] == rounds[1][::-1]

    def test_the_raw_score(self, vllm_reward: Server) -> None:
        [activated] = self.classify(vllm_reward, input="Water")
        [raw] = self.classify(vllm_reward, input="Water", use_activation=False)
        assert 0 < activated < 1 < raw

    def test_the_header_names_the_answer(self, vllm_reward: Server) -> None:
        answer = ask(vllm_reward, "/classify", {"model": "tiny-rm", "input": "a"}, {"x-request-id": "abc"})
        assert told(answer)["id"] == "classify-abc"

    def test_routes_that_are_not_there(self, vllm_reward: Server) -> None:
        assert ask(vllm_reward, "/v1/classify", {"model": "tiny-rm", "input": "a"}).status_code == 404
        assert ask(vllm_reward, CHAT, chat(model="tiny-rm")).status_code == 404

    def test_sglangs_field_is_refused(self, vllm_reward: Server) -> None:
        assert ask(vllm_reward, "/classify", {"model": "tiny-rm", "text": "a"}).status_code == 400

    def test_scores_and_ranks(self, vllm_reward: Server) -> None:
        query, documents = "What is blue?", ["The sky", "Water"]
        scored = told(ask(vllm_reward, "/score", {"model": "tiny-rm", "text_1": query, "text_2": documents}))
        ranked = told(ask(vllm_reward, "/rerank", {"model": "tiny-rm", "query": query, "documents": documents}))
        by_place = {row["index"]: row["relevance_score"] for row in ranked["results"]}
        assert [row["score"] for row in scored["data"]] == pytest.approx([by_place[0], by_place[1]])
        scores = [row["relevance_score"] for row in ranked["results"]]
        assert scores == sorted(scores, reverse=True)


class TestTwoRuns:
    """The whole rollout twice, straight to two replicas by round robin."""

    def rollouts(self, vllm_pair: list[Server], seeded: bool) -> dict[str, Any]:
        urls = [server.url + "/v1" for server in vllm_pair]
        seed = contrast.own_seed if seeded else None
        return contrast.compare(*(asyncio.run(contrast.rollout(urls, "tiny-llm", seed)) for _ in range(2)))

    def test_without_seeds_nearly_all_answers_differ(self, vllm_pair: list[Server]) -> None:
        assert self.rollouts(vllm_pair, seeded=False)["different_texts"] > 250

    def test_with_a_seed_each_none_does(self, vllm_pair: list[Server]) -> None:
        figures = self.rollouts(vllm_pair, seeded=True)
        assert figures["different_texts"] == 0
        assert figures["distinct_samples"] == {4: 64}
