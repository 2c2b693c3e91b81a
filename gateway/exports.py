"""Requests of a run or a session, as JSON lines over HTTP."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Sequence
from pathlib import Path

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse

from gateway.core.errors import CallerFault
from gateway.ledger.requests import Key, Requests
from gateway.ledger.writer import Mark

MEDIA = "application/x-ndjson"


async def page(
    folder: Path, live: bool, after: str | None, limit: int | None, gateways: Collection[str] = ()
) -> Response:
    """The next requests of a run: in canonical order, or, while it is `live`, in that of submission up to the frontier.

    `gateways`: those that served it, where there were several; `X-Detgate-Missing` names those whose part is elsewhere.
    `X-Detgate-Next` is what `after` must be to go on from there, as long as the order is the same. Raises `CallerFault`
    for any other `after`.
    """
    found, keys = await asyncio.to_thread(_sorted, folder, live)
    if after is not None:
        try:
            keys = found.after(keys, _key(after, live), live=live)
        except (KeyError, ValueError, TypeError):
            raise CallerFault(
                "after must be the X-Detgate-Next of an earlier answer of this run, in the order that it has now: "
                "that of submission while it is live, canonical when it has ended. Begin anew.",
                code="invalid_cursor",
                param="after",
            ) from None
    keys = keys[:limit]
    headers = {"x-detgate-order": "submission" if live else "canonical", **_missing(found, gateways)}
    last = _cursor(keys[-1], live) if keys else after
    if last is not None:
        headers["x-detgate-next"] = last
    return StreamingResponse(found.lines(keys), media_type=MEDIA, headers=headers)


def _sorted(folder: Path, live: bool) -> tuple[Requests, Sequence[Key]]:
    found = Requests(folder)
    return found, found.submitted() if live else found.canonical()


async def of_session(folder: Path, session: str, since: Mark | None) -> Requests:
    """The requests of one session."""
    return await asyncio.to_thread(Requests, folder, session, since)


async def whole(found: Requests, gateways: Collection[str] = ()) -> Response:
    """All that was found, in canonical order. `gateways`: as for `page`."""
    headers = {"x-detgate-order": "canonical", **_missing(found, gateways)}
    keys = await asyncio.to_thread(found.canonical)
    return StreamingResponse(found.lines(keys), media_type=MEDIA, headers=headers)


def _missing(found: Requests, gateways: Collection[str]) -> dict[str, str]:
    missing = sorted(set(gateways) - found.gateways)
    return {"x-detgate-missing": ", ".join(missing)} if missing else {}


def _cursor(key: Key, live: bool) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([live, *key])).decode().rstrip("=")


def _key(cursor: str, live: bool) -> Key:
    """What a cursor stands for. Raises `ValueError` or `TypeError`."""
    then, session, name, index = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    if then is not live:
        raise ValueError(cursor)
    return Key(session, name, index)
