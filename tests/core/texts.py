"""JSON as clients may write it: trees that keep how keys, strings and numbers are spelled, and the space."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

NAMES = ("seed", "n", "model", "sampling_params", "sampling_seed", "temperature", "messages", "", "é", 'a"b')
SHORT = {
    '"': '\\"',
    "\\": "\\\\",
    "/": "\\/",
    "\n": "\\n",
    "\t": "\\t",
    "\b": "\\b",
    "\r": "\\r",
    "\f": "\\f",
}
FEWER = settings(max_examples=settings().max_examples * 2 // 5)
"""For properties of bodies: each takes ten times as long to draw as what others are tried with."""

TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


@dataclass
class Leaf:
    text: str

    def render(self) -> str:
        return self.text


@dataclass
class Array:
    items: list[tuple[str, "Node", str]]
    space: str = ""

    def render(self) -> str:
        inner = ",".join(before + item.render() + after for before, item, after in self.items)
        return f"[{inner or self.space}]"


@dataclass
class Member:
    key: str
    value: "Node"
    spaces: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def name(self) -> str:
        return str(json.loads(self.key))

    def render(self) -> str:
        before, after_key, after_colon, after = self.spaces
        return f"{before}{self.key}{after_key}:{after_colon}{self.value.render()}{after}"


@dataclass
class Object:
    members: list[Member]
    space: str = ""
    front: list[Member] = field(default_factory=list)
    """What was put straight after the brace."""

    def render(self) -> str:
        rest = ",".join(member.render() for member in self.members) or self.space
        front = ",".join(member.render() for member in self.front)
        return "{" + front + ("," if front and self.members else "") + rest + "}"

    def last(self, name: str) -> Member | None:
        """The member that counts under this name."""
        return next((member for member in [*self.members[::-1], *self.front] if member.name == name), None)


Node = Leaf | Array | Object

spaces = st.text(" \t\n\r", max_size=2)


Pick = Callable[[Sequence[Any]], Any]


def spelled(text: str, pick: Pick) -> str:
    """A JSON string of this text, each character escaped where it must be and sometimes where it need not."""
    return '"' + "".join(_character(character, pick) for character in text) + '"'


def _character(character: str, pick: Pick) -> str:
    code = ord(character)
    must = code < 0x20 or 0xD800 <= code < 0xE000 or character in '"\\'
    if not must and pick(range(6)):
        return character
    short = SHORT.get(character)
    if short is not None and pick((True, False)):
        return short
    units = character.encode("utf-16-be", "surrogatepass")
    form = pick(("\\u{:04x}", "\\u{:04X}"))
    return "".join(form.format(int.from_bytes(units[i : i + 2])) for i in range(0, len(units), 2))


characters = st.one_of(st.sampled_from('ab"\\/{}[],:\n\u2028\ud800\udc00é😀'), st.characters())

picks: st.SearchStrategy[Pick] = st.integers(0, 2**32).map(lambda seed: Random(seed).choice)


@st.composite
def strings(draw: Any) -> str:
    text = draw(st.one_of(st.text(characters, max_size=12), st.sampled_from(NAMES)))
    return spelled(text, draw(picks))


@st.composite
def keys(draw: Any) -> str:
    return spelled(draw(st.one_of(st.sampled_from(NAMES), st.text(characters, max_size=3))), draw(picks))


numbers = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.integers(0, 10**40).map(str),
    st.sampled_from(
        (
            "0",
            "-0",
            "0.0",
            "-0.0",
            "0e5",
            "1E400",
            "-1e-400",
            "1e999999999",
            "0.1000000000000000055",
            "9007199254740993",
            "18446744073709551616",
            "-9223372036854775809",
            "1e22",
            "1e29",
            "1e30",
            "123e28",
            "0.7",
            "7e-1",
            "1.50",
            "NaN",
            "Infinity",
            "-Infinity",
        )
    ),
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?\Z"),
)

leaves = st.one_of(st.sampled_from(("true", "false", "null")), numbers, strings()).map(Leaf)


def _arrays(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Array]:
    return st.builds(Array, st.lists(st.tuples(spaces, nodes, spaces), max_size=4), spaces)


def objects(nodes: st.SearchStrategy[Node] = leaves) -> st.SearchStrategy[Object]:
    members = st.builds(Member, keys(), nodes, st.tuples(spaces, spaces, spaces, spaces))
    return st.builds(Object, st.lists(members, max_size=6), spaces)


nodes: st.SearchStrategy[Node] = st.recursive(
    leaves, lambda inner: st.one_of(_arrays(inner), objects(inner)), max_leaves=12
)
bodies = objects(nodes)


def compact(raw: bytes) -> list[bytes]:
    """The tokens of a JSON text: all of it but the space between them."""
    return TOKENS.findall(raw)


def same(left: Any, right: Any) -> bool:
    """Equality of parsed JSON in which NaN equals itself and 1, 1.0 and true are three values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)
