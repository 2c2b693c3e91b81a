"""Answers of real engines, byte for byte: vectors for whatever reads, merges or imitates them.

`{engine}/{name}.json` holds the request, the status and the headers that matter, `{engine}/{name}.body` the
raw body as it came. `tests/engines/capture.py` records them; nothing edits them by hand. Ids and times in
them are of one recording.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Capture:
    """One exchange with a real engine. `request` is the JSON body sent, or its text where it is not JSON."""

    engine: str
    server: str
    name: str
    method: str
    path: str
    request: Any
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        """The body of an answer that is not a stream."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of the stream's data lines in order, without `[DONE]`."""
        lines = (line[6:] for line in self.body.decode().split("\n") if line.startswith("data: "))
        return [json.loads(line) for line in lines if line != "[DONE]"]


def load(engine: str, name: str) -> Capture:
    """The capture of this name. Raises `FileNotFoundError` where there is none."""
    head = json.loads((HERE / engine / f"{name}.json").read_text())
    body = (HERE / engine / f"{name}.body").read_bytes()
    return Capture(engine=engine, name=name, body=body, **head)


def names(engine: str) -> list[str]:
    """The names of all captures of an engine, sorted."""
    return sorted(path.stem for path in (HERE / engine).glob("*.json"))


def save(capture: Capture) -> None:
    """Write a capture where `load` finds it."""
    folder = HERE / capture.engine
    folder.mkdir(exist_ok=True)
    head = {
        "server": capture.server,
        "method": capture.method,
        "path": capture.path,
        "request": capture.request,
        "status": capture.status,
        "headers": capture.headers,
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items())
    (folder / f"{capture.name}.json").write_text("{" + ",\n ".join(lines) + "}\n")
    (folder / f"{capture.name}.body").write_bytes(capture.body)
