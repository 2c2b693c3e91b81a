"""Reads an answer beside the bytes on their way to the client, as a stream or whole, without changing a byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from math import isfinite
from typing import Any

import orjson

from gateway.core.apis import anthropic, chat, generate, responses, scores
from gateway.core.seen import Observed, Seen, words
from gateway.core.sse import EVENT_LIMIT, Splitter, payload
from gateway.core.types import Api, Kind

_UNLIKE = (AttributeError, KeyError, TypeError, ValueError)
"""What reading JSON raises that is not shaped as any of the APIs."""


TOGETHER = 16
"""Events of a chat that are read at once: each alone would find the processor's caches full of something else."""

SMALL = 1024
"""Bytes of a chunk that may wait to be read."""

_LINE_END, _BRACE = b"\n{"


class Observer(Seen):
    """Watches one streamed answer."""

    __slots__ = ("_patient", "_splitter", "_unread")

    def __init__(self, api: Api, kind: Kind, choices: int = 1) -> None:
        super().__init__(api, kind, choices)
        self._splitter = Splitter(EVENT_LIMIT)
        self._unread: list[bytes] = []
        """Chunks that are an event each, neither the last nor an error's."""
        self._patient = api == "openai" or api == "native"
        """No event but `[DONE]` and errors can be the last."""

    def feed(self, chunk: bytes) -> None:
        """Read what came. Never raises: what cannot be read makes the content digest None."""
        splitter = self._splitter
        # Most chunks are one whole event, and most of those one line.
        end = len(chunk) - 2
        alone = splitter.empty and end > 6 and chunk.find(b"\r") < 0
        if alone and chunk.find(b"\n") == end and chunk[end + 1] == _LINE_END and chunk.startswith(b"data: "):
            if self._patient and end < SMALL and chunk[6] == _BRACE and chunk.find(b'"error"') < 0:
                self._unread.append(chunk)
                if len(self._unread) == TOGETHER:
                    self._catch_up()
                return
            self._catch_up()
            self._data(chunk[6:end])
            return
        self._catch_up()
        if alone and chunk.find(b"\n\n") == end:
            self._data(payload(chunk[:end]))
            return
        for event in splitter.feed(chunk):
            self._data(payload(event))
        if splitter.skipped:
            self.blind = True

    def result(self, *, over: bool = False) -> Observed:
        self._catch_up()
        return super().result(over=over and not self._splitter.skipping)

    def _catch_up(self) -> None:
        unread = self._unread
        if unread:
            self._unread = []
            for chunk in unread:
                self._data(chunk[6:-2])

    def whole(self, value: Any) -> Observed:
        """Read an answer that came in one piece. `value`: what its JSON holds."""
        self.done = True
        try:
            if self.kind == "score":
                scores.answer(self, value)
            else:
                for index, answer in enumerate(value if isinstance(value, list) else [value]):
                    self._answer(answer, index)
        except _UNLIKE:
            self.blind = True
        return self.result(over=True)

    def _data(self, data: bytes) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            if data == b"[DONE]":
                self.done = True
                return
            if not data:
                return
            self.blind = True
            event = _repaired(data)  # for what it says of its end
        try:
            if self.id is None:
                self.id = _id_of(event)
            choices = event.get("choices")
            if choices is None:
                self._named(event)
            else:
                chat.event(self, choices, event)
        except _UNLIKE:
            self.blind = True

    def _answer(self, answer: dict[str, Any], index: int) -> None:
        if self.id is None:
            self.id = _id_of(answer)
        choices = answer.get("choices")
        if choices is None:
            self._named(answer, index)
        else:
            chat.answer(self, choices, answer)

    def _named(self, event: dict[str, Any], index: int = 0) -> None:
        """Anything but chat and completions."""
        kind = event.get("type")
        if "meta_info" in event:
            generate.event(self, event, index)
        elif event.get("error") is not None and kind in (None, "error"):
            self.error = words(event["error"])
            self.done = self.done or self.api == "anthropic"
        elif kind == "error":
            self.error = words(event)
            self.done = True
        elif self.api == "anthropic":
            anthropic.event(self, event)
        elif self.api == "responses":
            responses.event(self, event)


class NoAnswer(ValueError):
    """What came whole is no answer of its API; the text says what it is."""


