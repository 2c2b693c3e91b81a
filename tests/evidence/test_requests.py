"""Requests in the order in which two ledgers are walked side by side, and what is known of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import main
from gateway.core.digits import natural
from gateway.evidence.bodies import asked
from gateway.evidence.ledgers import Source, Unusable, find
from gateway.evidence.requests import Request, Requests, base_of, equal_part, merged, request_of, sortable
from tests.evidence.ledger import request, write

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
NUMBERED = st.text("01279ab:/-", min_size=1, max_size=10)


@given(st.lists(NAMES | NUMBERED, min_size=2, max_size=8))
def test_bytes_sort_as_names_do(names: list[str]) -> None:
    assert sorted(names, key=sortable) == sorted(names, key=natural)


@given(NAMES | NUMBERED, NAMES | NUMBERED)
def test_no_name_begins_with_another(one: str, other: str) -> None:
    assert one == other or not sortable(one).startswith(sortable(other))


Capture = pytest.CaptureFixture[str]


def read(folder: Path) -> list[Request]:
    return [request_of(item) for item in Requests.read(find(str(folder), folder))]


def test_requests_come_by_session_then_index_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    records = [request("17:10", 0), request("17:2", 1), request("17:2", 0), request("3:0", 0)]
    found = read(write(tmp_path / "r", *records))
    assert [(each.identity, each.index) for each in found] == [("3:0", 0), ("17:2", 0), ("17:2", 1), ("17:10", 0)]


def test_what_explains_is_no_difference_and_what_decides_is(tmp_path: Path) -> None:
    def one(name: str, **changes: Any) -> bytes:
        return equal_part(
            next(iter(Requests.read(find(str(write(tmp_path / name, request("s", 0, **changes))), tmp_path))))
        )

    explains: dict[str, Any] = {"flags": ["racing"], "scheme": "areal", "racing": True, "request_id": "x", "group": "g"}
    decides: dict[str, Any] = {
        "digest": "x",
        "content": "x",
        "seed": 5,
        "engine": "x",
        "weight_version": "x",
        "status": 400,
        "answer": "x",
        "finish_reasons": ["length"],
        "outcome": "failed",
        "attempts": [],
    }
    plain = one("plain")
    assert [name for name, value in explains.items() if one(name, **{name: value}) != plain] == []
    assert [name for name, value in decides.items() if one(name, **{name: value}) == plain] == []


def test_calls_of_one_request_may_end_in_any_order(tmp_path: Path) -> None:
    calls = [{"replica": f"policy-{number}", "outcome": "answered"} for number in range(3)]
    write(tmp_path / "a", request("s", 0, attempts=calls))
    write(tmp_path / "b", request("s", 0, attempts=calls[::-1]))
    [a], [b] = read(tmp_path / "a"), read(tmp_path / "b")
    assert a.attempts == b.attempts


def test_claims_of_one_index_are_one_request(tmp_path: Path) -> None:
    first = request("s", 0, outcome="abandoned", answer="part")
    again = request("s", 0)
    found = read(write(tmp_path / "r", first, again))
    assert [each.outcome for each in found] == ["abandoned", "delivered"]
    one = merged(found)
    assert (one.outcome, one.claims, one.answer) == ("delivered", 2, "answer to s 0")
    assert one.opened == found[0].opened


def test_how_crowded_it_was(tmp_path: Path) -> None:
    claims = [request(f"s{number}", 0) for number in range(3)]
    found = read(write(tmp_path / "r", [claim[0] for claim in claims], [claim[1] for claim in claims], request("t", 0)))
    assert [each.crowd for each in found] == [3, 2, 3, 1]


def test_an_answer_ended_when_it_was_complete_not_when_that_was_recorded(tmp_path: Path) -> None:
    """A client that has its answer may be back before the end of the request before it is on record."""
    (one, closed), two = request("s", 0), request("s", 1)
    complete = {name: one[name] for name in ("run", "session", "identity", "index")} | {"event": "complete"}
    first, second = read(write(tmp_path / "r", [one, complete, two[0], closed, two[1]]))
    assert first.ended is not None
    assert first.closed is not None
    assert first.ended < second.opened < first.closed


def test_a_claim_without_an_end(tmp_path: Path) -> None:
    [found] = read(write(tmp_path / "r", request("s", 0)[:1]))
    assert (found.outcome, found.closed, found.attempts) == (None, None, [])


def test_an_end_that_another_gateway_wrote_before_the_claim_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", request("s", 0)[1:])
    (folder / "2-2.jsonl").write_bytes(orjson.dumps(request("s", 0)[0]) + b"\n")
    [found] = read(folder)
    assert found.delivered


def test_exported_requests_are_read_too(tmp_path: Path) -> None:
    """`GET /admin/runs/{run}/requests` gives a request as one object."""
    opened, closed = request("s", 0)
    export = {**opened, **closed, "claims": 2}
    del export["event"]
    (tmp_path / "export.jsonl").write_bytes(orjson.dumps(export) + b"\n")
    write(tmp_path / "r", request("s", 0))
    [found], [recorded] = read(tmp_path / "export.jsonl"), read(tmp_path / "r")
    assert (found.answer, found.claims, found.outcome) == (recorded.answer, 2, "delivered")


def test_only_content_order_puts_a_digest_behind_an_identity() -> None:
    assert base_of("17:3/0123456789abcdef", "content") == "17:3"
    assert base_of("17:3/0123456789abcdef", "arrival") == "17:3/0123456789abcdef"
    assert base_of("17:3/0123456789abcde", "content") == "17:3/0123456789abcde"


def test_a_body_is_known_only_if_it_was_kept_whole() -> None:
    body = {"request_body": "{}", "request_bytes": 2, "request_cut": False}
    assert asked(body) == b"{}"
    assert asked(body | {"request_cut": True}) is None
    assert asked(body | {"request_bytes": 3}) is None
    assert asked({}) is None


def test_torn_lines_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", request("s", 0))
    with (folder / "1-1.jsonl").open("ab") as file:
        file.write(b'{"event": "clo')
    assert Requests.read(find(str(folder), tmp_path)).torn == 1


def test_sessions_with_an_index_that_was_given_twice_are_counted_and_told(tmp_path: Path, capsys: Capture) -> None:
    twice = {"event": "fenced", "run": "r", "session": "s", "identity": "s", "index": 0}
    folder = write(tmp_path / "r", request("s", 0), request("s", 0, prompt="other"), [twice, twice | {"index": 1}])
    other = write(tmp_path / "other", request("s", 0), request("s", 0, prompt="other"))
    main(["diff", str(folder), str(other)])
    assert "A has 1 sessions with an index that was given twice" in capsys.readouterr().out
    main(["diff", str(folder), str(other), "--json"])
    assert json.loads(capsys.readouterr().out)["fenced"] == {"a": 1, "b": 0}


def test_records_of_several_runs_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", request("s", 0), request("s", 1, run="other"))
    with pytest.raises(Unusable, match="several runs: other, r"):
        Requests.read(find(str(folder), tmp_path))


def test_what_holds_no_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"event": "fleet"}\n')
    with pytest.raises(Unusable, match="holds no request"):
        Requests.read(Source("x", (tmp_path / "1.jsonl",)))
