"""What is seen of an answer while it passes: how it ended, and what it held.

An answer has ended when every choice has its finish reason, or its API's own last event has come: `[DONE]` proves
nothing (vLLM sends it after an error).

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

_WEIGHTS = re.compile(rb'(?<!\\)"weight_version"\s*:\s*"([^"\\]+)"')
"""A field of that name; within a text its quotes are escaped."""

UNNAMED = "default"
"""What SGLang tells as long as nobody has named its weights: nothing."""

_SAID_NOT = frozenset({"role", "tool_calls", "function_call"})


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
    """Every choice has its finish reason, or it came to its end and not all of it could be read; and there was no
    error."""
    content: str | None = None
    """32 hex digits; None where something could not be read, and on routes that neither sample nor score."""
    weight_version: str | None = None
    """Where the engine tells it; the versions in order, parted by commas, where the weights changed on the
    way."""
    id: str | None = None
    """The answer's own id, as the client sees it."""
    samples: tuple[Sample, ...] = ()
    """Its choices, where there are several or where it has no usage."""


class Said:
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
        """The content so far, or its next piece. Raises `TypeError` where it is no text."""
        if type(text) is not str:
            raise TypeError("a content that is no text")
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
                self.add(name, dumped(value))
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
                self.add(f"{position} {'partial_json' if name == 'input' else name}", dumped(value))

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
                self.add(f"{place} {part}", text if isinstance(text, str) else dumped(text))


class Seen:
    """What was seen of one answer until now. The readers in `gateway.core.apis` add to it.

    `choices`: how many the request asked for in this one answer."""

    __slots__ = (
        "_choices", "_weights", "api", "blind", "content", "done", "error", "id", "kind", "said", "sequence", "usage",
    )  # fmt: skip

    def __init__(self, api: Api, kind: Kind, choices: int = 1) -> None:
        self.api = api
        self.kind = kind
        self.done = False
        """The API's last event has come."""
        self.sequence = 0
        """Number that the next event of a Responses stream would have."""
        self.error: str | None = None
        """What it says went wrong."""
        self.content: str | None = None
        """The content digest of an answer that has no choices."""
        self.usage: Mapping[str, Any] | None = None
        self.id: str | None = None
        self.blind = False
        """Something of it could not be read."""
        self._choices = choices
        self.said: dict[int, Said] = {}
        """By the number of the choice."""
        self._weights: str | None = None

    def choice(self, index: int) -> Said:
        """What one choice has said. Raises `TypeError` where it has no number."""
        said = self.said.get(index)
        if said is None:
            if type(index) is not int:
                raise TypeError("a choice without a number")
            said = self.said[index] = Said()
        return said

    def use(self, usage: Any) -> None:
        """The engine tells of its usage."""
        if isinstance(usage, dict):
            self.usage = usage

    def weigh(self, holder: Mapping[str, Any]) -> None:
        """The engine may tell of its weights here."""
        spans = holder.get("weight_versions")
        if spans:
            told = [str(span["version"]) for span in spans]
        elif holder.get("weight_version") is not None:
            told = [str(holder["weight_version"])]
        else:
            return
        self._weights = joined(told if self._weights is None else [self._weights, *told])

    def result(self, *, over: bool = False) -> Observed:
        """All of it, as it is now.

        `over`: the answer came to its own end, so what could not be read may be where it says that it has ended.
        """
        said = [self.said[index] for index in sorted(self.said)]
        reasons = tuple(choice.finish for choice in said if choice.finish is not None)
        ended = len(reasons) == len(said) >= self._choices or self.kind != "sample"
        if self.api == "anthropic":
            ended = ended and self.done
        ended = ended or (over and self.blind)
        return Observed(
            finish_reasons=reasons,
            usage=self.usage or self._counted(),
            error=self.error,
            aborted="abort" in reasons or "cancelled" in reasons,
            done=self.done,
            ended=ended and self.error is None,
            content=self._digest(),
            weight_version=self._weights,
            id=self.id,
            samples=self._samples(said),
        )

    def _counted(self) -> Mapping[str, Any] | None:
        counts = [said.counts for said in self.said.values() if said.counts is not None]
        if not counts:
            return None
        return {"prompt_tokens": sum(c[0] for c in counts), "completion_tokens": sum(c[1] for c in counts)}

    def _samples(self, said: list[Said]) -> tuple[Sample, ...]:
        if self.kind != "sample" or self.blind or not said:
            return ()
        usage = self.usage or self._counted()
        if usage is not None and len(said) == 1:
            return ()
        streamed = any(choice.pieces > 1 for choice in said)
        shares = [choice.pieces if streamed else choice.opening for choice in said]
        total = usage.get("completion_tokens", 0) if usage is not None else None
        if type(total) is not int and type(total) is not float:
            total = sum(choice.pieces for choice in said)
        drawn = [choice.counts[1] if choice.counts is not None else 0 for choice in said]
        return tuple(
            Sample(choice.digest(), told or total * share / (sum(shares) or 1))
            for choice, told, share in zip(said, drawn, shares, strict=True)
        )

    def _digest(self) -> str | None:
        if self.blind:
            return None
        if self.content is not None or not self.said:
            return self.content
        total = blake2b(digest_size=16)
        for index in sorted(self.said):
            total.update(b"%d\n" % index)
            self.said[index].digest_into(total)
        return total.hexdigest()


def joined(versions: Iterable[str]) -> str:
    """Versions of weights as one text: each once, in order, parted by commas."""
    return ",".join(dict.fromkeys(",".join(versions).split(",")))


def weights(bodies: Iterable[bytes]) -> str | None:
    """Which weights whole answers tell of that were drawn apart; None: of none."""
    told = [version.decode() for body in bodies for version in _WEIGHTS.findall(body)]
    return joined(told) if told else None


def number(value: Any) -> int:
    """A whole number that an engine tells; 0 where it is none."""
    return value if type(value) is int else 0


def words(error: Any) -> str:
    """The message of an error, whatever its shape."""
    found = error.get("message") if isinstance(error, dict) else error
    if isinstance(found, str):
        return found
    try:
        return dumped(error)
    except TypeError:  # nested too deeply to be written
        return "an error without a message"


def without(value: Any, names: Iterable[str]) -> Any:
    """A JSON object without some of its members; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {key: inner for key, inner in value.items() if key not in names}


def dumped(value: Any) -> str:
    """JSON as text, alike for what is alike."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def hashed(value: Any) -> str:
    """The digest of that text."""
    return blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
