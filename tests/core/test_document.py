"""Bodies as clients send them, edited: what was not edited is there byte for byte."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core import document as module
from gateway.core.document import Document, DuplicateField, Edit, Malformed, Remove, Rename, Set
from tests.core.steps import steps
from tests.core.texts import FEWER, NAMES, Leaf, Member, Node, Object, bodies, compact, same, spaces

READ = (*NAMES, ("sampling_params", "seed"), ("sampling_params", "n"))

paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)
literals = st.sampled_from((b"7", b"18446744073709551615", b'"17:3:0.0!"', b"null", b'{"a":[]}'))
sets = st.builds(Set, paths, literals)
edits = st.one_of(sets, st.builds(Remove, paths), st.builds(Rename, paths, st.uuids().map(str)))


@pytest.fixture(params=["searched", "scanned"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to find a field: by its only occurrence, and by a scan."""
    if request.param == "scanned":
        monkeypatch.setattr(module, "_SEARCHED", 0)


# Reading


@FEWER
@given(bodies, spaces, spaces, st.booleans())
def test_what_python_reads_is_read(body: Object, before: str, after: str, mark: bool) -> None:
    text = before + body.render() + after
    value = json.loads(text)
    read = Document((b"\xef\xbb\xbf" if mark else b"") + text.encode()).value
    assert same(_floats(read), _floats(value))


def _floats(value: Any) -> Any:
    """Integers from 2⁶⁴ on as the floats that they may be read as."""
    if isinstance(value, dict):
        return {name: _floats(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_floats(inner) for inner in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return float(value)
    return value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b'{"a": }', "at byte 6"),
        ('{"é": 1 2}'.encode(), "at byte 9"),
        (b'\xef\xbb\xbf{"a" 1}', "at byte 8"),
        (b'{"a": 1} {}', "at byte 9"),
        (b"{'a': 1}", "at byte 1"),
        (b'{"a": 01}', "at byte 7"),
        (b'{"a": "\x01"}', "at byte 7"),
        (b"[1]", "must be a JSON object, not a list"),
        (b'"a"', "must be a JSON object, not a string"),
        (b"12", "must be a JSON object, not a number"),
        (b"NaN", "must be a JSON object, not a number"),
        (b"true", "must be a JSON object, not a boolean"),
        (b"null", "must be a JSON object, not null"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        ("{}".encode("utf-16"), "not UTF-8 (byte 0)"),
        ("{}".encode("utf-16-le"), "at byte 1"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested too deeply"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "too many digits"),
    ],
)
def test_what_is_no_json_object_is_refused_and_the_message_says_where(raw: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=re.escape(message)):
        Document(raw)


@given(st.binary(max_size=40))
@example(b'{"a": 1' + b"\xed\xa0\x80")
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        value = Document(raw).value
    except Malformed:
        return
    assert isinstance(value, dict)


# Looking


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("raw", "path", "literal"),
    [
        (b'{"n":1}', ("n",), b"1"),
        (b'{"n" :\n18446744073709551616 }', ("n",), b"18446744073709551616"),
        (b'{"p":{"n":-1.50e3}}', ("p", "n"), b"-1.50e3"),
        (b'{"p":{"n":null},"n":true,"q":false}', ("n",), b"true"),
        (b'{"n":"}\\"]"}', ("n",), b'"}\\"]"'),
        (b'{"n":[{"n":2}, "]"],"m":1}', ("n",), b'[{"n":2}, "]"]'),
        (b'{"n":1,"n":{}}', ("n",), b"{}"),
        (b'{"p":{"n":1},"p":{"n":2}}', ("p", "n"), b"2"),
        (b'{"p":{"n":1},"p":{}}', ("p", "n"), None),
        (b'{"p":[1]}', ("p", "n"), None),
        (b'{"a":"n"}', ("n",), None),
    ],
)
def test_where_a_value_begins_and_ends(raw: bytes, path: tuple[str, ...], literal: bytes | None) -> None:
    assert Document(raw).literal(path) == literal


@FEWER
@given(bodies, paths, st.booleans())
def test_a_literal_is_the_text_of_the_value_that_counts(body: Object, path: tuple[str, ...], scan: bool) -> None:
    document = Document(body.render().encode())
    if scan:
        document._places = dict.fromkeys(NAMES)
    node = _at(body, path)
    assert document.literal(path) == (None if node is None else node.render().encode())


def _at(body: Object, path: tuple[str, ...]) -> Node | None:
    node: Node = body
    for name in path:
        member = node.last(name) if isinstance(node, Object) else None
        if member is None:
            return None
        node = member.value
    return node


