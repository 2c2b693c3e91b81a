"""Two large ledgers made and compared: how long it takes, and how much memory.

python -m tests.evidence.million --requests 1000000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from hashlib import md5
from pathlib import Path

import orjson

from gateway.evidence.diff import compare
from gateway.evidence.ledgers import find
from tests.evidence.ledger import Records, request

TURNS = 4
BATCH = 1000


def ledger(folder: Path, requests: int, differs: int) -> None:
    """A run in which sessions of a few turns take turns; every so many requests one has another answer."""
    folder.mkdir()
    sessions = max(1, requests // TURNS)
    with (folder / "1-1.jsonl").open("wb") as file:
        for start in range(0, requests, BATCH):
            batch: Records = []
            for number in range(start, min(requests, start + BATCH)):
                turn, session = divmod(number, sessions)
                name = f"task-{session // 4}:{session % 4}"
                digest = md5(f"{name} {turn}".encode()).hexdigest()
                answer = "another" if differs and number % differs == differs - 1 else digest[::-1]
                opened, closed = request(name, turn, prompt=digest, answer=answer, group=f"task-{session // 4}")
                names = {each: opened[each] for each in ("run", "session", "identity", "index")}
                batch += [opened, {"event": "complete", **names}, closed]
            file.write(b"".join(orjson.dumps(record) + b"\n" for record in batch))


WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
"""This process, and the one that reads the other side."""


def _cpu() -> float:
    """Seconds of CPU that both have taken."""
    used = [resource.getrusage(whose) for whose in WHOSE]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each run")
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ledger(folder / "a", requests, 0)
        ledger(folder / "b", requests, 5000)
        size = sum(file.stat().st_size for file in folder.rglob("*.jsonl"))
        wall, cpu = time.perf_counter(), _cpu()
        found = compare(find("a", folder), find("b", folder))
        wall, cpu = time.perf_counter() - wall, _cpu() - cpu
    most = [resource.getrusage(whose).ru_maxrss // 1024 for whose in WHOSE]
    print(f"2 × {requests:,} requests, {size / 1e6:,.0f} MB: {wall:.1f} s, {cpu:.1f} s of CPU, at most {most} MB")
    print(f"{found.compared:,} compared, {found.different:,} differ")


if __name__ == "__main__":
    main()
