"""The sections of the configuration: what a value may be, what it means, and its default.

Only shapes stand here. What depends on several values is filled in and checked by `gateway.settings`; every
default below is that of `profile: balanced`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
)
from pydantic_core import PydanticCustomError

from gateway import engines

MASK = "**********"


def _no_truth(value: object) -> object:
    """Python counts true as 1; a configuration does not."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a number is needed")
    return value


def _slack(value: object) -> float:
    if value in ("inf", math.inf):
        return math.inf
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not number.is_integer() or number < 0:
        raise PydanticCustomError("slack", "a whole number from 0, or inf, is needed")
    return number


def _written(number: float) -> int | float | str:
    """A number as a person writes it: inf as `inf`, a whole one without a fraction."""
    if math.isinf(number):
        return "inf"
    return int(number) if number == int(number) else number


def _words(value: object) -> object:
    """The words of a text, unless it is a list in JSON that is broken: parts of that would be taken for keys."""
    if not isinstance(value, str) or re.match(r'\s*\[\s*"', value):
        return value
    return re.split(r"[\s,]+", value.strip())


def _some_path(value: object) -> object:
    """Python counts the empty path as the folder that one is in."""
    if value == "":
        raise PydanticCustomError("empty", "must not be empty")
    return value


def _secret(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    if not key:
        raise PydanticCustomError("empty", "an empty key would open to everyone")
    if key != key.strip() or not key.isprintable():
        raise PydanticCustomError("key", "a key has no space or line end around it, and no control character")
    return value


_HASHED = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,127})=)?sha256:([0-9a-f]{64})")


class Hashed(NamedTuple):
    """A key of which the configuration holds the hash alone."""

    name: str | None
    """Who has it."""
    digest: bytes
    """SHA-256 of the key."""


def hashed(text: str) -> Hashed | None:
    """What `[NAME=]sha256:HEX` says; None: the text is a key itself."""
    match = _HASHED.fullmatch(text)
    return None if match is None else Hashed(match[1], bytes.fromhex(match[2]))


def _opening(value: SecretStr) -> SecretStr:
    text = _secret(value).get_secret_value()
    if re.match(r"([^=]*=)?sha256:", text) and hashed(text) is None:
        raise PydanticCustomError("hash", "a hash is written [NAME=]sha256:HEX, as `detgate key hash` prints it")
    return value


def _nameless(value: SecretStr) -> SecretStr:
    found = hashed(value.get_secret_value())
    if found is not None and found.name is not None:
        raise PydanticCustomError("hash", "takes no name before its hash")
    return value


def _sent(value: SecretStr) -> SecretStr:
    if hashed(value.get_secret_value()) is not None:
        raise PydanticCustomError("hash", "is sent to the replicas: it must be the key, not its hash")
    if not value.get_secret_value().isascii():
        raise PydanticCustomError("key", "is sent to the replicas in a header: ASCII alone")
    return value


def one_of(kind: str, names: Iterable[str], value: str) -> str:
    """`value` if it is one of `names`, else an error of pydantic's own kind for a choice."""
    expected = sorted(names)
    if value not in expected:
        listing = ", ".join(f"'{name}'" for name in expected)
        raise PydanticCustomError("literal_error", "no such {kind}", {"kind": kind, "expected": listing})
    return value


def base_url(text: str) -> str:
    """The address under which a replica's routes stand, without a trailing slash and without `/v1`.

    Raises an error that names what is wrong: a scheme but http and https, no host, a query, credentials.
    """
    try:
        parts = urlsplit(text)
        bad_port = parts.port == 0
    except ValueError:
        raise PydanticCustomError("url", "not a URL, such as http://10.0.0.1:8000") from None
    for holds, message in (
        (parts.scheme not in ("http", "https") or "://" not in text, "needs http:// or https:// in front"),
        (not parts.hostname, "names no host"),
        (not re.fullmatch(r"[!-~]+", text) or "\\" in text, "holds a character that no URL has"),
        (not _resolvable(parts.hostname or ""), "names a host that no name server can know"),
        (bad_port, "has a port that none can listen on"),
        (parts.username is not None, "holds credentials: put them into the pool's api_key"),
        (parts.query or parts.fragment, "has a query or fragment, which no replica's address has"),
    ):
        if holds:
            raise PydanticCustomError("url", "{message}", {"message": message})
    path = re.sub(r"/+", "/", parts.path).rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def _resolvable(host: str) -> bool:
    """Whether `host` can be asked for at all: a label has 1 to 63 characters."""
    return ":" in host or all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise PydanticCustomError("endpoint", "a URL is needed, such as http://collector:4318/v1/traces")
    if parts.username is not None:
        raise PydanticCustomError("endpoint", "holds credentials: put them into OTEL_EXPORTER_OTLP_HEADERS")
    return text