@FEWER
@given(bodies, paths)
def test_elements_are_the_texts_of_a_list(body: Object, path: tuple[str, ...]) -> None:
    node = _at(body, path)
    expected = None
    if node is not None and not isinstance(node, Leaf | Object):
        expected = [item.render().encode() for _, item, _ in node.items]
    assert Document(body.render().encode()).elements(path) == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"seed": 1, "seed": 2}', "seed"),
        (b'{"seed": 1, "se\\u0065d": 2}', "seed"),
        (b'{"\\u0073eed": 1, "model": "x", "seed": null}', "seed"),
        (b'{"sampling_params": {"seed": 1, "seed": 1}}', "sampling_params.seed"),
        (b'{"sampling_params": {}, "sampling_params": {"seed": 1}}', "sampling_params"),
        (b'{"a": {"seed": 1}, "seed":1,"seed":1}', "seed"),
    ],
)
def test_a_field_that_stands_twice_is_named(raw: bytes, field: str) -> None:
    with pytest.raises(DuplicateField) as caught:
        Document(raw).check_unique(READ)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "raw",
    [
        b'{"seed":1,"prompt":"say \\"seed\\" and \\"seed"}',
        b'{"seed": 1, "stop": ["seed", "seed"], "tools": [{"seed": 1, "seed": 2}]}',
        b'{"sampling_params": {"seed": 1}, "seed": 1, "extra": {"seed": 3}}',
        b'{"foo": 1, "foo": 2, "seed": 1}',
        b'{"sampling_params": [{"seed": 1, "seed": 2}]}',
        b"{}",
    ],
)
def test_a_name_in_other_places_is_no_duplicate(raw: bytes) -> None:
    Document(raw).check_unique(READ)


@FEWER
@given(bodies)
def test_duplicates_are_found_however_the_body_is_written(body: Object) -> None:
    doubled = [name for name in NAMES if sum(member.name == name for member in body.members) > 1]
    inner = body.last("sampling_params")
    if inner is not None and isinstance(inner.value, Object):
        names = [member.name for member in inner.value.members]
        doubled += [f"sampling_params.{name}" for name in ("seed", "n") if names.count(name) > 1]
    document = Document(body.render().encode())
    if not doubled:
        document.check_unique(READ)
        return
    with pytest.raises(DuplicateField) as caught:
        document.check_unique(READ)
    assert caught.value.field == doubled[0]


# Editing


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("raw", "edit", "edited"),
    [
        (b"{}", Set(("seed",), b"7"), b'{"seed":7}'),
        (b" { } ", Set(("seed",), b"7"), b' {"seed":7 } '),
        (b'\xef\xbb\xbf{"a":1}', Set(("seed",), b"7"), b'\xef\xbb\xbf{"seed":7,"a":1}'),
        (b'{"a": 1}', Set(("seed",), b"7"), b'{"seed":7,"a": 1}'),
        (b'{"a": 1, "seed" : null}', Set(("seed",), b"7"), b'{"a": 1, "seed" : 7}'),
        (b'{"se\\u0065d":null}', Set(("seed",), b"7"), b'{"se\\u0065d":7}'),
        (b'{"seed":1,"seed":2}', Set(("seed",), b"7"), b'{"seed":1,"seed":7}'),
        (b'{"a":"\\"seed"}', Set(("seed",), b"7"), b'{"seed":7,"a":"\\"seed"}'),
        (b'{"a":1}', Set(("p", "s"), b"7"), b'{"p":{"s":7},"a":1}'),
        (b'{"a":1,"p":null}', Set(("p", "s"), b"7"), b'{"a":1,"p":{"s":7}}'),
        (b'{"p":{"t":0.70}}', Set(("p", "s"), b"7"), b'{"p":{"s":7,"t":0.70}}'),
        (b'{"p":1,"p":{}}', Set(("p", "s"), b"7"), b'{"p":1,"p":{"s":7}}'),
        (b'{"p":{"seed":1},"a":2}', Rename(("p", "seed"), "s"), b'{"p":{"s":1},"a":2}'),
        (b'{"x":1,"x":2}', Rename(("x",), "y"), b'{"y":1,"y":2}'),
        (b'{"a":1}', Rename(("x",), "y"), b'{"a":1}'),
        (b'{"x":1}', Remove(("x",)), b"{}"),
        (b'{ "x" : [1, "}"] , "a": 1}', Remove(("x",)), b'{ "a": 1}'),
        (b'{"a": 1 , "x": 2 }', Remove(("x",)), b'{"a": 1 }'),
        (b'{"a":1,"x":2,"b":3}', Remove(("x",)), b'{"a":1,"b":3}'),
        (b'{"x":1,"a":1,"x":2}', Remove(("x",)), b'{"a":1}'),
        (
            b'{"a":["\\\\"],"b":"\\\\\\"","x":"\\\\","c":"\\\\"}',
            Remove(("x",)),
            b'{"a":["\\\\"],"b":"\\\\\\"","c":"\\\\"}',
        ),
        (b'{"p":1}', Remove(("p", "x")), b'{"p":1}'),
        (b'{"p":1}', Rename(("p", "x"), "y"), b'{"p":1}'),
    ],
)
def test_one_edit(raw: bytes, edit: Edit, edited: bytes) -> None:
    assert Document(raw).edited([edit]) == edited


