"""What clients have open and have sent: connections and bytes of bodies, all together, and how much may be."""

from __future__ import annotations

from typing import Literal

from gateway.core.errors import Busy
from gateway.settings import Limits

REFUSED = 256
"""Connections beyond the bound that are told so, at once; more are dropped."""

Seat = Literal["taken", "refused", "dropped"]


class Intake:
    """Counts of one plane. Carriers add what comes in, the pipeline what it holds until it has answered."""

    __slots__ = ("bytes", "connections", "most_bytes", "most_connections", "refused")

    def __init__(self, limits: Limits) -> None:
        self.connections = 0
        self.refused = 0
        """Connections that are being told that there is no room for them."""
        self.most_connections = limits.connections
        self.bytes = 0
        """Of bodies."""
        self.most_bytes = limits.held_bytes

    def enter(self) -> Seat:
        """A connection has come."""
        if self.connections < self.most_connections:
            self.connections += 1
            return "taken"
        if self.refused < REFUSED:
            self.refused += 1
            return "refused"
        return "dropped"

    def leave(self, seat: Seat) -> None:
        """It has gone."""
        if seat == "taken":
            self.connections -= 1
        elif seat == "refused":
            self.refused -= 1

    def no_seat(self) -> Busy:
        """The refusal of a connection."""
        return Busy(
            f"{self.most_connections} connections are open already. Ask again later, keep fewer connections, "
            "or raise limits.connections.",
            code="too_many_connections",
        )

    def no_room(self) -> Busy:
        """The refusal of a body."""
        return Busy(
            f"Request bodies of {self.most_bytes} bytes are held already. Ask again later, send less at once, "
            "or raise limits.held_bytes.",
            code="too_many_bytes",
        )
