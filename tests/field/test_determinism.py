"""Seeds and indices: none shared, none lost, none unseen; what would fool or kill an engine is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import anthropic
import openai
import pytest

from tests import captures
from tests.field import clock
from tests.field.routes import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SGLANG_CHAT,
    SGLANG_CLASSIFY,
    SGLANG_COMPLETIONS,
    SGLANG_MESSAGES,
    TOKENS,
    Route,
    over,
)
from tests.harness import FakeWorker, Gate, Reply, Script, Seen, gateway, is_probe

CLONING = (SGLANG_CHAT, SGLANG_COMPLETIONS, GENERATE)
"""Routes whose engine gives all samples of a request one seed."""

SEEDED = (CHAT, COMPLETIONS, RESPONSES, TOKENS, GENERATE, SGLANG_CHAT, SGLANG_COMPLETIONS)

SGLANG_RESPONSES = Route("sglang", "/v1/responses", "responses", seed=False)


def seed_of(route: Route, seen: Seen) -> Any:
    """The seed where the route's engine reads it."""
    if route is GENERATE:
        return seen.json["sampling_params"].get("sampling_seed")
    return (seen.json["sampling_params"] if route is TOKENS else seen.json).get("seed")


def with_seed(route: Route, literal: str, field: str | None = None) -> bytes:
    """A request with this seed, as these characters, where its engine reads it or in another field."""
    body = route.body()
    nested = route in (TOKENS, GENERATE)
    name = field or ("sampling_seed" if route is GENERATE else "seed")
    if nested and field is None:
        body["sampling_params"][name] = "%"
    else:
        body[name] = "%"
    return json.dumps(body).replace('"%"', literal).encode()


def samples(route: Route, n: int) -> dict[str, Any]:
    """Fields that ask for n samples."""
    if route is GENERATE:
        return {"sampling_params": {"max_new_tokens": 5, "temperature": 1, "n": n}}
    return {"n": n}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["", "/sessions/s"], ids=["anonymous", "session"])
@over(CLONING)
async def test_no_clones(route: Route, session: str, stream: bool) -> None:
    """One prompt eight times without a seed, and once with n = 8: eight seeds each time (UniRL#208)."""
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url)) as gate:
        for _ in range(8):
            answer = await gate.http.post(session + route.path, json=route.body(stream=stream))
            assert answer.status_code == 200
        assert len({seed_of(route, seen) for seen in worker.seen}) == 8
        worker.seen.clear()
        answer = await gate.http.post(session + route.path, json=route.body(stream=stream, **samples(route, 8)))
        assert answer.status_code == 200
        seeds = {seed_of(route, seen) for seen in worker.seen}
        assert len(worker.seen) == len(seeds) == 8
        assert all(type(seed) is int and 1 <= seed < 2**31 for seed in seeds)
        assert int(answer.headers["x-detgate-seed"]) in seeds
        numbers = set()
        for value in values(answer.content, stream):
            numbers |= {choice["index"] for choice in value.get("choices", [value])} if stream else set()
        if stream:
            assert numbers == set(range(8))
        else:
            whole = answer.json()
            assert len(whole if route is GENERATE else whole["choices"]) == 8


