"""The content digest: what asks the same has the same, what asks otherwise another, by either way to it."""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core import canonical
from gateway.core.canonical import UNSAMPLED, content, form
from gateway.core.document import Document
from tests.core.steps import steps
from tests.core.texts import FEWER, Array, Leaf, Node, Object, bodies, numbers, spelled, strings

VECTORS = Path(__file__).parents[1] / "vectors" / "content.json"
ROUTE = "/v1/chat/completions"


def of(text: str | dict[str, Any]) -> str:
    return content(Document((text if isinstance(text, str) else json.dumps(text)).encode()), ROUTE)


def read(text: str) -> dict[str, Any]:
    """The body by the way that reads every byte again."""
    return canonical._without_ids(canonical._sampled(canonical._read(text)))


def test_the_golden_vectors_hold() -> None:
    rows = json.loads(VECTORS.read_text())
    assert len(rows) >= 15
    for row in rows:
        document = Document(row["body"].encode())
        assert form(document).decode() == row["form"]
        assert content(document, row["route"]) == row["digest"]


# One form


@FEWER
@given(bodies)
def test_every_way_gives_one_form(body: Object) -> None:
    text = body.render()
    reference = canonical._spelled(read(text))
    assert canonical._spelled(canonical._without_ids(canonical._sampled(canonical._walked(text)))) == reference
    assert form(Document(text.encode())) == reference
    assert form(Document(b"\xef\xbb\xbf" + text.encode())) == reference
    try:
        written = canonical._written(read(text))
    except canonical._Unfit:
        return
    assert written == reference


@FEWER
@given(bodies, st.randoms(use_true_random=False))
def test_neither_order_nor_space_nor_spelling_counts(body: Object, random: Random) -> None:
    assert of(body.render()) == of(_respelled(body, random))


def _respelled(node: Node, random: Random) -> str:
    """Another text of the same content."""
    space = random.choice(("", " ", "\n\t"))
    if isinstance(node, Object):
        members = list({member.name: member for member in node.members}.values())
        random.shuffle(members)
        texts = [
            f"{spelled(member.name, random.choice)}{space}:{_respelled(member.value, random)}" for member in members
        ]
        return "{" + space + f",{space}".join(texts) + "}"
    if isinstance(node, Array):
        return "[" + f"{space},".join([_respelled(item, random) for _, item, _ in node.items]) + space + "]"
    if node.text.startswith('"'):
        return spelled(json.loads(node.text), random.choice)
    return _renumbered(node.text, random)


def _renumbered(text: str, random: Random) -> str:
    """The same number moved along its exponent, or with zeros at its end; other literals as they are."""
    if not text.lstrip("-")[0].isdigit() or abs(Decimal(text.lower()).adjusted()) > 10**6:
        return text
    number = Decimal(text)
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    zeros = random.randint(0, 3)
    coefficient = "".join(map(str, digits)) + "0" * zeros
    return f"{'-' if sign else ''}{coefficient.lstrip('0') or '0'}{random.choice('eE')}{exponent - zeros}"


@given(numbers, numbers)
def test_numbers_are_equal_by_their_exact_value(left: str, right: str) -> None:
    assert (of(f'{{"x": {left}}}') == of(f'{{"x": {right}}}')) == (_valued(left) == _valued(right))
    assert (of(f'{{"x": [{left}]}}') == of(f'{{"x": [{right}]}}')) == (_valued(left) == _valued(right))


def _valued(text: str) -> Decimal | str:
    value = Decimal(text)
    return text if value.is_nan() else value


@given(st.lists(numbers, min_size=2, max_size=5))
def test_a_number_reads_as_itself_where_the_form_is_json(texts: list[str]) -> None:
    formed = form(Document(f'{{"x": [{",".join(texts)}]}}'.encode()))
    back = json.loads(formed, parse_float=_valued, parse_int=_valued, parse_constant=_valued)["x"]
    assert back == [_valued(text) for text in texts]


