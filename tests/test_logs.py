"""Lines of the log: their forms, and which request they are about."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
import structlog

from gateway.keys import entry
from gateway.logs import configure
from gateway.reader import Reader
from gateway.settings import Log
from tests.harness import FakeWorker, chat, gateway, pool

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**before)
    root.handlers, root.level = handlers, level


def read(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_each_line_about_a_request_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = {"api_keys": [entry("one", "alice")]}
    headers = {"authorization": "Bearer one", "x-request-id": "mine"}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth=auth, log={"level": "debug"}) as gate:
        configure(Log(level="debug", format="json"))
        capsys.readouterr()
        answer = await gate.http.post(f"/sessions/s{CHAT}", json=chat(), headers=headers)
        [line] = read(capsys)
        assert answer.headers["x-detgate-request-id"] == line["request_id"] == "s:0"
        assert (line["event"], line["user"], line["level"]) == ("request", "alice", "debug")

        await gate.http.post(CHAT, content=b"{", headers=headers)
        [line] = read(capsys)
        assert (line["client_request_id"], line["status"], "request_id" in line) == ("mine", 400, False)

        def fails(*_: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Reader, "read", fails)
        await gate.http.post(CHAT, json=chat(), headers=headers)
        lines = read(capsys)
        assert [(line["event"], line["client_request_id"], line["user"]) for line in lines] == [
            ("request failed", "mine", "alice"),
            ("request", "mine", "alice"),
        ]
        assert "a bug" in lines[0]["exception"]


async def test_lines_about_the_control_plane_carry_the_clients_id_and_no_other_line_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        configure(Log(format="json"))
        capsys.readouterr()
        await gate.http.post("/admin/pools/policy/replicas/policy-0/drain", headers={"x-request-id": "op-7"})
        await gate.http.post("/admin/weights", json={"version": "2"})
        told = [(line["event"], line.get("client_request_id")) for line in read(capsys)]
        assert ("fleet changed", "op-7") in told
        assert ("weights", None) in told


def test_a_line_is_written_in_one_piece_since_workers_share_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return len(text)

    pipe = Pipe()
    monkeypatch.setattr("sys.stderr", pipe)
    configure(Log(format="json"))
    structlog.get_logger().info("one")
    structlog.get_logger().info("two")
    assert [json.loads(piece)["event"] for piece in pipe.pieces] == ["one", "two"]
    assert all(piece.endswith("\n") for piece in pipe.pieces)


def test_lines_are_json_or_for_people_and_below_the_level_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    configure(Log(level="warning", format="json"))
    log = structlog.get_logger("detgate")
    log.info("unseen")
    log.warning("seen\nstill one line", what=1)
    logging.getLogger("library").warning("of a library")
    one, two = read(capsys)
    assert (one["event"], one["what"], one["level"]) == ("seen\nstill one line", 1, "warning")
    assert two["event"] == "of a library"
    assert set(two) == {"event", "level", "timestamp"}
    assert one["timestamp"].endswith("Z")
    configure(Log(format="console"))
    structlog.get_logger("detgate").info("for people", what=2)
    line = capsys.readouterr().err
    assert "for people" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("name", ["detgate", "library"])
def test_what_cannot_be_seen_is_written_out_for_people(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure(Log(format="console"))
    if name == "library":
        logging.getLogger(name).warning("who \u202e\x9b31m")
    else:
        structlog.get_logger(name).warning("who", session="\u202eeve\x9b31m\u2028")
    line = capsys.readouterr().err
    assert "\\u202e" in line
    assert "\\u009b31m" in line
    assert not {"\u202e", "\x9b", "\u2028"} & set(line)
