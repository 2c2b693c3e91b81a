"""How the suites against real engines ask: small requests over plain HTTP, and what stands in the answers."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SECONDS = 120.0

Body = dict[str, Any]


class Endpoint(Protocol):
    """A server, or a gateway before servers."""

    @property
    def url(self) -> str:
        """Where its routes stand."""


def ask(server: Endpoint, path: str, body: Body | str, headers: dict[str, str] | None = None) -> httpx.Response:
    """POST a JSON body, or text as it stands, and read the answer whole, whatever its status."""
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(
        server.url + path,
        content=content,
        headers={"content-type": "application/json", **(headers or {})},
        timeout=SECONDS,
    )


def told(answer: httpx.Response) -> Any:
    """The JSON of an answer that has to be 200."""
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(**more: Any) -> Body:
    """A chat request of 12 tokens at temperature 1, without a seed."""
    messages = [{"role": "user", "content": "Name a colour"}]
    return {"model": "tiny-llm", "messages": messages, "max_tokens": 12, "temperature": 1} | more


def complete(prompt: Any = "The colour is", **more: Any) -> Body:
    """A completion request of 12 tokens at temperature 1, without a seed."""
    return {"model": "tiny-llm", "prompt": prompt, "max_tokens": 12, "temperature": 1} | more


def texts(server: Endpoint, path: str, body: Body) -> list[str]:
    """The texts of the answer's choices, by their index."""
    choices = sorted(told(ask(server, path, body))["choices"], key=lambda choice: int(choice["index"]))
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def text(server: Endpoint, path: str, body: Body) -> str:
    """The text of an answer of one choice."""
    [only] = texts(server, path, body)
    return only


def at_once(server: Endpoint, path: str, bodies: list[Body]) -> list[httpx.Response]:
    """The answers to requests that are all in flight together, in the order of the requests."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(server, path, body), bodies))


def data_lines(stream: str) -> list[str]:
    """What stands after `data: ` in a stream of server-sent events, in order."""
    return [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]


def chunks(stream: str) -> list[Any]:
    """The JSON of a stream that ends with `[DONE]`."""
    lines = data_lines(stream)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def open_request(server: Endpoint, path: str, body: Body) -> socket.socket:
    """Send a request over a socket of its own and do not read: closing it is a client that leaves."""
    place = urlsplit(server.url)
    connection = socket.create_connection((place.hostname, place.port), timeout=SECONDS)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def metric(server: Endpoint, name: str) -> float:
    """The sum of a metric's samples; 0 where it has none."""
    lines = httpx.get(server.url + "/metrics", timeout=SECONDS).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def wait_metric(server: Endpoint, name: str, value: float, seconds: float) -> bool:
    """Whether the metric takes this value within the time."""
    deadline = time.monotonic() + seconds
    while metric(server, name) != value:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