@pytest.mark.parametrize(
    ("number", "written"),
    [
        ("1", "1"),
        ("1.0", "1"),
        ("1e0", "1"),
        ("10E-1", "1"),
        ("-0", "0"),
        ("-0.0e7", "0"),
        ("0.7", "7e-1"),
        ("0.70", "7e-1"),
        ("-95e-2", "-95e-2"),
        ("1e3", "1000"),
        ("9007199254740993", "9007199254740993"),
        ("18446744073709551616", "18446744073709551616"),
        ("0.1000000000000000055", "1000000000000000055e-19"),
        ("1e29", "1" + "0" * 29),
        ("1e30", "1e30"),
        ("1" + "0" * 30, "1e30"),
        ("9" * 30, "9" * 30),
        ("9" * 31, "9" * 31 + "e0"),
        ("-123e400", "-123e400"),
        ("1e-400", "1e-400"),
        ("1e999999999", "1e999999999"),
        ("0e999999999", "0"),
        ("1e" + "0" * 5_000 + "2", "100"),
        ("10e" + "9" * 5_000, "1e1" + "0" * 5_000),
        ("0.1e-" + "9" * 5_000, "1e-1" + "0" * 5_000),
        ("1" * 5_000 + ".5", "1" * 5_000 + "5e-1"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
    ],
)
def test_how_a_number_is_written(number: str, written: str) -> None:
    for place in ('{"x":%s}', '{"x":[%s]}', '{"x":{"y":%s}}', '{"x":[{"y":%s}]}'):
        assert form(Document((place % number).encode())).decode() == place % written


@given(strings())
def test_a_string_is_written_as_python_and_ecmascript_write_it(text: str) -> None:
    value = json.loads(text)
    escaped = json.dumps(value, ensure_ascii=False)
    expected = "".join(f"\\u{ord(c):04x}" if "\ud800" <= c < "\ue000" else c for c in escaped)
    assert form(Document(f'{{"x":{text}}}'.encode())).decode() == f'{{"x":{expected}}}'


def test_every_character_is_written_alike_by_both_writers() -> None:
    value = {"x": "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)}
    assert canonical._written(value) == canonical._spelled(value)


def test_keys_are_sorted_by_code_point_and_not_by_utf_16() -> None:
    text = '{"\U0001f600": 1, "\uffff": 2, "é": 3, "z": 4, "Z": 5, "": 6}'
    assert form(Document(text.encode())).decode() == '{"":6,"Z":5,"z":4,"é":3,"\uffff":2,"\U0001f600":1}'


@pytest.mark.parametrize("brackets", ["[]", "{}"])
@pytest.mark.parametrize("depth", [250, 260, 1_000])
def test_depth_is_no_matter(brackets: str, depth: int) -> None:
    opening = '{"a":' if brackets == "{}" else "["
    text = '{"x":' + opening * depth + "0.50" + brackets[1] * depth + "}"
    assert form(Document(text.encode())).decode() == text.replace("0.50", "5e-1")


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": list(range(100_000)), "temperature": 0.7},
        {"text": "hello " * 170_000, "sampling_params": {"temperature": 0.7, "top_p": 1.0}},
        {"messages": [{"role": "user", "content": "\ud800" + "\n\"'" * 300_000}], "x": [0.5]},
    ],
    ids=["ids", "text", "surrogate"],
)
def test_big_bodies_have_the_same_form_either_way(body: dict[str, Any]) -> None:
    text = json.dumps(body)
    assert form(Document(text.encode())) == canonical._spelled(read(text))


# What counts


@FEWER
@given(bodies, st.data())
def test_any_value_that_changes_changes_the_digest(body: Object, data: Any) -> None:
    kept = [member for member in body.members if member is body.last(member.name)]
    leaves = [leaf for member in kept if member.name not in UNSAMPLED for leaf in _leaves(member.value)]
    assume(leaves)
    before = of(body.render())
    leaf = data.draw(st.sampled_from(leaves))
    leaf.text = '"changed"' if leaf.text != '"changed"' else "null"
    assert of(body.render()) != before


def _leaves(node: Node) -> list[Leaf]:
    """The values that count."""
    if isinstance(node, Leaf):
        return [node]
    if isinstance(node, Array):
        inner = [item for _, item, _ in node.items]
    else:
        inner = [member.value for member in node.members if member is node.last(member.name)]
    return [leaf for item in inner for leaf in _leaves(item)]


@pytest.mark.parametrize("name", sorted(UNSAMPLED))
def test_what_does_not_sample_is_left_out_at_the_top_alone(name: str) -> None:
    assert of({"x": 1, name: 0.5}) == of({"x": 1}) == of({"x": 1, name: ["a"]})
    assert of({"x": [0.5], name: 1}) == of({"x": [0.5]})
    assert of({"x": {name: 1}}) != of({"x": {}})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"x": 1}', '{"x": true}'),
        ('{"x": 1}', '{"x": "1"}'),
        ('{"x": 0.5}', '{"x": "5e-1"}'),
        ('{"x": null}', "{}"),
        ('{"x": []}', '{"x": {}}'),
        ('{"x": [1, 2]}', '{"x": [2, 1]}'),
        ('{"x": [[1], 2]}', '{"x": [1, [2]]}'),
        ('{"seed": 1}', '{"seed": 2}'),
        ('{"x": "\\ud800"}', '{"x": "\\\\ud800"}'),
        ('{"x": NaN}', '{"x": "NaN"}'),
        ('{"x": 1e400}', '{"x": Infinity}'),
        ('{"tool_call_id": "a"}', '{"tool_call_id": "b"}'),
        ('{"previous_response_id": "a"}', '{"previous_response_id": 0}'),
    ],
)
def test_what_is_no_more_than_alike_differs(left: str, right: str) -> None:
    assert of(left) != of(right)


