"""One request as the handlers see it."""

import time
from dataclasses import dataclass, field

from gateway.sim.engine import Engine, Seen
from gateway.sim.faults import Fault
from gateway.sim.fields import Fields
from gateway.sim.jobs import Job
from gateway.sim.settings import SimSettings


@dataclass
class Ask:
    """A request that was read whole; `jobs` is what it put into the batch, dropped when it has ended."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
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
        return next((value for known, value in self.headers if known == name), None)

    def note(self, id: str, seed: int | None = None, seeds: tuple[int | None, ...] = ()) -> None:
        """Writes down what this request is known by and what its samples run with."""
        self.engine.counters.seen.append(Seen(id, self.path, seed, seeds, self.headers))
