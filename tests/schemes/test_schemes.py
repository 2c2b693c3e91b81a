"""Every seed scheme of the folder against its golden vectors; a new file is tested as soon as it is there."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import schemes

VECTORS = Path(__file__).parents[1] / "vectors" / "schemes"
FILES = sorted(path.stem for path in Path(schemes.__file__).parent.glob("[!_]*.py"))

masters = st.integers(0, 2**63 - 1)
identities = st.text(st.characters(codec="utf-8"), max_size=20)
indices = st.integers(0, 2**31 - 1)
members = st.none() | st.integers(0, 10_000)


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())
    return found


def test_the_folder_is_the_list() -> None:
    assert list(schemes.names()) == FILES
    assert {"areal", "offset", "v1"} <= set(FILES)
    assert sorted(path.stem for path in VECTORS.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_the_golden_vectors_hold(name: str) -> None:
    seed = schemes.load(name).seed
    rows = vectors(name)
    assert len(rows) >= 10
    for row in rows:
        assert seed(int(row["master"]), row["identity"], row["index"], row["member"]) == row["seed"], row


@pytest.mark.parametrize("name", FILES)
def test_a_scheme_says_its_formula(name: str) -> None:
    assert inspect.getdoc(schemes.load(name).seed)


@pytest.mark.parametrize("name", FILES)
@given(masters, identities, indices, members)
def test_seeds_have_31_bits(name: str, master: int, identity: str, index: int, member: int | None) -> None:
    assert 0 <= schemes.load(name).seed(master, identity, index, member) < 2**31


@given(masters, identities, indices, members)
def test_v1_is_never_0_and_leaves_the_member_to_the_identity(
    master: int, identity: str, index: int, member: int | None
) -> None:
    seed = schemes.load("v1").seed(master, identity, index, member)
    assert 1 <= seed <= 2**31 - 1
    assert seed == schemes.load("v1").seed(master, identity, index, None)


def test_v1_tells_its_parts_apart() -> None:
    seed = schemes.load("v1").seed
    asked = [(1, "23", 4), (12, "3", 4), (1, "2", 34), (1, "", 234), (1, "23", 5), (2, "23", 4), (1, "24", 4)]
    assert len({seed(*parts, None) for parts in asked}) == len(asked)


@pytest.mark.parametrize(
    ("identity", "index", "seed"),
    [("17:3", 0, 1152644103), ("17:3", 1, 817236710), ("17", 0, 422241094), ("0", 0, 745682570)],
)
def test_areal_repeats_the_seeds_that_areal_draws(identity: str, index: int, seed: int) -> None:
    assert schemes.load("areal").seed(42, identity, index, None) == seed
    assert schemes.load("areal").seed(7, identity, index, 5) == seed


def test_offset_counts_members_on_from_the_base() -> None:
    seed = schemes.load("offset").seed
    assert [seed(42, "any", 0, member) for member in range(3)] == [42, 43, 44]
    assert seed(42, "other", 1, None) == 1_000_045
    assert seed(2**31 - 1, "", 0, 1) == 0


def test_an_unknown_scheme_is_answered_with_those_there_are() -> None:
    with pytest.raises(LookupError, match="'v2': use one of areal, offset, v1"):
        schemes.load("v2")
    with pytest.raises(LookupError):
        schemes.load("__init__")


def test_seeds_do_not_depend_on_the_process() -> None:
    ask = "from gateway import schemes\nprint([schemes.load(name).seed(42, '17:3', 1, 2) for name in schemes.names()])"
    answers = {
        subprocess.run(
            [sys.executable, "-c", ask],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    }
    assert answers == {f"{[schemes.load(name).seed(42, '17:3', 1, 2) for name in FILES]}\n"}
