"""`python -m tests.bench.planted serve …`: a gateway that costs more than it should, for the check that must notice.

By how much, PLANTED says: µs a request, µs a byte of its body, µs a chunk of its answer.
"""

from __future__ import annotations

import os
import sys
import time
from unittest.mock import patch

from gateway.answers import Client
from gateway.carriers.client import Client as Http1Client
from gateway.cli import main
from gateway.core.types import Request
from gateway.pipeline import Pipeline

REQUEST_US, BYTE_US, CHUNK_US = (float(each) for each in os.environ["PLANTED"].split(","))
serve, write = Pipeline.serve, Http1Client.write


def burn(us: float) -> None:
    until = time.thread_time() + us / 1e6
    while time.thread_time() < until:
        pass


async def costly_serve(pipeline: Pipeline, request: Request, client: Client) -> None:
    burn(REQUEST_US + BYTE_US * len(request.body))
    await serve(pipeline, request, client)


def costly_write(client: Http1Client, data: bytes) -> None:
    burn(CHUNK_US)
    write(client, data)


if __name__ == "__main__":
    with patch.object(Pipeline, "serve", costly_serve), patch.object(Http1Client, "write", costly_write):
        sys.exit(main())
