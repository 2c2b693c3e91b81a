"""A JSON request body that is read once and changed without being written again.

The parsed value serves every decision; what goes upstream are the client's own bytes with single fields
spliced in, so numbers, key order, whitespace, unknown fields and repeated keys arrive as they were sent.
Where a field stands is found without a scan when its key occurs once in the bytes, and by a scan of the one
object that holds it otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

_BOM = "\ufeff"
_SEARCHED = 4096
"""Bytes up to which looking for the keys that are asked for costs less than one scan."""

_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
_STEP = re.compile(rb'"[^"]{0,64}"|"|\[|\]|\{|\}')
"""What moves a scan on: a short string as a whole, the quote that begins a longer one, a bracket.

Spelled so that every branch begins with a literal: `re` then skips what is between without trying each."""
_NESTING = b'"[{'
_SCALAR = re.compile(rb"[^\s,\]}]+")
_SCALAR_VALUE = re.compile(rb'\s*:\s*([^\s,\]}"\[{]+)')
"""A value that is no string, list or object, behind the colon of its key."""
_LAST_MEMBERS = re.compile(rb'\s*:\s*([^\s,\]}"\[{]+)[^\\\[\]{}]*\}\s*')
"""A scalar value, and what follows it to the end of the one object that it is in."""
_TAIL = 1024
"""Bytes at the end of a long body in which a field is looked for before the whole is scanned."""
_KEY = re.compile(rb'[\s,]*(?=")')
_COLON = re.compile(rb"\s*:\s*")
_COMMA = re.compile(rb"[\s,]*")


class Malformed(ValueError):
    """The body is no JSON object that a request can be read from. The message says what and where."""


class DuplicateField(ValueError):
    """A field that the gateway reads stands twice in its object, so what the client meant is open."""

    def __init__(self, field: str) -> None:
        super().__init__(f"The field {field} stands more than once in the body; send it once.")
        self.field = field
        """Dotted path: `seed`, `sampling_params.seed`."""


class Set(NamedTuple):
    """Insert a field, or replace its value where present. Parents that are absent or null become
    objects."""

    path: tuple[str, ...]
    literal: bytes
    """The value as JSON."""


class Rename(NamedTuple):
    """Give a field another key in place. No effect where it is absent."""

    path: tuple[str, ...]
    name: str


class Remove(NamedTuple):
    """Take a field out: key, value and one comma. No effect where it is absent."""

    path: tuple[str, ...]


Edit = Set | Rename | Remove
_Tree = dict[str, "Edit | _Tree"]
_Splice = tuple[int, int, bytes]


class _Member(NamedTuple):
    """Offsets of one member of an object: the key with its quotes, and the value."""

    key: int
    key_end: int
    value: int
    end: int


def values(raw: bytes) -> int:
    """About how many strings, lists and objects JSON holds, without reading it. Those within texts count too."""
    strings = (raw.count(b'"') - raw.count(b'\\"')) // 2
    return strings + raw.count(b"[") + raw.count(b"{")


class Document:
    """One request body: `raw` as it came, `value` as parsed. Neither may be changed.

    Read are UTF-8 (a byte order mark is passed over) and what Python's `json` reads, hence what the engines
    read: NaN and Infinity, lone surrogates, and of equal keys the last. Integers from 2⁶⁴ on may stand in
    `value` as floats; `literal` has their digits.

    Raises `Malformed` for anything else, for a body that is no object, and for nesting too deep for Python.
    """

    __slots__ = ("_escapes", "_indices", "_members", "_outlined", "_places", "raw", "value")

    def __init__(self, raw: bytes) -> None:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            value = _lenient(raw)
        if type(value) is not dict:
            raise Malformed(f"The body must be a JSON object, not {_KINDS[type(value)]}.")
        self.raw = raw
        self.value: dict[str, Any] = value
        self._places: dict[str, int | None] = {}
        self._members: dict[int, list[_Member]] = {}
        self._indices: dict[int, dict[bytes, list[_Member]]] = {}
        self._outlined: bytes | None = None
        self._escapes: bool | None = None

    @classmethod
    def opaque(cls, raw: bytes) -> Document:
        """A body that is passed on unread: `value` is empty, and it takes no edits."""
        document = cls(b"{}")
        document.raw = raw
        return document

    def check_unique(self, names: Iterable[str | tuple[str, str]]) -> None:
        """Raise `DuplicateField` if one of these fields stands more than once in its object.

        A name is a field of the body, a pair a field of an object in it: `("sampling_params", "seed")`.
        """
        if self._written_once():
            return
        value = self.value
        for name in names:
            if isinstance(name, str):
                if name in value and self._place(name) is None:
                    self._check_once((name,))
            elif type(holder := value.get(name[0])) is dict and name[1] in holder and self._place(name[1]) is None:
                self._check_once(name)

    def literal(self, path: tuple[str, ...]) -> bytes | None:
        """The bytes of the value at a path of object keys; None where there is no such field."""
        value: Any = self.value
        for name in path:
            if type(value) is not dict or name not in value:
                return None
            value = value[name]
        if len(self.raw) > _SEARCHED and len(path) == 1 and (found := self._at_the_end(name)) is not None:
            return found
        place = self._place(name)
        if place is not None and (match := _SCALAR_VALUE.match(self.raw, place + len(name) + 2)) is not None:
            return match[1]
        start = self._value(path)
        return self.raw[start : self._end(start)]

    def elements(self, path: tuple[str, ...]) -> list[bytes] | None:
        """The bytes of each element of the list at a path of object keys; None where there is no list."""
        literal = self.literal(path)
        if literal is None or not literal.startswith(b"["):
            return None
        outline = _outline(literal)
        found = []
        position = _after(_COMMA, outline, 1)
        while outline[position] != 0x5D:
            end = _end(outline, position)
            found.append(literal[position:end])
            position = _after(_COMMA, outline, end)
        return found

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The client's bytes with these edits made and nothing else touched.

        Absent fields go straight after the `{` of their object, in the order of the edits. Of a field that
        stands twice, `Set` replaces the last value (the one that counts); `Rename` and `Remove` take every
        occurrence, so that no earlier one comes to count.

        Raises `ValueError` where two edits touch one field or a new name is taken; `Malformed` where a
        field is to be set inside a value that is neither an object nor null.
        """
        if edits and (front := self._front(edits)) is not None:
            start = self.raw.index(b"{") + 1
            comma = b"," if self.value else b""
            return b"".join((self.raw[:start], front, comma, memoryview(self.raw)[start:]))
        splices: list[_Splice] = []
        self._splice(_tree(edits), self.value, (), splices)
        splices.sort()
        raw = self.raw
        pieces = []
        position = 0
        for start, end, literal in splices:
            pieces.append(raw[position:start])
            pieces.append(literal)
            position = end
        pieces.append(raw[position:])
        return b"".join(pieces)

    def _front(self, edits: Sequence[Edit]) -> bytes | None:
        """What goes in front of all members where these edits set absent fields of the body and do nothing else."""
        value = self.value
        pieces = {}
        for edit in edits:
            name = edit.path[0]
            if type(edit) is not Set or len(edit.path) > 1 or name in value or name in pieces:
                return None
            pieces[name] = b"%b:%b" % (_quoted(name), edit.literal)
        return b",".join(pieces.values())

    def _written_once(self) -> bool:
        """True if the bytes are just what a writer makes of `value`, which has every key once.

        Compact JSON, as the SDKs send it, is; it costs less to see that than to look for keys.
        """
        raw = self.raw
        if raw[raw.find(b":") + 1] in b" \t\n\r":
            return False
        try:
            return orjson.dumps(self.value) == raw
        except TypeError:  # deeper than it writes, or what only Python's reader takes
            return False

    def _splice(self, tree: _Tree, value: dict[str, Any], path: tuple[str, ...], splices: list[_Splice]) -> None:
        front: list[bytes] = []
        moved: list[Rename | Remove] = []
        for name, edit in tree.items():
            if name not in value:
                if (literal := _literal(edit)) is not None:
                    front.append(_quoted(name) + b":" + literal)
            elif isinstance(edit, Set):
                self._replace((*path, name), edit.literal, splices)
            elif isinstance(edit, dict):
                self._enter(edit, value[name], (*path, name), splices)
            else:
                moved.append(edit)
        removed = self._move(moved, value, tree, path, splices) if moved else 0
        if front:
            start = self._value(path) + 1
            comma = b"," if len(value) > removed else b""
            splices.append((start, start, b",".join(front) + comma))

    def _enter(self, tree: _Tree, value: Any, path: tuple[str, ...], splices: list[_Splice]) -> None:
        if type(value) is dict:
            self._splice(tree, value, path, splices)
        elif (literal := _literal(tree)) is not None:
            if value is not None:
                raise Malformed(f"The field {'.'.join(path)} must be an object, not {_KINDS[type(value)]}.")
            self._replace(path, literal, splices)

    def _replace(self, path: tuple[str, ...], literal: bytes, splices: list[_Splice]) -> None:
        start = self._value(path)
        splices.append((start, self._end(start), literal))

    def _move(
        self,
        edits: list[Rename | Remove],
        value: dict[str, Any],
        tree: _Tree,
        path: tuple[str, ...],
        splices: list[_Splice],
    ) -> int:
        """Add the splices of renamed and removed members of one object; returns how many names go."""
        holder = self._value(path)
        gone: set[int] = set()
        taken = {name for name in {*value, *tree} if not isinstance(tree.get(name), Remove)}
        for edit in edits:
            members = self._named(holder, edit.path[-1])
            if isinstance(edit, Remove):
                gone.update(member.key for member in members)
                continue
            if edit.name in taken:
                raise ValueError(f"{edit.path} cannot be named {edit.name!r}: that field is there")
            taken.add(edit.name)
            splices += [(member.key, member.key_end, _quoted(edit.name)) for member in members]
        splices += _without(self._scan(holder), gone)
        return sum(isinstance(edit, Remove) for edit in edits)

    def _place(self, name: str) -> int | None:
        """Where a key that is present stands, if it is known to occur once in the bytes; None means: scan.

        Without escapes, a key occurs in the bytes wherever it is a key; so the only occurrence is the key,
        at the top or inside. Of several, one may be a duplicate, a key of another object, or a string.
        """
        places = self._places
        if name in places:
            return places[name]
        raw = self.raw
        place = None
        if len(raw) <= _SEARCHED and not self._escaped() and (quoted := _plainly_quoted(name)):
            first = raw.find(quoted)
            if raw.find(quoted, first + 1) < 0:
                place = first
        places[name] = place
        return place

    def _at_the_end(self, name: str) -> bytes | None:
        """The literal of a field of a long body, if it is a scalar behind which there are only others; else None."""
        raw, quoted = self.raw, _plainly_quoted(name)
        place = raw.rfind(quoted, -_TAIL) if quoted else -1
        if place < 0 or raw[place - 1] == 0x5C:
            return None
        match = _LAST_MEMBERS.fullmatch(raw, place + len(quoted))
        return None if match is None else match[1]

    def _escaped(self) -> bool:
        """True if a letter, digit or underscore of a key may be written as an escape."""
        if self._escapes is None:
            self._escapes = b"\\u00" in self.raw and _ESCAPED_ASCII.search(self.raw) is not None
        return self._escapes

    def _outline(self) -> bytes:
        if self._outlined is None:
            self._outlined = _outline(self.raw)
        return self._outlined

    def _check_once(self, path: tuple[str, ...]) -> None:
        if len(self._named(self._value(path[:-1]), path[-1])) > 1:
            raise DuplicateField(".".join(path))

    def _value(self, path: tuple[str, ...]) -> int:
        """Offset of the value at a path that is present in `value`."""
        if not path:
            return self.raw.index(b"{")
        name = path[-1]
        place = self._place(name)
        if place is not None:
            return _after(_COLON, self.raw, place + len(name) + 2)
        return self._named(self._value(path[:-1]), name)[-1].value

    def _end(self, start: int) -> int:
        """Where the value that begins at `start` ends."""
        if self.raw[start] in _NESTING:
            return _end(self._outline(), start)
        return _after(_SCALAR, self.raw, start)

    def _named(self, start: int, name: str) -> list[_Member]:
        """The members of the object at `start` that have this key, however it is spelled."""
        index = self._indices.get(start)
        if index is None:
            index = self._indices[start] = self._indexed(start)
        return index.get(_quoted(name), [])

    def _indexed(self, start: int) -> dict[bytes, list[_Member]]:
        """The members of the object at `start` by their keys, spelled as `_quoted` spells them."""
        raw = self.raw
        index: dict[bytes, list[_Member]] = {}
        for member in self._scan(start):
            key = raw[member.key : member.key_end]
            index.setdefault(_encoded(json.loads(key)) if b"\\" in key else key, []).append(member)
        return index

    def _scan(self, start: int) -> list[_Member]:
        members = self._members.get(start)
        if members is None:
            members = self._members[start] = _members(self._outline(), start)
        return members