def _state(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if text != "memory" and not usable:
        raise PydanticCustomError("state", "memory, or a URL such as redis://host:6379/0, is needed")
    return text


def without_password(url: str) -> str:
    """`url` for printing: a password in it, before the host or in the query, replaced by asterisks."""
    url = re.sub(r"(//[^/?#:@]*:)[^/?#]*@", rf"\1{MASK}@", url)
    return re.sub(r"([?&]password=)[^&#]*", rf"\1{MASK}", url)


Seed = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, lt=2**63)]
Count = Annotated[int, BeforeValidator(_no_truth), Field(ge=1)]
Rank = Annotated[int, BeforeValidator(_no_truth), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, le=65535)]
FixedPort = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=65535)]
Written = PlainSerializer(_written, when_used="json")
Seconds = Annotated[float, BeforeValidator(_no_truth), Field(ge=0, allow_inf_nan=False), Written]
Patience = Annotated[float, BeforeValidator(_no_truth), Field(gt=0, allow_inf_nan=False), Written]
"""Seconds of which none would fail everything."""
Slack = Annotated[float, BeforeValidator(_slack), Written]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Key = Annotated[SecretStr, AfterValidator(_secret)]
Url = Annotated[str, AfterValidator(base_url)]
Folder = Annotated[Path, BeforeValidator(_some_path)]
File = Annotated[Path, BeforeValidator(_some_path), "of one file"]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_opening)], ...], BeforeValidator(_words)]
AdminKey = Annotated[SecretStr, AfterValidator(_opening), AfterValidator(_nameless)]
SentKey = Annotated[Key, AfterValidator(_sent)]
State = Annotated[str, AfterValidator(_state), PlainSerializer(without_password, when_used="json")]
Engine = Annotated[str, AfterValidator(lambda name: one_of("engine", engines.names(), name))]
Profile = Literal["off", "balanced", "strict"]
Action = Literal["warn", "refuse"]


