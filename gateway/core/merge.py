"""One answer made of the answers of a fan-out, in the shape that the engine itself would have given.

What a child said is moved, not written anew: choices, scores and vectors keep their bytes, and floats their
last digit. Only `index`, `id`, `usage` and `[DONE]` are the gateway's. The rules have the names of
`gateway.core.fanout`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from gateway.core.document import Document, Edit, Malformed, Set
from gateway.core.errors import UpstreamFault
from gateway.core.sse import Splitter, payload
from gateway.core.types import Call

_EVENT_LIMIT = 1 << 26
"""Bytes that one event of a child may have; a longer one fails the request."""

_SAMPLE_IN_ID = re.compile(rb'\.\d+(-\d+)?!"$')


def merge(rule: str, document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
    """The whole answer to `document`, of the bodies that came for its calls, in the same order.

    Raises `UpstreamFault` where a body is not what the engine answers on such a route.
    """
    join = _RULES[rule]
    try:
        return join(document, calls, bodies)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UpstreamFault(
            "A replica's answer to one of several samples has not the shape that its engine gives on this "
            "route, so the answers cannot be joined. Send single prompts with n = 1.",
            code="unmergeable_answer",
        ) from None


class StreamMerger:
    """Joins the streams of a fan-out, event by event as they come; children may come in any order.

    Choices get the numbers of their samples and all events one id. Usage is held back, summed and sent
    once, if the children send any; `[DONE]` comes once, at the end, if every child sent it and none sent an
    error.
    """

    def __init__(self, rule: str, document: Document, calls: Sequence[Call]) -> None:
        self._native = rule == "generate"
        self._calls = calls
        self._splitters = [Splitter(_EVENT_LIMIT) for _ in calls]
        self._id: bytes | None = None
        self._usages: dict[int, Document] = {}
        self._done: set[int] = set()
        self._failed = False

    def feed(self, child: int, chunk: bytes) -> bytes:
        """The bytes for the client that come of a chunk from one child, by its place among the calls.

        Raises `UpstreamFault` where an event is too long to be joined.
        """
        splitter = self._splitters[child]
        found = b"".join([self._event(child, event) for event in splitter.feed(chunk)])
        if splitter.skipped:
            raise UpstreamFault(
                f"A replica sent an event of more than {_EVENT_LIMIT} bytes, so samples cannot be joined. "
                "Send single prompts with n = 1.",
                code="unmergeable_answer",
            )
        return found

    def done(self, child: int) -> bool:
        """Whether a child has sent its last event."""
        return child in self._done

    def end(self, child: int) -> bytes:
        """A child's stream has ended. What it left unfinished is no event."""
        self._splitters[child] = Splitter(_EVENT_LIMIT)
        return b""

    def finish(self) -> bytes:
        """What ends the answer when all children have ended."""
        if self._failed:
            return b""
        usage = self._usage()
        return usage + b"data: [DONE]\n\n" if len(self._done) == len(self._calls) else usage

    def _event(self, child: int, event: bytes) -> bytes:
        data = payload(event)
        if data == b"[DONE]":
            self._done.add(child)
            return b""
        try:
            joined = self._joined(child, Document(data))
        except Malformed:
            joined = None
        return event + b"\n\n" if joined is None else joined

    def _joined(self, child: int, document: Document) -> bytes | None:
        """An event as the client gets it; None if it passes as it is. Raises `Malformed` for a choice that
        is none."""
        value, sample = document.value, self._calls[child].sample
        if value.get("error") is not None:
            self._failed = True
        elif self._native and "meta_info" in value:
            return _data(document, [Set(("index",), b"%d" % sample)])
        elif value.get("choices") == [] and isinstance(value.get("usage"), dict):
            self._usages[child] = document
            return b""
        elif (choices := document.elements(("choices",))) is not None:
            edits: list[Edit] = [Set(("choices",), _array(_numbered(choices, sample)))]
            if (given := document.literal(("id",))) is not None:
                edits.append(Set(("id",), self._one_id(given)))
            return _data(document, edits)
        return None

    def _one_id(self, given: bytes) -> bytes:
        """The first child's id. Ids made by the gateway tell which child's they are, so any of them tells
        the first's."""
        if self._id is None:
            self._id = _SAMPLE_IN_ID.sub(rb'.0\1!"', given)
        return self._id

    def _usage(self) -> bytes:
        if not self._usages:
            return b""
        last = self._usages[min(self._usages)]
        counts = [(self._calls[child], self._usages[child].value["usage"]) for child in sorted(self._usages)]
        edits: list[Edit] = [Set(("usage",), _summed(counts))]
        if self._id is not None and "id" in last.value:
            edits.append(Set(("id",), self._id))
        return _data(last, edits)


