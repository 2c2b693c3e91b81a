"""What is decided about a request before anything is sent: seed, request id and calls, from recorded inputs alone.

No clock, no load and no socket enters here, so a recorded request can be planned again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from gateway.core import fanout, ids, seeds
from gateway.core.document import Document, DuplicateField, Edit, Remove, Set
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
    """Seeds of single prompts, where the sampling params come as a list with one for each and any has one."""
    calls: tuple[Call, ...] = ()
    """The calls that the request becomes, without seeds yet."""

    @property
    def seeded(self) -> bool:
        """The client has sent a seed."""
        return self.seed is not None or bool(self.each)


class Plan(NamedTuple):
    """The decision. Everything that the client, the engine and the ledger are told follows from it."""

    identity: str
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    seed: int | None
    """That of sample 0."""
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
    seed, where = _sent(document, _seed_paths(handling))
    each = _sent_each(handling, document)
    if seed is not None and any(given not in (None, seed) for given in each):
        raise _refused(where, f"{'.'.join(where)} and sampling_params hold different seeds. Send one.")
    if seed is not None and seed + samples - 1 > seeds.LARGEST_CLIENT:
        raise _refused(where, f"{'.'.join(where)}: seed + n - 1 must not be above {seeds.LARGEST_CLIENT}.")
    calls = tuple(fanout.calls(handling, document, ()))
    return Wish(seed, samples, each, calls)


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
    calls = wish.calls
    if handling.kind == "sample" and handling.seed is not None:
        whose, place = (identity, index) if origin is None else (origin.identity, origin.index)

        def own(given: int | None) -> int:
            if given is not None and not mix:
                return given
            return scheme.seed(master if given is None else given, whose, place, member)

        seed = own(wish.seed)
        first = wish.seed if not wish.each or wish.each[0] is None else wish.each[0]
        source = "derived" if first is None or mix else "client"
        if origin is not None:
            seed = seeds.segment(seed, origin.sample, index + 1, positional=positional)
            source = source if positional else "derived"
        if len(calls) == 1 and not wish.each:
            sample, prompt, _, document, edits = calls[0]
            calls = (Call(sample, prompt, seed, document, edits),)
        else:
            drawn = _drawn(wish, seed, own, mix=mix)
            seed = drawn[0]
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


def unseeded(handling: Handling, document: Document) -> Document:
    """The request without the seeds that its client has sent."""
    edits: list[Edit] = [Remove(path) for path in _seed_paths(handling) if _present(document.value, path)]
    if listed := fanout.listed_params(handling, document):
        names = _listed_paths(handling)
        bare = [params.edited([Remove(path) for path in names]) for params in listed]
        edits.append(Set(("sampling_params",), b"[" + b",".join(bare) + b"]"))
    return Document(document.edited(edits))


def _drawn(wish: Wish, seed: int, own: Callable[[int], int], *, mix: bool) -> Sequence[int]:
    """The seed of each sample. `seed`: of the call; `own`: what it would be if the client had sent this one."""
    if not wish.each:
        return seeds.samples(seed, wish.samples)
    n = wish.samples // len(wish.each)
    if mix:
        bases = [seed if given is None else own(given) for given in wish.each]
        return seeds.apart([base for base in bases for _ in range(n)])
    drawn = seeds.samples(seed, wish.samples)
    for prompt, given in enumerate(wish.each):
        if given is not None:
            drawn[prompt * n : prompt * n + n] = seeds.samples(given, n)
    return drawn


def _sent(document: Document, paths: Iterable[Path], within: Path = ()) -> tuple[int | None, Path]:
    """The seed in these fields, and where it stands."""
    seed: int | None = None
    where: Path = ()
    for path in paths:
        if not _present(document.value, path):
            continue
        place = (*within, *path)
        given = _parse(document.literal(path), place)
        if given is None:
            continue
        if seed is not None and given != seed:
            raise _refused(place, f"{'.'.join(where)} and {'.'.join(place)} hold different seeds. Send one.")
        seed, where = given, place
    return seed, where


def _sent_each(handling: Handling, document: Document) -> tuple[int | None, ...]:
    """The seed of each prompt, where the sampling params come as a list and any of them has one."""
    paths = _listed_paths(handling)
    found = []
    for params in fanout.listed_params(handling, document):
        try:
            params.check_unique([name for (name,) in paths])
        except DuplicateField as error:
            field = f"sampling_params.{error.field}"
            raise CallerFault(str(DuplicateField(field)), code="duplicate_field", param=field) from None
        found.append(_sent(params, paths, ("sampling_params",))[0])
    return tuple(found) if any(given is not None for given in found) else ()


def _seed_paths(handling: Handling) -> tuple[Path, ...]:
    return (handling.seed, *handling.strays) if handling.seed else handling.strays


def _listed_paths(handling: Handling) -> list[Path]:
    """Where a seed may stand in one of several sampling params."""
    return [path[1:] for path in _seed_paths(handling) if path[0] == "sampling_params"]


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
