import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import InvalidSettings, Settings

REPLICA = {"name": "a-0", "url": "http://10.0.0.1:8000"}
POOL = {"name": "a", "engine": "vllm", "replicas": [REPLICA]}


def settings(**flags: Any) -> Settings:
    return Settings.load(None, {}, flags)


def one_pool(pool: Mapping[str, Any], **flags: Any) -> Settings:
    return settings(pools=[{**POOL, **pool}], **flags)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert settings().masked() == {
        "seed": 42,
        "profile": "balanced",
        "run": None,
        "scheme": "v1",
        "index_order": "arrival",
        "client_seed": "keep",
        "state": "memory",
        "host": "127.0.0.1",
        "port": 8000,
        "admin_port": None,
        "admin_host": None,
        "workers": 1,
        "insecure": False,
        "ledger": {
            "path": "ledger",
            "segment_bytes": 268435456,
            "on_error": "continue",
            "bodies": False,
            "body_bytes": 1048576,
        },
        "sessions": {
            "required": False,
            "idle_seconds": 86400,
            "weights": "any",
            "failed_reward": None,
            "allow_random": False,
        },
        "routing": {"key": "request", "slack": 0, "on_home_down": "next", "retry_sent": True},
        "limits": {
            "body_bytes": 67108864,
            "body_values": 500000,
            "head_bytes": 65536,
            "answer_bytes": 268435456,
            "held_bytes": 1073741824,
            "connections": 16384,
            "queue": 4096,
            "sessions": 100000,
            "group": 4096,
            "scopes": 20000,
            "runs": 64,
            "readings": 2,
            "attempts": 3,
        },
        "timeouts": {
            "connect": 5,
            "first_byte": None,
            "idle": None,
            "dead": 10,
            "settle": 1,
            "home": 60,
            "lane": None,
            "group": 60,
            "weights": 600,
            "client_write": 60,
            "store": 2,
            "gateway": 10,
            "reading": 60,
            "run": 2592000,
            "head": 30,
            "body": 60,
            "keep_alive": 75,
            "drain": 30,
        },
        "health": {"interval": 2, "timeout": 10, "failures": 3, "breaks": 5, "successes": 2},
        "auth": {"api_keys": [], "admin_key": None},
        "guards": {"shared_seed": "warn", "clones": "warn", "clone_tokens": 2},
        "tls": {"cert": None, "key": None, "client_ca": None},
        "log": {"level": "info", "format": "auto"},
        "tracing": {"endpoint": None, "queue": 2048},
        "pools": [],
    }


def test_every_setting_is_described() -> None:
    def undescribed(model: type[Any], path: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(f"{path}{name}")
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                found += undescribed(field.annotation, f"{path}{name}.")
        return found

    from gateway.settings import Pool, Replica

    assert undescribed(Settings, "") + undescribed(Pool, "pool.") + undescribed(Replica, "replica.") == []


def test_the_environment_wins_over_the_file_and_flags_over_both(config: Path) -> None:
    config.write_text("seed: 1\nscheme: areal\nrun: file\ntimeouts: {connect: 1, idle: 1, dead: 1}\n")
    env = {
        "DETGATE_SEED": "2",
        "DETGATE_SCHEME": "offset",
        "DETGATE_TIMEOUTS__CONNECT": "2",
        "DETGATE_TIMEOUTS__IDLE": "2",
        "HOME": "/",
    }
    told = Settings.load(config, env, {"seed": "3", "timeouts": {"connect": 3}})
    assert (told.seed, told.scheme, told.run) == (3, "offset", "file")
    assert (told.timeouts.connect, told.timeouts.idle, told.timeouts.dead) == (3.0, 2.0, 1.0)


def test_keywords_alone_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETGATE_SEED", "9")
    assert Settings(seed=7).seed == 7
    assert Settings().seed == 42


def test_settings_do_not_change() -> None:
    told = one_pool({})
    with pytest.raises(ValueError, match="frozen"):
        told.seed = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        told.pools[0].routing.slack = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("profile", "slack", "on_home_down", "guard"),
    [
        ("off", 0, "next", "warn"),
        ("balanced", 0, "next", "warn"),
        ("strict", math.inf, "wait", "refuse"),
    ],
)
def test_the_profile_gives_the_defaults(profile: str, slack: float, on_home_down: str, guard: str) -> None:
    told = one_pool({}, profile=profile)
    for routing in (told.routing, told.pools[0].routing):
        assert (routing.slack, routing.on_home_down) == (slack, on_home_down)
    assert (told.guards.shared_seed, told.guards.clones) == (guard, guard)


def test_a_setting_written_out_wins_over_the_profile() -> None:
    told = one_pool({}, profile="strict", routing={"slack": 4}, guards={"clones": "warn"}, sessions={"required": True})
    assert (told.routing.slack, told.routing.on_home_down) == (4, "wait")
    assert (told.guards.shared_seed, told.guards.clones) == ("refuse", "warn")


def test_a_pool_takes_over_the_routing_that_it_does_not_override() -> None:
    told = settings(
        profile="strict",
        routing={"key": "session", "on_home_down": "fail"},
        pools=[
            {**POOL, "routing": {"slack": 2}},
            {**POOL, "name": "b", "replicas": [{**REPLICA, "name": "b-0"}]},
        ],
    )
    routing = [pool.routing for pool in told.pools]
    assert [(rule.key, rule.slack, rule.on_home_down) for rule in routing] == [
        ("session", 2, "fail"),
        ("session", math.inf, "fail"),
    ]