def _data(document: Document, edits: Sequence[Edit]) -> bytes:
    return b"data: " + document.edited(edits) + b"\n\n"


def _array(elements: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(elements) + b"]"


def _numbered(elements: Iterable[bytes], first: int) -> list[bytes]:
    """The elements with their indices, counted from `first` on."""
    return [Document(element).edited([Set(("index",), b"%d" % index)]) for index, element in enumerate(elements, first)]


def _summed(usages: Sequence[tuple[Call, dict[str, Any]]]) -> bytes:
    """The usage of all: what is counted of a prompt once for each prompt, everything else of each child."""
    seen: set[int] = set()
    total: dict[str, Any] = {}
    for call, usage in usages:
        _add(
            total,
            {
                name: None if call.prompt in seen and name.startswith("prompt") else count
                for name, count in usage.items()
            },
        )
        seen.add(call.prompt)
    if "total_tokens" in total:
        total["total_tokens"] = (total.get("prompt_tokens") or 0) + (total.get("completion_tokens") or 0)
    return orjson.dumps(total)


def _add(total: dict[str, Any], usage: dict[str, Any]) -> None:
    for name, count in usage.items():
        before = total.setdefault(name, None)
        if isinstance(count, dict):
            inner = total[name] = before if isinstance(before, dict) else {}
            _add(inner, count)
        elif type(count) is int:
            total[name] = (before or 0) + count
        elif before is None:
            total[name] = count


def _usage_edits(documents: Sequence[Document], calls: Sequence[Call]) -> list[Edit]:
    usages = [
        (call, document.value["usage"])
        for call, document in zip(calls, documents, strict=True)
        if document.value.get("usage") is not None
    ]
    return [Set(("usage",), _summed(usages))] if usages else []


def _listed(field: str) -> Callable[[Document, Sequence[Call], Sequence[bytes]], bytes]:
    """A rule for answers that are an object with numbered elements in one field."""

    def joined(document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
        answers = [Document(body) for body in bodies]
        elements = [element for answer in answers for element in _elements(answer, field)]
        edits = [Set((field,), _array(_numbered(elements, 0))), *_usage_edits(answers, calls)]
        return answers[0].edited(edits)

    return joined


def _scores(document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
    """SGLang's /v1/score: one row an item in up to three parallel lists."""
    answers = [Document(body) for body in bodies]
    edits = _usage_edits(answers, calls)
    for field in ("scores", "pooled_hidden_states", "token_logprobs"):
        if isinstance(answers[0].value.get(field), list):
            edits.append(Set((field,), _array(element for answer in answers for element in _elements(answer, field))))
    return answers[0].edited(edits)


def _rerank(document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
    """vLLM's rerank: results by falling relevance, `top_n` of them."""
    answers = [Document(body) for body in bodies]
    elements = [element for answer in answers for element in _elements(answer, "results")]
    ranked = _ranked(_numbered(elements, 0), "relevance_score", document.value.get("top_n"))
    return answers[0].edited([Set(("results",), _array(ranked)), *_usage_edits(answers, calls)])


def _ranking(document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
    """SGLang's rerank: the same without an object around it."""
    elements = [element for body in bodies for element in _top(body)]
    return _array(_ranked(_numbered(elements, 0), "score", document.value.get("top_n")))


def _ranked(elements: list[bytes], field: str, top: Any) -> list[bytes]:
    # Equal scores stay in the order of the documents, as they do in both engines.
    ranked = sorted(elements, key=lambda element: -Document(element).value[field])
    return ranked[:top] if top else ranked


def _native(document: Document, calls: Sequence[Call], bodies: Sequence[bytes]) -> bytes:
    """SGLang's own routes: a list of what each child gave."""
    return _array(element for body in bodies for element in _top(body))


def _top(body: bytes) -> list[bytes]:
    """The elements of a body that is a list, or the body itself."""
    listed = body if body.lstrip().startswith(b"[") else _array([body])
    return _elements(Document(b'{"a":' + listed + b"}"), "a")


def _elements(answer: Document, field: str) -> list[bytes]:
    elements = answer.elements((field,))
    if elements is None:
        raise KeyError(field)
    return elements


_RULES: dict[str, Callable[[Document, Sequence[Call], Sequence[bytes]], bytes]] = {
    "choices": _listed("choices"),
    "conversations": _listed("choices"),
    "data": _listed("data"),
    "embedding": _native,
    "generate": _native,
    "pairs": _listed("data"),
    "ranking": _ranking,
    "rerank": _rerank,
    "scores": _scores,
}
