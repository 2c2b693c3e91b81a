"""What the gateway was told: by a YAML file, `DETGATE_*` variables and flags, in growing strength.

A `Settings` is complete and consistent once it exists: what depends on the profile, the role or the settings
at the top is filled in, and settings that contradict each other are refused. Nothing downstream has to ask.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway import schemes
from gateway.settings import checks, messages, sources
from gateway.settings.messages import InvalidSettings
from gateway.settings.schema import (
    Auth,
    Count,
    FixedPort,
    Guards,
    Health,
    Lane,
    Ledger,
    Limits,
    Log,
    Name,
    Pool,
    Port,
    Profile,
    Replica,
    ReplicaTls,
    Routing,
    Seed,
    Sessions,
    State,
    Timeouts,
    Tls,
    Tracing,
    hashed,
    one_of,
)

__all__ = [
    "Auth",
    "Guards",
    "Health",
    "InvalidSettings",
    "Lane",
    "Ledger",
    "Limits",
    "Log",
    "Pool",
    "Replica",
    "ReplicaTls",
    "Routing",
    "Sessions",
    "Settings",
    "Timeouts",
    "Tls",
    "Tracing",
    "hashed",
]

_STRICT: dict[str, dict[str, Any]] = {
    "ledger": {"on_error": "fail"},
    "routing": {"slack": math.inf, "on_home_down": "wait"},
    "guards": {"shared_seed": "refuse", "clones": "refuse"},
}
"""Defaults of `profile: strict` that are not the schema's."""


class Settings(BaseSettings):
    """Everything in force. Made by `Settings.load`; keywords alone read neither file nor environment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        case_sensitive=True,
        env_prefix=sources.PREFIX,
        env_nested_delimiter="__",
    )

    seed: Seed = Field(42, description="Master seed, from 0 to 2⁶³−1; each derived seed follows from it.")
    profile: Profile = Field(
        "balanced",
        description="off: a plain proxy that says so. balanced: repeatable index and seed, least load."
        " strict: the"
        " same replica too, and what cannot be promised is refused.",
    )
    run: Name | None = Field(None, description="Name of the run; none: a new run at each start. Needed with redis.")
    scheme: str = Field("v1", description="How seeds are derived: v1, areal or offset.")
    index_order: Literal["arrival", "content"] = Field(
        "arrival",
        description="What numbers a session's requests: the order they arrive in, or their content.",
    )
    client_seed: Literal["keep", "reject", "mix"] = Field(
        "keep", description="What becomes of a client's own seed; mix: it takes the master seed's place."
    )
    state: State = Field("memory", description="Where counters live: memory, or redis://host:6379/0.", repr=False)
    host: str = Field("127.0.0.1", description="Address to listen on.", min_length=1)
    port: Port = Field(8000, description="Port to listen on; 0: a free one.")
    admin_port: FixedPort | None = Field(
        None,
        description="Port for administration, pages, `/determinism` and `/metrics`, which `port` then refuses; null:"
        " all stand on `port`.",
    )
    admin_host: str | None = Field(
        None, description="Address to listen on with `admin_port`; null: that of `host`.", min_length=1
    )
    workers: Count = Field(1, description="Processes that serve; more than one needs state: redis://….")
    insecure: bool = Field(False, description="Listen off loopback without api_keys too.")
    ledger: Ledger = Field(Ledger(), description="The record of every request.")
    sessions: Sessions = Field(Sessions(), description="Who may ask, and for how long a session lasts.")
    routing: Routing = Field(Routing(), description="Which replica serves a request.")
    limits: Limits = Field(Limits(), description="Bounds; inclusive.")
    timeouts: Timeouts = Field(Timeouts(), description="Bounds of time, in seconds.")
    health: Health = Field(Health(), description="How replicas are probed.")
    auth: Auth = Field(Auth(), description="Who may ask.")
    guards: Guards = Field(Guards(), description="What becomes of answers that look like clones.")
    tls: Tls = Field(Tls(), description="Certificates, where the gateway itself speaks TLS.")
    log: Log = Field(Log(), description="What is logged, and how.")
    tracing: Tracing = Field(Tracing(), description="Where spans of requests go.")
    pools: tuple[Pool, ...] = Field((), description="Replicas, in groups that serve the same model on one engine.")

    @classmethod
    def load(cls, config: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Self:
        """The settings of a file, an environment and flags, which are nested as in the file.

        The environment and flags may hold the short form of one pool too: `worker_urls` and `engine`.

        Raises InvalidSettings with a line for each fault.
        """
        file = sources.from_file(config) if config else {}
        environment = sources.from_environment(cls, env)
        try:
            return cls(**sources.merged(file, environment, dict(flags)))
        except ValidationError as error:
            raise InvalidSettings(messages.lines(cls, error, partial(sources.origin, env, flags))) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords alone: `load` has read and merged everything else."""
        return (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """`given` with the defaults that depend on the profile, the role, or the settings at the top."""
        raw = {key: value for key, value in given.items() if value is not None}
        if raw.get("profile") == "strict":
            raw |= {name: _beneath(weak, raw.get(name)) for name, weak in _STRICT.items()}
        if isinstance(raw.get("pools"), list | tuple):
            raw["pools"] = [_filled_pool(pool, raw.get("routing")) for pool in raw["pools"]]
        return raw

    @field_validator("scheme")
    @classmethod
    def _scheme_exists(cls, name: str) -> str:
        return one_of("scheme", schemes.names(), name)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lines = list(checks.contradictions(self))
        if lines:
            raise PydanticCustomError("contradiction", "{text}", {"text": "; ".join(lines), "lines": lines})
        return self

    def warnings(self) -> list[str]:
        """A line for each setting that can be used, but not with what its owner may expect of it."""
        return list(checks.doubts(self))

    def deciding(self) -> dict[str, Any]:
        """The settings that decide what a request gets; two processes of one run must agree on them."""
        return {
            "seed": self.seed,
            "scheme": self.scheme,
            "index_order": self.index_order,
            "client_seed": self.client_seed,
            "profile": self.profile,
            "pools": {pool.name: sorted(replica.name for replica in pool.replicas) for pool in self.pools},
        }

    def digest(self) -> str:
        """SHA-256 of `deciding()` as JSON with sorted keys and no spaces, in hex."""
        text = json.dumps(self.deciding(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def masked(self) -> dict[str, Any]:
        """Everything in force as plain JSON values, for printing: keys and passwords masked."""
        return self.model_dump(mode="json")


def _beneath(weak: Mapping[str, Any], strong: Any) -> Any:
    """`strong` over the defaults `weak`; what is no mapping is left for the schema to refuse."""
    if isinstance(strong, BaseModel):
        strong = strong.model_dump(exclude_unset=True)
    if strong is None:
        return dict(weak)
    return {**weak, **strong} if isinstance(strong, Mapping) else strong


def _filled_pool(pool: Any, routing: Any) -> Any:
    raw = _beneath({}, pool)
    if not isinstance(raw, dict):
        return raw
    above = _beneath({}, routing)
    if isinstance(above, dict):
        raw["routing"] = _beneath(above, raw.get("routing"))
    lane = _beneath({}, raw.get("lane"))
    if isinstance(lane, dict):
        lane = _filled_lane(lane, raw.get("role") == "reward")
    raw["lane"] = lane
    return raw


def _filled_lane(lane: dict[str, Any], reward: bool) -> dict[str, Any]:
    scope = lane.get("scope", "replica" if reward else "none")
    one = scope == "group" or (reward and scope != "none")
    return {"scope": scope, **({"limit": 1} if one else {}), **lane}
