"""The whole of several gateways, their store and their replicas in one process, in time that a seed decides.

`python -m tests.simulate --help` runs it; docs/simulation.md says what it shows.
"""
