"""Data-plane routes that the gateway answers from what it knows: the merged list of models, and aborts."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.answers import Client
from gateway.core.document import Document, Malformed
from gateway.core.errors import Busy, CallerFault, ModelNotFound, WrongMethod
from gateway.core.types import Request
from gateway.dispatcher import Dispatcher
from gateway.fleet import Fleet, Pool
from gateway.session import Session

_JSON = b"content-type: application/json\r\n"
_MODELS = "/v1/models"
_ABORT = "/abort_request"


class Local:
    """Answers that need no plan."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    def owns(self, route: str) -> bool:
        """Whether this answers a route."""
        return route.startswith(_MODELS) or route == _ABORT

    async def answer(self, route: str, request: Request, client: Client, session: Session | None) -> None:
        """Answer a request to one of its routes. Raises a `CallerFault` or `Busy`.

        `session`: of whom it is, if that was created; such a one aborts its own requests alone.
        """
        method = "POST" if route == _ABORT else "GET"
        if request.method != method:
            raise WrongMethod(f"{route} takes {method}, not {request.method}.", method)
        if route == _ABORT:
            await self._abort(request.body, session)
            client.reply(200, _JSON, b"{}")
        else:
            client.reply(200, _JSON, orjson.dumps(self.models(route)))

    def models(self, route: str) -> dict[str, Any]:
        """All models of all pools, each once; or the one that the route names."""
        found: dict[str, dict[str, Any]] = {}
        for pool in self._fleet:
            for model in _told(pool):
                found.setdefault(model["id"], model)
        if route == _MODELS:
            if not found:
                raise Busy("The replicas have not said yet which models they serve.", code="models_unknown")
            return {"object": "list", "data": list(found.values())}
        name = route.removeprefix(f"{_MODELS}/")
        if name not in found:
            raise ModelNotFound(
                f"No pool serves the model {name!r}. Served: {', '.join(sorted(found))}.", param="model"
            )
        return found[name]

    async def _abort(self, body: bytes, session: Session | None) -> None:
        try:
            document = Document(body)
        except Malformed as error:
            raise CallerFault(str(error), code="invalid_json") from None
        wanted = document.value.get("rid") or document.value.get("request_id")
        if not isinstance(wanted, str) or not wanted:
            raise CallerFault(
                "Name the request to abort: rid, as you sent it or as X-Detgate-Request-Id told it.",
                code="rid_required",
                param="rid",
            )
        for sending in self._dispatcher.named(wanted):
            if session is not None and sending.job.session != "/".join(session.place):
                continue
            if sending.sent is None or sending.job.pool.engine.ABORT is None:
                sending.give_up()
            else:
                sending.unwanted = True
                await self._dispatcher.abort(sending)


def _told(pool: Pool) -> list[dict[str, Any]]:
    told = [model for replica in pool.replicas.values() for model in replica.models or ()]
    if not pool.settings.models:
        return told
    by_name = {model["id"]: model for model in told}
    return [
        by_name.get(name, {"id": name, "object": "model", "created": 0, "owned_by": "detgate"})
        for name in pool.settings.models
    ]
