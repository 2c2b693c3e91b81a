"""`detgate doctor` and `detgate verify` as processes of their own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import gates


@dataclass(frozen=True)
class Told:
    """What a command said."""

    status: int
    out: str
    text: str
    """Its standard error too."""

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def findings(self, pool: str) -> list[dict[str, Any]]:
        """Doctor's findings of a pool."""
        found: list[dict[str, Any]] = self.json["pools"][pool]["findings"]
        return found


def detgate(command: str, folder: Path, pool: dict[str, Any], *arguments: str) -> Told:
    """Run a command on one pool, with the ledger of a gateway that `gates.gateway` started in the folder."""
    file = folder / f"{command}.yaml"
    file.write_text(json.dumps({"pools": [pool], "ledger": {"path": str(folder / "ledger")}}))
    done = subprocess.run(
        [sys.executable, "-m", "gateway", command, "--config", str(file), *arguments],
        cwd=gates.ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return Told(done.returncode, done.stdout, done.stdout + done.stderr)
