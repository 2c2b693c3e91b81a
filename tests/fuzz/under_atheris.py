"""One target under atheris, in an environment that has it: started by `python -m tests.fuzz`."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

with atheris.instrument_imports(include=["gateway"]):
    from tests.fuzz import targets


def main() -> None:
    name, seconds, corpus = sys.argv[1:4]
    options = [f"-max_total_time={seconds}", "-max_len=2000", "-timeout=20", "-print_final_stats=1", "-close_fd_mask=0"]
    atheris.Setup([sys.argv[0], *options, corpus], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
