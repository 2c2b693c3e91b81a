"""Faults that can be switched on while an engine runs.

Rules stand in the order in which they were given; a request meets all that match it, a later one winning over
an earlier one field by field. A rule without a route concerns the requests that the engine computes something
for; one with `health_…` fields concerns the probes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

PROBES = frozenset({"/health", "/ready", "/health_generate", "/ping"})
TELLING = PROBES | {"/metrics", "/version", "/v1/models", "/server_info", "/get_server_info", "/model_info"}
ACTING = {"/abort_request", "/flush_cache", "/reset_prefix_cache"}
QUIET = TELLING | ACTING | {"/v1/loads", "/get_model_info", "/weight_info", "/detgate/processes"}
_PROBE_FIELDS = frozenset({"health_delay", "health_status"})


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request; times in seconds, tokens counted over all choices of a stream.

    status                    answers with this status and the engine's error body
    delay_head                waits before the head
    delay_token               waits before each token
    hang                      takes the request and never answers
    reset_before_head         takes the request, then resets the connection
    reset_after_tokens        resets the connection after that many tokens; a whole answer breaks midway
    cut_after_tokens          the same by a plain close, without the end of the transfer
    close_after_tokens        ends the transfer cleanly, without the end of the answer
    silent_after_tokens       sends no more and keeps the connection open
    error_event_after_tokens  sends the engine's error event; a whole answer is a 500
    abort_after_tokens        the engine ends the sample: 200, finish_reason "abort", what there is
    chunk_split               splits each write, inside a character of several bytes where there is one
    coalesce                  sends finish, usage and [DONE] in one write
    comments                  sends a comment line before each token, as an engine's keep-alive does
    gzip                      compresses the answer
    extra_headers             adds these headers to the answer
    unseeded_42               a request without a seed runs with seed 42
    health_delay              waits before a probe's answer
    health_status             answers probes with this status
    """

    status: int | None = None
    delay_head: float = 0.0
    delay_token: float = 0.0
    hang: bool = False
    reset_before_head: bool = False
    reset_after_tokens: int | None = None
    cut_after_tokens: int | None = None
    close_after_tokens: int | None = None
    silent_after_tokens: int | None = None
    error_event_after_tokens: int | None = None
    abort_after_tokens: int | None = None
    chunk_split: bool = False
    coalesce: bool = False
    comments: bool = False
    gzip: bool = False
    extra_headers: tuple[tuple[str, str], ...] = ()
    unseeded_42: bool = False
    health_delay: float = 0.0
    health_status: int | None = None


NO_FAULT = Fault()


@dataclass
class Rule:
    """A fault's fields, the route that it is for (None: see the module), and how often it still strikes."""

    changes: Mapping[str, Any]
    route: str | None = None
    times: int | None = None

    def concerns(self, path: str) -> bool:
        if self.times == 0:
            return False
        if self.route is not None:
            return path == self.route
        if path in PROBES:
            return not _PROBE_FIELDS.isdisjoint(self.changes)
        return path not in QUIET and not _PROBE_FIELDS.issuperset(self.changes)


@dataclass
class Faults:
    """The rules in force."""

    rules: list[Rule] = field(default_factory=list)

    def add(self, *, route: str | None = None, times: int | None = None, **changes: Any) -> None:
        """Switches a fault on, for the next `times` requests to `route`. ValueError: no such fault."""
        unknown = set(changes) - {known.name for known in fields(Fault)}
        if unknown or not changes:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown)) or 'none named'}")
        headers = changes.get("extra_headers")
        if isinstance(headers, list | tuple):
            changes["extra_headers"] = tuple((str(name), str(value)) for name, value in headers)
        self.rules.append(Rule(changes, route, times))

    def clear(self) -> None:
        self.rules.clear()

    def take(self, path: str) -> Fault:
        """The fault that the next request to `path` meets."""
        fault = NO_FAULT
        for rule in self.rules:
            if rule.concerns(path):
                fault = replace(fault, **rule.changes)
                if rule.times is not None:
                    rule.times -= 1
        self.rules = [rule for rule in self.rules if rule.times != 0]
        return fault

    def report(self) -> list[dict[str, object]]:
        return [{**rule.changes, "route": rule.route, "times": rule.times} for rule in self.rules]