_KINDS: dict[type, str] = {
    list: "a list",
    dict: "an object",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _lenient(raw: bytes) -> Any:
    """What Python's `json` reads and orjson does not; raises `Malformed` with the offset in bytes."""
    if not raw.strip():
        raise Malformed("The body is empty; send a JSON object.")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"The body is not UTF-8 (byte {error.start}); send JSON encoded as UTF-8.") from None
    mark = len(_BOM) if text.startswith(_BOM) else 0
    try:
        return json.loads(text[mark:])
    except RecursionError:
        raise Malformed("The body is nested too deeply; send fewer levels of lists and objects.") from None
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos + mark].encode())
        raise Malformed(f"The body is not JSON: {error.msg} at byte {offset}.") from None
    except ValueError:
        raise Malformed("The body holds an integer of too many digits to be read.") from None


def _tree(edits: Sequence[Edit]) -> _Tree:
    """The edits by where they belong. What is set stands in the order in which it was, whatever else is done."""
    tree: _Tree = {}
    for edit in sorted(edits, key=_sets_nothing):
        node = tree
        *parents, name = edit.path
        for parent in parents:
            inner = node.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ValueError(f"two edits touch {edit.path}")
            node = inner
        if name in node:
            raise ValueError(f"two edits touch {edit.path}")
        node[name] = edit
    return tree


