"""A simulated engine: the routes, shapes, seeds, batches and failings of vLLM and SGLang around a toy model.

For tests and demonstrations; nothing in the gateway's data plane imports it.
"""

from gateway.sim.app import App, build
from gateway.sim.engine import Engine
from gateway.sim.faults import Fault, Faults
from gateway.sim.records import Counters, Seen
from gateway.sim.server import SimServer, serve
from gateway.sim.settings import SimSettings

__all__ = [
    "App",
    "Counters",
    "Engine",
    "Fault",
    "Faults",
    "Seen",
    "SimServer",
    "SimSettings",
    "build",
    "serve",
]
