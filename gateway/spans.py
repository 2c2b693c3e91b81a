"""Spans of requests, made by OpenTelemetry's SDK and exported by OTLP.

A request is a server's span, each of its sendings a client's span beneath it, whose id the replica is told. What they
say has the names of OpenTelemetry's conventions for HTTP and generative AI, and `detgate.…` for what the gateway
decided. Never what was asked or answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from gateway import __version__
from gateway.core import traces
from gateway.core.types import Request
from gateway.fleet import Replica
from gateway.settings import Tracing
from gateway.work import Asked, Work

log = structlog.get_logger("detgate.tracing")

EXPORT_SECONDS = 5
"""How long one export may take."""

CLOSE_SECONDS = 6.0
"""How long the last ones may take at the end."""

_OPERATIONS = {"chat/completions": "chat", "messages": "chat", "responses": "chat", "embeddings": "embeddings"}
"""What the conventions call routes, by the end of the path. Other routes that sample are completions of a text."""

_ASKED = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int}
"""What of a body is told as it stands, and what it must be."""

_LARGEST = 2**63 - 1
"""The largest number that OTLP carries: one that is larger would keep its whole batch from being exported."""

_INPUT, _OUTPUT = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


def build(settings: Tracing) -> Spans:
    """Spans that go where the configuration says."""
    return Spans(OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_SECONDS), settings.queue)


class Spans:
    """Owns the provider of spans, and with it their queue and the thread that exports them."""

    def __init__(self, exporter: SpanExporter, queue: int) -> None:
        own = {"service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            own["service.name"] = "detgate"
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        batch = min(512, queue)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=queue, max_export_batch_size=batch)
        )
        self._tracer = self._provider.get_tracer("detgate", __version__)

    def begin(self, request: Request) -> Traced:
        """A request has come: its span, beneath the one that it names."""
        context = None
        parent = traces.parent(request.fields)
        if parent is not None:
            state = TraceState.from_header([traces.state(request.headers).decode("latin-1")])
            remote = SpanContext(parent.trace, parent.span, True, TraceFlags(parent.flags & 1), state)
            context = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(request.method, context, SpanKind.SERVER)
        return Traced(self._tracer, span, request.method)

    async def close(self) -> None:
        """Export what was not, for a bounded time."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.to_thread(self._provider.shutdown)
        except TimeoutError:
            pass


class Traced:
    """The spans of one request."""

    def __init__(self, tracer: Any, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method
        self._beneath = set_span_in_context(span)
        self._sendings: dict[str, Span] = {}
        self._number = 0
        self.id = f"{span.get_span_context().trace_id:032x}"

    def sent(self, engine_id: str, replica: Replica) -> bytes:
        """A call goes to a replica: its span, and the header lines that name it."""
        self._number += 1
        address = replica.connections.address
        span = self._sendings[engine_id] = self._tracer.start_span(
            self._method,
            self._beneath,
            SpanKind.CLIENT,
            {
                "http.request.method": self._method,
                "server.address": address.host,
                "server.port": address.port,
                "detgate.pool": replica.pool,
                "detgate.replica": replica.name,
                "detgate.engine_id": engine_id,
                "detgate.sending": self._number,
            },
        )
        own = span.get_span_context()
        told = f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}"
        return traces.lines(told.encode(), own.trace_state.to_header().encode())

    def left(self, engine_id: str, status: int, *, complete: bool) -> None:
        """A call is over."""
        span = self._sendings.pop(engine_id, None)
        if span is None:
            return
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 400:
            _failed(span, str(status))
        elif not complete:
            _failed(span, "broken" if status else "unanswered")
        span.end()

    def end(self, work: Work, outcome: str, error: str | None) -> None:
        """The request is over: say what it was, and end its spans."""
        try:
            self._tell(work, outcome, error)
        except Exception:  # whatever it is, the request is not to hear of it
            log.exception("a span does not tell all", trace_id=self.id)
        self._span.end(time.time_ns())

    def _tell(self, work: Work, outcome: str, error: str | None) -> None:
        span = self._span
        for engine_id in list(self._sendings):
            self.left(engine_id, 0, complete=False)
        span.set_attributes({"http.request.method": self._method, "detgate.outcome": outcome, **_told(work)})
        if work.asked is not None:
            span.update_name(f"{self._method} {work.asked.route}")
        if outcome != "delivered":
            _failed(span, error or outcome, server=outcome != "abandoned" and not 400 <= work.answer.status < 500)


def _failed(span: Span, why: str, *, server: bool = True) -> None:
    """What is the caller's own doing is told, and is no error of this server: the conventions want it so."""
    span.set_attribute("error.type", _carried(why))
    if server:
        span.set_status(StatusCode.ERROR)


def _told(work: Work) -> dict[str, Any]:
    """What is known of a request at its end."""
    answer, job, decided, scope = work.answer, work.job, work.plan, work.scope
    told: dict[str, Any] = {
        "http.response.status_code": answer.status or None,
        "user.name": work.user,
    }
    if work.asked is not None:
        told |= _of_ask(work.asked)
    if scope is not None and decided is not None:
        told |= {
            "detgate.run": scope.run,
            "detgate.session": scope.session,
            "detgate.identity": scope.identity,
            "detgate.index": decided.index,
            "detgate.request_id": decided.request_id,
            "detgate.seed_source": decided.seed_source,
            "detgate.racing": work.raced,
            "gen_ai.conversation.id": scope.session,
            "gen_ai.request.seed": decided.seed,
        }
    if job is not None:
        told |= {
            "detgate.replica": job.replicas[-1] if job.replicas else None,
            "detgate.attempts": job.attempts,
            "detgate.lane_wait": job.lane_wait,
            "detgate.reasons": job.flags or None,
        }
    observed = answer.observed
    if observed is not None:
        usage = observed.usage or {}
        told |= {
            "gen_ai.response.id": observed.id,
            "gen_ai.response.finish_reasons": [str(reason) for reason in observed.finish_reasons] or None,
            "gen_ai.usage.input_tokens": _count(usage, _INPUT),
            "gen_ai.usage.output_tokens": _count(usage, _OUTPUT),
            "detgate.weight_version": observed.weight_version,
        }
    return {name: value for name, given in told.items() if (value := _carried(given)) is not None}


def _carried(value: Any) -> Any:
    """A value as OTLP can carry it; None where it cannot. Texts lose lone surrogates, which JSON may hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_carried(each) for each in value]
    return None if type(value) is int and abs(value) > _LARGEST else value


def _of_ask(asked: Asked) -> dict[str, Any]:
    body = asked.document.value
    model = body.get("model")
    told: dict[str, Any] = {
        "http.route": asked.route,
        "detgate.pool": asked.pool.name,
        "gen_ai.provider.name": asked.pool.settings.engine,
        "gen_ai.request.model": model if isinstance(model, str) else None,
    }
    if asked.handling.kind not in ("sample", "score"):
        return told
    end = next((name for route, name in _OPERATIONS.items() if asked.route.endswith(route)), None)
    told["gen_ai.operation.name"] = end or (
        "text_completion" if asked.handling.kind == "sample" else asked.route.rpartition("/")[2]
    )
    for name, kind in _ASKED.items():
        given = body.get(name)
        if isinstance(given, int | float) and type(given) in (kind, int) and abs(given) <= _LARGEST:
            told[f"gen_ai.request.{name}"] = kind(given)
    if asked.wish.samples > 1:
        told["gen_ai.request.choice.count"] = asked.wish.samples
    return told


def _count(usage: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if type(value := usage.get(name)) is int), None)
