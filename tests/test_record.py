"""What the ledger tells of a request, and that others can read it as it is."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from gateway.record import counts
from tests.harness import (
    DONE,
    FakeWorker,
    Gate,
    Reply,
    Script,
    Seen,
    Wire,
    chat,
    completion,
    delta,
    gateway,
    polite,
    pool,
)

CHAT = "/sessions/s/v1/chat/completions"


@asynccontextmanager
async def gate_of(folder: Path, script: Any = polite, replicas: int = 2, **settings: Any) -> AsyncIterator[Gate]:
    async with FakeWorker(script) as one, FakeWorker(script) as two:
        urls = [one.url, two.url][:replicas]
        ledger = {"path": str(folder)} | settings.pop("ledger", {})
        async with gateway(pool("policy", *urls), run="r", ledger=ledger, **settings) as gate:
            yield gate


def pair(gate: Gate) -> tuple[dict[str, Any], dict[str, Any]]:
    """The claim and the end of the only request."""
    opened, closed = (each for each in gate.records() if each["event"] in ("opened", "closed"))
    return opened, closed


async def test_a_record_has_all_that_decided_and_all_that_came(tmp_path: Path) -> None:
    async with gate_of(tmp_path) as gate:
        answer = await gate.http.post(CHAT, json=chat("x", n=1), headers={"X-Index-Order": "content"})
        opened, closed = pair(gate)
        settings, fleet = gate.gateway.settings, gate.gateway.fleet
        replica = answer.headers["x-detgate-replica"]
        assert opened["config"] == settings.digest()
        assert (opened["scheme"], opened["order"], opened["model"]) == ("v1", "content", "test-model")
        assert (opened["stream"], opened["n"], opened["epoch"]) == (False, 1, 0)
        assert opened["identity"] == f"s/{opened['content'][:16]}"
        assert abs(opened["time"] - closed["time"]) < 60
        assert sorted(closed["candidates"]) == ["policy-0", "policy-1"]
        assert closed["candidates"][0] == closed["replica"] == replica
        assert closed["loads"] == {"policy-0": 0, "policy-1": 0}
        assert closed["attempts"] == [{"replica": replica, "outcome": "answered"}]
        assert closed["engine"] == next(each.fingerprint for each in fleet.replicas if each.name == replica)
        assert (closed["status"], closed["outcome"], closed["finish_reasons"]) == (200, "delivered", ["stop"])
        assert closed["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        assert len(closed["answer"]) == 32
        assert 0 < closed["first_byte_seconds"] <= closed["seconds"]
        assert not any(name.endswith("_body") for name in (*opened, *closed))


async def test_each_sending_is_told_with_how_it_ended(tmp_path: Path) -> None:
    broken: list[str] = []

    async def breaks_once(seen: Seen, reply: Reply) -> None:
        if not broken:
            broken.append(seen.target)
            reply.reset()
        else:
            await polite(seen, reply)

    async with gate_of(tmp_path, breaks_once) as gate:
        assert (await gate.http.post(CHAT, json=chat("x"))).status_code == 200
        _, closed = pair(gate)
    assert [each["outcome"] for each in closed["attempts"]] == ["broken", "answered"]
    assert [each["replica"] for each in closed["attempts"]] == closed["replicas"]
    assert closed["candidates"] == [closed["replica"]]


async def test_every_record_has_the_same_columns(tmp_path: Path) -> None:
    async with gate_of(tmp_path, profile="balanced") as gate:
        await gate.http.post(CHAT, json=chat("x"))
        await gate.http.post(CHAT, json=chat("x", stream=True, model=7))
        for replica in gate.gateway.fleet.replicas:
            replica.draining = True
        assert (await gate.http.post(CHAT, json=chat("y"))).status_code == 503
        records = [each for each in gate.records() if each["event"] in ("opened", "closed")]
    for event in ("opened", "closed"):
        columns = [tuple(each) for each in records if each["event"] == event]
        assert len(set(columns)) == 1
        assert len(columns) == 3


async def test_bodies_are_kept_byte_for_byte_and_cut_where_they_are_too_long(tmp_path: Path) -> None:
    sent = '{"model" : "test-model", "messages":[{"role":"user","content":"Grüße \\ud83d\\ude00"}], "temperature": 1.0}'
    async with gate_of(tmp_path, ledger={"bodies": True, "body_bytes": 200}) as gate:
        answer = await gate.http.post(CHAT, content=sent, headers={"authorization": "Bearer secret-of-a-client"})
        opened, closed = pair(gate)
        text = (tmp_path / "r").glob("*.jsonl")
        whole = b"".join(file.read_bytes() for file in text)
    assert (opened["request_body"], opened["request_bytes"], opened["request_cut"]) == (sent, len(sent.encode()), False)
    assert closed["answer_body"] == answer.text[:200]
    assert (closed["answer_bytes"], closed["answer_cut"]) == (len(answer.content), True)
    assert b"secret-of-a-client" not in whole


@pytest.mark.parametrize("limit", [999, 1000])
async def test_a_cut_body_ends_with_a_whole_character(tmp_path: Path, limit: int) -> None:
    async with gate_of(tmp_path, ledger={"bodies": True, "body_bytes": limit}) as gate:
        body = json.dumps(chat("ü" * 1000), ensure_ascii=False).encode()
        await gate.http.post(CHAT, content=body)
        opened, _ = pair(gate)
    assert body.startswith(opened["request_body"].encode())
    assert limit - 2 < len(opened["request_body"].encode()) <= limit
    assert (opened["request_bytes"], opened["request_cut"]) == (len(body), True)


async def test_of_a_stream_the_events_are_kept_as_the_client_got_them(tmp_path: Path) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in (delta("h"), delta("i"), delta("", "stop"), DONE):
            reply.chunk(event)
        reply.end()

    async with gate_of(tmp_path, script, ledger={"bodies": True}) as gate:
        answer = await gate.http.post(CHAT, json=chat("x", stream=True))
        await gate.until(lambda: len(gate.records()) == 2)
        opened, closed = pair(gate)
    assert opened["stream"]
    assert closed["answer_body"] == answer.text
    assert closed["answer_body"].endswith(DONE)


async def test_of_a_request_that_is_refused_the_error_is_kept(tmp_path: Path) -> None:
    async with gate_of(tmp_path, ledger={"bodies": True}) as gate:
        for replica in gate.gateway.fleet.replicas:
            replica.draining = True
        answer = await gate.http.post(CHAT, json=chat("x"))
        _, closed = pair(gate)
    assert (closed["outcome"], closed["error"]) == ("refused", "no_healthy_replica")
    assert closed["answer_body"] == answer.text


async def test_a_request_with_text_that_cannot_be_written_has_its_record(tmp_path: Path) -> None:
    async with gate_of(tmp_path, ledger={"bodies": True}) as gate:
        for index, body in enumerate((b'{"model":"\\ud800","messages":[]}', b'{"model":"test-model","messages":[]}')):
            answer = await gate.http.post(CHAT, content=body, headers={"X-Detgate-Pool": "policy"})
            assert (answer.status_code, answer.headers["x-detgate-index"]) == (200, str(index))
        await gate.until(lambda: len(gate.records()) == 4)
        models = [each["model"] for each in gate.records() if each["event"] == "opened"]
        assert models == ["\\ud800", "test-model"]


ODD = {
    "id": b'"\\ud800"',
    "usage": b'{"completion_tokens":99999999999999999999999,"prompt_tokens":NaN,"\\udfff":1}',
    "choices": b'[{"index":0,"message":{},"finish_reason":"\\ud83d","weight_versions":[{"version":"\\udfff"}]}]',
    "metadata": b'{"weight_version":"\\ud800"}',
    "error": b'{"message":"\\ud800"}',
}


@pytest.mark.parametrize("field", ODD)
async def test_so_has_an_answer(tmp_path: Path, field: str) -> None:
    answer = {} if field == "error" else completion()
    raw = json.dumps(answer | {field: "@"}).encode().replace(b'"@"', ODD[field])

    async def script(seen: Seen, reply: Reply) -> None:
        if seen.json.get("stream"):
            reply.sse()
            reply.chunk(b"data: " + raw.replace(b'"message"', b'"delta"') + b"\n\n" + DONE.encode())
            reply.end()
        else:
            reply.head(200, ("content-type", "application/json"), length=len(raw))
            reply.writer.write(raw)

    async with gate_of(tmp_path, script) as gate:
        for stream in (False, True):
            got = (await gate.http.post(CHAT, json=chat("x", stream=stream))).content
            assert raw.replace(b'"message"', b'"delta"') in got.replace(b'"message"', b'"delta"')
        await gate.until(lambda: len(gate.records()) == 4)
        ends = [(each["outcome"], each["answer"]) for each in gate.records() if each["event"] == "closed"]
        assert ends == [("failed" if field == "error" else "delivered", None)] * 2


UNSUMMABLE: list[Any] = ["2", [1], 2**63]
COUNTS: list[Any] = [None, {}, 4.5]


@pytest.mark.parametrize(
    ("engine", "count"), [("vllm", count) for count in COUNTS + UNSUMMABLE] + [("sglang", count) for count in COUNTS]
)
async def test_counts_that_are_none_break_no_answer_of_several_samples(engine: str, count: Any) -> None:
    async with FakeWorker(counting(count)) as worker, gateway(pool("policy", worker.url, engine=engine)) as gate:
        for stream in (False, True):
            answer = await gate.http.post(CHAT, json=chat("x", n=2, stream=stream))
            assert answer.status_code == 200
            assert (b"[DONE]" in answer.content) is stream
        await gate.until(lambda: [each["event"] for each in gate.records()].count("closed") == 2)
        ends = [(each["outcome"], each["used"]) for each in gate.records() if each["event"] == "closed"]
        assert ends == [("delivered", True)] * 2


@pytest.mark.parametrize("count", UNSUMMABLE)
async def test_counts_that_cannot_be_summed_are_an_error_of_the_replica(count: Any) -> None:
    async with FakeWorker(counting(count)) as worker, gateway(pool("policy", worker.url, engine="sglang")) as gate:
        whole = await gate.http.post(CHAT, json=chat("x", n=2))
        assert whole.json()["error"]["code"] == "unmergeable_answer"
        async with Wire(gate.port) as wire:
            wire.post(CHAT, chat("x", n=2, stream=True))
            assert await wire.head() == 200
            body = await wire.broken_body()
        assert b'"code":"unmergeable_answer"' in body
        await gate.until(lambda: [each["event"] for each in gate.records()].count("closed") == 2)
        assert [each["used"] for each in gate.records() if each["event"] == "closed"] == [False, False]


def counting(count: Any) -> Script:
    """Answers with one choice for each sample, and this count of tokens."""
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count}

    async def script(seen: Seen, reply: Reply) -> None:
        number = seen.json.get("n", 1)
        choices = [{"index": i, "message": {"content": f"a{i}"}, "finish_reason": "stop"} for i in range(number)]
        if seen.json.get("stream"):
            reply.sse()
            for i in range(number):
                reply.chunk(delta("a", index=i) + delta("", "stop", index=i))
            reply.chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n{DONE}")
            reply.end()
        else:
            reply.json({"choices": choices, "usage": usage})

    return script


def rows(query: str) -> list[Any]:
    """What DuckDB says."""
    found = duckdb.sql(query)
    assert found is not None
    return found.fetchall()


async def test_duckdb_reads_segments_as_they_are(tmp_path: Path) -> None:
    answers = iter(range(100))

    async def script(seen: Seen, reply: Reply) -> None:
        number = next(answers)
        usage: dict[str, Any] = {"prompt_tokens": 3, "total_tokens": number, "details": None}
        if number % 2:
            usage |= {"total_tokens": str(number), "cost": 0.25, "details": {"cached_tokens": 1}}
        reply.json(completion(usage=usage))

    async with gate_of(tmp_path, script, ledger={"bodies": True, "segment_bytes": 4096}) as gate:
        for number in range(20):
            body = chat(f"{number}", **({"seed": 2**62} if number % 3 else {}))
            await gate.http.post(CHAT, json=body, headers={"idempotency-key": f"k{number}"} if number % 5 else {})
        gate.records()
        folder = tmp_path / "r"
        assert len(list(folder.glob("*.jsonl"))) > 3
        table = f"read_json('{folder}/*.jsonl', union_by_name = true)"
        columns = {name: kind.replace('"', "") for name, kind, *_ in rows(f"DESCRIBE SELECT * FROM {table}")}
        expected = {
            "index": "BIGINT", "seed": "BIGINT", "status": "BIGINT", "seconds": "DOUBLE", "time": "DOUBLE",
            "identity": "VARCHAR", "stream": "BOOLEAN", "request_body": "VARCHAR", "key": "VARCHAR",
            "attempts": "STRUCT(replica VARCHAR, outcome VARCHAR)[]", "finish_reasons": "VARCHAR[]",
        }  # fmt: skip
        assert {name: columns[name] for name in expected} == expected
        assert "JSON" not in columns.values()
        query = f"""
            SELECT o.index, o.seed, c.usage.prompt_tokens, json_extract_string(o.request_body, '$.messages[0].content')
            FROM {table} o JOIN {table} c USING (run, session, identity, index)
            WHERE o.event = 'opened' AND c.event = 'closed' ORDER BY o.index
        """
        found = rows(query)
    assert [(index, prompt, text) for index, _, prompt, text in found] == [(n, 3, f"{n}") for n in range(20)]
    assert [seed == 2**62 for _, seed, _, _ in found] == [bool(n % 3) for n in range(20)]


async def test_jq_reads_segments_as_they_are(tmp_path: Path) -> None:
    jq = shutil.which("jq")
    if jq is None:  # nothing is lost: DuckDB has read the same lines above
        return
    async with gate_of(tmp_path) as gate:
        await gate.http.post(CHAT, json=chat("x"))
        [file] = (tmp_path / "r").glob("*.jsonl")
        opened, _ = pair(gate)
        query = (jq, "-c", 'select(.event == "opened") | [.index, .seed]', str(file))
        process = await asyncio.create_subprocess_exec(*query, stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate()
        assert json.loads(told) == [0, opened["seed"]]


@pytest.mark.parametrize(
    ("usage", "kept"),
    [
        ({"total_tokens": 3}, {"total_tokens": 3}),
        ({"total_tokens": "3", "cost": 0.5, "ok": True, "none": None}, {}),
        ({"details": {"cached_tokens": 1, "audio": None}}, {"details": {"cached_tokens": 1}}),
    ],
)
def test_of_usage_whole_numbers_are_kept(usage: dict[str, Any], kept: dict[str, Any]) -> None:
    assert counts(usage) == kept
