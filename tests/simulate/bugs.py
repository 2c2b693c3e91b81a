"""Bugs that one could make, each as a change to the running code: the simulator must find every one.

`CAUGHT` says in which story each is found; `make simulate-bugs` searches anew, which is needed when the gateway, the
clients or the faults have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import orjson

from gateway.carriers.asgi import DataPlane
from gateway.core import canonical, plan
from gateway.core.indexing import Ask, Claim
from gateway.departures import Departures
from gateway.dispatcher import Dispatcher
from gateway.ledger.writer import Ledger
from gateway.pipeline import Pipeline
from gateway.sending import Sending
from gateway.shared import deeds, lanes, scripts
from gateway.shared.deeds import scope_name
from gateway.shared.lanes import Places
from gateway.shared.link import Link, Script
from gateway.stores import ScopeKey
from gateway.stores.redis import RedisStore, SharedRun

Apply = Callable[[ExitStack], None]
BUGS: dict[str, Apply] = {}

Story = tuple[int, bool]
"""A seed, and whether a third of the sessions is enough."""

CAUGHT: dict[str, Story] = {
    "get-then-set": (0, True),
    "no-epoch": (33, True),
    "claimed-before-the-body-was-read": (4, True),
    "settled-without-release": (4, True),
    "released-though-delivered": (1, True),
    "a-retry-draws-anew": (1, True),
    "a-key-bound-twice": (0, True),
    "races-of-another-scope": (19, False),
    "a-late-call-is-run": (1, False),
    "a-lost-claim-is-not-given-back": (1, False),
    "the-dead-keep-their-claims": (5, False),
    "an-end-of-the-dead-is-told-once": (68, True),
    "delivered-without-the-store": (0, True),
    "a-released-index-is-delivered": (6, False),
    "a-refused-end-is-not-told-again": (62, False),
    "who-took-part-is-forgotten": (25, True),
    "two-histories-are-not-compared": (110, False),
    "a-place-is-kept-on-cancel": (1, True),
    "a-lease-without-fencing": (97, False),
    "a-wake-up-is-lost": (1, True),
    "an-abort-is-not-awaited": (1, True),
    "in-the-queue-and-in-the-lane": (9, False),
    "a-load-leaks-on-a-break": (4, True),
    "a-seed-of-the-process": (1, True),
    "recorded-too-late": (2, False),
    "complete-before-it-is-sent": (1, True),
}
"""Bug → a story that finds it, and nothing in the code as it is."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The code with a bug in it."""
    with ExitStack() as stack:
        BUGS[name](stack)
        yield


def _bug(apply: Apply) -> Apply:
    BUGS[apply.__name__.replace("_", "-")] = apply
    return apply


def _patch(stack: ExitStack, where: Any, name: str, what: Any) -> None:
    stack.enter_context(mock.patch.object(where, name, what))


def _edit(stack: ExitStack, name: str, *changes: tuple[str, str]) -> None:
    """Change the text of a script, or of all that begin with the rule."""
    if name == "lanes":
        _patch(stack, lanes, "SCRIPT", _changed(lanes.SCRIPT, changes))
        return
    names = ("CLAIM", "COMPLETE", "SETTLE", "TAKE_PART", "REPORT", "BEAT", "LEAVE") if name == "rule" else (name,)
    for each in names:
        _patch(stack, scripts, each, _changed(getattr(scripts, each), changes))


def _changed(script: Script, changes: tuple[tuple[str, str], ...]) -> Script:
    source = script.source
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return Script(source)


# --- indices


@_bug
def get_then_set(stack: ExitStack) -> None:
    """The next number is read by one call and taken by another."""
    _edit(
        stack,
        "CLAIM",
        (
            "index, reused = head.next, false\n    head.next = head.next + 1",
            "index, reused = tonumber(ARGV[15]), false\n    head.next = math.max(head.next, index + 1)",
        ),
    )
    known: dict[bytes, int] = {}
    claim, send = SharedRun.claim, Link.send

    async def reading(run: SharedRun, key: ScopeKey, ask: Ask, seconds: float) -> Claim:
        await run.learn(key)
        return await claim(run, key, ask, seconds)

    def sending(link: Link, script: Script, keys: Any, args: Any) -> Any:
        if script is scripts.CLAIM:
            args = (*args, known.get(args[3], 0))
        return send(link, script, keys, args)

    async def learn(run: SharedRun, key: ScopeKey) -> None:
        _, counted = await run._link.call(scripts.LOOK, run._keys, (b"", _scope(key)))
        known[_scope(key)] = int(counted.split(b",")[0]) if counted else 0

    _patch(stack, SharedRun, "claim", reading)
    _patch(stack, SharedRun, "learn", learn)
    _patch(stack, Link, "send", sending)


