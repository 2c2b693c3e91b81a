"""What a record must hold, so that a run can go on from it, or so that it can be read at all.

Where a run goes on, fields that nothing is restored from are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gateway.core.errors import Busy
from gateway.core.indexing import LATE, MANY, NONE

Fits = Callable[[Any], bool]


class Unreadable(Busy):
    """What a run goes on from cannot be made out, so it is not served until somebody has mended it."""

    code = "run_unreadable"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=60)


def unsound(place: str, why: str) -> Unreadable:
    """The refusal of a run with a record that is `wrong`. `place`: where that stands."""
    return Unreadable(
        f"{place} is no sound record: {why}. Mend it, or begin another run. With state: memory an empty line in its "
        "place is a gap, and the run goes on in another epoch."
    )


def foreign(record: Mapping[str, Any], run: str) -> str | None:
    """Why a record is none of this run; None: it is one."""
    if (told := record.get("run", run)) == run:
        return None
    return f"run is {told!r:.100}, and not {run}: a segment of another run belongs into the folder of that"


def wrong(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record; None: nothing."""
    event = record.get("event")
    if type(event) is not str:
        return "event is missing or of another type"
    if not _name_or_none(record.get("session")):
        return "session is of another type"
    for name, fits in _FIELDS.get(event, _NO_FIELDS).items():
        if name not in record:
            return f"{name} is missing"
        if not fits(record[name]):
            return f"{name} cannot be {record[name]!r:.100}"
    more = _MORE.get(event)
    return None if more is None else more(record)