def test_no_edit_gives_the_bytes() -> None:
    assert Document(b' {"a" : 1.0}\n').edited([]) == b' {"a" : 1.0}\n'


def test_edits_are_made_at_once_and_new_fields_stand_in_their_order() -> None:
    raw = b'{"n": 4, "seed": 1, "p": {"seed": 2}, "user": "u"}'
    edits: list[Edit] = [
        Set(("rid",), b'"r"'),
        Set(("n",), b"1"),
        Remove(("seed",)),
        Rename(("p", "seed"), "sampling_seed"),
        Set(("q", "b"), b"1"),
        Set(("p", "t"), b"0"),
        Set(("q", "a"), b"2"),
        Remove(("user",)),
    ]
    expected = b'{"rid":"r","q":{"b":1,"a":2},"n": 1, "p": {"t":0,"sampling_seed": 2}}'
    assert Document(raw).edited(edits) == expected


@pytest.mark.parametrize(
    "edits",
    [
        [Set(("a",), b"1"), Set(("a",), b"2")],
        [Set(("p",), b"1"), Set(("p", "a"), b"2")],
        [Set(("p", "a"), b"1"), Remove(("p",))],
        [Rename(("x",), "y")],
        [Rename(("x",), "new"), Set(("new",), b"1")],
        [Rename(("x",), "new"), Rename(("y",), "new")],
    ],
)
def test_edits_of_one_field_are_refused(edits: list[Edit]) -> None:
    with pytest.raises(ValueError, match=r"two edits|cannot be named"):
        Document(b'{"x": 1, "y": 2}').edited(edits)


def test_a_new_field_needs_no_comma_where_all_others_go() -> None:
    assert Document(b'{"x": 1}').edited([Set(("seed",), b"7"), Remove(("x",))]) == b'{"seed":7}'


def test_a_new_name_may_take_the_place_of_a_removed_field() -> None:
    edits: list[Edit] = [Rename(("sampling_seed",), "seed"), Remove(("seed",))]
    assert Document(b'{"seed": null, "sampling_seed": 5}').edited(edits) == b'{"seed": 5}'


@pytest.mark.parametrize("value", ["1", "[]", '"a"', "false"])
def test_nothing_is_set_inside_what_is_no_object(value: str) -> None:
    document = Document(f'{{"p": {{"q": {value}}}}}'.encode())
    with pytest.raises(Malformed, match=r"p\.q must be an object"):
        document.edited([Set(("p", "q", "s"), b"1")])


@FEWER
@given(bodies, st.lists(edits, max_size=4), st.booleans())
def test_edits_change_what_they_name_and_no_other_byte(body: Object, edits: list[Edit], scan: bool) -> None:
    assume(not any(_conflict(a.path, b.path) for i, a in enumerate(edits) for b in edits[:i]))
    document = Document(body.render().encode())
    if scan:
        document._places = dict.fromkeys(NAMES)
    expected = copy.deepcopy(body)
    try:
        for edit in edits:
            _apply(expected, edit.path, edit)
    except TypeError:
        with pytest.raises(Malformed):
            document.edited(edits)
        return
    edited = document.edited(edits)
    text = expected.render()
    if not any(isinstance(edit, Remove) for edit in edits):
        assert edited == text.encode()
    assert compact(edited) == compact(text.encode())
    assert same(json.loads(edited), json.loads(text))


