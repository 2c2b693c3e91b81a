"""What reached an engine and what became of it, for tests to look at."""

from collections import deque
from dataclasses import dataclass, field

_SEEN = 10_000
_BODIES = 100
_BODY_BYTES = 256 * 2**20

Headers = tuple[tuple[str, str], ...]


@dataclass
class Seen:
    """One request as it reached the engine, whatever became of it.

    `id` and `seed` are what the request carries, then what the engine made of that once it has read it;
    `seeds` is what the samples ran with, None where it was random, empty where there was no sample.
    """

    route: str
    headers: Headers
    id: str | None = None
    seed: object = None
    seeds: tuple[int | None, ...] = ()

    def header(self, name: str) -> str | None:
        """The first header of that (lower case) name."""
        return next((value for known, value in self.headers if known == name), None)


@dataclass
class Counters:
    """What happened since the start: all requests but probes and others that compute nothing.

    `seen` holds the last 10,000; `bodies` the raw bodies of the last 100, less if they are large. `preemptions` is told
    by vLLM's metrics; nothing preempts here, so it stays what it is set to.
    """

    requests: int = 0
    peak_running: int = 0
    aborted: int = 0
    disconnects: int = 0
    preemptions: int = 0
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=_SEEN))
    bodies: deque[bytes] = field(default_factory=lambda: deque(maxlen=_BODIES))

    def arrived(self, seen: Seen, body: bytes) -> None:
        self.requests += 1
        self.seen.append(seen)
        self.bodies.append(body)
        while len(self.bodies) > 1 and sum(map(len, self.bodies)) > _BODY_BYTES:
            self.bodies.popleft()