def _sets_nothing(edit: Edit) -> bool:
    return not isinstance(edit, Set)


def _literal(edit: Edit | _Tree) -> bytes | None:
    """What an edit makes of an absent field: its JSON, or None if the field stays absent."""
    if isinstance(edit, Set):
        return edit.literal
    if not isinstance(edit, dict):
        return None
    made = [(name, literal) for name, inner in edit.items() if (literal := _literal(inner)) is not None]
    if not made:
        return None
    return b"{" + b",".join([_quoted(name) + b":" + literal for name, literal in made]) + b"}"


def _quoted(name: str) -> bytes:
    """A name as a JSON string, without escapes where it can be."""
    return _remembered(name) if len(name) <= 64 else _encoded(name)


def _encoded(name: str) -> bytes:
    try:
        return orjson.dumps(name)
    except TypeError:  # lone surrogates
        return json.dumps(name).encode()


_remembered = lru_cache(maxsize=256)(_encoded)


def _plainly_quoted(name: str) -> bytes:
    """A name as a JSON string that can be spelled in one way without escapes; nothing where it cannot."""
    return _plainly_remembered(name) if len(name) <= 64 else b""


@lru_cache(maxsize=256)
def _plainly_remembered(name: str) -> bytes:
    return _encoded(name) if name.isidentifier() and name.isascii() else b""