def _scope(key: ScopeKey) -> bytes:
    return scope_name(key.session, key.identity)


@_bug
def no_epoch(stack: ExitStack) -> None:
    """Whoever answers is taken for the server that there was."""
    _edit(stack, "rule", ("if now == kept then", "if kept then"))


@_bug
def claimed_before_the_body_was_read(stack: ExitStack) -> None:
    """The index is taken when the head is there; who leaves before the body is there keeps it."""
    early: dict[tuple[RedisStore, bytes], list[Claim]] = {}
    body, claim = DataPlane._body, RedisStore.claim

    async def reading(plane: Any, receive: Any) -> bytes | None:
        visit = receive.__self__
        headers = {name.decode(): value.decode() for name, value in visit._scope["headers"]}
        kinds = ("x-request-index", "idempotency-key", "x-index-order", "x-stainless-retry-count")
        session, path = headers["x-session-id"], visit._scope["path"]
        if path == "/v1/chat/completions" and not any(kind in headers for kind in kinds):
            raw = canonical.raw(path, visit.body)
            store = plane._plane.pipeline.store
            key = ScopeKey(plane._plane.run, session, session)
            early.setdefault((store, raw), []).append(await claim(store, key, Ask("arrival", raw), 1.0))
        return await body(plane, receive)

    async def claiming(store: RedisStore, key: ScopeKey, ask: Ask, seconds: float) -> Claim:
        if had := early.get((store, ask.raw)):
            return had.pop()
        return await claim(store, key, ask, seconds)

    _patch(stack, DataPlane, "_body", reading)
    _patch(stack, RedisStore, "claim", claiming)


@_bug
def settled_without_release(stack: ExitStack) -> None:
    """An index that nobody got is not there for who asks again."""
    _edit(stack, "SETTLE", ("if not live.used then\n            call('ZADD'", "if false then\n            call('ZADD'"))


@_bug
def released_though_delivered(stack: ExitStack) -> None:
    """Every end says that nothing was delivered."""
    finish = SharedRun._finish
    _patch(stack, SharedRun, "_finish", lambda run, held, used: finish(run, held, False))


@_bug
def a_retry_draws_anew(stack: ExitStack) -> None:
    """What was released is not looked for."""
    _edit(stack, "CLAIM", ("    if free then", "    if false then"))


@_bug
def a_key_bound_twice(stack: ExitStack) -> None:
    """Each gateway binds keys of its own."""
    _edit(stack, "CLAIM", ("session .. 'k' .. key", "session .. 'k' .. gateway .. key"))


@_bug
def races_of_another_scope(stack: ExitStack) -> None:
    """Whether an index raced is read where another's races are kept."""
    old = "    if live and live.drawn and live.since < head.races then\n        return true\n    end\n"
    _edit(
        stack,
        "rule",
        (old, ""),
        ("call('HEXISTS', H, scope .. 'r' .. written(index))", "call('HEXISTS', H, H .. 'r' .. written(index))"),
    )


@_bug
def a_late_call_is_run(stack: ExitStack) -> None:
    """Calls of a connection that was given up count."""
    _edit(stack, "CLAIM", ("got[2] ~= connection", "not got[2]"))


@_bug
def a_lost_claim_is_not_given_back(stack: ExitStack) -> None:
    """Who is gone before the answer is there forgets that it has asked."""
    _patch(stack, SharedRun, "_give_back", lambda run, held: run._held.pop(held.token, None))


@_bug
def the_dead_keep_their_claims(stack: ExitStack) -> None:
    """Nobody ends what a gateway that died had."""
    _edit(stack, "BEAT", ("end_all(PREFIX .. 'claims:' .. other)", "{}"))


@_bug
def an_end_of_the_dead_is_told_once(stack: ExitStack) -> None:
    """Who notices that a gateway is gone hears once what that had, if at all."""
    once = "        told[#told + 1] = lost\n        call('HDEL', ends, kept[each])\n"
    _edit(stack, "BEAT", ("        told[#told + 1] = lost\n", once))


@_bug
def delivered_without_the_store(stack: ExitStack) -> None:
    """What the store could not be told is delivered all the same."""
    complete = SharedRun.complete
    _patch(stack, SharedRun, "complete", lambda run, key, index, sure: complete(run, key, index, False))


@_bug
def a_released_index_is_delivered(stack: ExitStack) -> None:
    """Whether the index is still the request's is not looked at."""
    _edit(stack, "COMPLETE", ("return {'gone'}", "return {'done', 0}"))