def values(body: bytes, stream: bool) -> list[dict[str, Any]]:
    """The events of a stream that hold choices."""
    if not stream:
        return []
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: {")]
    return [value for value in map(json.loads, lines) if value.get("choices") != []]


class Together:
    """Answers when so many requests have come."""

    def __init__(self, route: Route, count: int) -> None:
        self.route = route
        self.count = count
        self._all = asyncio.Event()

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        self.count -= 1
        if not self.count:
            self._all.set()
        await self._all.wait()
        await self.route.polite(seen, reply)


PROMPT: dict[Route, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda words: {"messages": [{"role": "user", "content": words}]},
    COMPLETIONS: lambda words: {"prompt": words},
    RESPONSES: lambda words: {"input": words},
    MESSAGES: lambda words: {"messages": [{"role": "user", "content": words}]},
    GENERATE: lambda words: {"text": words},
}


@dataclass
class Given:
    """What sixteen siblings were told, by the number of their prompt, and what was recorded of them."""

    seeds: dict[int, str | None]
    ids: dict[int, str]
    guarantees: dict[int, str]
    closed: list[dict[str, Any]]
    races: float


async def sixteen(route: Route, order: Sequence[int], index_order: str) -> Given:
    """Sixteen prompts of one session, begun in this order and all in flight at once."""
    async with (
        FakeWorker(Together(route, 16)) as worker,
        gateway(route.pool(worker.url), index_order=index_order) as gate,
    ):

        async def ask(number: int) -> tuple[int, Any]:
            body = route.body(**PROMPT[route](f"prompt {number}"))
            answer = await gate.http.post(f"/sessions/s{route.path}", json=body)
            return number, answer.headers

        told = dict(await asyncio.gather(*map(ask, order)))
        await gate.until(lambda: sum(record["event"] == "closed" for record in gate.records()) == 16)
        return Given(
            {number: headers.get("x-detgate-seed") for number, headers in told.items()},
            {number: headers["x-detgate-request-id"] for number, headers in told.items()},
            {number: headers["x-detgate-guarantee"] for number, headers in told.items()},
            [record for record in gate.records() if record["event"] == "closed"],
            await gate.gauge("detgate_racing_total"),
        )


@over(tuple(PROMPT))
async def test_siblings_in_content_order_get_the_same_seeds(route: Route) -> None:
    """Sixteen calls at once in one session, in two orders: each prompt has its seed again (AReaL proxy)."""
    order = list(range(16))
    one = await sixteen(route, order, "content")
    Random(7).shuffle(order)
    two = await sixteen(route, order, "content")
    assert (one.seeds, one.ids) == (two.seeds, two.ids)
    assert len(set(one.ids.values())) == 16
    assert len(set(one.seeds.values())) == (16 if route.seed else 1)
    assert two.races == 0
    assert not any("racing" in guarantee for guarantee in two.guarantees.values())


@over(tuple(PROMPT))
async def test_siblings_in_arrival_order_are_said_to_race(route: Route) -> None:
    """The network decided who is first: header, ledger and metrics say so of each (AReaL proxy)."""
    given = await sixteen(route, range(16), "arrival")
    assert {record["index"] for record in given.closed} == set(range(16))
    assert all(record["racing"] for record in given.closed)
    assert all(guarantee.startswith("none; racing") for guarantee in given.guarantees.values())
    assert given.races == 16


async def openai_chat(sdk: openai.AsyncOpenAI, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    answer: Any = await sdk.chat.completions.create(model="tiny-llm", messages=messages, stream=stream)
    await read(answer, stream)


async def openai_completions(sdk: openai.AsyncOpenAI, stream: bool) -> None:
    await read(await sdk.completions.create(model="tiny-llm", prompt="hi", stream=stream), stream)


async def openai_responses(sdk: openai.AsyncOpenAI, stream: bool) -> None:
    await read(await sdk.responses.create(model="tiny-llm", input="hi", stream=stream), stream)


async def read(answer: Any, stream: bool) -> None:
    if stream:
        async for _ in answer:
            pass


def failing_once(route: Route, how: str) -> Script:
    """The first request fails, all others are answered."""
    failed = False

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal failed
        if failed:
            await route.polite(seen, reply)
            return
        failed = True
        if how == "reset":
            reply.reset()
        else:
            reply.json({"error": {"message": "full"}}, 503, ("retry-after-ms", "1"))

    return script


def assert_same_request(worker: FakeWorker, gate: Gate, route: Route) -> None:
    """Two sendings by the SDK were one request to the engine, and one index to the ledger."""
    first, second = worker.seen
    assert first.body == second.body
    assert first.header("x-request-id") == second.header("x-request-id")
    if route.seed:
        assert seed_of(route, first) is not None
    opened = [record for record in gate.records() if record["event"] == "opened"]
    assert [record["index"] for record in opened] == [0, 0]
    assert opened[0]["seed"] == opened[1]["seed"]
    closed = [record["outcome"] for record in gate.records() if record["event"] == "closed"]
    assert closed == ["failed", "delivered"]


@pytest.mark.parametrize("how", ["503", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "ask"),
    [(CHAT, openai_chat), (COMPLETIONS, openai_completions), (RESPONSES, openai_responses)],
    ids=["chat", "completions", "responses"],
)
def test_what_the_openai_sdk_retries_is_the_same_request(route: Route, ask: Any, stream: bool, how: str) -> None:
    """The SDK sends again, with nothing but a retry count to say so: same index, same seed, same bytes."""

    async def main() -> None:
        async with FakeWorker(failing_once(route, how)) as worker, gateway(route.pool(worker.url)) as gate:
            http = openai.DefaultAsyncHttpxClient(verify=False)
            url = f"{gate.url}/sessions/s/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=1, http_client=http) as sdk:
                await ask(sdk, stream)
            await gate.until(lambda: sum(record["event"] == "closed" for record in gate.records()) == 2)
            assert_same_request(worker, gate, route)

    clock.run(main())


@pytest.mark.parametrize("how", ["503", "reset"])
def test_what_the_anthropic_sdk_retries_is_the_same_request(how: str) -> None:
    """The same of /v1/messages, whose base URL holds no /v1."""
    messages: Any = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with FakeWorker(failing_once(MESSAGES, how)) as worker, gateway(MESSAGES.pool(worker.url)) as gate:
            http = anthropic.DefaultAsyncHttpxClient(verify=False)
            url = f"{gate.url}/sessions/s"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=1, http_client=http) as sdk:
                await sdk.messages.create(model="tiny-llm", max_tokens=5, messages=messages)
            await gate.until(lambda: sum(record["event"] == "closed" for record in gate.records()) == 2)
            assert_same_request(worker, gate, MESSAGES)

    clock.run(main())


def sglang(deterministic: bool) -> Script:
    """Probes of an SGLang server that says in which mode it is."""

    async def probes(seen: Seen, reply: Reply) -> None:
        assert is_probe(seen)
        reply.json({"enable_deterministic_inference": deterministic} if seen.target == "/server_info" else {})

    return probes


@over((GENERATE, SGLANG_CHAT, SGLANG_COMPLETIONS, SGLANG_MESSAGES, SGLANG_RESPONSES))
async def test_min_p_never_reaches_an_engine_that_dies_of_it(route: Route) -> None:
    """min_p to SGLang in deterministic mode is refused with a reason; 0 passes (sglang#33695)."""
    nested = {"sampling_params": {"temperature": 1, "min_p": 0.1}}
    harmful = nested if route is GENERATE else {"min_p": 0.1}
    harmless = {"sampling_params": {"min_p": 0}} if route is GENERATE else {"min_p": 0}
    async with (
        FakeWorker(route.polite, probes=sglang(True)) as worker,
        gateway(route.pool(worker.url)) as gate,
    ):
        refused = await gate.http.post(f"/sessions/s{route.path}", json=route.body(**harmful))
        assert refused.status_code == 400
        assert "min_p" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert worker.seen == []
        passed = await gate.http.post(f"/sessions/s{route.path}", json=route.body(**harmless))
        assert (passed.status_code, passed.headers["x-detgate-index"]) == (200, "0")
    async with (
        FakeWorker(route.polite, probes=sglang(False)) as worker,
        gateway(route.pool(worker.url)) as gate,
    ):
        assert (await gate.http.post(route.path, json=route.body(**harmful))).status_code == 200


@over(SEEDED)
async def test_a_seed_that_engines_misread_is_refused(route: Route) -> None:
    """2⁶³, "12", true, 1.5 and the like, in any seed field: 400, and no engine sees it (sglang PR#28960)."""
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url)) as gate:
        for literal in ("9223372036854775808", '"12"', "true", "1.5", "1.0", "1e3", "-1", "[1]"):
            for field in (None, "seed", "sampling_seed"):
                body = with_seed(route, literal, field)
                answer = await gate.http.post(f"/sessions/s{route.path}", content=body)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "invalid_seed"), (literal, field)
                assert error["param"].endswith("seed")
        assert worker.seen == []
        answer = await gate.http.post(f"/sessions/s{route.path}", json=route.body())
        assert answer.headers["x-detgate-index"] == "0"


