"""Faults that were reported in public against other gateways, routers and engines, as tests of this one."""