@_bug
def a_refused_end_is_not_told_again(stack: ExitStack) -> None:
    """An end that the server refused is told to nobody."""
    _patch(stack, SharedRun, "_owe", lambda run, held: None)


@_bug
def who_took_part_is_forgotten(stack: ExitStack) -> None:
    """A gateway that comes back knows of no other that may have served."""
    _patch(stack, deeds, "known", lambda folder: [])


@_bug
def two_histories_are_not_compared(stack: ExitStack) -> None:
    """What is told of an index that went to another is passed over."""
    _edit(stack, "REPORT", ("        fence(session, index, about)\n", ""))


# --- lanes


@_bug
def a_place_is_kept_on_cancel(stack: ExitStack) -> None:
    """Who leaves while it waits stays in the queue."""
    leave = Places.leave

    def leaving(places: Places, claim: Any) -> None:
        if claim.state == "waiting":
            claim.state = "over"
        else:
            leave(places, claim)

    _patch(stack, Places, "leave", leaving)


@_bug
def a_lease_without_fencing(stack: ExitStack) -> None:
    """Who comes back after its lease goes on with what it had."""
    _edit(stack, "lanes", ("if redis.call('EXISTS', root .. 'gone:' .. token) == 1 then", "if false then"))
    for_ever = property(lambda places: math.inf, lambda places, value: None)
    stack.enter_context(mock.patch.object(Places, "_until", for_ever, create=True))


@_bug
def a_wake_up_is_lost(stack: ExitStack) -> None:
    """Nobody hears that its turn has come, and nobody looks."""

    async def look(places: Places) -> None:
        pass

    _patch(stack, Places, "_hear", lambda places, message: None)
    _patch(stack, Places, "_look", look)


@_bug
def an_abort_is_not_awaited(stack: ExitStack) -> None:
    """A place is given back when the connection is closed."""

    async def left(departures: Departures, sending: Sending, lane: Any) -> bool:
        return True

    _patch(stack, Departures, "_left", left)


@_bug
def in_the_queue_and_in_the_lane(stack: ExitStack) -> None:
    """Who is in waits too, in what the store has forgotten back to."""
    text = "        unqueue(lane, place)\n        redis.call('HSET'"
    _edit(stack, "lanes", (text, "        redis.call('HSET'"))


# --- loads, seeds, the ledger


@_bug
def a_load_leaks_on_a_break(stack: ExitStack) -> None:
    """A replica that broke keeps the load of what broke on it."""
    forget = Dispatcher.forget

    def forgetting(dispatcher: Dispatcher, sending: Sending) -> None:
        if sending.sent is not None and not sending.sent.complete:
            sending.replica.load += 1
        forget(dispatcher, sending)

    _patch(stack, Dispatcher, "forget", forgetting)


@_bug
def a_seed_of_the_process(stack: ExitStack) -> None:
    """Seeds depend on how many requests a process has served."""
    make, served = plan.make, count()
    _patch(stack, plan, "make", lambda *args, master, **named: make(*args, master=master + next(served), **named))


@_bug
def recorded_too_late(stack: ExitStack) -> None:
    """What was claimed is written when its answer is there."""
    late: dict[tuple[Ledger, str, int], list[dict[str, Any]]] = {}
    complete, closed = Ledger.complete, Ledger.closed

    def claimed(ledger: Ledger, record: dict[str, Any]) -> bool:
        late.setdefault((ledger, record["identity"], record["index"]), []).append(record)
        return True

    def write(ledger: Ledger, record: dict[str, Any]) -> None:
        for each in late.pop((ledger, record["identity"], record["index"]), ()):
            ledger._held += orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE)

    def completing(ledger: Ledger, record: dict[str, Any]) -> None:
        write(ledger, record)
        complete(ledger, record)

    def closing(ledger: Ledger, record: dict[str, Any]) -> None:
        write(ledger, record)
        closed(ledger, record)

    _patch(stack, Ledger, "claimed", claimed)
    _patch(stack, Ledger, "complete", completing)
    _patch(stack, Ledger, "closed", closing)


@_bug
def complete_before_it_is_sent(stack: ExitStack) -> None:
    """What is still in flight races no more."""
    forward = Pipeline._forward

    async def forwarding(walker: Pipeline, work: Any, asked: Any, decided: Any, job: Any, client: Any) -> None:
        if work.claim is not None and asked.handling.kind == "sample":
            work.completed = True
            await walker.store.complete(work.scope, work.claim.index)
        await forward(walker, work, asked, decided, job, client)

    _patch(stack, Pipeline, "_forward", forwarding)
