"""Traces: what of a client's goes on, and the spans that OpenTelemetry's own SDK is given."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway import spans, tracing
from gateway.settings import InvalidSettings, Settings
from tests.harness import DONE, FakeWorker, Gate, Reply, Seen, chat, completion, delta, gateway, polite, pool

CHAT = "/v1/chat/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
ON = {"endpoint": "http://127.0.0.1:9/v1/traces"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What takes the place of OTLP; all else is the SDK's own."""
    memory = InMemorySpanExporter()

    def instead(**settings: Any) -> SpanExporter:
        assert settings["endpoint"] == ON["endpoint"]
        return memory

    monkeypatch.setattr(spans, "OTLPSpanExporter", instead)
    return memory


def finished(gate: Gate, exporter: InMemorySpanExporter) -> tuple[list[ReadableSpan], list[ReadableSpan]]:
    """The requests' spans and those of sendings, as far as they have ended."""
    made = gate.gateway._tracing
    assert isinstance(made, spans.Spans)
    made._provider.force_flush()
    found = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    by_kind = {kind: [span for span in found if span.kind is kind] for kind in (SpanKind.SERVER, SpanKind.CLIENT)}
    return by_kind[SpanKind.SERVER], by_kind[SpanKind.CLIENT]


@pytest.mark.parametrize("carrier", ["http1", "asgi"])
async def test_without_tracing_a_good_parent_goes_on_as_it_came_and_a_bad_one_does_not(carrier: Any) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), carrier=carrier) as gate:
        await gate.http.post(CHAT, json=chat("a"), headers=PARENT)
        await gate.http.post(CHAT, json=chat("b"), headers=PARENT | {"traceparent": "00-0-0-00"})
        await gate.http.post(CHAT, json=chat("c"))
        assert gate.gateway._tracing is None
        told = [(seen.header("traceparent"), seen.header("tracestate")) for seen in worker.seen]
        assert told == [(PARENT["traceparent"], "a=1"), (None, None), (None, None)]


async def test_spans_say_what_was_asked_decided_and_answered(exporter: InMemorySpanExporter) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tracing=ON, seed=42) as gate:
        body = chat("the secret plan", max_tokens=7, temperature=1, top_p=0.5)
        answer = await gate.http.post("/sessions/17:3" + CHAT, json=body, headers=PARENT)
        [request], [sending] = finished(gate, exporter)
        assert request.name == f"POST {CHAT}"
        told = dict(request.attributes or {})
        assert {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "test-model",
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.request.seed": int(answer.headers["x-detgate-seed"]),
            "gen_ai.response.id": "chatcmpl-1",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 1,
            "gen_ai.conversation.id": "17:3",
            "detgate.session": "17:3",
            "detgate.identity": "17:3",
            "detgate.index": 0,
            "detgate.request_id": "17:3:0",
            "detgate.replica": "policy-0",
            "detgate.pool": "policy",
            "detgate.attempts": 1,
            "detgate.outcome": "delivered",
            "http.route": CHAT,
            "http.response.status_code": 200,
        }.items() <= told.items()
        assert "secret plan" not in str(told) + str(sending.attributes)
        assert request.status.status_code is not StatusCode.ERROR
        assert request.parent is not None
        assert sending.parent is not None
        assert (request.parent.span_id, request.context.trace_id) == (int(SPAN, 16), int(TRACE, 16))
        assert sending.parent.span_id == request.context.span_id
        assert worker.seen[0].header("traceparent") == f"00-{TRACE}-{sending.context.span_id:016x}-01"
        assert worker.seen[0].header("tracestate") == "a=1"
        assert (sending.attributes or {})["http.response.status_code"] == 200


