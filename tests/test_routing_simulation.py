"""The simulation of routing: what slack costs and buys, and that the documents show what it prints."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.routing_simulation import SLACKS, Traffic, compare, main, simulate

ROOT = Path(__file__).parents[1]
DOCUMENT, PICTURE = ROOT / "docs" / "routing.md", ROOT / "docs" / "images" / "routing.svg"


@pytest.mark.parametrize("jitter", [0.01, 0.1])
def test_more_slack_moves_fewer_requests_and_piles_up_more(jitter: float) -> None:
    rows = [compare(Traffic(jitter=jitter, requests=1024), slack) for slack in SLACKS]
    assert all(less.moved >= more.moved for less, more in pairwise(rows))
    assert all(less.peak <= more.peak for less, more in pairwise(rows))
    assert rows[0].moved > 0.5
    assert rows[-1].moved == 0


def test_in_sessions_too_once_slack_lets_a_turn_leave_the_place_that_the_last_one_freed() -> None:
    rows = [compare(Traffic(turns=8, requests=1024), slack) for slack in SLACKS]
    assert all(less.moved >= more.moved for less, more in pairwise(rows[1:]))
    assert all(less.peak <= more.peak for less, more in pairwise(rows))
    assert rows[-1].moved == 0


@pytest.mark.parametrize("slack", [0.0, 2.0, math.inf])
def test_runs_without_jitter_are_equal(slack: float) -> None:
    assert compare(Traffic(jitter=0.0, requests=512), slack).moved == 0


def test_at_slack_zero_no_replica_has_more_than_its_even_share_in_flight() -> None:
    assert simulate(Traffic(requests=1024), 0, 1).peak == 16


def test_every_request_of_every_session_is_sent_once() -> None:
    done = simulate(Traffic(turns=3, requests=100, in_flight=7), 0, 1)
    counts = Counter(done.went)
    assert counts.total() == 100
    assert counts.keys() == {"policy-0", "policy-1", "policy-2", "policy-3"}
    assert done.imbalance == max(counts.values()) / 25


def test_the_turns_of_a_session_wait_for_one_another() -> None:
    assert simulate(Traffic(turns=64, requests=64), 0, 1).peak == 1
    assert simulate(Traffic(turns=1, requests=64), 0, 1).peak == 16


def test_the_document_shows_what_the_simulation_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "routing.svg"
    main(["--plot", str(drawn)])
    printed = capsys.readouterr().out
    shown = [line for line in DOCUMENT.read_text().splitlines() if line in printed.splitlines() and "|" in line]
    assert "\n".join(shown) == "\n".join(line for line in printed.splitlines() if line.startswith("|"))
    assert drawn.read_text() == PICTURE.read_text(), "make sim-routing draws it anew"
    names = {element.text for element in ElementTree.fromstring(drawn.read_text()).iter() if element.text}
    assert {"independent requests, jitter 1%", "sessions of 8 requests", "slack", "inf"} <= names
