"""What a record must hold, so that a run can go on from it. Fields that nothing is restored from are not looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
        return "content is missing, which a number or a key is bound to"
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

_NO_FIELDS: dict[str, Fits] = {}

_FIELDS: dict[str, dict[str, Fits]] = {
    "opened": {
        **_REQUEST,
        "order": _order,
        "digest": _hex,
        "content": _name_or_none,
        "key": _name_or_none,
        "repeat": _count,
        "flags": _flags,
    },
    "waited": {"session": _text, "identity": _text, "digest": _hex, "asked": _asked, "repeat": _count},
    "complete": _REQUEST,
    "closed": {**_REQUEST, "used": _flag},
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
    "session": _session,
    "fleet": _fleet,
    "weights": _weights,
}
