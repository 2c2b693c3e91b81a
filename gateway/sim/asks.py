"""One request as the handlers see it."""

import contextlib
import time
from dataclasses import dataclass, field

from gateway.sim.engine import Engine
from gateway.sim.faults import Fault
from gateway.sim.fields import Fields, Refused
from gateway.sim.jobs import Job
from gateway.sim.records import Seen
from gateway.sim.settings import SimSettings

_SEEDS = ("seed", "sampling_seed")


@dataclass
class Ask:
    """A request that was read whole; `jobs` is what it put into the batch, dropped when it has ended."""

    method: str
    path: str
    seen: Seen
    body: bytes
    fault: Fault
    engine: Engine
    created: int = field(default_factory=lambda: int(time.time()))
    jobs: list[Job] = field(default_factory=list)
    _fields: Fields | None = None

    @property
    def settings(self) -> SimSettings:
        return self.engine.settings

    @property
    def fields(self) -> Fields:
        """The body's members. Refused: it is no JSON object."""
        if self._fields is None:
            self._fields = Fields.parse(self.body)
        return self._fields

    def header(self, name: str) -> str | None:
        """The first header of that (lower case) name."""
        return self.seen.header(name)

    def note(self, id: str, seed: int | None = None, seeds: tuple[int | None, ...] = ()) -> None:
        """Writes down what this request is known by and what its samples run with."""
        self.seen.id, self.seen.seed, self.seen.seeds = id, seed, seeds

    def note_arrival(self) -> None:
        """Counts the request, with the id and seed that it carries."""
        self.engine.counters.arrived(self.seen, self.body)
        self.seen.id = self.header("x-request-id")
        with contextlib.suppress(Refused):
            fields = self.fields
            inner = fields.get("sampling_params")
            places = [fields.members, inner if isinstance(inner, dict) else {}]
            found = [place[name] for place in places for name in _SEEDS if place.get(name) is not None]
            self.seen.seed = found[0] if found else None
            self.seen.id = fields.get("rid") if isinstance(fields.get("rid"), str) else self.seen.id
