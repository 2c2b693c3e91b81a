"""What the gateway was told: by a YAML file, `DETGATE_*` variables and flags, in growing strength.

A `Settings` is complete and consistent once it exists: what depends on the profile, the role or the settings
at the top is filled in, and settings that contradict each other are refused. Nothing downstream has to ask.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway import schemes
from gateway.settings import checks, deciding, defaults, messages, sources
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
        return defaults.filled(given)

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
        return deciding.deciding(self)

    def digest(self) -> str:
        """SHA-256 of `deciding()` as JSON with sorted keys and no spaces, in hex."""
        text = json.dumps(self.deciding(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def masked(self) -> dict[str, Any]:
        """Everything in force as plain JSON values, for printing: keys and passwords masked."""
        return self.model_dump(mode="json")
