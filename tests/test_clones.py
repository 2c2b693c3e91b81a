"""Equal answers to different seeds, within a group and within a call, through a whole gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import sessions
from tests.harness import FakeWorker, Gate, Reply, Seen, Wire, chat, completion, delta, gateway, pool
from tests.test_groups import keys
from tests.test_sessions import CHAT, ask, bearer, create, refused, said


def answer(*texts: str, tokens: int = 6) -> dict[str, Any]:
    """A chat answer with these choices, whose usage has so many tokens in all."""
    choices = [
        {"index": n, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for n, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    return completion(choices=choices, usage=usage)


class Parrot:
    """A replica that says what it is told to, whatever the seed."""

    def __init__(self, *texts: str, tokens: int = 6) -> None:
        self.texts, self.tokens = texts, tokens

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        if not seen.json.get("stream"):
            reply.json(answer(*self.texts, tokens=self.tokens))
            return
        reply.sse()
        for index, text in enumerate(self.texts):
            for piece in text.split(" "):
                reply.chunk(delta(piece, index=index))
        reply.chunk("".join(delta(finish="stop", index=index) for index in range(len(self.texts))) + "data: [DONE]\n\n")
        reply.end()


def seen_clones(gate: Gate) -> int:
    return gate.gateway.telemetry.guard.values.get(("clones",), 0)


async def post(gate: Gate, key: str, **body: Any) -> Any:
    return await gate.http.post(CHAT, json=chat("x") | body, headers=bearer(key))


async def test_equal_answers_of_members_are_counted_said_and_warned_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with FakeWorker(Parrot("a b c")) as worker, gateway(pool("policy", worker.url)) as gate:
        told = await create(gate, "17", group_size=3)
        answers = [await ask(gate, key) for key in keys(told)]
        assert ["cloned" in each.headers["x-detgate-guarantee"] for each in answers] == [False, True, True]
        assert len({said(each)[1] for each in answers}) == 3
        assert seen_clones(gate) == 2
        flags = [record["flags"] for record in gate.records() if record["event"] == "closed"]
        assert ["cloned" in each for each in flags] == [False, True, True]
    assert "".join(capsys.readouterr()).count("equal answers to different seeds") == 1


@pytest.mark.parametrize(
    ("more", "tokens"),
    [({"temperature": 0}, 6), ({"top_k": 1}, 6), ({}, 1)],
    ids=["temperature 0", "top_k 1", "one token"],
)
async def test_what_is_not_drawn_or_too_short_to_tell_is_no_clone(more: dict[str, Any], tokens: int) -> None:
    async with FakeWorker(Parrot("a b c", tokens=tokens)) as worker:
        async with gateway(pool("policy", worker.url), guards={"clones": "refuse"}) as gate:
            told = await create(gate, "17", group_size=2)
            assert [(await post(gate, key, **more)).status_code for key in keys(told)] == [200, 200]
            assert seen_clones(gate) == 0


async def test_how_long_an_answer_must_be_can_be_said() -> None:
    settings: dict[str, Any] = {"guards": {"clones": "refuse", "clone_tokens": 7}}
    parrot = Parrot("a b c", tokens=6)
    async with FakeWorker(parrot) as worker, gateway(pool("policy", worker.url), **settings) as gate:
        told = await create(gate, "17", group_size=3)
        assert [(await ask(gate, key)).status_code for key in keys(told)] == [200] * 3
        parrot.tokens = 7
        longer = [await ask(gate, key, "longer") for key in keys(told)]
        assert [each.status_code for each in longer] == [200, 409, 409]


async def test_other_prompts_other_answers_other_groups_and_equal_seeds_are_no_clones() -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(answer(str(seen.json["seed"]) if seen.json["messages"][0]["content"] == "varies" else "a b c"))

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url)) as gate:
        one, two = await create(gate, "17", group_size=2), await create(gate, "18", group_size=1)
        first, second = keys(one)
        for key, text in ((first, "p"), (second, "q"), (keys(two)[0], "p"), (first, "varies"), (second, "varies")):
            assert "cloned" not in (await ask(gate, key, text)).headers["x-detgate-guarantee"]
        for key in (first, second):
            await post(gate, key, seed=5, messages=[{"role": "user", "content": "seeded"}])
        assert seen_clones(gate) == 0
        await post(gate, second, seed=6, messages=[{"role": "user", "content": "seeded"}])
        assert seen_clones(gate) == 1


async def test_where_clones_are_refused_nothing_is_lost() -> None:
    parrot = Parrot("a b c")
    async with FakeWorker(parrot) as worker:
        async with gateway(pool("policy", worker.url), guards={"clones": "refuse"}) as gate:
            told = await create(gate, "17", group_size=2)
            assert (await ask(gate, keys(told)[0])).status_code == 200
            refusals = [await ask(gate, keys(told)[1]) for _ in range(2)]
            assert {refused(each) for each in refusals} == {(409, "cloned_samples")}
            assert refusals[0].headers["x-should-retry"] == "false"
            assert "17:0:0" in refusals[0].json()["error"]["message"]
            parrot.texts = ("d e f",)
            again = await ask(gate, keys(told)[1])
            assert {each.headers["x-detgate-seed"] for each in (*refusals, again)} == {again.headers["x-detgate-seed"]}
            assert said(again)[0] == "17:1:0"
            outcomes = [
                (record["outcome"], record["error"])
                for record in gate.records()
                if record["event"] == "closed" and record["identity"] == "17:1"
            ]
            assert outcomes == [("refused", "cloned_samples")] * 2 + [("delivered", None)]


async def test_strict_refuses_and_a_setting_that_is_written_out_wins() -> None:
    async with FakeWorker(Parrot("a b c")) as worker:
        cases: tuple[tuple[dict[str, Any], int], ...] = (({}, 409), ({"guards": {"clones": "warn"}}, 200))
        for written, status in cases:
            async with gateway(pool("policy", worker.url), profile="strict", **written) as gate:
                told = await create(gate, "17", group_size=2)
                await ask(gate, keys(told)[0])
                assert (await ask(gate, keys(told)[1])).status_code == status


@pytest.mark.parametrize(
    ("texts", "tokens", "clones"),
    [
        (("a b", "c d", "a b"), 6, True),
        (("a b", "c d", "e f"), 6, False),
        (("a", "a", "a much longer answer than those"), 12, False),
        (("a", "a"), 2, False),
    ],
)
async def test_equal_samples_of_one_call(texts: tuple[str, ...], tokens: int, clones: bool) -> None:
    async with FakeWorker(Parrot(*texts, tokens=tokens)) as worker:
        async with gateway(pool("policy", worker.url), guards={"clones": "refuse"}) as gate:
            told = await gate.http.post(CHAT, json=chat("x", n=len(texts)))
            assert told.status_code == (409 if clones else 200)
            assert seen_clones(gate) == clones


async def test_samples_that_were_drawn_in_calls_of_their_own_are_compared_too() -> None:
    async with FakeWorker(Parrot("a b c")) as worker, gateway(pool("policy", worker.url, engine="openai")) as gate:
        told = await gate.http.post(CHAT, json=chat("x", n=2))
        assert "cloned" in told.headers["x-detgate-guarantee"]
        assert len(worker.seen) == 2


async def native(seen: Seen, reply: Reply) -> None:
    """SGLang's /generate, which says what its text makes it, whatever the seed."""
    meta = {"id": "x", "prompt_tokens": 1, "completion_tokens": 6, "finish_reason": {"type": "stop"}}
    reply.json({"text": f"{seen.json['text']} b c", "meta_info": meta})