@pytest.mark.parametrize(
    ("role", "lane", "scope", "limit"),
    [
        ("generate", {}, "none", None),
        ("generate", {"scope": "group"}, "group", 1),
        ("generate", {"scope": "pool", "limit": 1}, "pool", 1),
        ("reward", {}, "replica", 1),
        ("reward", None, "replica", 1),
        ("reward", {"limit": 2}, "replica", 2),
        ("reward", {"scope": "pool"}, "pool", 1),
        ("reward", {"scope": "none"}, "none", None),
    ],
)
def test_lane_defaults(role: str, lane: dict[str, Any] | None, scope: str, limit: int | None) -> None:
    pool = one_pool({"role": role, "lane": lane}, sessions={"required": True}).pools[0]
    assert (pool.lane.scope, pool.lane.limit) == (scope, limit)


def test_models_made_in_python_are_filled_too() -> None:
    pool = one_pool({"role": "reward"}).pools[0]
    again = Settings(profile="strict", pools=(pool,))
    assert again.pools[0].lane.limit == 1
    assert again.guards.clones == "refuse"


def test_an_empty_section_has_its_defaults(config: Path) -> None:
    config.write_text("timeouts:\n  # connect: 3\npools:\n")
    assert Settings.load(config, {}, {}) == settings()


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    told = one_pool(
        {"api_key": "s-pool"},
        run="r",
        state="rediss://user:s-redis@host:6379/0?password=s-query",
        auth={"api_keys": ["s-one", "s-two"], "admin_key": "s-admin"},
    )
    for shown in (json.dumps(told.masked()), repr(told), str(told), repr(told.pools)):
        assert "s-" not in shown
    assert told.masked()["auth"]["api_keys"] == ["**********", "**********"]
    assert told.masked()["state"] == "rediss://user:**********@host:6379/0?password=**********"
    assert told.auth.api_keys[1].get_secret_value() == "s-two"


def test_a_state_without_a_password_is_shown_as_it_is() -> None:
    assert settings(state="redis://host:6379/0", run="r").masked()["state"] == "redis://host:6379/0"


def test_what_is_in_force_can_be_read_back(config: Path) -> None:
    told = one_pool({"role": "reward", "models": ["m"]}, profile="strict", timeouts={"idle": 0.5})
    config.write_text(yaml.safe_dump(told.masked(), sort_keys=False))
    assert Settings.load(config, {}, {}) == told


def test_the_digest_is_that_of_earlier_releases() -> None:
    told = settings(
        seed=7,
        profile="strict",
        pools=[
            POOL,
            {**POOL, "name": "b", "replicas": [{**REPLICA, "name": "b-1"}, {**REPLICA, "name": "b-0"}]},
        ],
    )
    assert told.deciding() == {
        "seed": 7,
        "scheme": "v1",
        "index_order": "arrival",
        "client_seed": "keep",
        "profile": "strict",
        "pools": {"a": ["a-0"], "b": ["b-0", "b-1"]},
    }
    assert told.digest() == "c2a9385043c447585fc93563615bc2dbfde083dc80922a0b2162d2de3dba3fca"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"scheme": "areal"},
        {"index_order": "content"},
        {"client_seed": "mix"},
        {"profile": "strict"},
        {"pools": [{**POOL, "name": "b"}]},
        {"pools": [{**POOL, "replicas": [{**REPLICA, "name": "a-1"}]}]},
        {"pools": [{**POOL, "engine": "sglang"}]},
        {"pools": [{**POOL, "role": "reward"}]},
        {"pools": [{**POOL, "models": ["m"]}]},
        {"pools": [{**POOL, "lane": {"scope": "pool", "limit": 4}}]},
        {"pools": [{**POOL, "routing": {"key": "session"}}]},
        {"routing": {"key": "session"}},
        {"routing": {"slack": "inf"}},
        {"routing": {"on_home_down": "fail"}},
    ],
)
def test_what_decides_changes_the_digest(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"pools": [POOL]}
    assert settings(**{**base, **change}).digest() != settings(**base).digest()


def test_what_does_not_decide_leaves_the_digest() -> None:
    replicas = [{"name": "a-1", "url": "http://elsewhere"}, REPLICA]
    here = settings(pools=[{**POOL, "replicas": replicas}])
    there = settings(pools=[{**POOL, "replicas": replicas[::-1]}], port=1, timeouts={"idle": 3}, run="r")
    assert here.digest() == there.digest()


def test_a_fault_names_the_variable_that_it_came_from(config: Path) -> None:
    config.write_text("limits: {queue: x}\n")
    env = {"DETGATE_SEED": "x", "DETGATE_LIMITS__ATTEMPTS": "0", "DETGATE_PORT": "x"}
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(config, env, {"port": "y"})
    assert caught.value.lines == [
        "seed: a whole number is needed (not 'x') (from DETGATE_SEED)",
        "port: a whole number is needed (not 'y')",
        "limits.queue: a whole number is needed (not 'x')",
        "limits.attempts: at least 1 is needed (not '0') (from DETGATE_LIMITS__ATTEMPTS)",
    ]
