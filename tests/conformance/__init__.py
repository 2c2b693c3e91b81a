"""Public suites on the gateway: `make conformance` fetches and runs them; only these drivers are kept here."""