def test_of_equal_keys_the_last_counts() -> None:
    assert of('{"a": 1, "x": {"b": 1.0, "b": 2}, "a": 3}') == of('{"a": 3, "x": {"b": 2}}')
    assert of('{"stream": true, "a": 1, "str\\u0065am": 2}') == of('{"a": 1}')


def test_the_route_counts_and_cannot_be_taken_for_content() -> None:
    document = Document(b'{"x":1}')
    assert content(document, "/v1/a") != content(document, "/v1/b")
    assert content(Document(b"{}"), "/v1/a{}") != content(Document(b"{}"), "/v1/a")


# Invented ids


def chat(first: str, second: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": first, "type": "function"}, {"id": second, "type": "function"}],
            },
            {"role": "tool", "tool_call_id": second, "content": "2"},
            {"role": "tool", "tool_call_id": first, "content": "1"},
        ],
        "temperature": 0.7,
    }


def responses(first: str, second: str) -> dict[str, Any]:
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
            {"type": "function_call", "id": second, "call_id": first, "name": "f"},
            {"type": "function_call_output", "call_id": first, "output": "1"},
            {"type": "item_reference", "id": second},
        ],
    }


def anthropic(first: str, second: str) -> dict[str, Any]:
    return {
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "?"},
                    {"type": "tool_use", "id": first, "name": "f", "input": {"id": 1}},
                    {"type": "server_tool_use", "id": second, "name": "g"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": second, "content": "2"},
                    {"type": "tool_result", "tool_use_id": first, "content": "1"},
                ],
            },
        ],
    }


def batch(first: str, second: str) -> dict[str, Any]:
    return {"messages": [chat(first, second)["messages"], chat(second, first)["messages"]]}


@pytest.mark.parametrize("loop", [chat, responses, anthropic, batch])
def test_a_tool_loop_repeats_whatever_ids_the_engine_drew(loop: Callable[[str, str], dict[str, Any]]) -> None:
    assert of(loop("call_1a", "call_2b")) == of(loop("chatcmpl-tool-77", "é")) == of(loop("#1", "#0"))
    assert of(loop("call_1a", "call_2b")) != of(loop("call_1a", "call_1a"))
    text = json.dumps(loop("a", "b"))
    assert form(Document(text.encode())) == canonical._spelled(read(text))


_PIECES = st.sampled_from([None, "a", "é", 0.5, 7, True, [], ["x"], [{"type": "text", "text": "a"}], {"x": 0.1}])
_TURNS = st.fixed_dictionaries(
    {"role": st.just("user"), "content": st.just("a") | _PIECES},
    optional={"tool_call_id": _PIECES, "tool_calls": _PIECES, "name": _PIECES},
)
_CHATS = st.dictionaries(
    st.sampled_from(["model", "temperature", "stop", "user", "input", "previous_response_id", "tools"]),
    _PIECES,
    max_size=1,
)


@given(_CHATS, st.lists(_TURNS, max_size=2), st.booleans())
def test_a_plain_chat_has_the_form_of_any_other_body(chat: dict[str, Any], turns: list[Any], compact: bool) -> None:
    text = json.dumps({**chat, "messages": turns}, separators=(",", ":") if compact else None)
    assert form(Document(text.encode())) == canonical._spelled(read(text))


def test_which_call_an_answer_is_for_counts() -> None:
    crossed = chat("a", "b")
    crossed["messages"][2]["tool_call_id"] = "a"
    crossed["messages"][3]["tool_call_id"] = "b"
    assert of(crossed) != of(chat("a", "b"))