class Section(BaseModel):
    """A part of the configuration: unchangeable, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Ledger(Section):
    path: Folder = Field(Path("ledger"), description="Folder of the runs; a run's records lie in {path}/{run}/*.jsonl.")
    segment_bytes: Count = Field(268_435_456, description="Bytes after which a segment is followed by another.")
    on_error: Literal["fail", "continue"] = Field(
        "continue",
        description="What becomes of requests while the ledger cannot be written: refused with 503, or served"
        " and marked `unrecorded`. Default by profile: continue; strict: fail.",
    )
    bodies: bool = Field(False, description="Keep the bodies of requests and answers too, as diff and replay want.")
    body_bytes: Count = Field(1_048_576, description="Bytes of one body that are kept; what is cut off is said.")


class Sessions(Section):
    required: bool = Field(False, description="Refuse requests that name no session.")
    idle_seconds: Seconds = Field(
        86400.0, description="Seconds without a request after which a session made by `POST /sessions` ends."
    )
    weights: Literal["any", "hold"] = Field(
        "any",
        description="Hold a created session, and all of its group, to the version of the weights that it met first.",
    )
    failed_reward: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Reward of a created session that fails before it was given one; null: none.",
    )
    allow_random: bool = Field(
        False,
        description="Serve a session id that holds a UUID or ULID and comes without an identity in"
        " strict too,"
        " although no other run can repeat it.",
    )


class Routing(Section):
    key: Literal["request", "session"] = Field(
        "request",
        description="What is hashed: each request's id, or the session's, whose first replica is then kept.",
    )
    slack: Slack = Field(
        0.0,
        description="Load above the least loaded replica, in requests, up to which a replica is a candidate;"
        " inf makes"
        " the choice a function of key and pool alone. Default by profile: 0; strict: inf.",
    )
    on_home_down: Literal["next", "wait", "fail"] = Field(
        "next",
        description="With slack inf, what becomes of requests whose replica is down: go to the next by score,"
        " wait for"
        " it, or are refused. Default by profile: next; strict: wait.",
    )
    retry_sent: bool = Field(
        True,
        description="Send a request again that broke after it had been sent whole; its index and seed stay the same.",
    )


class Lane(Section):
    scope: Literal["none", "replica", "pool", "session", "group"] = Field(
        "none", description="What shares one bound of requests in flight. Default of reward pools: replica."
    )
    limit: Count | None = Field(
        None, description="Requests in flight in one lane. Default of reward pools and of scope group: 1."
    )
    members: Literal["present", "episode"] = Field(
        "present",
        description="With scope group: order those who wait, or let a member start only after the sessions"
        " of lower"
        " members have ended.",
    )


class Replica(Section):
    name: Name = Field(description="Stable name, unique over all pools; routing hashes it, never the URL.")
    url: Url = Field(description="Address of the server; a trailing slash or /v1 makes no difference.")
    dp_rank: Rank | None = Field(None, description="Data-parallel rank to pin, where a server has several.")


class ReplicaTls(Section):
    ca: File | None = Field(
        None, description="PEM file of the authorities that replicas are believed by; null: the system's."
    )
    cert: File | None = Field(None, description="PEM file of the certificate that replicas are shown; null: none.")
    key: File | None = Field(None, description="PEM file of its key; null: it is in `cert`.")


class Pool(Section):
    name: Name = Field(description="Stable name, unique.")
    engine: Engine = Field(description="What the replicas run: vllm, sglang, or openai for any other server.")
    role: Literal["generate", "reward"] = Field("generate", description="Whether the replicas sample or score.")
    models: tuple[str, ...] = Field((), description="Models served; none listed: what the replicas say.")
    api_key: SentKey | None = Field(None, description="Sent to the replicas in place of the client's own key.")
    tls: ReplicaTls = Field(ReplicaTls(), description="How `https://` replicas are believed, and what they are shown.")
    lane: Lane = Field(Lane(), description="Bound of what is in flight.")
    deterministic: Literal["probe", "declared"] = Field(
        "probe",
        description="Find out whether the engine is in its deterministic mode, or take it as said where it"
        " does not"
        " tell.",
    )
    isolate_cache: Literal["off", "request", "run"] = Field(
        "off",
        description="What may find what in the engine's prefix cache: all, each request what is its own, or each run."
        " Enters no seed.",
    )
    priority: Literal["off", "index", "header"] = Field(
        "off",
        description="What an engine whose scheduler goes by priority is told: nothing, a request's index, or its"
        " `X-Detgate-Priority`. Lower goes first.",
    )
    routing: Routing = Field(Routing(), description="As routing at the top; what is left out is taken from there.")
    replicas: tuple[Replica, ...] = Field(min_length=1, description="The servers.")


class Limits(Section):
    body_bytes: Count = Field(67108864, description="Longest request body, in bytes.")
    body_values: Count = Field(
        500_000,
        description="Strings, lists and objects in a body that has more than 8 bytes for each of so many; past it 413."
        " They are counted before it is read, so brackets in texts count too.",
    )
    head_bytes: Count = Field(65536, description="Longest request head, in bytes.")
    answer_bytes: Count = Field(
        268435456, description="Longest answer of a replica that is no stream, unpacked, in bytes; past it 502."
    )
    held_bytes: Count = Field(
        1073741824,
        description="Bytes of request bodies that are held at once, of all requests, and as many again of"
        " those taken apart; past it 503.",
    )
    connections: Count = Field(16384, description="Connections of clients that are open at once; past it 503.")
    queue: Count = Field(
        4096,
        description="Requests that may wait in one lane; past it the next gets 503. One that is taken apart counts as"
        " its calls, and is taken whole or not at all.",
    )
    sessions: Count = Field(100_000, description="Sessions made by `POST /sessions` that have not ended; past it 503.")
    group: Count = Field(4096, description="Sessions of one group; a larger one is refused with 400.")
    scopes: Count = Field(
        20_000,
        description="Counters in memory that remember one request each, or fewer that remember more (nine more count as"
        " another counter); those unused for longest go to a file in the run's folder.",
    )
    runs: Count = Field(
        64,
        description="Runs that one process has open; past it the longest idle one is closed, or, where none is idle,"
        " 503.",
    )
    readings: Count = Field(2, description="Ledgers that are read at once for pages of `/ui`; past it 503.")
    attempts: Count = Field(3, description="Sendings of one request, the first included.")


class Timeouts(Section):
    connect: Patience = Field(5.0, description="Seconds to open a connection to a replica.")
    first_byte: Patience | None = Field(None, description="Seconds to an answer's first byte; null: no bound.")
    idle: Patience | None = Field(None, description="Seconds between two bytes of an answer; null: no bound.")
    dead: Seconds = Field(10.0, description="Seconds of silence after which a replica that probes call down is broken.")
    settle: Seconds = Field(1.0, description="Seconds that a repeat or a racing request waits for the other to end.")
    home: Seconds = Field(60.0, description="Seconds that a request waits for its replica with on_home_down: wait.")
    lane: Seconds | None = Field(
        None, description="Seconds that a request waits for its turn in a lane, then 503; null: no bound."
    )
    group: Seconds = Field(
        60.0, description="Seconds that a member of a group waits for those before it with members: episode."
    )
    weights: Seconds = Field(
        600.0, description="Seconds that a change of weights waits for what is in flight, and requests wait for it."
    )
    client_write: Patience = Field(60.0, description="Seconds that a client may take nothing of its answer.")
    store: Patience = Field(2.0, description="Seconds for one call to the store.")
    gateway: Seconds = Field(
        10.0,
        ge=0.1,
        description="Seconds of silence after which a gateway of a run in redis counts as gone, and for which the"
        " others wait to be told what it did when redis may have forgotten.",
    )
    reading: Patience = Field(60.0, description="Seconds that a page of `/ui` may read ledgers.")
    run: Patience = Field(
        2592000.0, description="Seconds after its last request for which a run is kept in redis; then it answers 410."
    )
    head: Patience = Field(30.0, description="Seconds that a client may take to send a request's head.")
    body: Patience = Field(60.0, description="Seconds that it may take for the body, and one more for each 16 KiB.")
    keep_alive: Seconds = Field(75.0, description="Seconds that a client's idle connection is kept.")
    drain: Seconds = Field(30.0, description="Seconds that requests in flight have to end after SIGTERM.")


class Health(Section):
    interval: Patience = Field(2.0, description="Seconds between two probes of a replica.")
    timeout: Patience = Field(10.0, description="Seconds that a probe may take; a busy server is slow, not dead.")
    failures: Count = Field(3, description="Probes in a row that fail before a replica counts as down.")
    breaks: Count = Field(5, description="Requests in a row that break on a replica before it gets no more but trials.")
    successes: Count = Field(2, description="Probes in a row that pass before it counts as up again.")


class Auth(Section):
    api_keys: Keys = Field(
        (),
        description="Keys that open the data plane, or hashes of them, `[NAME=]sha256:HEX`: a list, or a text with"
        " spaces or commas; none: open.",
    )
    admin_key: AdminKey | None = Field(
        None, description="Key of the admin routes; none: open on a loopback bind, closed on any other."
    )


class Tls(Section):
    cert: File | None = Field(None, description="PEM file of the gateway's certificate and its chain; null: no TLS.")
    key: File | None = Field(None, description="PEM file of its key; null: it is in `cert`.")
    client_ca: File | None = Field(
        None, description="PEM file of the authorities whose certificate every client must show; null: none need one."
    )


class Tracing(Section):
    endpoint: Endpoint | None = Field(
        None,
        description="Where spans go by OTLP over HTTP, as in http://collector:4318/v1/traces; null: none are made."
        " Needs the extra `otel`.",
    )
    queue: Count = Field(2048, description="Spans that wait to be exported; past it they are dropped.")


class Guards(Section):
    shared_seed: Action = Field(
        "warn",
        description="On equal explicit seeds for one prompt within a group. Default by profile: warn; strict: refuse.",
    )
    clones: Action = Field(
        "warn",
        description="On equal answers to different seeds within a group or a call. Default by profile: warn; strict:"
        " refuse.",
    )
    clone_tokens: Count = Field(
        2, description="Tokens from which equal answers count as clones; shorter ones are often equal by chance."
    )


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is written.")
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console where standard error is a terminal, json elsewhere."
    )
