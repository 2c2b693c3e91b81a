"""What the gateway leans on in SGLang, asked of real servers: `make test-sglang`, not `make test`."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines import contrast, servers
from tests.engines.asking import (
    CHAT,
    COMPLETIONS,
    ask,
    at_once,
    chat,
    chunks,
    complete,
    metric,
    open_request,
    text,
    texts,
    told,
    wait_metric,
)
from tests.engines.servers import Server, Spec

# Installing and starting the servers is part of the first test.
pytestmark = pytest.mark.timeout(1800)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"
RUNNING = "sglang:num_running_reqs"
UNSEEDED = 42


def native(text: Any = "The colour is", rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """A request of 12 tokens to SGLang's own generate route, at temperature 1."""
    params = {"max_new_tokens": 12, "temperature": 1} | sampling
    return {"text": text, "sampling_params": params} | ({} if rid is None else {"rid": rid})


def generated(server: Server, **sampling: Any) -> str:
    """The text that the generate route gives for one prompt."""
    said: str = told(ask(server, GENERATE, native(**sampling)))["text"]
    return said


def told_loads(server: Server) -> list[dict[str, Any]]:
    """What each rank's scheduler says of itself."""
    loads: list[dict[str, Any]] = httpx.get(server.url + "/v1/loads", timeout=5).json()["loads"]
    return loads


def message_text(server: Server, **more: Any) -> str:
    """The text that the messages route gives."""
    said: str = told(ask(server, MESSAGES, chat(**more)))["content"][0]["text"]
    return said


def response_text(server: Server, **more: Any) -> str:
    """The text that the responses route gives."""
    body = {"model": "tiny-llm", "input": "Name a colour", "max_output_tokens": 12, "temperature": 1} | more
    said: str = told(ask(server, RESPONSES, body))["output"][0]["content"][0]["text"]
    return said


class TestSeeds:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, complete())])
    def test_without_a_seed_everyone_gets_42(self, sglang: Server, path: str, body: dict[str, Any]) -> None:
        assert text(sglang, path, body) == text(sglang, path, body | {"seed": UNSEEDED})
        assert text(sglang, path, body | {"seed": None}) == text(sglang, path, body)
        assert text(sglang, path, body | {"seed": 7}) != text(sglang, path, body)

    def test_generate_has_a_field_of_its_own(self, sglang: Server) -> None:
        assert generated(sglang) == generated(sglang, sampling_seed=UNSEEDED)
        assert generated(sglang, sampling_seed=7) == generated(sglang, sampling_seed=7)
        assert generated(sglang, sampling_seed=7) != generated(sglang)

    def test_the_wrong_field_is_ignored_or_refused(self, sglang: Server) -> None:
        assert text(sglang, CHAT, chat(sampling_seed=7)) == text(sglang, CHAT, chat())
        assert told(ask(sglang, GENERATE, native() | {"seed": 7}))["text"] == generated(sglang)
        refused = ask(sglang, GENERATE, native(seed=7))
        assert refused.status_code == 400
        assert "unknown field `seed`" in refused.json()["error"]

    def test_responses_and_messages_drop_a_seed(self, sglang: Server) -> None:
        assert response_text(sglang, seed=7) == response_text(sglang, seed=8)
        assert message_text(sglang, seed=7) == message_text(sglang, seed=8)
        assert message_text(sglang, seed=7) == text(sglang, CHAT, chat(seed=UNSEEDED))

    @pytest.mark.parametrize(("seed", "same"), [("12", 12), (True, 1), (1.0, 1), (53023623507391, 7)])
    def test_seeds_that_are_taken_for_another(self, sglang: Server, seed: Any, same: int) -> None:
        assert text(sglang, CHAT, chat(seed=seed)) == text(sglang, CHAT, chat(seed=same))

    def test_more_than_32_bits_are_folded_not_cut(self, sglang: Server) -> None:
        assert text(sglang, CHAT, chat(seed=5 + 2**32)) != text(sglang, CHAT, chat(seed=5))

    @pytest.mark.parametrize("seed", [2**63, 1.5, "seven", [7]])
    def test_seeds_that_are_refused(self, sglang: Server, seed: Any) -> None:
        assert ask(sglang, CHAT, chat(seed=seed)).status_code == 400

    @pytest.mark.parametrize("seed", [2**63, "12", True, 1.0])
    def test_generate_takes_integers_alone(self, sglang: Server, seed: Any) -> None:
        assert ask(sglang, GENERATE, native(sampling_seed=seed)).status_code == 400

    def test_noise_hangs_on_the_position(self, sglang: Server) -> None:
        whole = told(ask(sglang, GENERATE, native(sampling_seed=7)))["output_ids"]
        prompt = told(ask(sglang, "/tokenize", {"model": "tiny-llm", "prompt": "The colour is"}))["tokens"]
        rest = {"max_new_tokens": 7, "temperature": 1, "sampling_seed": 7}
        continued = told(ask(sglang, GENERATE, {"input_ids": prompt + whole[:5], "sampling_params": rest}))
        assert continued["output_ids"] == whole[5:]

    def test_another_mode_ignores_seeds(self, tmp_path: Path) -> None:
        with servers.running([Spec("sglang")], tmp_path) as [loose]:
            assert text(loose, CHAT, chat(seed=7)) != text(loose, CHAT, chat(seed=7))


