"""Guards against samples that share their noise without anyone having meant it."""

from __future__ import annotations

import structlog

from gateway.core.errors import CallerFault
from gateway.settings import Guards as GuardSettings
from gateway.telemetry import Telemetry
from gateway.work import Asked

log = structlog.get_logger("detgate.guards")

REMEMBERED = 10_000
"""Requests with a seed of their own that are remembered for one group."""


class Guards:
    """Looks at requests before they take an index."""

    def __init__(self, settings: GuardSettings, telemetry: Telemetry) -> None:
        self._refuses = settings.shared_seed == "refuse"
        self._telemetry = telemetry
        self._warned: set[str] = set()

    def check(self, asked: Asked) -> None:
        """Notice a seed and prompt that another member of the group has sent: the two would be clones.

        At temperature 0 nothing is drawn, so nothing is shared. Raises `CallerFault` where guards.shared_seed refuses.
        """
        group = asked.session.group if asked.session is not None else None
        if group is None or asked.session is None or asked.wish.seed is None or _temperature(asked) == 0:
            return
        content = asked.content()
        first = group.seeded.setdefault(content, asked.session.known.session)
        if len(group.seeded) > REMEMBERED:
            del group.seeded[next(iter(group.seeded))]
        if first == asked.session.known.session:
            return
        self._telemetry.guard.add("shared_seed")
        if self._refuses:
            raise CallerFault(
                f"Member {first} of this group has sent the same prompt with seed {asked.wish.seed}, so both would get "
                "the same answer. Send no seed, or another for each member; guards.shared_seed: warn lets it pass.",
                code="shared_seed",
                param="seed",
            )
        if asked.run not in self._warned:
            self._warned.add(asked.run)
            log.warning(
                "members of a group share seed and prompt: their answers are clones", run=asked.run, group=group.id
            )


def _temperature(asked: Asked) -> object:
    value = asked.document.value
    params = value.get("sampling_params")
    return (params if isinstance(params, dict) else value).get("temperature")
