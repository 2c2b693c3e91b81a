"""What is decided about a request before anything is sent: seed, request id and calls, from recorded inputs alone.

No clock, no load and no socket enters here, so a recorded request can be planned again and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from gateway.core import fanout, ids, seeds
from gateway.core.document import Document, Edit, Remove, Set
from gateway.core.errors import CallerFault
from gateway.core.resume import Origin
from gateway.core.types import Call, Handling, Path

SeedSource = Literal["derived", "client", "none"]


class Scheme(Protocol):
    """A seed scheme's module."""

    def seed(self, master: int, identity: str, index: int, member: int | None) -> int: ...


class Wish(NamedTuple):
    """What the client asked for, read from the body before an index is taken."""

    seed: int | None = None
    samples: int = 1
    each: tuple[int | None, ...] = ()
    """Seeds of single prompts, where the sampling params come as a list with one for each."""
    calls: tuple[Call, ...] = ()
    """The calls that the request becomes, without seeds yet."""


class Plan(NamedTuple):
    """The decision. Everything that the client, the engine and the ledger are told follows from it."""

    identity: str
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    seed: int | None
    seed_source: SeedSource
    request_id: str
    calls: tuple[Call, ...]


def read_wish(handling: Handling, document: Document, *, split: bool = False) -> Wish:
    """The client's seed, wherever it stands, how many samples it wants, and in which calls they are drawn.

    `split`: each input of a scoring request gets a call of its own. Raises `CallerFault`.
    """
    if handling.kind == "sample" and handling.plain(document.value):
        return Wish(calls=(Call(0, 0, None, document, ()),))
    _check_params(handling, document.value)
    if handling.kind != "sample":
        return Wish(calls=tuple(fanout.calls(handling, document, (), split_inputs=split)))
    samples = fanout.samples(handling, document)
    each = tuple(_parse(literal, handling.seed or ()) for literal in fanout.sent_seeds(handling, document))
    seed: int | None = None
    where: Path = ()
    for path in _seed_paths(handling, document):
        given = _parse(document.literal(path), path)
        if given is None:
            continue
        if seed is not None and given != seed:
            raise _refused(path, f"{'.'.join(where)} and {'.'.join(path)} hold different seeds. Send one.")
        seed, where = given, path
    if seed is not None and seed + samples - 1 > seeds.LARGEST_CLIENT:
        raise _refused(where, f"{'.'.join(where)}: seed + n - 1 must not be above {seeds.LARGEST_CLIENT}.")
    calls = tuple(fanout.calls(handling, document, ()))
    return Wish(seed, samples, each if any(given is not None for given in each) else (), calls)


def make(
    handling: Handling,
    wish: Wish,
    *,
    scheme: Scheme,
    master: int,
    mix: bool,
    identity: str,
    index: int,
    ordinal: int = 0,
    member: int | None = None,
    origin: Origin | None = None,
    positional: bool = False,
) -> Plan:
    """Decide. `mix`: a client's seed takes the master seed's place in the scheme instead of being kept.

    `origin`: the sample that this request goes on with; `positional`: as `seeds.segment` has it.
    """
    seed: int | None = None
    source: SeedSource = "none"
    if handling.kind == "sample" and handling.seed is not None:
        if wish.seed is not None and not mix:
            seed, source = wish.seed, "client"
        else:
            whose, place = (identity, index) if origin is None else (origin.identity, origin.index)
            seed = scheme.seed(master if wish.seed is None else wish.seed, whose, place, member)
            source = "derived"
        if origin is not None:
            seed = seeds.segment(seed, origin.sample, index + 1, positional=positional)
            source = source if positional else "derived"
    calls = wish.calls
    if seed is not None:
        if len(calls) == 1 and not wish.each:
            sample, prompt, _, document, edits = calls[0]
            calls = (Call(sample, prompt, seed, document, edits),)
        else:
            drawn = _each_seed(wish, seed)
            calls = tuple([call._replace(seed=drawn[call.sample]) for call in calls])
    return Plan(identity, index, seed, source, ids.request_id(identity, index, ordinal), calls)


def seed_edits(handling: Handling, call: Call) -> list[Edit]:
    """What puts a call's seed where the engine reads it, and takes it away where the engine would not."""
    if handling.kind != "sample":
        return []
    value = call.document.value
    edits: list[Edit] = []
    if not handling.asks.isdisjoint(value):
        edits += [Remove(path) for path in handling.strays if path[0] in value and _present(value, path)]
    if call.seed is not None and handling.seed is not None:
        edits.append(Set(handling.seed, b"%d" % call.seed))
    return edits


def _each_seed(wish: Wish, seed: int) -> Sequence[int]:
    if wish.samples == 1 and not wish.each:
        return (seed,)
    drawn = seeds.samples(seed, wish.samples)
    n = wish.samples // len(wish.each) if wish.each else 0
    for prompt, given in enumerate(wish.each):
        if given is not None:
            drawn[prompt * n : prompt * n + n] = seeds.samples(given, n)
    return drawn


def _seed_paths(handling: Handling, document: Document) -> list[Path]:
    value = document.value
    paths = (handling.seed, *handling.strays) if handling.seed else handling.strays
    return [path for path in paths if path[0] in value and _present(value, path)]


def _check_params(handling: Handling, value: dict[str, Any]) -> None:
    """Raise `CallerFault` where the seed goes into a field that can hold none."""
    if handling.seed is None or len(handling.seed) == 1:
        return
    name = handling.seed[0]
    params = value.get(name)
    if not (
        params is None or isinstance(params, dict) or (isinstance(params, list) and fanout.shares_out(handling, name))
    ):
        raise CallerFault(f"{name} must be an object.", param=name)


def _present(value: Any, path: Path) -> bool:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _parse(literal: bytes | None, path: Path) -> int | None:
    try:
        return None if literal is None else seeds.parse(literal)
    except seeds.InvalidSeed as error:
        raise _refused(path, f"{'.'.join(path)}: {error}") from None


def _refused(path: Path, message: str) -> CallerFault:
    return CallerFault(message, code="invalid_seed", param=".".join(path))