def _without(members: list[_Member], gone: set[int]) -> list[_Splice]:
    """Splices that take members out of an object, each with the comma that parted it from what stays."""
    splices = []
    kept_before = False
    for i, member in enumerate(members):
        if member.key not in gone:
            kept_before = True
        elif kept_before:
            splices.append((members[i - 1].end, member.end, b""))
        else:
            end = members[i + 1].key if i + 1 < len(members) else member.end
            splices.append((member.key, end, b""))
    return splices


def _outline(raw: bytes) -> bytes:
    """The same bytes, at the same offsets, without escaped quotes: every quote begins or ends a string."""
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _members(outline: bytes, start: int) -> list[_Member]:
    """The members of the object at `start`, in the order of the bytes, which are known to be JSON."""
    members = []
    position = start + 1
    while (match := _KEY.match(outline, position)) is not None:
        key = match.end()
        key_end = outline.index(b'"', key + 1) + 1
        value = _after(_COLON, outline, key_end)
        position = _end(outline, value)
        members.append(_Member(key, key_end, value, position))
    return members


def _after(pattern: re.Pattern[bytes], outline: bytes, position: int) -> int:
    match = pattern.match(outline, position)
    assert match is not None
    return match.end()


def _end(outline: bytes, start: int) -> int:
    first = outline[start]
    if first == 0x22:
        return outline.index(b'"', start + 1) + 1
    if first in b"[{":
        return _container_end(outline, start + 1)
    return _after(_SCALAR, outline, start)


def _container_end(outline: bytes, position: int) -> int:
    depth = 1
    while True:
        for match in _STEP.finditer(outline, position):
            start, position = match.span()
            first = outline[start]
            if first == 0x22:
                if position == start + 1:
                    break
            elif first in b"[{":
                depth += 1
            else:
                depth -= 1
                if not depth:
                    return position
        position = outline.index(b'"', position) + 1