def odd(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record for whoever only reads it: a field that is there has another type. None: nothing."""
    event, get = record.get("event"), record.get
    table = _READ.get(event, _READ_ELSE) if type(event) is str else _READ_ELSE
    made = (*record, *map(type, record.values()))
    if made not in table.sound:
        for name, types in table.types.items():
            if type(get(name)) not in types:
                return f"{name} cannot be {get(name)!r:.100}"
        if len(table.sound) < _MADE:
            table.sound.add(made)
    for name in table.counts:
        if (value := get(name)) and not 0 <= value < 1 << 31:
            return f"{name} cannot be {value!r:.100}"
    for name in _IDS:
        if (value := get(name)) and len(value) > _LONGEST:
            return f"{name} is too long"
    for name, fits in table.parts:
        if (value := get(name)) and not fits(value):
            return f"{name} cannot be {value!r:.100}"
    if table is _READ_ELSE and event is None and "identity" in record:
        return next((f"{name} is missing" for name in _REQUEST if get(name) is None), None)
    return None


def odd_claim(record: Mapping[str, Any]) -> str | None:
    """The same for whoever makes decisions again."""
    if (why := odd(record)) is not None or record.get("event") not in ("opened", "given_back"):
        return why
    if (digest := record.get("digest")) is not None and not _hex(digest):
        return f"digest cannot be {digest!r:.100}"
    if (order := record.get("order")) is not None and not _order(order):
        return f"order cannot be {order!r:.100}"
    if record.get("content") is None and (order == "client" or record.get("key") is not None):
        return _UNBOUND
    return None


def odd_to_send(record: Mapping[str, Any]) -> str | None:
    """The same for whoever sends requests again, and creates sessions for it."""
    if (why := odd(record)) is not None:
        return why
    needed: tuple[str, ...] = ()
    match record.get("event"):
        case "opened":
            needed = ("route", "order", "pool")
        case "session":
            needed = ("session", "identity", *(() if record.get("group") is None else ("group_identity", "group_size")))
    return next((f"{name} is missing" for name in needed if record.get(name) is None), None)


def odd_to_show(record: Mapping[str, Any]) -> str | None:
    """The same for whoever shows requests and sessions."""
    if (why := odd(record)) is not None:
        return why
    needed = {"session": ("session", "identity"), "gateway": ("gateway",)}.get(record.get("event", ""), ())
    return next((f"{name} is missing" for name in needed if record.get(name) is None), None)


def _text(value: Any) -> bool:
    return type(value) is str


def _name_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _flag(value: Any) -> bool:
    return type(value) is bool


def _index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _whole_or_none(value: Any) -> bool:
    return value is None or type(value) is int


def _number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _order(value: Any) -> bool:
    return value in ("arrival", "content", "client")


def _order_or_none(value: Any) -> bool:
    return value in (None, "arrival", "content")


def _asked(value: Any) -> bool:
    return _index(value) or (type(value) is int and value in (MANY, NONE, LATE))


def _flags(value: Any) -> bool:
    return type(value) is list and all(type(flag) is str for flag in value)


def _hex(value: Any) -> bool:
    try:
        bytes.fromhex(value)
    except (TypeError, ValueError):
        return False
    return True


def _opened(record: Mapping[str, Any]) -> str | None:
    if record["content"] is None and (record["order"] == "client" or record["key"] is not None):
        return _UNBOUND
    if record.get("kind") == "sample" and not _text(record.get("request_id")):
        return "request_id is missing or of another type"
    return None


def _session(record: Mapping[str, Any]) -> str | None:
    if not _number_or_none(record.get("failed_reward")):
        return "failed_reward is of another type"
    if record["group"] is None:
        return None
    if not (_text(record.get("group_identity")) and _count(record.get("group_size")) and _count(record["member"])):
        return "group_identity, group_size or member is missing or of another type"
    return None


def _fleet(record: Mapping[str, Any]) -> str | None:
    """What `/admin` was asked for is made again; what else became of the fleet is not."""
    if not record.get("asked"):
        return None
    if not all(_text(record.get(name)) for name in ("change", "pool", "replica")):
        return "change, pool or replica is missing or of another type"
    if record["change"] == "added" and not (_text(record.get("url")) and _rank_or_none(record.get("dp_rank"))):
        return "url or dp_rank is missing or of another type"
    return None if _name_or_none(record.get("fingerprint")) else "fingerprint is of another type"


def _rank_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _weights(record: Mapping[str, Any]) -> str | None:
    return None if _count(record.get("number", 0)) else "number is of another type"


_REQUEST: dict[str, Fits] = {"session": _text, "identity": _text, "index": _index}

_CLAIM: dict[str, Fits] = {
    **_REQUEST,
    "order": _order,
    "digest": _hex,
    "content": _name_or_none,
    "key": _name_or_none,
    "repeat": _count,
    "flags": _flags,
}

_NO_FIELDS: dict[str, Fits] = {}

_FIELDS: dict[str, dict[str, Fits]] = {
    "opened": _CLAIM,
    "given_back": _CLAIM,
    "waited": {"session": _text, "identity": _text, "digest": _hex, "asked": _asked, "repeat": _count},
    "complete": _REQUEST,
    "closed": {**_REQUEST, "used": _flag},
    "fenced": _REQUEST,
    "session": {
        "session": _text,
        "identity": _text,
        "ordinal": _count,
        "index_order": _order_or_none,
        "seed": _whole_or_none,
        "group": _name_or_none,
        "member": _whole_or_none,
        "submission": _whole_or_none,
        "key_digest": _hex,
    },
    "session_ended": {"session": _text, "state": _text, "why": _name_or_none, "session_reward": _number_or_none},
    "session_weights": {"session": _text, "pool": _text, "version": _text},
    "reward": {**_REQUEST, "reward": _number, "before": _number_or_none, "session_reward": _number_or_none},
    "weights": {"change": _text, "pool": _text, "version": _name_or_none, "paused": _flag, "time": _number},
}

_MORE: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "opened": _opened,
    "given_back": _opened,
    "session": _session,
    "fleet": _fleet,
    "weights": _weights,
}


def _texts(value: Any) -> bool:
    return all(type(each) is str for each in value)


def _numbers(value: Any) -> bool:
    return all(map(_number, value.values()))


def _attempts(value: Any) -> bool:
    return all(
        type(each) is dict and type(each.get("replica")) is str and _name_or_none(each.get("outcome")) for each in value
    )


_UNBOUND = "content is missing, which a number or a key is bound to"


class _Read(NamedTuple):
    """What commands and pages read of a record. All may be null, or not there, but for what tells requests apart."""

    types: dict[str, tuple[type, ...]]
    counts: tuple[str, ...]
    parts: tuple[tuple[str, Fits], ...]
    """Lists and objects, and what must be in them."""
    sound: set[tuple[Any, ...]]
    """Names and types of sound records, as they were met: nearly all are made as another was."""


_MADE = 1000
"""So many of these are kept."""

_IDS = ("session", "identity")
_LONGEST = 4096

_NONE = type(None)
_TEXT, _WHOLE, _LIST, _OBJECT = (str, _NONE), (int, _NONE), (list, _NONE), (dict, _NONE)

_KEY: dict[str, tuple[type, ...]] = {"session": (str,), "identity": (str,), "index": (int,)}
_ANY: dict[str, tuple[type, ...]] = {"run": _TEXT, "time": (float, int, _NONE), "gateway": _TEXT, "flags": _LIST}
_OPENED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("order", "digest", "content", "request_id", "route", "pool", "scheme", "group", "resumes"), _TEXT),
    **dict.fromkeys(("key", "model", "seed_source"), _TEXT),
    **dict.fromkeys(("seed", "ordinal", "member", "repeat", "claims"), _WHOLE),
}
_CLOSED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("finish_reasons", "attempts", "replicas", "candidates"), _LIST),
    **dict.fromkeys(("usage", "loads"), _OBJECT),
    "used": (bool, _NONE),
}
_ELSE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("event", "session", "identity", "why"), _TEXT),
    **dict.fromkeys(("index", "group_size"), _WHOLE),
    "facts": _OBJECT,
}
_COUNTS = ("index", "ordinal", "member", "repeat", "claims")
_PARTS: tuple[tuple[str, Fits], ...] = (
    ("flags", _texts),
    ("attempts", _attempts),
    ("replicas", _texts),
    ("candidates", _texts),
    ("loads", _numbers),
)

_READ: dict[str, _Read] = {
    "opened": _Read(_KEY | _ANY | _OPENED, _COUNTS, _PARTS[:1], set()),
    "given_back": _Read(_KEY | _ANY | _OPENED, _COUNTS, _PARTS[:1], set()),
    "complete": _Read(_KEY, ("index",), (), set()),
    "closed": _Read(_KEY | _ANY | _CLOSED, ("index",), _PARTS, set()),
}
_READ_ELSE = _Read(_ANY | _OPENED | _CLOSED | _ELSE, (*_COUNTS, "group_size"), _PARTS, set())
"""Of all else: what became of sessions and replicas, and requests as one object each."""
