"""Bytes that nobody thought of: the same targets under hypothesis in `make test` and under atheris in `make fuzz`."""
