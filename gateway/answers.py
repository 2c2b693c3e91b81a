"""Bringing an engine's answer to the client: whole or streamed, from one call or merged from several.

An answer is *complete* when the engine has said all of it: then its place in lane and load is given back and it races
no more, before the last byte goes to the client, so that a client that asks one thing at a time never meets itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gateway.core import fields, merge, shapes
from gateway.core.document import Document
from gateway.core.errors import Fault, UpstreamFault
from gateway.core.observer import NoAnswer, Observer, check, observe, scored
from gateway.core.seen import Observed, weights
from gateway.core.sse import EVENT_LIMIT, Passing
from gateway.core.types import Api, Call, Handling, Headers
from gateway.dispatcher import Dispatcher
from gateway.sending import Job, Sending
from gateway.upstream import Broken, Exchange

KEPT_ERRORS = frozenset((400, 413, 422))
"""Error answers of an engine that belong to their request: asked again, it would get the same."""


class Client(Protocol):
    """The way back to whoever asked. Each carrier gives one."""

    @property
    def started(self) -> bool:
        """A byte of the answer has left."""

    @property
    def response_complete(self) -> bool: ...

    @property
    def disconnected(self) -> bool:
        """The client has left."""

    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def reply(self, status: int, headers: bytes, body: bytes) -> None: ...
    def start(self, status: int, headers: bytes, length: int | None = None) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def break_off(self) -> None: ...
    async def flushed(self) -> bool: ...


@dataclass(slots=True)
class Answer:
    """What came, for the record."""

    status: int = 0
    observer: Observer | None = None
    """Watches a stream."""
    passing: Passing | None = None
    """Lets a stream through that is not merged."""
    observed: Observed | None = None
    first_byte_at: float = 0.0
    complete_at: float = 0.0
    delivered: bool = False
    """Handed to the client whole, and it was an answer to the request."""
    left: bool = False
    """Its client left before it had taken it whole."""
    error: str | None = None

    async def taken(self, client: Client, status: int, *, unwanted: bool) -> None:
        """Wait until the client has it whole: then it is delivered, if it is an answer to the request."""
        self.left = not await client.flushed()
        self.delivered = not self.left and answered(status, self.observed, unwanted=unwanted)

    def cut(self, *, unwanted: bool) -> None:
        """Its client left in the middle of a stream: SDKs do as soon as it tells of an error, which is how it ended."""
        if self.observer is None or self.observed is not None:
            return
        observed = self.observer.result()
        if not answered(self.status, observed, unwanted=unwanted):
            self.observed = observed


@dataclass(slots=True)
class Asking:
    """What relaying needs to know of a request."""

    job: Job
    document: Document
    calls: tuple[Call, ...]
    samples: int
    client: Client
    answer: Answer
    head: Callable[[Sending, Headers], bytes]
    """The header lines of the answer, from the sending that gives its head and the engine's own headers."""
    complete: Callable[[], Awaitable[object]]
    """Called when the last call's answer has ended, before its last byte leaves."""

    @property
    def handling(self) -> Handling:
        return self.job.handling

    @property
    def api(self) -> Api:
        return self.job.handling.api


async def relay(dispatcher: Dispatcher, asking: Asking) -> None:
    """Send the calls of one request and bring the answer back. Raises a `Fault` while nothing reached the client."""
    if len(asking.calls) > 1:
        await _merged(dispatcher, asking)
        return
    sending = await dispatcher.send(asking.job, asking.calls[0])
    try:
        exchange = sending.exchange
        if exchange.status != 200:
            _check(asking, sending)
        _began(asking, sending)
        if exchange.streams:
            await _stream(asking, sending)
        else:
            await _whole(asking, sending)
    finally:
        sending.end()


def _began(asking: Asking, sending: Sending) -> None:
    exchange = sending.exchange
    asking.answer.status = exchange.status
    asking.answer.first_byte_at = exchange.begun_at or exchange.heard


def _check(asking: Asking, sending: Sending) -> None:
    """Raise an `UpstreamFault` where a status says that there is no answer to a request that has an index."""
    status = sending.exchange.status
    if (300 <= status < 400 or status == 204 or status == 205) and _counts(asking):
        raise _nothing(sending, f"status {status}")


def _counts(asking: Asking) -> bool:
    """Whether the request has an index, which only an answer uses."""
    return asking.job.handling.computes and asking.job.request_id != ""


def _nothing(sending: Sending, what: str) -> UpstreamFault:
    sending.exchange.distrust()
    return UpstreamFault(
        f"Replica {sending.replica.name} answered with {what}, which is no answer on this route.", code="no_answer"
    )