def test_ordinals_follow_the_order_of_the_form_and_not_of_the_bytes() -> None:
    turns = '"messages": [{{"tool_calls": [{{"id": "{0}1"}}]}}, {{"tool_call_id": "{0}1"}}]'
    items = '"input": [{{"id": "{0}2", "call_id": "{0}3"}}]'
    earlier = '"previous_response_id": "{0}4"'
    left, right = f"{turns}, {items}, {earlier}", f"{earlier}, {items}, {turns}"
    assert form(Document(f"{{{left.format('a')}}}".encode())) == form(Document(f"{{{right.format('b')}}}".encode()))
    assert form(Document(f"{{{left.format('a')}}}".encode())).decode() == (
        '{"input":[{"call_id":#1,"id":#2}],'
        '"messages":[{"tool_calls":[{"id":#0}]},{"tool_call_id":#0}],"previous_response_id":#3}'
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hi", "id": "X"}]},
        {"messages": [{"content": [{"type": "image", "id": "X"}]}]},
        {"messages": [{"tool_calls": [{"id": "a", "function": {"id": "X"}}]}]},
        {"input": ["X"]},
        {"input": [["X"]]},
        {"input": "X"},
        {"tools": [{"id": "X"}]},
        {"messages": [[[{"tool_call_id": "X"}]]]},
    ],
)
def test_what_the_client_wrote_in_other_places_counts(body: dict[str, Any]) -> None:
    assert of(body) != of(json.dumps(body).replace("X", "Y"))


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [
                {"tool_calls": [{"id": 1}, 2, None], "tool_call_id": None, "content": [3, {"type": []}]},
                "x",
            ]
        },
        {
            "messages": {"tool_calls": [{"id": "a"}]},
            "input": [{"id": ["a"], "call_id": 0}],
            "previous_response_id": 4,
        },
    ],
)
def test_shapes_that_no_api_knows_are_content_like_any_other(body: dict[str, Any]) -> None:
    assert json.loads(form(Document(json.dumps(body).encode()))) == body


def test_a_value_that_was_read_is_not_changed() -> None:
    body = chat("a", "b") | {"sampling_params": {"temperature": 0.5}, "user": "u"}
    document = Document(json.dumps(body).encode())
    form(document)
    assert document.value == body


# Cost


def _many(count: int, member: str) -> str:
    return ",".join([member.replace("@", str(i)) for i in range(count)])


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ('{"messages":[],"logit_bias":{@}}', '"@":-1.5'),
        ('{"messages":[],@}', '"k@":-1.5'),
        ('{"o":{@}}', '"k@":{"x":1.5}'),
        ('{"o":[@]}', '{"x":{"y":1.5}}'),
        ('{"messages":[],@}', '"o@":' + '{"a":' * 30 + "1.5" + "}" * 30),
        ('{"a":1.5,@,"b":1.5}', '"c":1.5'),
        ('{"a":1.5,@,"b":1.5}', r'"\u0061":1.5'),
        (r'{"\u0061b":1.5,@,"b":1.5}', '"k@":1'),
        ('{"o":{"a":1.5,@,"b":2.5}}', r'"\u0061@":1'),
    ],
)
def test_the_digest_takes_time_in_proportion_to_the_body(body: str, member: str) -> None:
    small, large = (Document((body.replace("@", _many(n, member)) + " " * 5000).encode()) for n in (200, 800))
    assert steps(lambda: content(large, ROUTE)) < 5 * steps(lambda: content(small, ROUTE))


def test_of_many_floats_few_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    literal = Document.literal

    def counted(document: Document, path: tuple[str, ...]) -> bytes | None:
        looked_up.append(path)
        return literal(document, path)

    monkeypatch.setattr(Document, "literal", counted)
    floats = {f"k{i}": 1.5 for i in range(1000)}
    for body in (floats, {"o": floats}, {f"o{i}": {"x": 1.5} for i in range(1000)}):
        of(body)
    assert len(looked_up) <= 3 * canonical._MOST


# Bytes


def test_the_bytes_digest_tells_route_and_body_apart() -> None:
    digests = {
        canonical.raw(route, body)
        for route, body in [
            ("/v1/a", b"{}"),
            ("/v1/b", b"{}"),
            ("/v1/a", b"{} "),
            ("/v1/a{", b"}"),
            ("", b""),
            ("/v1/a", b"{}" * 100_000),
        ]
    }
    assert len(digests) == 6
    assert {len(digest) for digest in digests} == {16}
    assert canonical.raw("/v1/a", b"{} "[:2]) in digests


@pytest.mark.parametrize(
    ("body", "varies"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, False),
        ({"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}, False),
        ({"prompt": "hi", "tools": [], "tool_choice": "auto"}, False),
        ({"prompt": "hi", "user": "somebody"}, True),
        ({"prompt": "hi", "rid": "1"}, True),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]}, True),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]}, True),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, True),
        ({"input": "hi", "previous_response_id": "1"}, True),
    ],
)
def test_what_varies_from_run_to_run(body: dict[str, Any], varies: bool) -> None:
    for text in (json.dumps(body), json.dumps(body, separators=(",", ":"))):
        assert canonical.varies(Document(text.encode())) is varies
