"""Several whole gateways and the sessions of one run: AReaL's routes, exports, keys, at whichever is asked."""

from __future__ import annotations

import asyncio
import errno
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import runs
from gateway.settings import InvalidSettings, Settings
from tests.harness import FakeWorker, Gate, Reply, Seen, chat, completion, pool
from tests.harness import gateway as whole
from tests.redis_server import Front, RedisServer
from tests.shared.test_epochs import Pair
from tests.test_joint_lanes import gateways
from tests.waiting import until

CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def post(gate: Gate, path: str, body: Any, key: str = "") -> httpx.Response:
    return await gate.http.post(path, json=body, headers=bearer(key) if key else {})


async def test_an_episode_goes_through_whichever_gateway(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        shared: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
        async with gateways(3, server.url, pool("policy", worker.url), **shared) as (one, two, three):
            started = (await post(one, "/rl/start_session", {"task_id": "17"})).json()
            key = started["api_key"]
            ids: list[str] = []
            for gate in (two, three, two):
                answer = await post(gate, CHAT, chat(str(len(ids))), key)
                assert (answer.status_code, answer.headers["x-detgate-index"]) == (200, str(len(ids)))
                ids.append(answer.headers["x-detgate-request-id"])
            for gate, name, reward in ((one, ids[0], 0.25), (three, ids[1], 0.5), (two, None, 1.0)):
                given = await post(gate, "/rl/set_reward", {"reward": reward, "interaction_id": name}, key)
                assert (given.status_code, given.json()["interaction_count"]) == (200, 3), given.text
            for gate in (one, two, three):
                told = (await gate.http.get("/sessions/17", headers=bearer(key))).json()
                assert (told["reward"], told["state"], told["open_requests"], told["next_index"]) == (
                    1.75,
                    "open",
                    0,
                    3,
                )
            ended = await asyncio.gather(*(post(gate, "/rl/end_session", {}, key) for gate in (one, two, three)))
            assert {answer.status_code for answer in ended} == {200}
            for gate in (one, two, three):
                assert (await post(gate, CHAT, chat("late"), key)).status_code == 410
                assert (await post(gate, "/rl/set_reward", {"reward": 1.0}, key)).status_code == 410
            # One ledger, read whole at each.
            for gate in (one, two, three):
                answer = await gate.http.get("/sessions/17/requests", headers=bearer(key))
                assert "x-detgate-missing" not in answer.headers
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert [(each["index"], each["reward"], each["session_reward"]) for each in lines] == [
                    (0, 0.25, 1.75),
                    (1, 0.5, 1.75),
                    (2, 1.0, 1.75),
                ]


async def test_a_gateway_with_a_ledger_of_its_own_gives_its_part_and_says_so() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(2, server.url, pool("policy", worker.url)) as (one, two):
            for number, gate in enumerate((one, two, one)):
                await post(gate, f"/sessions/s{CHAT}", chat(str(number)))
            names = [next(r["gateway"] for r in gate.records() if r["event"] == "gateway") for gate in (one, two)]
            for path in ("/sessions/s/requests", "/admin/runs/r/requests"):
                for gate, other, indices in ((one, names[1], [0, 2]), (two, names[0], [1])):
                    answer = await gate.http.get(path)
                    assert answer.headers["x-detgate-missing"] == other
                    assert [json.loads(line)["index"] for line in answer.text.splitlines()] == indices


async def test_a_session_that_nobody_created_is_known_at_every_gateway(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        shared: dict[str, Any] = {"ledger": {"path": str(tmp_path)}}
        async with gateways(2, server.url, pool("policy", worker.url), **shared) as (one, two):
            assert (await two.http.get("/sessions/s")).status_code == 404
            await post(one, f"/sessions/s{CHAT}", chat())
            told = (await two.http.get("/sessions/s")).json()
            assert (told["next_index"], told["open_requests"], told["state"]) == (1, 0, "open")
            assert (await two.http.delete("/sessions/s")).json()["state"] == "ended"
            assert (await post(one, f"/sessions/s{CHAT}", chat())).status_code == 410


async def test_a_session_with_a_key_is_closed_to_who_has_none_at_every_gateway() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(2, server.url, pool("policy", worker.url)) as (one, two):
            made = (await post(one, "/sessions", {"identity": "a", "run": "other"})).json()
            path = f"/runs/other/sessions/a{CHAT}"
            assert (await post(two, path, chat())).status_code == 401
            assert (await post(two, path, chat(), made["api_key"])).status_code == 200
            assert (await post(two, CHAT, chat(), made["api_key"])).headers["x-detgate-session"] == "a"
            assert (await post(two, f"/sessions/b{CHAT}", chat(), made["api_key"])).status_code == 404
            assert (await post(two, CHAT, chat(), "dgs-nobody")).status_code == 401


@pytest.mark.parametrize("outcome", ["delivered", "failed"])
async def test_an_end_knows_how_the_last_request_went_at_another_gateway(outcome: str) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        if outcome == "failed":
            reply.json({"error": {"message": "no", "type": "x", "code": "x", "param": None}}, 500)
        else:
            reply.json(completion())

    async with RedisServer() as server, FakeWorker(script) as worker:
        async with gateways(2, server.url, pool("policy", worker.url)) as (one, two):
            made = (await post(one, "/sessions", {"identity": "a"})).json()
            await post(two, CHAT, chat(), made["api_key"])
            ended = (await one.http.delete("/sessions/a", headers=bearer(made["api_key"]))).json()
            assert ended["state"] == ("ended" if outcome == "delivered" else "failed")
            assert (ended["why"] or "").startswith("its last request was not delivered: " * (outcome == "failed"))


async def test_without_the_store_sessions_are_refused_in_bounded_time_and_go_on_after() -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        async with gateways(1, server.url, pool("policy", worker.url), timeouts={"store": 0.5}) as (gate,):
            made = (await post(gate, "/sessions", {"identity": "a"})).json()
            server.freeze()
            async with asyncio.timeout(5):
                for answer in (
                    await post(gate, "/sessions", {"identity": "b"}),
                    await post(gate, CHAT, chat(), made["api_key"]),
                    await gate.http.delete("/sessions/a", headers=bearer(made["api_key"])),
                ):
                    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            server.thaw()
            async with asyncio.timeout(10):
                while (await post(gate, CHAT, chat(), made["api_key"])).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await post(gate, "/sessions", {"identity": "b"})).status_code == 201


async def test_a_clone_is_seen_at_whichever_gateway_its_twin_was_drawn(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        shared: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "guards": {"clone_tokens": 1}}
        async with gateways(2, server.url, pool("policy", worker.url), **shared) as (one, two):
            made = (await post(one, "/sessions", {"identity": "17", "group_size": 3})).json()
            first, second, third = (each["api_key"] for each in made["sessions"])
            told = [await post(gate, CHAT, chat("a"), key) for gate, key in ((one, first), (two, second), (one, third))]
            assert ["cloned" in answer.headers["x-detgate-guarantee"] for answer in told] == [False, True, True]
            other = await post(two, CHAT, chat("another prompt"), second)
            assert "cloned" not in other.headers["x-detgate-guarantee"]


async def test_a_seed_that_a_member_used_is_known_at_whichever_gateway(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        shared: dict[str, Any] = {"ledger": {"path": str(tmp_path)}, "guards": {"shared_seed": "refuse"}}
        async with gateways(2, server.url, pool("policy", worker.url), **shared) as (one, two):
            made = (await post(one, "/sessions", {"identity": "17", "group_size": 2})).json()
            first, second = (each["api_key"] for each in made["sessions"])
            asked = [(one, first, 5), (two, second, 5), (two, second, 6), (two, first, 5)]
            told = [await post(gate, CHAT, chat("a", seed=seed), key) for gate, key, seed in asked]
            assert [answer.status_code for answer in told] == [200, 400, 200, 200]
            assert told[1].json()["error"]["code"] == "shared_seed"


async def test_the_trainer_takes_what_a_session_did_from_whichever_gateway(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        shared: dict[str, Any] = {"ledger": {"path": str(tmp_path), "bodies": True}}
        async with gateways(3, server.url, pool("policy", worker.url), **shared) as (one, two, three):
            key = (await post(one, "/rl/start_session", {"task_id": "17"})).json()["api_key"]
            for gate, text in ((two, "a"), (three, "b")):
                await post(gate, CHAT, chat(text), key)
            await post(three, "/rl/set_reward", {"reward": 1.0}, key)
            waiting = asyncio.create_task(post(one, "/export_trajectories", {"session_id": "17", "discount": 0.5}))
            await post(two, "/rl/end_session", {}, key)
            told = (await waiting).json()["interactions"]
            asked = [(each["messages"][0]["content"], each["reward"]) for each in told.values()]
            assert asked == [("a", 0.5), ("b", 1.0)]


async def test_where_a_part_of_the_ledger_is_elsewhere_the_trainer_gets_nothing(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        mine, theirs = ({"ledger": {"path": str(tmp_path / name), "bodies": True}} for name in ("mine", "theirs"))
        async with (
            gateways(1, server.url, pool("policy", worker.url), **mine) as (one,),
            gateways(1, server.url, pool("policy", worker.url), **theirs) as (two,),
        ):
            key = (await post(one, "/rl/start_session", {"task_id": "17"})).json()["api_key"]
            await post(two, CHAT, chat("a"), key)
            await post(one, "/rl/end_session", {}, key)
            refused = await post(one, "/export_trajectories", {"session_id": "17"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ledger_elsewhere")


async def test_names_that_were_reloaded_are_accepted_by_a_restart(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"run": "r", "state": server.url, "ledger": {"path": str(tmp_path)}}
        old = pool("policy", worker.url)
        new = old | {"replicas": [{"name": "another", "url": worker.url}]}
        for configured, reloaded in ((old, new), (new, None)):
            async with whole(configured, **given) as gate:
                store: Any = gate.gateway._store
                await until(lambda store=store: store.why_down("r") is None)  # type: ignore[misc]
                if reloaded is not None:
                    gate.gateway.changes.reload(
                        gate.gateway.settings, Settings.load(None, {}, {**given, "pools": [reloaded]})
                    )
                    await gate.until(lambda gate=gate: all(each.up for each in gate.gateway.fleet.replicas))  # type: ignore[misc]
                answer = await post(gate, CHAT, chat())
                assert (answer.status_code, answer.headers["x-detgate-replica"]) == (200, "another")


async def test_settings_that_were_refused_can_be_put_right(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        policy = pool("policy", worker.url)
        theirs: dict[str, Any] = {"run": "r", "state": server.url, "ledger": {"path": str(tmp_path / "theirs")}}
        mine = theirs | {"ledger": {"path": str(tmp_path / "mine")}}
        async with whole(policy, **theirs) as one:
            store: Any = one.gateway._store
            await until(lambda: store.why_down("r") is None)
            assert (await post(one, CHAT, chat())).status_code == 200
            async with whole(policy | {"routing": {"key": "session"}}, **mine) as two:
                refused = await post(two, CHAT, chat())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "run_differs")
                assert "settings: pools[policy].routing.key. Put" in refused.json()["error"]["message"]
            async with whole(policy, **mine) as two:
                store = two.gateway._store
                await until(lambda: store.why_down("r") is None)
                assert (await post(two, CHAT, chat())).status_code == 200


@pytest.mark.parametrize("first", ["memory", "redis"])
async def test_a_run_stays_with_the_state_it_began_with(first: str, tmp_path: Path) -> None:
    """The other kind of store knows nothing of the indices that it gave away."""
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"run": "r", "ledger": {"path": str(tmp_path)}}
        states = {"memory": {"state": "memory"}, "redis": {"state": server.url}}
        settings = {name: {**given, **state} for name, state in states.items()}
        second = "redis" if first == "memory" else "memory"
        async with whole(pool("policy", worker.url), **settings[first]):
            with pytest.raises(InvalidSettings, match="state: Run r began with state: "):
                async with whole(pool("policy", worker.url), **settings[second]):
                    pass
            async with whole(pool("policy", worker.url), **{**settings[second], "run": "other"}) as gate:
                answer = await gate.http.post(CHAT, json=chat(), headers={"x-detgate-run": "r"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "run_differs")
        with pytest.raises(InvalidSettings, match="state: Run r began with state: "):
            async with whole(pool("policy", worker.url), **settings[second], resume=True):
                pass


BROKEN = {"ledger": "gateway.ledger.writer.Ledger._write", "sessions": "gateway.sessions.Sessions._put_by"}


@pytest.mark.parametrize("fails", BROKEN)
async def test_a_run_that_could_not_be_opened_leaves_nobody_behind_who_would_end_its_requests(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store is reached anew, each who lives in a run tells what it has: there must be one."""
    release = asyncio.Event()

    async def held(seen: Seen, reply: Reply) -> None:
        await release.wait()
        reply.json(completion())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with RedisServer() as server, Front(server.port) as front, FakeWorker(held) as worker:
        given: dict[str, Any] = {"state": front.url, "ledger": {"path": str(tmp_path), "on_error": "fail"}}
        async with whole(pool("policy", worker.url), run="own", **given) as gate:
            with monkeypatch.context() as patch:
                where = {
                    "ledger": "gateway.ledger.writer.Ledger._write",
                    "sessions": "gateway.sessions.Sessions._put_by",
                }
                patch.setattr(where[fails], full)
                headers = {"x-session-id": "s", "x-detgate-run": "x"}
                assert (await gate.http.post(CHAT, json=chat("a"), headers=headers)).status_code == 503
            first = asyncio.create_task(gate.http.post(CHAT, json=chat("b"), headers=headers))
            await until(lambda: len(worker.seen) == 1)
            store: Any = gate.gateway._store
            before = store.link.generation
            front.cut()
            await until(lambda: store.link.generation > before and store.why_down("x") is None)
            second = asyncio.create_task(gate.http.post(CHAT, json=chat("c"), headers=headers))
            await until(lambda: len(worker.seen) == 2)
            release.set()
            answers = await asyncio.gather(first, second)
            assert [(a.status_code, a.headers["x-detgate-index"]) for a in answers] == [(200, "0"), (200, "1")]


async def test_what_a_gateway_did_and_cannot_make_out_any_more_is_refused_with_its_place(tmp_path: Path) -> None:
    """The server forgot it, and the ledger is to tell it again."""
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"state": server.url, "run": "r", "ledger": {"path": str(tmp_path)}}
        async with whole(pool("policy", worker.url), **given) as gate:
            await post(gate, f"/sessions/s{CHAT}", chat())
        [file] = (tmp_path / "r").glob("*.jsonl")
        sound = file.read_bytes()
        file.write_bytes(sound.replace(b'"digest":"', b'"digest":"x'))
        await server.ask("FLUSHALL")
        async with whole(pool("policy", worker.url), **given) as gate:
            for _ in range(2):
                refused = await post(gate, f"/sessions/s{CHAT}", chat())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "run_unreadable")
                message = refused.json()["error"]["message"]
                assert re.match(rf"{re.escape(str(file))}, line \d is no sound record: digest cannot be 'x", message)
            assert any("is no sound record" in why for why in (await gate.http.get("/readyz")).json()["why"])
            file.write_bytes(sound)
            store: Any = gate.gateway._store
            await until(lambda: store.why_down("r") is None)
            assert (await post(gate, f"/sessions/s{CHAT}", chat("2"))).headers["x-detgate-index"] == "1"


async def test_a_segment_of_another_run_ends_the_start(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "1-1.jsonl").write_bytes(b'{"event":"gateway","run":"other"}\n')
        with pytest.raises(InvalidSettings, match=r"1-1\.jsonl, line 1 is no sound record: run is 'other', and not r"):
            async with whole(pool("policy", worker.url), state=server.url, run="r", ledger={"path": str(tmp_path)}):
                pass


async def test_a_broken_record_of_weights_ends_the_start_with_its_place(tmp_path: Path) -> None:
    async with RedisServer() as server, FakeWorker() as worker:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "1-1.jsonl").write_bytes(b'{"event":"fleet"}\n{"event":"weights","pool":"policy"}\n')
        with pytest.raises(InvalidSettings, match=r"1-1\.jsonl, line 2 is no sound record: change is missing"):
            async with whole(pool("policy", worker.url), state=server.url, run="r", ledger={"path": str(tmp_path)}):
                pass


async def of_run(gate: Gate, run: str, text: str, **headers: str) -> httpx.Response:
    return await gate.http.post(f"/runs/{run}/sessions/s{CHAT}", json=chat(text), headers=headers)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def shown(ledger: Path) -> list[Path]:
    """Where gateways show those who share the folder that they live."""
    return list(ledger.glob("*/*.gateway"))


async def takes_part(server: RedisServer, run: str) -> list[bytes]:
    """Gateways that the store takes for alive in a run."""
    told: list[bytes] = await server.ask("ZRANGE", f"detgate:{{{run}}}:beats", 0, -1)
    return told


@pytest.mark.parametrize("forgets", [False, True])
async def test_an_idle_run_makes_room_and_goes_on_where_it_was_when_it_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    monkeypatch.setattr(runs, "REST", 0)
    async with RedisServer() as server, FakeWorker() as worker:
        given: dict[str, Any] = {"state": server.url, "run": "own", "limits": {"runs": 2}}
        async with whole(pool("policy", worker.url), **given, ledger={"path": str(tmp_path)}) as gate:
            store: Any = gate.gateway._store
            sessions: Any = gate.gateway.sessions
            for number in range(3):
                for run in ("a", "b", "c"):
                    async with asyncio.timeout(20):
                        while (answer := await of_run(gate, run, str(number))).status_code == 503:
                            # The run before it is not left while the store has not noted its end.
                            assert error_of(answer)[1] in ("too_many_runs", "store_unavailable")
                    assert (answer.status_code, answer.headers["x-detgate-index"]) == (200, str(number))
                    assert set(store._runs) == set(sessions._events) == {"own", run}
                    assert len(await takes_part(server, run)) == 1
                    assert len(shown(tmp_path)) == 2
                if forgets:
                    await server.ask("FLUSHALL")
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert {name for name in names if name.startswith(("run ", "sessions of "))} == {
                "run own",
                "run c",
                "sessions of own",
                "sessions of c",
            }
            if not forgets:
                assert await takes_part(server, "a") == []


async def test_a_run_in_which_something_happens_or_that_was_named_just_now_makes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        if b"slow" in seen.body:
            await go.wait()
        reply.json(completion())

    async with RedisServer() as server, FakeWorker(script) as worker:
        given: dict[str, Any] = {"state": server.url, "run": "own", "limits": {"runs": 2}}
        async with whole(pool("policy", worker.url), **given, ledger={"path": str(tmp_path)}) as gate:
            slow = asyncio.create_task(of_run(gate, "a", "slow"))
            await until(lambda: worker.running == 1)
            with monkeypatch.context() as patch:
                patch.setattr(runs, "REST", 0)
                assert error_of(await of_run(gate, "b", "1")) == (503, "too_many_runs")
                go.set()
                assert (await slow).status_code == 200
                made = await post(gate, "/sessions", {"identity": "x", "run": "a"})
                assert error_of(await of_run(gate, "b", "1")) == (503, "too_many_runs")
                key = bearer(made.json()["api_key"])
                assert (await gate.http.delete("/runs/a/sessions/x", headers=key)).json()["state"] == "ended"
            assert error_of(await of_run(gate, "b", "1")) == (503, "too_many_runs")
            store: Any = gate.gateway._store
            await until(lambda: "a" not in store.busy)
            monkeypatch.setattr(runs, "REST", 0)
            assert (await of_run(gate, "b", "1")).headers["x-detgate-index"] == "0"
            await until(lambda: "b" not in store.busy)
            # Of the session that has ended is known what was known.
            ended = await gate.http.post(f"/runs/a/sessions/x{CHAT}", json=chat(), headers=key)
            assert error_of(ended) == (410, "session_ended")


async def test_what_a_gateway_did_in_a_run_before_it_left_it_is_told_when_the_server_has_lost_the_last_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "REST", 0)
    pair = Pair()
    async with pair.up() as front, FakeWorker() as worker:
        given: dict[str, Any] = {"state": front.url, "run": "own", "limits": {"runs": 2}}
        given["timeouts"] = {"gateway": 1.0}
        async with whole(pool("policy", worker.url), **given, ledger={"path": str(tmp_path)}) as gate:
            store: Any = gate.gateway._store

            async def asked(run: str, text: str) -> str:
                async with asyncio.timeout(20):
                    while (answer := await of_run(gate, run, text)).status_code == 503:
                        pass
                return answer.headers["x-detgate-index"]

            assert await asked("a", "0") == "0"
            await until(lambda: not store.busy)
            await pair.follow()
            await pair.part()
            assert await asked("a", "1") == "1"
            assert await asked("b", "0") == "0"
            assert "a" not in store._runs
            await pair.fail_over()
            assert await asked("a", "2") == "2"