def _unread(asking: Asking, sending: Sending, body: bytes, what: str) -> Observed | None:
    """What a whole answer was that is none of its API: scores may come as bytes.

    Raises an `UpstreamFault` where it says nothing and its request has an index.
    """
    if not _counts(asking):
        return None
    if not body:
        raise _nothing(sending, "an empty body")
    form = fields.find(sending.exchange.headers, b"content-type")
    if asking.handling.kind == "score" and form and not form.startswith((b"text/", b"application/json")):
        return scored(body)
    raise _nothing(sending, what)


async def _whole(asking: Asking, sending: Sending) -> None:
    exchange, answer, client, handling = sending.exchange, asking.answer, asking.client, asking.job.handling
    body, status = exchange.body, exchange.status
    sending.end()
    if status < 400:
        try:
            answer.observed = observe(body, handling.api, handling.kind)
        except NoAnswer as error:
            answer.observed = _unread(asking, sending, body, str(error))
    answer.complete_at = exchange.heard
    await asking.complete()
    headers = exchange.headers
    if status >= 400:
        shaped = shapes.normalised(status, body, handling.api)
        if shaped is not None:
            body = shaped
            headers = [field for field in headers if field[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
    client.reply(status, asking.head(sending, headers), body)
    await answer.taken(client, status, unwanted=sending.unwanted)


async def _stream(asking: Asking, sending: Sending) -> None:
    exchange, answer, client = sending.exchange, asking.answer, asking.client
    observer = answer.observer = Observer(asking.api, asking.handling.kind, asking.samples)
    passing = answer.passing = Passing(EVENT_LIMIT)
    held = b""
    client.on_pause, client.on_resume = exchange.pause, exchange.resume
    client.start(exchange.status, asking.head(sending, exchange.headers))

    def forward(data: bytes) -> bool:
        nonlocal held
        observer.feed(data)
        data = passing.feed(data)
        if exchange.complete or observer.done:
            held = data
            return True
        client.write(data)
        return False

    def rest(data: bytes) -> bool:
        client.write(passing.feed(data))
        return False

    try:
        await sending.pipe(forward)
        if exchange.complete:
            sending.end()
        observed = answer.observed = observer.result(over=True)
        answer.complete_at = exchange.heard
        await asking.complete()
        if held:
            client.write(held)
        if not exchange.complete:
            if observed.ended:  # its last event says so: nothing that the client does next may find it under way
                await answer.taken(client, exchange.status, unwanted=sending.unwanted)
            if answer.delivered:
                client.write(passing.rest)
                client.end()
                sending.outlive()
                return
            await sending.pipe(rest)
            sending.end()
    except Broken as error:
        answer.observed = observer.result()
        _break(asking, f"Replica {sending.replica.name} broke in mid-stream: {error.reason}.")
        return
    except asyncio.CancelledError:
        answer.cut(unwanted=sending.unwanted)
        raise
    if not observed.ended and observed.error is None and asking.handling.kind == "sample":
        _break(asking, f"Replica {sending.replica.name} ended the stream before the answer was whole.")
        return
    client.write(passing.rest)
    client.end()
    await answer.taken(client, exchange.status, unwanted=sending.unwanted)


async def _merged(dispatcher: Dispatcher, asking: Asking) -> None:
    """Several calls, one answer. If one fails for good, the others are cancelled and the request fails whole."""
    merger = _Merger(asking, await dispatcher.join(asking.job, asking.calls))
    failed: BaseException | None = None
    try:
        try:
            async with asyncio.TaskGroup() as group:
                for position, call in enumerate(asking.calls):
                    group.create_task(merger.run(dispatcher, position, call))
        except* (Fault, Broken, _Refused) as failures:
            failed = _first(failures)
    except asyncio.CancelledError:
        asking.answer.cut(unwanted=any(sending.unwanted for sending in merger.sendings))
        raise
    finally:
        for sending in merger.sendings:
            sending.end()
    if failed is None:
        await merger.finish()
    else:
        await merger.fail(failed)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class _Refused(Exception):
    """An engine refused one of the calls: its answer stands for all."""

    def __init__(self, sending: Sending) -> None:
        super().__init__()
        self.sending = sending


class _Merger:
    """The calls of one request under way, and the one answer made of theirs."""

    def __init__(self, asking: Asking, joined: list[Sending]) -> None:
        self.asking = asking
        self.sendings = joined
        self._bodies: list[bytes] = [b""] * len(asking.calls)
        self._stream: merge.StreamMerger | None = None
        self._observer = asking.answer.observer = Observer(asking.api, asking.handling.kind, asking.samples)

    async def run(self, dispatcher: Dispatcher, position: int, call: Call) -> None:
        """Send one call and take its answer in. Raises what makes the request fail."""
        sending = await dispatcher.send(self.asking.job, call, self.sendings[position])
        self.sendings[position] = sending
        exchange = sending.exchange
        if exchange.status >= 400:
            raise _Refused(sending)
        if exchange.status != 200:
            _check(self.asking, sending)
        if not self.asking.answer.first_byte_at:
            _began(self.asking, sending)
        if exchange.streams:
            self._start(sending)
            await sending.pipe(partial(self._feed, position))
            self._emit(self._merging.end(position))
            if not exchange.complete:
                sending.outlive()
        else:
            body = self._bodies[position] = exchange.body
            try:
                check(body, self.asking.api, self.asking.handling.kind)
            except NoAnswer as error:
                _unread(self.asking, sending, body, str(error))
        sending.end()

    @property
    def _merging(self) -> merge.StreamMerger:
        assert self._stream is not None
        return self._stream

    def _start(self, sending: Sending) -> None:
        if self._stream is not None:
            return
        asking = self.asking
        self._stream = merge.StreamMerger(asking.handling.merge or "", asking.document, asking.calls)
        asking.client.on_pause, asking.client.on_resume = self._pause, self._resume
        asking.client.start(sending.exchange.status, asking.head(sending, sending.exchange.headers))

    def _feed(self, position: int, data: bytes) -> bool:
        self._emit(self._merging.feed(position, data))
        return self._merging.done(position)

    def _emit(self, data: bytes) -> None:
        if data:
            self._observer.feed(data)
            self.asking.client.write(data)

    def _exchanges(self) -> Iterator[Exchange]:
        return (sending.sent for sending in self.sendings if sending.sent is not None)

    def _pause(self) -> None:
        for exchange in self._exchanges():
            exchange.pause()

    def _resume(self) -> None:
        for exchange in self._exchanges():
            exchange.resume()

    async def finish(self) -> None:
        """All calls were answered."""
        asking, client, answer = self.asking, self.asking.client, self.asking.answer
        if self._stream is None:
            body = merge.merge(asking.handling.merge or "", asking.document, asking.calls, self._bodies)
            seen = observe(body, asking.api, asking.handling.kind)
            answer.observed = seen._replace(weight_version=weights(self._bodies) or seen.weight_version)
            await self._complete()
            first = self.sendings[0]
            client.reply(first.exchange.status, asking.head(first, first.exchange.headers), body)
        else:
            try:
                last = self._stream.finish()
            except TypeError:
                told = "Replicas tell of their usage in a way that cannot be summed, so samples cannot be joined."
                raise UpstreamFault(told, code="unmergeable_answer") from None
            self._observer.feed(last)
            observed = answer.observed = self._observer.result(over=True)
            await self._complete()
            if not observed.ended and observed.error is None:
                _break(asking, "A replica ended its stream before the answer was whole.")
                return
            client.write(last)
            client.end()
        unwanted = any(sending.unwanted for sending in self.sendings)
        await answer.taken(client, answer.status, unwanted=unwanted)

    async def _complete(self) -> None:
        self.asking.answer.complete_at = asyncio.get_running_loop().time()
        await self.asking.complete()

    async def fail(self, error: BaseException) -> None:
        """One call failed: so does the request."""
        asking = self.asking
        if isinstance(error, _Refused):
            if not asking.client.started:
                _began(asking, error.sending)
                await _whole(asking, error.sending)
                return
            error = UpstreamFault("The engine refused one of the samples after others had begun.")
        elif isinstance(error, Broken):
            error = UpstreamFault(f"A replica broke while it drew a sample: {error.reason}.")
        if not asking.client.started:
            raise error
        asking.answer.observed = self._observer.result()
        _break(asking, str(error))


def _break(asking: Asking, message: str) -> None:
    """End a stream that has begun as an error: an event in the API's own shape, and no clean end after it."""
    fault = UpstreamFault(message)
    if not asking.client.started:
        raise fault
    break_stream(asking.client, asking.answer, fault, asking.api)


def break_stream(client: Client, answer: Answer, fault: Fault, api: Api) -> None:
    """Tell of a fault in the stream that has begun, in its API's shape, and leave it without a clean end."""
    answer.error = fault.message
    sequence = answer.observer.sequence if answer.observer is not None else 0
    torn = answer.passing is not None and answer.passing.torn
    client.write((b"\n\n" if torn else b"") + shapes.stream_error(fault, api, sequence))
    client.break_off()


def answered(status: int, observed: Observed | None, *, unwanted: bool = False) -> bool:
    """Whether an answer that reached the client answers the request, so that its index is used.

    `unwanted`: its client asked to abort it, so that an aborted answer is what it wanted.
    """
    if status >= 400:
        return status in KEPT_ERRORS
    return observed is None or not (observed.error or (observed.aborted and not unwanted))
