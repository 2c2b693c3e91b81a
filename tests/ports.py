"""Ports for processes that tests start."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

_RANGE = range(11_000, 31_000)
"""Below what systems give to connections of their own, so that none takes a port before the process listens there."""

_tries = count(os.getpid() * 61)


def free() -> int:
    """A port that nobody listens on. No two calls of one process give the same, and hardly any two processes."""
    while True:
        port = _RANGE[next(_tries) % len(_RANGE)]
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
