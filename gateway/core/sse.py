"""What an answer says of itself, read beside the bytes on their way to the client: how it ended, and what
it held.

Streams are watched chunk by chunk without changing a byte. `[DONE]` proves nothing (vLLM sends it after an
error), so an answer has ended when every choice has its finish reason, or its API's own last event has
come.

The content digest is BLAKE2b with 16 bytes over what was said: for each choice in index order, for each of
its fields in order of name, the name, and the digest of the field's whole text; then the finish reason.
Ids, times, usage and logprobs stay out, and so does the way the text was cut into chunks: a stream and a
whole answer with equal chat or completion content have equal digests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from gateway.core.types import Api, Kind

_UNLIKE = (AttributeError, KeyError, TypeError, ValueError)
"""What reading JSON raises that is not shaped as any of the APIs."""

EVENT_LIMIT = 1 << 20
"""Bytes of one event that are kept until it is whole; of a longer one nothing is read."""

_WEIGHTS = re.compile(rb'(?<!\\)"weight_version"\s*:\s*"([^"\\]+)"')
"""A field of that name; within a text its quotes are escaped."""

_SAID_NOT = frozenset({"role", "tool_calls", "function_call"})
_INVENTED = frozenset({"id", "call_id", "created_at"})
_INCIDENTAL = frozenset({"id", "created", "model", "object", "usage", "meta_info", "metadata", "system_fingerprint"})


class Sample(NamedTuple):
    """One choice of an answer."""

    content: str
    """32 hex digits, alike for what is alike."""
    tokens: float
    """How many were drawn: told, or judged by its share of the answer."""


class Observed(NamedTuple):
    """What an answer was."""

    finish_reasons: tuple[str, ...] = ()
    """In choice order; of an Anthropic answer its stop reason, of a Responses answer its status or why it
    is short."""
    usage: Mapping[str, Any] | None = None
    """The engine's own usage object; /generate's token counts under OpenAI's names."""
    error: str | None = None
    """The message of an error event, or of an answer that failed."""
    aborted: bool = False
    """A choice was aborted: both engines may say so with status 200 and partial text."""
    done: bool = False
    """The API's last event has come: `[DONE]`, message_stop, response.completed … It may follow an error."""
    ended: bool = False
    """Every choice has its finish reason and there was no error."""
    content: str | None = None
    """32 hex digits; None where an event was too long or no JSON, and on routes that neither sample nor
    score."""
    weight_version: str | None = None
    """Where the engine tells it; the versions in order, parted by commas, where the weights changed on the
    way."""
    id: str | None = None
    """The answer's own id, as the client sees it."""
    samples: tuple[Sample, ...] = ()
    """Its choices, where there are several or where it has no usage."""