def _conflict(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    return a[: len(b)] == b or b[: len(a)] == a


def _apply(node: Object, path: tuple[str, ...], edit: Edit) -> None:
    """The edit made on the tree that the text was written from. Raises TypeError where it cannot be."""
    name = path[0]
    member = node.last(name)
    if len(path) > 1:
        if member is not None and isinstance(member.value, Object):
            _apply(member.value, path[1:], edit)
        elif isinstance(edit, Set):
            if member is None:
                member = Member(json.dumps(name, ensure_ascii=False), Leaf("null"))
                node.front.append(member)
            if member.value.render() != "null":
                raise TypeError
            member.value = Object([])
            _apply(member.value, path[1:], edit)
    elif isinstance(edit, Set):
        if member is None:
            node.front.append(Member(json.dumps(name, ensure_ascii=False), Leaf(edit.literal.decode())))
        else:
            member.value = Leaf(edit.literal.decode())
    elif isinstance(edit, Remove):
        node.members = [member for member in node.members if member.name != name]
    else:
        for member in node.members:
            if member.name == name:
                member.key = json.dumps(edit.name)


# Bodies that broke others

DIGITS = b'{"seed": 9007199254740993, "max": 18446744073709551616, "x": 1e-7, "y": 0.10, "z": 1E+2}'
SCHEMA = (
    b'{"model": "m", "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": '
    b'{"zebra": {"type": "number"}, "apple": {}, "mango": {}}}}}}'
)
UNKNOWN = b'{"return_routed_experts": true, "foo": {"a": null}, "foo": {"b": []}}'


@pytest.mark.parametrize("raw", [DIGITS, SCHEMA, UNKNOWN])
def test_digits_key_order_and_unknown_fields_arrive_as_sent(raw: bytes) -> None:
    edited = Document(raw).edited([Set(("request_id",), b'"17:3:0.0!"'), Set(("p", "sampling_seed"), b"7")])
    assert edited == b'{"request_id":"17:3:0.0!","p":{"sampling_seed":7},' + raw[1:]


def test_a_seed_is_read_digit_by_digit() -> None:
    document = Document(DIGITS)
    assert document.literal(("seed",)) == b"9007199254740993"
    assert document.literal(("max",)) == b"18446744073709551616"


@pytest.mark.parametrize("size", [7_000, 200_000, 2_000_000, 20_000_000])
@pytest.mark.parametrize("fill", ["hello world ", '{"say": "hi\\n"}', "héllo 你好 "], ids=["plain", "escaped", "wide"])
def test_big_bodies_are_edited_like_small_ones(size: int, fill: str) -> None:
    content = json.dumps(fill * (size // len(fill)), ensure_ascii=False).encode()
    head = b'{"model": "m", "messages": [{"role": "user", "content": ' + content + b'}], "seed": '
    document = Document(head + b'null, "n": 1}')
    document.check_unique(READ)
    assert document.literal(("n",)) == b"1"
    edited = document.edited([Set(("seed",), b"123"), Set(("rid",), b'"r"')])
    assert edited == b'{"rid":"r",' + head[1:] + b'123, "n": 1}'


def test_many_edits_of_a_deep_body_need_no_recursion_by_depth() -> None:
    deep = b"[" * 1_000 + b"]" * 1_000
    raw = b'{"a": ' + deep + b', "seed": 1, "x": {"seed": 2}}'
    assert Document(raw).edited([Set(("seed",), b"5")]) == raw.replace(b'"seed": 1', b'"seed": 5')


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("body", "literal"),
    [
        (f'{{"t": "{LONG}", "a": 1.50}}', b"1.50"),
        (f'{{"t": "{LONG}", "a" : 1.5 , "b": "a", "c": null }}\n', b"1.5"),
        (f'{{"a": 1, "t": "{LONG}", "a": 2.0}}', b"2.0"),
        (f'{{"a": 1.5, "t": "{LONG}"}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "o": {{"a": 2}}}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "o": [{{"a": 2}}]}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "s": "\\"a\\": 3"}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "x\\"a": 3}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "s": "a"}}', b"1.5"),
        (f'{{"a": 1.5, "t": "{LONG}", "a": 2, "\\u0061": 3}}', b"3"),
        (f'{{"t": "{LONG}", "a": 2, "s": "}}"}}', b"2"),
        (f'{{"t": "{LONG}", "a": "1"}}', b'"1"'),
        (f'{{"t": "{LONG}", "a": [1]}}', b"[1]"),
    ],
)
def test_a_field_of_a_long_body_is_found_wherever_it_stands(body: str, literal: bytes) -> None:
    assert Document(body.encode()).literal(("a",)) == literal


@pytest.mark.parametrize("member", ['"@": 1', '"\\u0061@": 1', '"a": 1', '"@": {"b": [1.5, "c"]}'])
def test_work_is_in_proportion_to_the_body_and_not_to_what_is_asked_of_it(member: str) -> None:
    def work(count: int, fields: int) -> int:
        members = ",".join(member.replace("@", str(i)) for i in range(count))
        mine = ",".join(f'"f{i}": 1, "f{i}": 1.5' for i in range(fields))
        document = Document(f'{{{mine}, {members}, "t": "{LONG}"}}'.encode())
        return steps(lambda: [document.literal((f"f{i}",)) for i in range(fields)])

    once = work(2400, 1)
    assert once < 5 * work(600, 1)
    assert work(2400, 40) < 1.5 * once