def observe(body: bytes, api: Api, kind: Kind) -> Observed:
    """What a whole answer with status 200 was. Raises `NoAnswer` where it draws or scores and is none."""
    if kind != "sample" and kind != "score":
        return _UNREAD
    value, repaired = _read(body)
    seen = _plain(value) if kind == "sample" and not repaired else None
    if seen is not None:
        return seen
    _check(value, api, kind)
    if repaired and kind == "score":
        return scored(body)
    observer = Observer(api, kind)
    observer.blind = repaired
    return observer.whole(value)


def check(body: bytes, api: Api, kind: Kind) -> None:
    """Raise `NoAnswer` where `observe` does, of an answer that draws or scores."""
    _check(_read(body)[0], api, kind)


def scored(body: bytes) -> Observed:
    """What scores were that came as bytes."""
    return Observed(done=True, ended=True, content=blake2b(body, digest_size=16).hexdigest())


def _read(body: bytes) -> tuple[Any, bool]:
    """What the JSON of a whole answer holds, and whether it had to be repaired. Raises `NoAnswer` where it is none."""
    try:
        return orjson.loads(body), False
    except orjson.JSONDecodeError:
        pass
    try:
        body.decode()
    except UnicodeDecodeError:
        raise NoAnswer("what is no JSON") from None
    value = _repaired(body)
    if value is None:
        raise NoAnswer("what is no JSON")
    return value, True


_HELD: Mapping[Api, frozenset[str]] = {
    "openai": frozenset({"choices", "error"}),
    "anthropic": frozenset({"content", "error"}),
    "responses": frozenset({"output", "error"}),
    "native": frozenset({"choices", "meta_info", "error"}),
}
"""What a sampled answer has at least one of, by API: an error is an answer too, which `Observed.error` tells."""

_HELD_BY_SCORES = frozenset({"data", "embedding", "results", "score", "scores", "error"})


def _check(value: Any, api: Api, kind: Kind) -> None:
    """Raise `NoAnswer` unless it is an object of the API, or a list of them where it may be."""
    held = _HELD[api] if kind == "sample" else _HELD_BY_SCORES
    listed = isinstance(value, list) and (kind == "score" or api == "native")
    answers = value if listed else [value]
    if not answers or not all(isinstance(each, dict) and not held.isdisjoint(_told(each)) for each in answers):
        raise NoAnswer("JSON of another shape")


def _told(answer: Mapping[str, Any]) -> Iterator[str]:
    """The members that say something. No choices are nothing: a stream without one has not ended either."""
    return (name for name, value in answer.items() if value is not None and (name != "choices" or value != []))


def _repaired(data: bytes) -> Any:
    """What Python's `json` reads and orjson does not, as nearly as JSON can say it; None where it is no JSON at all.

    Numbers that are none are null, and what is no text is replaced.
    """
    try:
        value = json.loads(data.decode("utf-8-sig", "replace"), parse_constant=_nothing, parse_float=_finite)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except ValueError:
        return None
    except RecursionError:
        return {}


def _nothing(name: str) -> None:
    return None


def _finite(literal: str) -> float | None:
    number = float(literal)
    return number if isfinite(number) else None


_UNREAD = Observed(done=True, ended=True)


def _plain(value: Any) -> Observed | None:
    """What an answer with one choice was that holds text and nothing else, as most do; None: it is none such."""
    if type(value) is not dict or value.get("metadata"):
        return None
    choices, usage = value.get("choices"), value.get("usage")
    if type(choices) is not list or len(choices) != 1 or type(usage) is not dict or not usage:
        return None
    choice = choices[0]
    if type(choice) is not dict or choice.get("index") != 0 or "weight_versions" in choice:
        return None
    message = choice.get("message")
    if message is None:
        text = choice.get("text")
    elif type(message) is dict:
        text = message.get("content")
        for name, said in message.items():
            if said and name != "content" and name != "role":
                return None
    else:
        return None
    finish = choice.get("finish_reason")
    if not text or type(text) is not str or type(finish) is not str:
        return None
    digest = blake2b(text.encode(), digest_size=16).digest()
    total = blake2b(b"0\n7:content%b=%b\n" % (digest, finish.encode()), digest_size=16).hexdigest()
    aborted = finish == "abort" or finish == "cancelled"
    return Observed((finish,), usage, None, aborted, True, True, total, None, _id_of(value))


def _id_of(event: dict[str, Any]) -> str | None:
    """The id of an answer, or of that which an event is of."""
    holder = event.get("message") or event.get("response") or event.get("meta_info") or event
    found = holder.get("id") if isinstance(holder, dict) else None
    return found if isinstance(found, str) else None