class Splitter:
    """Cuts a byte stream into events at blank lines (LF or CRLF), across any chunk borders.

    Bytes after the last blank line are kept for the next chunk, up to `limit`; an event that grows beyond
    it is passed over and counted in `skipped`."""

    __slots__ = ("_limit", "_partial", "_searched", "_skipping", "empty", "skipped")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._searched = 0
        self._skipping = False
        self.empty = True
        """Nothing is kept: the next chunk begins an event."""
        self.skipped = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that this chunk completes, without the blank line that ends each."""
        partial = self._partial
        partial += chunk
        events = []
        start = 0
        at = max(self._searched - 3, 0)
        while (found := _blank(partial, at)) is not None:
            stop, at = found
            if not self._skipping:
                events.append(bytes(partial[start:stop]))
            self._skipping = False
            start = at
        del partial[:start]
        if len(partial) > self._limit:
            self.skipped += not self._skipping
            self._skipping = True
            del partial[:-3]
        self._searched = len(partial)
        self.empty = not partial
        return events


def _blank(data: bytearray, at: int) -> tuple[int, int] | None:
    """Where the next event ends and the one after it begins."""
    plain = data.find(b"\n\n", at)
    carried = data.find(b"\r\n\r\n", at, plain + 3 if plain >= 0 else len(data))
    if carried >= 0:
        return carried, carried + 4
    return (plain, plain + 2) if plain >= 0 else None


def payload(event: bytes) -> bytes:
    """The data of an event, its lines joined; empty for comments such as keep-alives."""
    start = event.find(b"\n") + 1 if event.startswith(b"event: ") else 0
    if event.startswith(b"data: ", start) and event.find(b"\n", start) < 0:
        return event[start + 6 :]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


class Observer:
    """Watches one streamed answer. `choices`: how many the request asked for in this one stream."""

    __slots__ = (
        "_api",
        "_blind",
        "_choices",
        "_content",
        "_error",
        "_id",
        "_kind",
        "_said",
        "_splitter",
        "_usage",
        "_weights",
        "done",
        "sequence",
    )

    def __init__(self, api: Api, kind: Kind, choices: int = 1) -> None:
        self.done = False
        """The API's last event has come."""
        self.sequence = 0
        """Number that the next event of a Responses stream would have."""
        self._api = api
        self._kind = kind
        self._choices = choices
        self._splitter = Splitter(EVENT_LIMIT)
        self._said: dict[int, _Said] = {}
        self._usage: Mapping[str, Any] | None = None
        self._error: str | None = None
        self._blind = False
        self._content: str | None = None
        self._weights: str | None = None
        self._id: str | None = None

    def feed(self, chunk: bytes) -> None:
        """Read what came. Never raises: what cannot be read makes the content digest None."""
        # Most chunks are one whole event, and most of those one line.
        end = len(chunk) - 2
        if end > 0 and self._splitter.empty:
            if chunk.find(b"\n") == end and chunk[end + 1] == 0x0A and chunk.startswith(b"data: "):
                self._data(chunk[6:end])
                return
            if chunk.find(b"\n\n") == end:
                self._data(payload(chunk[:end]))
                return
        for event in self._splitter.feed(chunk):
            self._data(payload(event))

    def result(self) -> Observed:
        """What was seen until now."""
        said = [self._said[index] for index in sorted(self._said)]
        reasons = tuple(choice.finish for choice in said if choice.finish is not None)
        ended = len(reasons) == len(said) >= self._choices or self._kind != "sample"
        if self._api == "anthropic":
            ended = ended and self.done
        return Observed(
            finish_reasons=reasons,
            usage=self._usage or self._counted(),
            error=self._error,
            aborted="abort" in reasons or "cancelled" in reasons,
            done=self.done,
            ended=ended and self._error is None,
            content=self._digest(),
            weight_version=self._weights,
            id=self._id,
            samples=self._samples(said),
        )

    def whole(self, body: bytes, value: Any) -> Observed:
        """Read an answer that came in one piece. `value`: what its JSON holds; None where it is no JSON."""
        self.done = True
        if value is None:
            self._blind = self._kind == "sample"
            self._content = None if self._blind else blake2b(body, digest_size=16).hexdigest()
            return self.result()
        try:
            if self._kind == "score":
                self._score(value)
            else:
                for index, answer in enumerate(value if isinstance(value, list) else [value]):
                    self._answer(answer, index)
        except _UNLIKE:
            self._blind = True
        return self.result()

    def _data(self, data: bytes) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            if data == b"[DONE]":
                self.done = True
            elif data:
                self._blind = True
            return
        try:
            if self._id is None:
                self._id = _id_of(event)
            choices = event.get("choices")
            if choices is None:
                self._named(event)
                return
            for choice in choices:
                self._choice(choice)
            usage = event.get("usage")
            if usage is not None:
                self._use(usage)
        except _UNLIKE:
            self._blind = True

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index", 0)
        said = self._said.get(index) or self._new(index)
        delta = choice.get("delta")
        if delta is not None:
            text = delta.get("content")
            if text:
                said.add("content", text)
            if len(delta) > 1 or not text:
                for name, value in delta.items():
                    if value and name != "content":
                        said.message(delta)
                        break
        elif "text" in choice:
            said.add("content", choice["text"])
        elif choice.get("token_ids"):
            said.add("tokens", "".join([f"{token}," for token in choice["token_ids"]]))
        finish = choice.get("finish_reason")
        if finish is not None:
            said.stop(finish)
            if "weight_versions" in choice:
                self._weigh(choice)

    def _answer(self, answer: dict[str, Any], index: int) -> None:
        if self._id is None:
            self._id = _id_of(answer)
        choices = answer.get("choices")
        if choices is None:
            self._named(answer, index)
            return
        for choice in choices:
            message = choice.get("message")
            if message is not None:
                choice["delta"] = _numbered(message)
            self._choice(choice)
        self._use(answer.get("usage"))
        self._weigh(answer.get("metadata") or {})

    def _named(self, event: dict[str, Any], index: int = 0) -> None:
        """Anything but chat and completions."""
        kind = event.get("type")
        if "meta_info" in event:
            self._generated(event, event.get("index", index))
        elif event.get("error") is not None and kind in (None, "error"):
            self._error = _words(event["error"])
            self.done = self.done or self._api == "anthropic"
        elif kind == "error":
            self._error = _words(event)
            self.done = True
        elif self._api == "anthropic":
            self._anthropic(event, kind)
        elif self._api == "responses":
            self._responses(event, kind)

    def _generated(self, event: dict[str, Any], index: int) -> None:
        said = self._said.get(index) or self._new(index)
        meta = event["meta_info"]
        tokens = event.get("output_ids")
        text = event.get("text")
        completed = meta.get("completion_tokens", 0)
        if text is None:
            text = "".join([f"{token}," for token in tokens or ()])
        # A server may stream what is new instead of all so far; then it also sends fewer ids than it counts.
        said.so_far(text, whole=tokens is None or len(tokens) >= completed)
        said.counts = (meta.get("prompt_tokens", 0), completed)
        reason = meta.get("finish_reason")
        if reason is not None:
            said.stop(reason["type"] if isinstance(reason, dict) else reason)
            self._weigh(meta)

    def _anthropic(self, event: dict[str, Any], kind: str | None) -> None:
        said = self._said.get(0) or self._new(0)
        if kind == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type" and isinstance(value, str):
                    said.add(f"{event['index']} {name}", value)
        elif kind == "content_block_start":
            said.block(event["index"], event["content_block"], opening=True)
        elif kind == "message_delta":
            said.stop(event["delta"].get("stop_reason"))
            self._use({**(self._usage or {}), **(event.get("usage") or {})})
        elif kind == "message_start":
            self._use(event["message"].get("usage"))
        elif kind == "message_stop":
            self.done = True
        elif kind == "message":
            for position, block in enumerate(event.get("content") or ()):
                said.block(position, block)
            said.stop(event.get("stop_reason"))
            self._use(event.get("usage"))

    def _responses(self, event: dict[str, Any], kind: str | None) -> None:
        self.sequence = event.get("sequence_number", self.sequence) + 1
        response = event.get("response", event)
        if kind not in (None, "response.completed", "response.incomplete", "response.failed"):
            return
        self.done = True
        said = self._said.get(0) or self._new(0)
        status = response.get("status")
        if status == "incomplete":
            status = (response.get("incomplete_details") or {}).get("reason", status)
        said.stop(status)
        self._use(response.get("usage"))
        if status == "failed":
            self._error = _words(response.get("error"))
        self._content = _hashed([_without(item, _INVENTED) for item in response.get("output") or ()])

    def _score(self, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        self._content = _hashed([_without(item, _INCIDENTAL) for item in items])
        if isinstance(value, dict):
            self._use(value.get("usage"))

    def _new(self, index: int) -> _Said:
        if type(index) is not int:
            raise TypeError("a choice without a number")
        said = self._said[index] = _Said()
        return said

    def _use(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self._usage = usage

    def _weigh(self, holder: Mapping[str, Any]) -> None:
        spans = holder.get("weight_versions")
        if spans:
            told = [str(span["version"]) for span in spans]
        elif holder.get("weight_version") is not None:
            told = [str(holder["weight_version"])]
        else:
            return
        self._weights = joined(told if self._weights is None else [self._weights, *told])

    def _counted(self) -> Mapping[str, Any] | None:
        counts = [said.counts for said in self._said.values() if said.counts is not None]
        if not counts:
            return None
        return {"prompt_tokens": sum(c[0] for c in counts), "completion_tokens": sum(c[1] for c in counts)}

    def _samples(self, said: list[_Said]) -> tuple[Sample, ...]:
        if self._kind != "sample" or self._blind or self._splitter.skipped or not said:
            return ()
        usage = self._usage or self._counted()
        if usage is not None and len(said) == 1:
            return ()
        streamed = any(choice.pieces > 1 for choice in said)
        shares = [choice.pieces if streamed else choice.opening for choice in said]
        total = usage.get("completion_tokens", 0) if usage is not None else sum(choice.pieces for choice in said)
        drawn = [choice.counts[1] if choice.counts is not None else 0 for choice in said]
        return tuple(
            Sample(choice.digest(), told or total * share / (sum(shares) or 1))
            for choice, told, share in zip(said, drawn, shares, strict=True)
        )

    def _digest(self) -> str | None:
        if self._blind or self._splitter.skipped:
            return None
        if self._content is not None or not self._said:
            return self._content
        total = blake2b(digest_size=16)
        for index in sorted(self._said):
            total.update(b"%d\n" % index)
            self._said[index].digest_into(total)
        return total.hexdigest()


def observe(body: bytes, api: Api, kind: Kind) -> Observed:
    """What a whole answer with status 200 was."""
    if kind != "sample" and kind != "score":
        return _UNREAD
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    seen = _plain(value) if kind == "sample" else None
    return Observer(api, kind).whole(body, value) if seen is None else seen


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


class _Said:
    """What one choice has said. Texts are hashed as they come, so a long answer costs no memory."""

    __slots__ = ("_fields", "_latest", "counts", "finish", "opening", "pieces")

    def __init__(self) -> None:
        self.finish: str | None = None
        self.counts: tuple[int, int] | None = None
        """Prompt and completion tokens, where they come with each choice."""
        self.pieces = 0
        """In how many pieces its fields came."""
        self.opening = 0
        """Characters of the first piece of each."""
        self._fields: dict[str, blake2b] = {}
        self._latest: str | None = None

    def add(self, field: str, text: str) -> None:
        """The next piece of a field."""
        self.pieces += 1
        known = self._fields.get(field)
        if known is not None:
            known.update(text.encode())
        elif text:
            self._fields[field] = blake2b(text.encode(), digest_size=16)
            self.opening += len(text)

    def stop(self, reason: Any) -> None:
        """It has finished, if there is a reason."""
        if reason is not None:
            self.finish = str(reason)

    def so_far(self, text: str, *, whole: bool) -> None:
        """The content so far, or its next piece."""
        if whole:
            self._latest = text
            return
        if self._latest is not None:
            self.add("content", self._latest)
            self._latest = None
        self.add("content", text)

    def message(self, delta: Mapping[str, Any]) -> None:
        """The fields of a chat message, or of a piece of one, but for its content if that is a string."""
        for name, value in delta.items():
            if not value or name in _SAID_NOT:
                continue
            if isinstance(value, str):
                if name != "content":
                    self.add(name, value)
            elif isinstance(value, list | dict):
                self.add(name, _dumped(value))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            self._called(f"tool {call.get('index', position)}", call.get("function") or {})
        self._called("function", delta.get("function_call") or {})

    def block(self, position: int, block: Mapping[str, Any], *, opening: bool = False) -> None:
        """A content block of an Anthropic answer; in a stream it opens with empty texts."""
        for name, value in block.items():
            if name == "id" or not value:
                continue
            if isinstance(value, str):
                self.add(f"{position} {name}", value)
            elif not opening:
                self.add(f"{position} {'partial_json' if name == 'input' else name}", _dumped(value))

    def digest_into(self, total: blake2b) -> None:
        """Add all that was said. The content so far stays apart from the fields, so this may be asked
        twice."""
        digests = {name: known.digest() for name, known in self._fields.items()}
        if self._latest:
            digests["content"] = blake2b(self._latest.encode(), digest_size=16).digest()
        for name in sorted(digests):
            total.update(b"%d:%b" % (len(name.encode()), name.encode()) + digests[name])
        total.update(b"=" + (self.finish or "").encode() + b"\n")

    def digest(self) -> str:
        """All that was said, as 32 hex digits."""
        total = blake2b(digest_size=16)
        self.digest_into(total)
        return total.hexdigest()

    def _called(self, place: str, function: Mapping[str, Any]) -> None:
        for part in ("name", "arguments"):
            text = function.get(part)
            if text:
                self.add(f"{place} {part}", text if isinstance(text, str) else _dumped(text))


def _numbered(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole message as if it had come as one delta: its tool calls are numbered by place."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "index": place} for place, call in enumerate(calls)]}


def joined(versions: Iterable[str]) -> str:
    """Versions of weights as one text: each once, in order, parted by commas."""
    return ",".join(dict.fromkeys(",".join(versions).split(",")))


def weights(bodies: Iterable[bytes]) -> str | None:
    """Which weights whole answers tell of that were drawn apart; None: of none."""
    told = [version.decode() for body in bodies for version in _WEIGHTS.findall(body)]
    return joined(told) if told else None


def _id_of(event: dict[str, Any]) -> str | None:
    """The id of an answer, or of that which an event is of."""
    holder = event.get("message") or event.get("response") or event.get("meta_info") or event
    found = holder.get("id") if isinstance(holder, dict) else None
    return found if isinstance(found, str) else None


def _words(error: Any) -> str:
    words = error.get("message") if isinstance(error, dict) else error
    return words if isinstance(words, str) else _dumped(error)


def _without(value: Any, names: Iterable[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if key not in names}


def _dumped(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _hashed(value: Any) -> str:
    return blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
