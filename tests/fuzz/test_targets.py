"""The targets on bytes from strategies: JSON of every spelling, cut and bent; streams; ledgers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.core.texts import bodies
from tests.fuzz import targets
from tests.harness import MODEL, FakeWorker, gateway, pool

few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

written = st.tuples(st.sampled_from(("", "\ufeff")), st.text(" \t\r\n", max_size=2), bodies).map(
    lambda parts: (parts[0] + parts[1] + parts[2].render() + parts[1]).encode()
)


@st.composite
def bent(draw: Any) -> bytes:
    """A body with a few of its bytes otherwise: most are no JSON any more."""
    raw = bytearray(draw(written))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw) - 1))
        raw[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from((b'"', b"\\", b"{", b"}", b",", b":", b"\x00", b"\xff", b" ", b"1"))
        )
    return bytes(raw)


def deep(levels: int, opening: str, closing: str) -> bytes:
    return ('{"a": ' + opening * levels + "1" + closing * levels + ', "seed": null}').encode()


DEEP = [
    deep(levels, *kind)
    for levels in (100, 900, 1020, 1030, 5000)
    for kind in (("[", "]"), ('{"seed":', "}"), ('[{"n":', "}]"))
]


@pytest.mark.parametrize("name", targets.TARGETS)
def test_where_atheris_begins_holds(name: str) -> None:
    for data in targets.SEEDS[name]:
        targets.TARGETS[name](data)


@few
@given(st.one_of(written, bent()))
@example(b"{}")
@example(b'{"seed":1,"seed":2}')
@example(b'{"s\\u0065ed":1,"a":"\\ud800","b":1e400,"c":[1.0,-0,123456789012345678901234567890]}')
def test_what_is_spliced_says_the_same(data: bytes) -> None:
    targets.document(data)


@few
@given(st.one_of(written, bent()))
def test_the_canonical_form_hangs_on_what_is_said(data: bytes) -> None:
    targets.content(data)


@pytest.mark.parametrize("data", DEEP, ids=lambda data: f"{data[6:14]!r} {len(data)}")
def test_nesting_is_read_or_refused_and_never_fails(data: bytes) -> None:
    targets.document(data)
    targets.content(data)


lines = st.sampled_from(
    (
        b"data: ",
        b"data:",
        b"event: error",
        b": ping",
        b"\n",
        b"\r\n",
        b"\r",
        b"[DONE]",
        b'{"choices": [{"index": 0}]}',
        b"\xe5\x8c",
        b"{",
    )
)


@few
@given(st.binary(min_size=4, max_size=4), st.lists(st.one_of(lines, st.binary(max_size=5)), max_size=14).map(b"".join))
def test_a_stream_says_the_same_however_it_is_cut(cuts: bytes, stream: bytes) -> None:
    targets.events(cuts + stream)


records = st.sampled_from(
    (b'{"event": "opened"}', b'{"event": "gap"}', b"[]", b"1", b'{"a', b"\xff", b"{}", b"\n", b"\n", b"\r\n", b"\x00")
)


@few
@given(st.lists(records, max_size=12).map(b"".join))
def test_any_ledger_is_read(data: bytes) -> None:
    targets.ledger(data)


async def test_what_reaches_the_engine_says_what_the_client_said_and_the_seed() -> None:
    """Through the whole gateway: bodies of any spelling, and its own fields once."""
    asked: list[bytes] = []

    @settings(max_examples=30, database=None, deadline=None)
    @given(bodies)
    def collect(body: Any) -> None:
        body.members = [member for member in body.members if member.name not in OWN]
        rest = body.render().strip()[1:-1].strip()
        front = f'{{ "model":"{MODEL}","messages" : [{{"role": "user", "content": "x"}}]'
        asked.append((front + (" , " + rest if rest else "") + " }\n").encode())

    collect()
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        for body in asked:
            answer = await gate.http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 200, (body, answer.text)
            seed = targets.Number(answer.headers["x-detgate-seed"])
            seen = targets.spelled(worker.seen[-1].body)
            assert seen.pairs == [("seed", seed), *targets.spelled(body).pairs]
    assert len(asked) >= 25


OWN = {"model", "messages", "seed", "n", "sampling_params", "sampling_seed"}


def test_the_reader_here_sees_what_others_do_not() -> None:
    assert targets.spelled(b'{"a":1,"a":1.0}') == targets.Members(
        [("a", targets.Number("1")), ("a", targets.Number("1.0"))]
    )
    with pytest.raises(json.JSONDecodeError):
        targets.spelled(b"{")
