"""What must hold for any bytes. Each target takes some, and fails by an `AssertionError` or whatever else it raises.

What JSON says is read here by Python's own reader, with every key and every digit kept, and not by the gateway's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from gateway.core import canonical
from gateway.core.document import Document, Edit, Malformed, Remove, Rename, Set
from gateway.core.observer import Observer
from gateway.core.sse import Splitter, payload
from gateway.core.types import Api
from gateway.ledger.reader import Segments

SEED = b"1943677700"


class Number(NamedTuple):
    """A number as it is spelled."""

    text: str


class Members(NamedTuple):
    """An object as it is spelled: equal keys and their order too."""

    pairs: list[tuple[str, Any]]

    def names(self) -> set[str]:
        return {key for key, _ in self.pairs}


def spelled(raw: bytes) -> Any:
    """What the bytes say, whole. Raises `ValueError` where Python's reader does."""
    text = raw.decode()
    return json.loads(
        text.removeprefix("\ufeff"),
        object_pairs_hook=Members,
        parse_int=Number,
        parse_float=Number,
        parse_constant=Number,
    )


def document(data: bytes) -> None:
    """What is spliced says the same as before and what was set, and nothing else."""
    try:
        read = Document(data)
    except Malformed:
        return
    literals = {name: read.literal((name,)) for name in read.value}
    edits: dict[str, list[Edit]] = {
        "none": [],
        "set": [Set(("seed",), SEED)],
        "taken": [Remove(("seed",)), Remove(("n",))],
    }
    if "moved" not in read.value:
        edits["renamed"] = [Rename(("seed",), "moved")]
    if isinstance(read.value.get("sampling_params"), dict | None):
        edits["inner"] = [Set(("sampling_params", "sampling_seed"), SEED)]
    edited = {name: Document(data).edited(each) for name, each in edits.items()}
    with suppress(RecursionError):  # deeper than this reader goes
        _compare(spelled(data), literals, {name: spelled(raw) for name, raw in edited.items()})


def _compare(before: Any, literals: dict[str, bytes | None], after: dict[str, Any]) -> None:
    assert isinstance(before, Members)
    assert {name: spelled(literal or b"") for name, literal in literals.items()} == dict(before.pairs)
    seed = Number(SEED.decode())
    pairs = before.pairs
    expected = {
        "none": pairs,
        "set": with_set(before, "seed", seed),
        "taken": [pair for pair in pairs if pair[0] not in ("seed", "n")],
        "renamed": [("moved" if key == "seed" else key, value) for key, value in pairs],
    }
    if "inner" in after:
        holder = dict(pairs).get("sampling_params") or Members([])
        expected["inner"] = with_set(before, "sampling_params", Members(with_set(holder, "sampling_seed", seed)))
    assert {name: members.pairs for name, members in after.items()} == {name: expected[name] for name in after}


def with_set(members: Members, name: str, value: Any) -> list[tuple[str, Any]]:
    """The members with a field set: in the place of the last of its name, else in front."""
    pairs = list(members.pairs)
    for at in reversed(range(len(pairs))):
        if pairs[at][0] == name:
            pairs[at] = (name, value)
            return pairs
    return [(name, value), *pairs]


def content(data: bytes) -> None:
    """The canonical form hangs on what is said and not on how it is written; and it is JSON that says the same."""
    try:
        read = Document(data)
    except Malformed:
        return
    form = canonical.form(read)
    assert canonical.form(Document(data)) == form
    with suppress(RecursionError):  # deeper than this reader goes
        said = spelled(data)
        respelled = rewritten(said).encode()
        assert canonical.form(Document(respelled)) == form, respelled
        if b"#" not in form:
            again = spelled(form)
            assert [key for key, _ in again.pairs] == sorted(again.names())
            assert again.names() == said.names() - canonical.UNSAMPLED


def rewritten(value: Any) -> str:
    """The same said otherwise: escapes, space, the order of keys; of equal keys the last alone."""
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Members):
        kept = dict(value.pairs)
        return (
            "{ "
            + " , ".join(f"{json.dumps(key)} :\n{rewritten(kept[key])}" for key in sorted(kept, reverse=True))
            + "}"
        )
    if isinstance(value, list):
        return "[\t" + " ,".join(map(rewritten, value)) + " ]"
    return json.dumps(value)


def events(data: bytes) -> None:
    """A stream says the same however it is cut, and reading it raises nothing. The first bytes say where it is cut."""
    cuts = sorted(byte * len(data) // 256 for byte in data[:4])
    stream = data[4:]
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, parted = Splitter(1 << 20), Splitter(1 << 20)
    found = whole.feed(stream)
    assert [event for piece in pieces for event in parted.feed(piece)] == found
    assert whole.empty == parted.empty
    assert b"".join(found).replace(b"\r", b"").replace(b"\n", b"") in stream.replace(b"\r", b"").replace(b"\n", b"")
    for event in found:
        payload(event)
    small = Splitter(16)
    for piece in pieces:
        small.feed(piece)
        assert len(small._partial) <= 16 + len(piece)
    for api in get_args(Api):
        seen = []
        for parts in ([stream], pieces):
            observer = Observer(api, "sample")
            for part in parts:
                observer.feed(part)
            seen.append(observer.result())
        assert seen[0]._replace(samples=()) == seen[1]._replace(samples=())


def ledger(data: bytes) -> None:
    """Any bytes are read as records and counted gaps; a torn end is cut off, and then nothing more is changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "0.jsonl"
        file.write_bytes(data)
        segments = Segments(folder)
        records = list(segments)
        whole = data[: data.rfind(b"\n") + 1]
        assert file.read_bytes() == whole
        assert all(isinstance(record, dict) for record in records)
        again = Segments(folder)
        assert list(again) == records
        assert again.gaps == segments.gaps
        assert file.read_bytes() == whole
        lines = whole.split(b"\n")[:-1]
        assert len(records) + segments.gaps >= sum(line.startswith(b"{") for line in lines)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "document": document,
    "content": content,
    "events": events,
    "ledger": ledger,
}

SEEDS: dict[str, list[bytes]] = {
    "document": [
        b'{"model": "m", "seed": 1, "seed": null, "n": 2, "sampling_params": {"sampling_seed": 1, "x": [1e400, -0]}}',
        b'\xef\xbb\xbf{"a\\u0062": "\\ud800", "s\\u0065ed": 18446744073709551616, "sampling_params": null}',
        b'{"messages": [{"role": "user", "content": "\\"seed\\": 1 }"}], "stop": ["}", "]", "\\\\"]} ',
    ],
    "content": [
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "c1"}]}, {"role": "tool", "tool_call_id": "c1"}]}',
        b'{"temperature": 0.70, "x": [1, 1.0, 10e-1, 1e30, {"a": 1e999999999}], "user": "u", "input": [{"id": "c"}]}',
    ],
    "events": [
        b'\x10\x40\x80\xc0data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n',
        b'\x01\x02\x03\xf0event: message_delta\r\ndata: {"delta": {"stop_reason": "x"}}\r\n\r\n: ping\n\n',
        b'\x10\x40\x80\xc0data: {"choices": [{"index": 0}]}\r\n\r\nid: 1\ndata: [DONE]\n\n',
    ],
    "ledger": [b'{"event": "opened", "index": 0}\n{"event": "gap"}\n{"event": "clo', b"\n\n[]\nnull\n{}\n\xff\n"],
}
"""Where atheris begins."""