async def test_each_sending_has_a_span_of_its_own_whose_failure_it_tells(exporter: InMemorySpanExporter) -> None:
    async def breaks(seen: Seen, reply: Reply) -> None:
        reply.reset()

    async with FakeWorker(breaks) as one, FakeWorker() as two:
        async with gateway(pool("policy", one.url, two.url), tracing=ON) as gate:
            answers = [await gate.http.post(CHAT, json=chat(str(n))) for n in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            requests, sendings = finished(gate, exporter)
            assert len(requests) == 4
            assert len(sendings) == 4 + len(one.seen)
            assert one.seen
            failed = [span for span in sendings if span.status.status_code is StatusCode.ERROR]
            assert {(span.attributes or {})["detgate.replica"] for span in failed} == {"policy-0"}
            assert {(span.attributes or {})["error.type"] for span in failed} == {"unanswered"}
            named = {(seen.header("traceparent") or "")[:53] for seen in [*one.seen, *two.seen]}
            assert named == {f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-" for span in sendings}


async def test_the_calls_of_a_fan_out_are_spans_of_one_request(exporter: InMemorySpanExporter) -> None:
    async with FakeWorker() as worker:
        async with gateway(pool("policy", worker.url, engine="sglang"), tracing=ON) as gate:
            assert (await gate.http.post(CHAT, json=chat(n=3))).status_code == 200
            [request], sendings = finished(gate, exporter)
            assert (request.attributes or {})["gen_ai.request.choice.count"] == 3
            assert len(sendings) == 3
            assert {span.parent.span_id for span in sendings if span.parent} == {request.context.span_id}


async def test_a_refused_request_and_a_broken_stream_are_spans_too(exporter: InMemorySpanExporter) -> None:
    async def half(seen: Seen, reply: Reply) -> None:
        reply.sse()
        reply.chunk(delta("h"))
        await reply.writer.drain()
        reply.reset()

    async with FakeWorker(half) as worker, gateway(pool("policy", worker.url), tracing=ON) as gate:
        await gate.http.post(CHAT, content=b"{", headers=PARENT)
        with pytest.raises(httpx.RemoteProtocolError):
            await gate.http.post(CHAT, json=chat(stream=True))
        await gate.until(gate.idle)
        refused, broken = finished(gate, exporter)[0]
        assert refused.context.trace_id == int(TRACE, 16)
        assert (refused.attributes or {})["error.type"] == "invalid_json"
        assert refused.status.status_code is StatusCode.UNSET, "it was the caller's fault"
        assert (broken.attributes or {})["detgate.outcome"] == "failed"
        assert broken.status.status_code is StatusCode.ERROR


async def test_what_is_decided_is_the_same_with_spans_and_without(exporter: InMemorySpanExporter) -> None:
    told: list[list[Any]] = []
    for endpoint in ({}, ON):
        async with (
            FakeWorker() as worker,
            gateway(pool("policy", worker.url), profile="strict", tracing=endpoint) as gate,
        ):
            headers = {"x-session-id": "s"} | (PARENT if endpoint else {})
            answers = [await gate.http.post(CHAT, json=chat(str(n)), headers=headers) for n in range(3)]
            names = ("x-detgate-index", "x-detgate-seed", "x-detgate-request-id", "x-detgate-replica")
            told.append([[answer.headers[name] for name in names] for answer in answers])
            told.append([seen.body for seen in worker.seen])
    assert told[0] == told[2]
    assert told[1] == told[3]


async def test_spans_are_exported_by_otlp_and_the_last_when_the_gateway_ends() -> None:
    exported: list[ExportTraceServiceRequest] = []

    async def collect(seen: Seen, reply: Reply) -> None:
        assert seen.target == "/v1/traces"
        exported.append(ExportTraceServiceRequest.FromString(_unpacked(seen)))
        reply.head(200, ("content-type", "application/x-protobuf"), length=0)

    async def stream(seen: Seen, reply: Reply) -> None:
        reply.sse()
        for event in (delta("h"), delta("", "stop"), DONE):
            reply.chunk(event)
        reply.end()

    async with FakeWorker(stream) as worker, FakeWorker(collect) as collector:
        endpoint = {"endpoint": f"{collector.url}/v1/traces"}
        async with gateway(pool("policy", worker.url), tracing=endpoint) as gate:
            await gate.http.post(CHAT, json=chat(stream=True))
        [resource] = [each for request in exported for each in request.resource_spans]
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert names["service.name"] == "detgate"
        assert {span.name for scope in resource.scope_spans for span in scope.spans} == {f"POST {CHAT}", "POST"}


async def test_a_collector_that_is_away_harms_no_request() -> None:
    async with FakeWorker(polite) as worker, gateway(pool("policy", worker.url), tracing=ON) as gate:
        assert (await gate.http.post(CHAT, json=chat())).status_code == 200


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name="opentelemetry.sdk")

    monkeypatch.setattr(tracing, "import_module", missing)
    with pytest.raises(InvalidSettings, match=r"needs the package opentelemetry.*detgate\[otel\]"):
        tracing.build(Settings.load(None, {}, {"tracing": ON}))
    assert tracing.build(Settings.load(None, {}, {})) is None


def _unpacked(seen: Seen) -> bytes:
    assert seen.header("content-encoding") in (None, "identity")
    return seen.body


@pytest.mark.parametrize(
    "fields",
    [
        f'"temperature": 1{"0" * 400}',
        f'"temperature": -1{"0" * 400}',
        f'"top_p": 1{"0" * 400}',
        f'"max_tokens": {2**63}, "top_k": {-(2**64)}',
        '"temperature": Infinity',
        '"temperature": NaN',
    ],
)
async def test_numbers_that_no_span_can_carry_are_left_out(exporter: InMemorySpanExporter, fields: str) -> None:
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tracing=ON) as gate:
        body = f'{{"model": "test-model", "messages": [], "user": "u", {fields}}}'
        answer = await gate.http.post(CHAT, content=body.encode())
        assert answer.status_code == 200
        [request], _ = finished(gate, exporter)
        asked = {"gen_ai.request.model", "gen_ai.request.seed"}
        assert {name for name in request.attributes or {} if name.startswith("gen_ai.request.")} == asked
        encode_spans([request])
        [(_, counted)] = gate.gateway.telemetry.requests.values.items()
        assert counted == 1


async def test_what_is_said_is_told_as_it_can_be_carried(exporter: InMemorySpanExporter) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        reply.json(completion() | {"usage": {"prompt_tokens": 2**63, "completion_tokens": 5}})

    async with FakeWorker(script) as worker, gateway(pool("policy", worker.url), tracing=ON) as gate:
        assert (await gate.http.post(CHAT, json=chat())).status_code == 200
        [request], _ = finished(gate, exporter)
        told = request.attributes or {}
        assert (told.get("gen_ai.usage.input_tokens"), told["gen_ai.usage.output_tokens"]) == (None, 5)
        encode_spans([request])
    assert spans._carried(["a\ud800", 2**63, "ü", -(2**63) + 1]) == ["a?", None, "ü", -(2**63) + 1]


async def test_a_span_that_cannot_be_told_harms_no_request(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(work: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(spans, "_told", fails)
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tracing=ON) as gate:
        assert (await gate.http.post(CHAT, json=chat())).status_code == 200
        [request], [sending] = finished(gate, exporter)
        assert sending.parent is not None
        assert request.context.span_id == sending.parent.span_id
        [(_, counted)] = gate.gateway.telemetry.requests.values.items()
        assert counted == 1


def test_an_answer_without_usage_tells_none() -> None:
    assert spans._count({}, ("prompt_tokens",)) is None
    assert spans._count(completion()["usage"], ("prompt_tokens", "input_tokens")) == 3