@over(SEEDED)
async def test_nothing_leaves_without_a_seed(route: Route) -> None:
    """Seeded, unseeded and null-seeded requests side by side: all are seeded in the end (vllm#51226)."""
    sent = ["null" if n % 3 == 0 else str(n + 100) for n in range(12)]
    bodies = [with_seed(route, literal) for literal in sent] + [json.dumps(route.body()).encode()] * 8
    async with FakeWorker(Together(route, len(bodies))) as worker, gateway(route.pool(worker.url)) as gate:
        answers = await asyncio.gather(*(gate.http.post(route.path, content=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    seeds = [seed_of(route, seen) for seen in worker.seen]
    assert all(type(seed) is int for seed in seeds)
    assert sorted(seed for seed in seeds if seed < 200) == [n + 100 for n in range(12) if n % 3]
    assert len(set(seeds)) == len(seeds)
    sources = [answer.headers["x-detgate-seed-source"] for answer in answers]
    assert sources.count("client") == 8
    assert sources.count("derived") == 12


@over((GENERATE, SGLANG_CHAT, CHAT, TOKENS))
async def test_a_seed_in_a_field_that_the_engine_ignores_is_moved(route: Route) -> None:
    """A client's seed in another engine's field counts, where this engine reads it (vllm#51226)."""
    field = "seed" if route in (GENERATE, TOKENS) else "sampling_seed"
    async with FakeWorker(route.polite) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, content=with_seed(route, "77", field))
        assert answer.headers["x-detgate-seed-source"] == "client"
        assert seed_of(route, worker.seen[0]) == 77
        assert field not in worker.seen[0].json


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["sampling_seed", "seed"])
async def test_a_prompts_own_seed_is_a_seed_of_the_clients(name: str, stream: bool) -> None:
    body = GENERATE.body(stream=stream) | {"text": ["a", "b"], "sampling_params": [{name: 3}, {name: 4}]}
    body.pop("input_ids", None)
    async with FakeWorker(GENERATE.polite) as worker:
        async with gateway(GENERATE.pool(worker.url), client_seed="reject") as gate:
            answer = await gate.http.post(GENERATE.path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "client_seed_rejected")
            assert worker.seen == []
        for policy, source in (("keep", "client"), ("mix", "derived")):
            worker.seen.clear()
            async with gateway(GENERATE.pool(worker.url), client_seed=policy) as gate:
                answer = await gate.http.post(GENERATE.path, json=body)
                got = {seen.json["text"]: seed_of(GENERATE, seen) for seen in worker.seen}
                assert answer.headers["x-detgate-seed-source"] == source
                assert answer.headers["x-detgate-seed"] == str(got["a"])
                assert (got == {"a": 3, "b": 4}) is (policy == "keep")
                assert not {3, 4} & {*got.values()} or policy == "keep"
                opened = next(record for record in gate.records() if record["event"] == "opened")
                assert (opened["seed"], opened["seed_source"]) == (got["a"], source)


@pytest.mark.parametrize("action", ["warn", "refuse"])
@over((CHAT, GENERATE))
async def test_one_seed_for_a_whole_group_is_noticed(route: Route, action: str) -> None:
    """Equal seed and prompt from several members of a group draw clones, unless nothing is drawn (verl#2646)."""

    def body(seed: int, temperature: float) -> dict[str, Any]:
        if route is GENERATE:
            return route.body(sampling_params={"sampling_seed": seed, "temperature": temperature})
        return route.body(seed=seed, temperature=temperature)

    async with (
        FakeWorker(route.polite) as worker,
        gateway(route.pool(worker.url), guards={"shared_seed": action}) as gate,
    ):
        group = (await gate.http.post("/sessions", json={"identity": "17", "group_size": 3})).json()

        async def ask(seed: int, temperature: float) -> list[int]:
            statuses = []
            for member in group["sessions"]:
                headers = {"authorization": f"Bearer {member['api_key']}"}
                answer = await gate.http.post(route.path, json=body(seed, temperature), headers=headers)
                statuses.append(answer.status_code)
            return statuses

        assert await ask(5, 0.0) == [200, 200, 200]
        with pytest.raises(KeyError):
            await gate.gauge("detgate_guard_total", guard="shared_seed")
        statuses = await ask(7, 1.0)
        assert await gate.gauge("detgate_guard_total", guard="shared_seed") >= 1
        if action == "warn":
            assert statuses == [200, 200, 200]
        else:
            assert statuses[0] == 200
            assert all(400 <= status < 500 for status in statuses[1:])


async def test_seeds_of_prompts_that_a_whole_group_has_are_noticed_too() -> None:
    body = {"text": ["a", "b"], "sampling_params": [{}, {"seed": 3}]}
    greedy = body | {"sampling_params": [{"temperature": 0}, {"seed": 3, "temperature": 0}]}
    async with (
        FakeWorker(GENERATE.polite) as worker,
        gateway(GENERATE.pool(worker.url), guards={"shared_seed": "refuse"}) as gate,
    ):
        group = (await gate.http.post("/sessions", json={"identity": "17", "group_size": 2})).json()
        for asked, expected in ((greedy, [200, 200]), (body, [200, 400])):
            statuses = []
            for member in group["sessions"]:
                headers = {"authorization": f"Bearer {member['api_key']}"}
                statuses.append((await gate.http.post(GENERATE.path, json=asked, headers=headers)).status_code)
            assert statuses == expected


TEXTS = ["The sky is blue", "Water", "1 + 1 = 2"]


@pytest.mark.parametrize(("route", "field"), [(CLASSIFY, "input"), (SGLANG_CLASSIFY, "text")], ids=["vllm", "sglang"])
async def test_each_input_is_scored_alone(route: Route, field: str) -> None:
    """Three inputs in one call on a reward pool: one at a time, and the engine's own shape (reward-bench#137)."""
    listed = captures.load(route.engine, "classify-list").json()
    single = listed["data"] if isinstance(listed, dict) else listed
    running = most = 0

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        text = seen.json[field]
        (text,) = text if isinstance(text, list) else [text]
        score = single[TEXTS.index(text)]
        await asyncio.sleep(0)
        if route is CLASSIFY:
            usage = {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}
            reply.json(listed | {"data": [score | {"index": 0}], "usage": usage})
        else:
            reply.json(score)
        running -= 1

    async with FakeWorker(script) as worker, gateway(route.pool(worker.url)) as gate:
        answer = await gate.http.post(route.path, json=route.body() | {field: TEXTS})
        assert answer.status_code == 200
        assert most == 1
        assert len(worker.seen) == 3
        got = answer.json()
        if route is CLASSIFY:
            assert got["data"] == listed["data"]
            assert got.keys() == listed.keys()
            assert got["usage"]["prompt_tokens"] == 15
        else:
            assert got == listed
        opened = [record for record in gate.records() if record["event"] == "opened"]
        assert len(opened) == 1