class TestSamples:
    @pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, complete())])
    def test_n_samples_are_clones(self, sglang: Server, path: str, body: dict[str, Any]) -> None:
        samples = texts(sglang, path, body | {"n": 4, "seed": 7})
        assert len(samples) == 4
        assert set(samples) == {text(sglang, path, body | {"seed": 7})}

    def test_equal_prompts_of_a_list_are_clones(self, sglang: Server) -> None:
        samples = texts(sglang, COMPLETIONS, complete(["The colour is"] * 2, seed=7))
        assert samples == [text(sglang, COMPLETIONS, complete(seed=7))] * 2

    def test_generate_clones_too(self, sglang: Server) -> None:
        several = told(ask(sglang, GENERATE, native(sampling_seed=7, n=2)))
        prompts = told(ask(sglang, GENERATE, native(["The colour is"] * 2, sampling_seed=7)))
        assert {answer["text"] for answer in several + prompts} == {generated(sglang, sampling_seed=7)}

    def test_a_list_of_parameters_has_a_seed_each(self, sglang: Server) -> None:
        params = [native(sampling_seed=seed)["sampling_params"] for seed in (7, 8)]
        body = {"text": ["The colour is"] * 2, "sampling_params": params}
        said = [answer["text"] for answer in told(ask(sglang, GENERATE, body))]
        assert said == [generated(sglang, sampling_seed=seed) for seed in (7, 8)]

    def test_a_list_of_one_is_answered_by_a_list(self, sglang: Server) -> None:
        [only] = told(ask(sglang, GENERATE, native(["The colour is"], sampling_seed=7)))
        assert only["text"] == generated(sglang, sampling_seed=7)


class TestIds:
    def test_the_rid_names_the_answer(self, sglang: Server) -> None:
        assert told(ask(sglang, CHAT, chat(rid="17:3:0.0!")))["id"] == "17:3:0.0!"
        assert told(ask(sglang, GENERATE, native(rid="17:3:1.0!")))["meta_info"]["id"] == "17:3:1.0!"

    def test_the_header_is_not_read(self, sglang: Server) -> None:
        answer = ask(sglang, CHAT, chat(), {"x-request-id": "abc"})
        assert "abc" not in told(answer)["id"]
        assert "x-request-id" not in answer.headers

    def test_a_rid_in_use_is_refused(self, sglang: Server) -> None:
        bodies = [native(rid="twice", max_new_tokens=300, ignore_eos=True)] * 2
        statuses = [answer.status_code for answer in at_once(sglang, GENERATE, bodies)]
        assert sorted(statuses) == [200, 400]