@pytest.mark.parametrize(
    ("params", "clones"),
    [
        ([{"seed": 3}, {"seed": 3}], False),
        ([{"seed": 3}, {"seed": 4}], True),
        ([{"seed": 3}, {}], True),
        ([{"temperature": 0}, {"temperature": 0}], False),
        ([{"temperature": 0}, {}], False),
    ],
)
async def test_equal_answers_to_prompts_with_parameters_of_their_own(params: list[Any], clones: bool) -> None:
    async with FakeWorker(native) as worker:
        async with gateway(pool("policy", worker.url, engine="sglang"), guards={"clones": "refuse"}) as gate:
            told = await gate.http.post("/generate", json={"text": ["a", "a"], "sampling_params": params})
            assert told.status_code == (409 if clones else 200)
            assert seen_clones(gate) == clones


@pytest.mark.parametrize(("other", "clones"), [({"seed": 3}, False), ({"seed": 4}, True)])
async def test_equal_answers_of_members_to_prompts_with_seeds_of_their_own(other: Any, clones: bool) -> None:
    async with FakeWorker(native) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        told = await create(gate, "17", group_size=2)
        for key, own in zip(keys(told), ({"seed": 3}, other), strict=True):
            body = {"text": ["a", "b"], "sampling_params": [{"seed": 2}, own]}
            await gate.http.post("/generate", json=body, headers=bearer(key))
        assert seen_clones(gate) == clones


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_that_has_begun_goes_on_and_the_ledger_says_so(usage: bool) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(delta("a"))
        await go.wait()
        reply.chunk(delta("b"))
        reply.chunk(delta("c"))
        reply.chunk(delta(finish="stop"))
        if usage:
            reply.chunk('data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\n')
        reply.chunk("data: [DONE]\n\n")
        reply.end()

    async with FakeWorker(script) as worker:
        async with gateway(pool("policy", worker.url), guards={"clones": "refuse"}) as gate:
            told = await create(gate, "17", group_size=2)
            for key in keys(told):
                async with Wire(gate.port) as wire:
                    wire.post(CHAT, chat(stream=True), ("authorization", f"Bearer {key}"))
                    assert await wire.head() == 200
                    await wire.chunk()
                    go.set()
                    assert b"[DONE]" in await wire.body()
                go.clear()
            await gate.until(lambda: sum(record["event"] == "closed" for record in gate.records()) == 2)
            ends = [record for record in gate.records() if record["event"] == "closed"]
            assert [(end["outcome"], "cloned" in end["flags"]) for end in ends] == [
                ("delivered", False),
                ("delivered", True),
            ]
            assert seen_clones(gate) == 1


async def test_what_is_remembered_of_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "FIRSTS", 3)
    async with FakeWorker(Parrot("a b c")) as worker, gateway(pool("policy", worker.url)) as gate:
        told = await create(gate, "17", group_size=1)
        for text in "pqrst":
            await ask(gate, keys(told)[0], text)
        [group] = gate.gateway.sessions._groups.values()
        assert len(group.firsts) == 3