class TestAborts:
    def abort(self, server: Server, rid: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        """The answers to requests of which `rid` is aborted once all run."""

        def when_running() -> None:
            assert wait_metric(server, RUNNING, len(bodies), seconds=10)
            assert ask(server, "/abort_request", {"rid": rid}).status_code == 200

        aborting = threading.Thread(target=when_running)
        aborting.start()
        answers = at_once(server, GENERATE, bodies)
        aborting.join()
        return answers

    def endless(self, rid: str) -> dict[str, Any]:
        return native(rid=rid, max_new_tokens=1500, ignore_eos=True)

    def test_an_aborted_answer_is_200_and_partial(self, sglang: Server) -> None:
        [answer] = self.abort(sglang, "only", [self.endless("only")])
        meta = told(answer)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] < 1500

    def test_ids_match_by_prefix(self, sglang: Server) -> None:
        answers = self.abort(sglang, "s1", [self.endless("s1"), self.endless("s12")])
        reasons = [told(answer)["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort", "abort"]

    def test_an_end_mark_keeps_others_running(self, sglang: Server) -> None:
        short = native(rid="s12!", max_new_tokens=400, ignore_eos=True)
        answers = self.abort(sglang, "s1!", [self.endless("s1!"), short])
        reasons = [told(answer)["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort", "length"]

    def test_closing_the_connection_cancels(self, sglang: Server) -> None:
        with open_request(sglang, CHAT, chat(max_tokens=1500, ignore_eos=True, stream=True)):
            assert wait_metric(sglang, RUNNING, 1, seconds=5)
        assert wait_metric(sglang, RUNNING, 0, seconds=4)


class TestLoads:
    """What is in it now. The metrics are behind by up to 40 tokens, and a closed connection is seen late."""

    def inside(self, server: Server) -> int:
        return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in told_loads(server))

    def becomes(self, server: Server, count: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.inside(server) != count:
            if time.monotonic() > deadline:
                return False
        return True

    def test_a_request_is_counted_before_its_metrics_tell(self, sglang: Server) -> None:
        behind = 0
        for attempt in range(5):
            rid = f"counted-{attempt}"
            try:
                with open_request(sglang, GENERATE, native(max_new_tokens=1500, ignore_eos=True) | {"rid": rid}):
                    assert self.becomes(sglang, 1, seconds=2)
                    behind += metric(sglang, RUNNING) == 0
            finally:
                ask(sglang, "/abort_request", {"rid": rid})
            assert self.becomes(sglang, 0, seconds=1)
            assert wait_metric(sglang, RUNNING, 0, seconds=4)
        # On a busy machine the question may come late enough for the metrics to have caught up.
        assert behind

    def test_an_abort_by_id_ends_at_once_what_a_closed_connection_leaves_running(self, sglang: Server) -> None:
        for rid in ("closed-1", "closed-2"):
            with open_request(sglang, GENERATE, native(max_new_tokens=1500, ignore_eos=True) | {"rid": rid}):
                assert self.becomes(sglang, 1, seconds=2)
            time.sleep(0.3)
            assert self.inside(sglang) == 1
            ask(sglang, "/abort_request", {"rid": rid})
            assert self.becomes(sglang, 0, seconds=0.5)


class TestStreams:
    def test_choices_have_ids_of_their_own(self, sglang: Server) -> None:
        asked = chat(n=2, seed=1, stream=True, stream_options={"include_usage": True})
        parts = chunks(ask(sglang, CHAT, asked).text)
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["completion_tokens"] == 24
        assert len({part["id"] for part in parts}) == 2

    def test_generate_streams_the_text_so_far(self, sglang: Server) -> None:
        parts = chunks(ask(sglang, GENERATE, native(sampling_seed=7) | {"stream": True}).text)
        said = [part["text"] for part in parts]
        whole = said[-1]
        assert all(whole.startswith(part.rstrip("\N{REPLACEMENT CHARACTER}")) for part in said)
        assert whole == generated(sglang, sampling_seed=7)
        assert "index" not in parts[0]

    def test_parts_of_a_list_are_numbered(self, sglang: Server) -> None:
        two = native(["The colour is", "Water is"], sampling_seed=7) | {"stream": True}
        assert {part["index"] for part in chunks(ask(sglang, GENERATE, two).text)} == {0, 1}

    def test_a_bad_stream_is_an_event_in_a_200(self, sglang: Server) -> None:
        answer = ask(sglang, GENERATE, native(temperature=-1) | {"stream": True})
        assert answer.status_code == 200
        [part] = chunks(answer.text)
        assert part["error"]["code"] == 400


class TestErrors:
    def test_flat_on_chat(self, sglang: Server) -> None:
        body = ask(sglang, CHAT, chat(seed=2**63)).json()
        assert body["object"] == "error"
        assert set(body) == {"object", "message", "type", "param", "code"}

    def test_nested_on_responses(self, sglang: Server) -> None:
        answer = ask(sglang, RESPONSES, {"model": "nobody", "input": "a"})
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    def test_anthropics_on_messages(self, sglang: Server) -> None:
        assert ask(sglang, MESSAGES, chat(messages=1)).json()["type"] == "error"

    def test_two_shapes_on_generate(self, sglang: Server) -> None:
        assert isinstance(ask(sglang, GENERATE, native(sampling_seed="7")).json()["error"], str)
        assert set(ask(sglang, GENERATE, native(temperature=-1)).json()["error"]) == {"message"}

    def test_the_model_is_not_checked(self, sglang: Server) -> None:
        assert text(sglang, CHAT, chat(model="nobody")) == text(sglang, CHAT, chat())


class TestWhatItIs:
    def test_ready_is_quick_and_health_is_not(self, sglang: Server) -> None:
        started = time.monotonic()
        assert httpx.get(sglang.url + "/ready").status_code == 200
        ready = time.monotonic()
        assert httpx.get(sglang.url + "/health", timeout=30).status_code == 200
        assert ready - started < 0.5 < 0.9 < time.monotonic() - ready

    def test_server_info_tells_the_mode(self, sglang: Server) -> None:
        info = httpx.get(sglang.url + "/server_info").json()
        assert info["enable_deterministic_inference"] is True
        assert info["sampling_backend"] == "pytorch"
        assert info["version"] == "0.5.23"

    def test_model_info_tells_the_kind(self, sglang: Server, sglang_reward: Server) -> None:
        kinds = [httpx.get(server.url + "/model_info").json()["is_generation"] for server in (sglang, sglang_reward)]
        assert kinds == [True, False]

    def test_answers_tell_the_weight_version(self, sglang: Server) -> None:
        assert told(ask(sglang, CHAT, chat()))["metadata"]["weight_version"] == "default"


class TestReward:
    def scores(self, server: Server, texts: str | list[str]) -> list[float]:
        answer = told(ask(server, "/classify", {"text": texts}))
        rows = answer if isinstance(answer, list) else [answer]
        return [row["embedding"][0] for row in rows]

    def test_a_list_is_answered_in_its_order(self, sglang_reward: Server) -> None:
        inputs = ["The sky is blue", "Water", "1 + 1 = 2"]
        alone = [self.scores(sglang_reward, text)[0] for text in inputs]
        assert self.scores(sglang_reward, inputs) == pytest.approx(alone)
        assert len(set(alone)) == 3

    def test_one_at_a_time_is_equal_to_the_last_bit(self, sglang_reward: Server) -> None:
        inputs = [f"{contrast.prompt_text(n)} It is {n}." for n in range(50)]
        rounds = [[self.scores(sglang_reward, one) for one in order] for order in (inputs, inputs[::-1])]
        assert rounds[0] == rounds[1][::-1]

    def test_the_softmax_route_says_nothing(self, sglang_reward: Server) -> None:
        answer = told(ask(sglang_reward, "/v1/classify", {"model": "tiny-rm", "input": ["a", "b"]}))
        assert [row["probs"] for row in answer["data"]] == [[1.0], [1.0]]

    def test_vllms_field_is_refused(self, sglang_reward: Server) -> None:
        assert ask(sglang_reward, "/classify", {"input": "a"}).status_code == 400


class TestWhatKills:
    """Requests that a gateway has to keep away: each takes a server of its own down."""

    def dies(self, spec: Spec, logs: Path, path: str, body: dict[str, Any]) -> bool:
        with servers.running([spec], logs) as [server]:
            # The answer may be an error or a broken connection.
            with suppress(httpx.TransportError):
                ask(server, path, body)
            deadline = time.monotonic() + 30
            while server.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            return server.process.poll() is not None

    def test_min_p_in_deterministic_mode(self, tmp_path: Path) -> None:
        assert self.dies(servers.SGLANG, tmp_path, GENERATE, native(min_p=0.1))

    def test_generating_on_a_reward_model(self, tmp_path: Path) -> None:
        assert self.dies(servers.SGLANG_REWARD, tmp_path, GENERATE, native())


class TestTwoRuns:
    """The whole rollout twice, straight to one replica."""

    def rollouts(self, sglang: Server, seeded: bool) -> dict[str, Any]:
        seed = contrast.own_seed if seeded else None
        urls = [sglang.url + "/v1"]
        return contrast.compare(*(asyncio.run(contrast.rollout(urls, "tiny-llm", seed)) for _ in range(2)))

    def test_without_seeds_all_samples_of_a_prompt_are_clones(self, sglang: Server) -> None:
        assert self.rollouts(sglang, seeded=False)["distinct_samples"] == {1: 64}

    def test_with_a_seed_each_none_are(self, sglang: Server) -> None:
        assert self.rollouts(sglang, seeded=True)["distinct_samples"] == {4: 64}
